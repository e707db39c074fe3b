"""`rt.compare`: compares evaluations of stored runs by example, and finds those that flipped.

The statistics are those of `rolltree.evaluation`; `records.arms` finds and reads the evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rolltree.errors import ConfigError
from rolltree.estimate import CONFIDENCE
from rolltree.evaluation import Comparison, EvalReport, Settings
from rolltree.evaluation import compare_reports as compare_reports
from rolltree.evaluation.comparison import (
    Clusters,
    ExampleChange,
    are_same_runs,
    compare_values,
    example_changes,
    measure_names,
)
from rolltree.evaluation.reducers import values
from rolltree.records.arms import ArmName, ComparedArm, read_arms
from rolltree.rollouts.conversation import conversation_of
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run

NUM_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """A rollout that illustrates a change: where it is stored, its question and answers."""

    run: Path
    request_id: str
    # Of an episode with several trajectories, the first.
    trajectory_index: int
    # The last user message of the prompt, and the assistant's messages.
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """One arm against the baseline."""

    a: str
    b: str
    # By name, the reward first.
    measures: Mapping[str, Comparison]
    # The examples whose reward changed: first the lost, then the won, then the others.
    changes: tuple[ExampleChange, ...]
    # For each of the first changes, a rollout of A and one of B: the best of the arm that is
    # ahead, the worst of the other.
    shown: tuple[tuple[ShownRollout, ShownRollout], ...]
    # Common examples whose dataset rows (answer, info) differ although their ids are equal.
    num_other_inputs: int

    @property
    def reward(self) -> Comparison:
        """The comparison of mean rewards."""
        return self.measures["reward"]

    @property
    def num_lost(self) -> int:
        """Examples that most rollouts passed in A and not in B."""
        return sum(change.flip == "lost" for change in self.changes)

    @property
    def num_won(self) -> int:
        """Examples that most rollouts passed in B and not in A."""
        return sum(change.flip == "won" for change in self.changes)

    @property
    def sentences(self) -> list[str]:
        """The result in words: the reward first, then what limits the comparison."""
        return self.told(self.a, self.b)

    def told(self, a: str, b: str) -> list[str]:
        """Return the sentences with other names for the two arms."""
        reward = self.reward
        sentences = [reward.sentence(a, b)]
        if self.num_other_inputs:
            sentences.append(
                f"{self.num_other_inputs} of {reward.difference.num_examples} examples have the "
                "same id but different contents in the two arms: they are different questions."
            )
        if reward.num_only_a or reward.num_only_b:
            sentences.append(
                f"{reward.num_only_a} examples of {a} and {reward.num_only_b} of {b} are left out: "
                "they are not scored in every run of both."
            )
        return sentences

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "a": self.a,
            "b": self.b,
            "sentences": self.sentences,
            "measures": {name: found.as_dict() for name, found in self.measures.items()},
            "num_lost": self.num_lost,
            "num_won": self.num_won,
            "num_other_inputs": self.num_other_inputs,
            "changes": [{**asdict(change), "flip": change.flip} for change in self.changes],
            "shown": [[{**asdict(one), "run": str(one.run)} for one in two] for two in self.shown],
        }


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Arms against the first of them.

    With several pairs every interval is so wide that all of them hold together at `confidence`
    (Bonferroni): two pairs at 95 % have intervals of 97.5 %.
    """

    arms: tuple[ComparedArm, ...]
    pairs: tuple[ComparedPair, ...]
    confidence: float

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "confidence": self.confidence,
            "arms": [arm.as_dict() for arm in self.arms],
            "pairs": [pair.as_dict() for pair in self.pairs],
        }

    def __str__(self) -> str:
        return "\n".join(line for pair in self.pairs for line in pair.sentences)


