"""`ReasoningGymEnv`: the procedural tasks of the `reasoning_gym` package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolltree.environments.multiturn import SingleTurnEnv
from rolltree.environments.parsers import Parser, XMLParser
from rolltree.environments.rubrics import Rubric
from rolltree.values.errors import ConfigError, did_you_mean, import_extra
from rolltree.values.types import Info, Messages

SYSTEM = "Think first, then give the final answer, and nothing else, in this form:\n"
EVAL_SEED_OFFSET = 10_007


class ReasoningGymEnv(SingleTurnEnv):
    """One question of a reasoning-gym task, scored by that task's own `score_answer`.

    Training and evaluation data sets have different seeds; questions in both are left out of the
    training rows. The reward is the metric `task_score`; `format_reward` is only reported.

    Args:
        tasks: a task's name, several names, or names with their settings:
            `{"chain_sum": {"max_terms": 3}}`. Rows alternate between several tasks.
        num_train, num_eval: rows generated in all.
        seed: the data sets are generated from it.
        parser: finds the answer; default: `<answer>` tags.
        settings: for `SingleTurnEnv`.

    Raises:
        ConfigError: the package is missing, or has no such task or setting.
    """

    def __init__(
        self,
        tasks: str | Sequence[str] | Mapping[str, Mapping[str, Any]],
        *,
        num_train: int = 500,
        num_eval: int = 100,
        seed: int = 0,
        parser: Parser | None = None,
        **settings: Any,
    ) -> None:
        wanted = _wanted(tasks)
        self.train_sets = _open(wanted, num_train, seed)
        self.eval_sets = _open(wanted, num_eval, seed + EVAL_SEED_OFFSET)
        held_out = _rows(self.eval_sets, "eval", num_eval)
        asked = {row["question"] for row in held_out}
        trained = [
            row
            for row in _rows(self.train_sets, "train", num_train)
            if row["question"] not in asked
        ]
        parser = XMLParser(["answer"]) if parser is None else parser
        rubric = Rubric([self.task_score], parser=parser)
        rubric.add_metric(parser.get_format_reward_func(), run_inline=True)
        if isinstance(parser, XMLParser):
            settings.setdefault("system_prompt", SYSTEM + parser.get_format_str())
        super().__init__(
            dataset=trained or None,
            eval_dataset=held_out or None,
            parser=parser,
            rubric=rubric,
            **settings,
        )

    def task_score(self, parser: Parser, completion: Messages, info: Info) -> float:
        """Return the task's own score of the answer, in [0, 1]; without an answer, 0.

        The entry is regenerated from its index, because scoring needs more than the answer.
        """
        answer = parser.parse_answer(completion)
        if not answer:
            return 0.0
        sets = self.train_sets if info["split"] == "train" else self.eval_sets
        data = sets[info["task"]]
        return float(data.score_answer(answer=str(answer), entry=data[info["index"]]))


def _wanted(tasks: Any) -> dict[str, Mapping[str, Any]]:
    if isinstance(tasks, str):
        return {tasks: {}}
    wanted = dict(tasks) if isinstance(tasks, Mapping) else {name: {} for name in tasks}
    if not wanted:
        raise ConfigError("a ReasoningGymEnv got no tasks, so it has nothing to ask.")
    return wanted


def _open(wanted: Mapping[str, Mapping[str, Any]], num: int, seed: int) -> dict[str, Any]:
    reasoning_gym = import_extra("reasoning_gym", "a ReasoningGymEnv", "rolltree[worlds]")
    known = reasoning_gym.factory.DATASETS
    sets: dict[str, Any] = {}
    for name, config in wanted.items():
        if name not in known:
            raise ConfigError(f"reasoning-gym has no task {name!r}.{did_you_mean(name, known)}")
        size = -(-num // len(wanted))
        try:
            sets[name] = reasoning_gym.create_dataset(name, seed=seed, size=max(size, 1), **config)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(
                f"reasoning-gym task {name!r} refuses its settings {dict(config)}: {error}."
            ) from error
    return sets


def _rows(sets: Mapping[str, Any], split: str, num: int) -> list[dict[str, Any]]:
    rows = []
    for position in range(num):
        name = list(sets)[position % len(sets)]
        index = position // len(sets)
        entry = sets[name][index]
        rows.append(
            {
                "question": entry["question"],
                "answer": str(entry["answer"]),
                "task": name,
                "info": {"task": name, "index": index, "split": split},
            }
        )
    return rows
