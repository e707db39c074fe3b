"""`EnvGroup` and `EnvGroupRubric` of verifiers 0.1.8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from rolltree import environments as rooms
from rolltree.environments.dataset import Rows
from rolltree.store.weights import ScoredPart
from rolltree.values.errors import ConfigError
from rolltree.values.types import RolloutInput, SamplingArgs, State
from rolltree.verifiers.datasets import is_hub_dataset
from rolltree.verifiers.environments import Environment
from rolltree.verifiers.rubrics import Rubric


class EnvGroupRubric(Rubric):
    """Scores a state by the rubric of its environment, and fills in the others' metrics with 0."""

    def __init__(self, env_map: Mapping[str, rooms.Environment]) -> None:
        super().__init__()
        self.env_map = env_map
        # Every state has the metrics of all environments, 0 for those not played, so that all
        # columns have the same length.
        names = {name for env in env_map.values() for name in _names_of(env.rubric)}
        self.all_reward_names = sorted(names)

    # verifiers calls the private method, and authors override it; rolltree calls the public one.
    def _get_reward_func_names(self) -> list[str]:
        return self.all_reward_names

    def get_reward_func_names(self) -> list[str]:
        """Return the metrics of all environments."""
        return self.all_reward_names

    def scored_parts(self) -> list[ScoredPart]:
        """Return the functions of each environment."""
        return [
            replace(part, task=name)
            for name, env in self.env_map.items()
            for part in env.rubric.scored_parts()
        ]

    async def score_rollout(
        self, state: State, score_sem: AbstractAsyncContextManager[Any]
    ) -> None:
        """Score one rollout by its environment's rubric."""
        env = self.env_map.get(state.get("task", "default"))
        if env is not None:
            await env.rubric.score_rollout(state, score_sem=score_sem)
        self._complete(state, env is not None)

    async def score_group(
        self, states: Sequence[State], score_sem: AbstractAsyncContextManager[Any]
    ) -> None:
        """Score the rollouts of one group by the rubric of the first one's environment."""
        env = self.env_map.get(states[0].get("task", "default"))
        if env is not None:
            await env.rubric.score_group(states, score_sem=score_sem)
        for state in states:
            self._complete(state, env is not None)

    def _complete(self, state: State, is_scored: bool) -> None:
        if not is_scored:
            self.logger.warning("No environment found for task %r", state.get("task"))
            # As in verifiers. rolltree's own group raises here, since 0 is a verdict on the answer.
            state["reward"] = 0.0
        found = (state.get("metrics") or {}) if is_scored else {}
        state["metrics"] = {name: found.get(name, 0.0) for name in self.all_reward_names}


class EnvGroup(Environment, rooms.EnvGroup):
    """Several environments as one; a row's `task` is the name of its environment."""

    def __init__(
        self,
        envs: list[rooms.Environment],
        env_names: list[str] | None = None,
        map_kwargs: dict[str, Any] = {},  # noqa: B006  (never changed)
        **kwargs: Any,
    ) -> None:
        if not envs:
            raise ConfigError("EnvGroup requires at least one environment")
        self.envs = envs
        self.env_names = env_names or [f"env_{index}" for index in range(len(envs))]
        if len(self.env_names) != len(self.envs):
            raise ConfigError("Number of env_names must match number of envs")
        self.env_map = dict(zip(self.env_names, self.envs, strict=True))
        # verifiers calls `get_dataset`, which raises for an environment with evaluation data only.
        # Not from `env_map`: of environments with one name, the last plays the rows of all.
        named = list(zip(self.env_names, self.envs, strict=True))
        trained = [(name, env.dataset) for name, env in named if env.dataset is not None]
        tested = [(name, env.get_eval_dataset()) for name, env in named]
        Environment.__init__(
            self,
            dataset=_joined(trained) if trained else None,
            eval_dataset=_joined(tested),
            rubric=EnvGroupRubric(self.env_map),
            oai_tools=None,
            map_kwargs=map_kwargs,
            **kwargs,
        )

    def format_dataset(
        self,
        dataset: Any,
        system_prompt: str | None = None,
        few_shot: list[dict[str, Any]] | None = None,
        question_key: str = "question",
        answer_key: str = "answer",
        map_kwargs: dict[str, Any] = {},  # noqa: B006  (never changed)
    ) -> Any:
        """Return the joined rows with prompts, renumbered."""
        if not is_hub_dataset(dataset):
            settings = (system_prompt, few_shot, question_key, answer_key, map_kwargs)
            rows = super().format_dataset(dataset, *settings)
            return Rows(rows, lambda row, index: {**row, "example_id": index})
        # Rows are renumbered after joining, since rows of two environments would be one group;
        # the task stays, since it says which environment plays.
        dataset = self._ensure_prompt(
            dataset, system_prompt, few_shot, question_key, answer_key, map_kwargs
        )
        if "example_id" in dataset.column_names:
            dataset = dataset.remove_columns(["example_id"])
        return dataset.add_column("example_id", list(range(len(dataset))))

    async def init_state(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Let the row's environment make the state."""
        env = self.get_env_for_task(input["task"])
        return await env.init_state(input, client, model, sampling_args)

    async def setup_state(self, state: State) -> State:
        """Let the row's environment prepare the state."""
        return await self.get_env_for_task(state["task"]).setup_state(state)

    async def rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Let the row's environment play it."""
        env = self.get_env_for_task(input["task"])
        return await env.rollout(input, client, model, sampling_args)

    def get_env_for_task(self, task: str) -> rooms.Environment:
        """Return the environment of this name; the first one for other names."""
        return self.env_map.get(task, self.envs[0])

    def own_task(self, task: str) -> str:
        """Return the task itself: an environment sees the name that the group gave it."""
        return task

    def set_max_seq_len(self, max_seq_len: int | None) -> None:
        """Set the limit of the group and of its environments."""
        super().set_max_seq_len(max_seq_len)
        for env in self.envs:
            env.set_max_seq_len(max_seq_len)


def _joined(parts: Sequence[tuple[str, Any]]) -> Any:
    """Return the rows of all parts one after the other, each with its part's name as the task."""
    if not all(is_hub_dataset(rows) for _, rows in parts):
        return [{**row, "task": name} for name, rows in parts for row in rows]
    from datasets import concatenate_datasets

    named = []
    for name, rows in parts:
        # The group routes by `task`, so an environment's own tasks are lost here, as in verifiers.
        if "task" in rows.column_names:
            rows = rows.remove_columns(["task"])
        named.append(rows.add_column("task", [name] * len(rows)))
    return concatenate_datasets(named)


def _names_of(rubric: Any) -> list[str]:
    names = getattr(rubric, "_get_reward_func_names", None) or rubric.get_reward_func_names
    return list(names())