def compare(
    *arms: ArmName,
    confidence: float = CONFIDENCE,
    pass_threshold: float = 1.0,
    price: tuple[float, float] | None = None,
    num_examples: int = NUM_EXAMPLES,
) -> RunComparison:
    """Compare evaluations of stored runs with the first, example by example.

    An arm is `"[NAME=]RUN[:PHASE]"`, several of these with commas between them (runs of one
    recipe with several seeds), or a list of them. A phase is a name (`eval_after`) or the step of
    a held-out evaluation (`28`). The default is the last held-out evaluation, or the only phase.
    One run alone is compared with itself: its first and its last held-out evaluation.

    Measures are those of `rolltree.evaluation.compare_reports`; `breaks`, how often per rollout a
    prompt did not extend the previous call; and with `price`, `cost`: dollars per rollout, at these
    prices of a million prompt and a million sampled tokens. Rollouts are shown for the first
    `num_examples` changed examples.

    >>> print(compare("runs/demo"))  # doctest: +SKIP
    The reward of step 28 is higher than that of step 0, +0.730 [+0.608, +0.814] over 100 examples:
    not noise.

    Raises:
        ConfigError: no such phase, fewer than two arms, or no scored example in common.
        StoreError: not a run.
    """
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"confidence is {confidence}; an interval needs one between 0 and 1.")
    found = read_arms(arms, Settings(confidence=confidence, pass_threshold=pass_threshold))
    each = 1 - (1 - confidence) / (len(found) - 1)
    with ExitStack() as stack:
        opened = {
            run.path: stack.enter_context(Run.open(run.path, mode="r"))
            for arm in found
            for run in arm.runs
        }
        pairs = []
        for arm in found[1:]:
            changes = example_changes(found[0].reports, arm.reports)
            pairs.append(
                ComparedPair(
                    a=found[0].name,
                    b=arm.name,
                    measures=_measures(found[0], arm, each, price),
                    changes=tuple(changes),
                    shown=tuple(
                        (
                            _shown(found[0], change, opened, best=change.gain < 0),
                            _shown(arm, change, opened, best=change.gain > 0),
                        )
                        for change in changes[:num_examples]
                    ),
                    num_other_inputs=_num_other_inputs(found[0], arm),
                )
            )
    return RunComparison(found, tuple(pairs), confidence)


def _measures(
    a: ComparedArm, b: ComparedArm, confidence: float, price: tuple[float, float] | None
) -> dict[str, Comparison]:
    """Return all measures, but no pass@k if nothing passes in either arm."""
    names = measure_names((*a.reports, *b.reports))
    found = {
        name: compare_reports(a.reports, b.reports, measure=name, confidence=confidence)
        for name in names
    }
    # 0 of 100 against 0 of 100 carries no information, at any k.
    empty = [
        name
        for name, each in found.items()
        if name.startswith("pass") and not each.before.mean and not each.after.mean
    ]
    for name in empty:
        del found[name]
    extra: dict[str, tuple[Sequence[Clusters], ...]] = {"breaks": (a.breaks, b.breaks)}
    if price is not None:
        extra["cost"] = tuple([_costs(each, price) for each in arm.reports] for arm in (a, b))
    # Two phases of the same runs are paired by run as well as by example (design/0024).
    same_runs = are_same_runs(a.reports, b.reports)
    for name, (before, after) in extra.items():
        other = compare_values(before, after, confidence=confidence, same_runs=same_runs)
        if other is not None:
            found[name] = other
    return found


def _costs(report: EvalReport, price: tuple[float, float]) -> Clusters:
    """Return dollars per rollout by example."""
    found: dict[Any, list[float]] = {}
    names = ("example", "num_prompt_tokens", "num_completion_tokens")
    for example, prompt, sampled in zip(
        *(values(report.outcomes, name) for name in names), strict=True
    ):
        cost = (prompt * price[0] + sampled * price[1]) / 1e6
        found.setdefault(example, []).append(cost)
    return found


def _shown(
    arm: ComparedArm, change: ExampleChange, opened: Mapping[Path, Run], *, best: bool
) -> ShownRollout:
    """Return the best or the worst scored rollout of an example."""
    scored = [
        (reward, -number, request_id)
        for number, report in enumerate(arm.reports)
        for request_id, example, reward in zip(
            *(values(report.outcomes, name) for name in ("request_id", "example", "reward")),
            strict=True,
        )
        if example == change.example and reward is not None
    ]
    _, number, request_id = max(scored) if best else min(scored)
    run = arm.runs[-number]
    rows = list(opened[run.path].rollouts(request_id=request_id, phase=run.phase))
    (result,) = decode_results(rows, tokens=False)
    prompt, completion = conversation_of(result.states[0]) if result.states else ([], [])
    question = [m for m in prompt if m.get("role") == "user"]
    answers = [m for m in completion if m.get("role") == "assistant"]
    return ShownRollout(
        run=run.path,
        request_id=request_id,
        trajectory_index=rows[0].trajectory_index,
        question=_text(question[-1]) if question else "",
        answers=tuple(map(_text, answers)),
    )


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content and not isinstance(content, str):
        parts = [item.get("text", "") for item in content if isinstance(item, Mapping)]
        content = " ".join(map(str, parts))
    calls = [str(call) for call in message.get("tool_calls") or ()]
    return " ".join([content or "", *calls]).strip()


def _num_other_inputs(a: ComparedArm, b: ComparedArm) -> int:
    first, *others = (*a.inputs, *b.inputs)
    return sum(
        any(other.get(example, given) != given for other in others)
        for example, given in first.items()
    )
