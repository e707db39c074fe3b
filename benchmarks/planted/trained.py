"""Runs of the tiny model that `rt.train` trains: `train(folder, FAULTS["gaming"].run)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import rolltree as rt

LETTERS = "abcdefgh"


def said(completion: Any) -> str:
    return str(completion[-1]["content"])


def share(text: str, holds: Callable[[str], bool]) -> float:
    return sum(map(holds, text)) / max(1, len(text))


@rt.run_inline
def letters(completion: Any) -> float:
    """The share of what was said that are letters; the untrained model writes few."""
    return share(said(completion), str.isalpha)


@rt.run_inline
def correct(completion: Any) -> float:
    """At most half of it are letters, as it is mostly before training."""
    return float(letters(completion) <= 0.5)


@rt.run_inline
def early(completion: Any) -> float:
    """The share of letters from the first half of the alphabet."""
    return share(said(completion), lambda c: c.lower() in "abcdefghijklm")


@rt.run_inline
def exact(completion: Any, answer: str) -> float:
    """What the tiny model never says."""
    return float(said(completion) == f"The answer is {answer}.")


@rt.run_inline
def rare(completion: Any) -> float:
    """One answer in thirty."""
    return float(said(completion)[:1].lower() == "q")


@rt.run_inline
def half(completion: Any) -> float:
    return 0.5


@rt.run_inline
def below_zero(completion: Any) -> float:
    return early(completion) - 1.0


@rt.run_inline
def most_is_0_8(completion: Any) -> float:
    return 0.8 * early(completion)


@rt.run_inline
def starts_early(completion: Any) -> float:
    return float(said(completion)[:1].lower() in "abcdefghijklm" and said(completion) != "")


@rt.run_inline
def long(completion: Any) -> float:
    return min(1.0, len(said(completion)) / 40)


@rt.run_inline
def silent(completion: Any) -> float:
    return float(not said(completion).strip())


@rt.run_inline
def raises(completion: Any) -> float:
    if len(said(completion)) % 2:
        raise KeyError("no such answer")
    return letters(completion)


@rt.run_inline
def unsure(completion: Any) -> float:
    return early(completion) if len(said(completion)) % 2 else float("nan")


class TwoTurns(rt.MultiTurnEnv):
    """Asks twice; the world breaks when the run has gone on for a while, if it is to."""

    breaks = False
    num_played = 0

    async def env_response(self, messages: rt.Messages, state: rt.State) -> rt.Messages:
        TwoTurns.num_played += 1
        if self.breaks and TwoTurns.num_played > 150:
            raise ConnectionError("the world is gone")
        return [{"role": "user", "content": "More."}]


@dataclass(frozen=True)
class Training:
    """What a run trains, and how; everything left out is healthy."""

    rewards: Sequence[Any] = (early,)
    weights: Sequence[float] | None = None
    metrics: Sequence[Any] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_turns: int = 1
    breaks: bool = False
    num_steps: int = 16
    max_tokens: int = 6
    lr: float = 5e-3
    # How many held-out questions there are, and whether they are those of training.
    num_held_out: int = 0
    is_shared: bool = False
    # The version from which on the engine's logprobs are wrong.
    wrong_from: int | None = None


class Fault(NamedTuple):
    """A training with a fault, and the kinds of sentences of which one must alarm."""

    kinds: tuple[str, ...]
    run: Training


def train(folder: Path, given: Training) -> Path:
    """Train a run; one that ends with an error is stored like any other."""
    rubric = rt.Rubric(list(given.rewards), weights=given.weights and list(given.weights))
    for metric in given.metrics:
        rubric.add_metric(metric)
    rows = [{"question": f"write {letter}", "answer": letter} for letter in LETTERS]
    held_out = (
        rows if given.is_shared else [{**row, "question": f"say {row['answer']}"} for row in rows]
    )
    data = {"dataset": rows, "rubric": rubric, "env_id": "letters"}
    if given.num_held_out:
        data["eval_dataset"] = held_out[: given.num_held_out]
    env: Any = rt.SingleTurnEnv(**data)
    if given.num_turns > 1:
        env = TwoTurns(max_turns=given.num_turns, **data)
        env.breaks, TwoTurns.num_played = given.breaks, 0
    settings: dict[str, Any] = {
        "algorithm": {"group_size": 8, "groups_per_step": 4},
        "optim": {"lr": given.lr},
        "sampling": {"max_tokens": given.max_tokens},
        "eval": {"before": bool(given.num_held_out), "after": bool(given.num_held_out)},
        "checkpoint": {"export": False},
    }
    for section, values in given.settings.items():
        settings[section] = settings.get(section, {}) | values
    settings["train"] = {"num_steps": given.num_steps} | settings.get("train", {})
    with _engine(given.wrong_from), suppress(rt.RolltreeError):
        rt.train(environment=env, model="tiny", run_dir=str(folder), quiet=True, **settings)
    return folder


@contextmanager
def _engine(wrong_from: int | None) -> Iterator[None]:
    """Let the engine return other logprobs for what the weights of a version on sample."""
    from rolltree.inference.local.client import LocalClient

    sample = LocalClient._sample

    async def wrong(self: Any, *call: Any) -> Any:
        output = await sample(self, *call)
        is_wrong = output.versions >= (wrong_from or 0)
        return replace(output, logprobs=output.logprobs - 0.3 * is_wrong.astype("float32"))

    if wrong_from is not None:
        LocalClient._sample = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalClient._sample = sample  # type: ignore[method-assign]


FAULTS: Mapping[str, Fault] = {
    "trained_gaming": Fault(("gaming",), Training(rewards=(letters,), metrics=(correct,))),
    "trained_format": Fault(
        ("form",), Training(rewards=(exact, early), weights=(1.0, 0.5), num_steps=24)
    ),
    "trained_constant": Fault(("zero_variance",), Training(rewards=(half,))),
    "trained_all_zero": Fault(("zero_variance",), Training(rewards=(exact,))),
    "trained_lr": Fault(("collapse", "reward"), Training(lr=0.5)),
    "trained_flat": Fault(
        ("flat_groups",), Training(rewards=(rare,), settings={"algorithm": {"name": "zero"}})
    ),
    "trained_raises": Fault(("scoring", "failures", "unscored"), Training(rewards=(raises,))),
    "trained_unscored": Fault(("scoring", "failures", "unscored"), Training(rewards=(unsure,))),
    "trained_silence": Fault(("empty_answers",), Training(rewards=(silent,), num_steps=24)),
    "trained_shared": Fault(
        ("shared_questions",), Training(num_held_out=8, is_shared=True, num_steps=8)
    ),
    "trained_drift": Fault(
        ("drift",), Training(wrong_from=5, num_steps=8, settings={"train": {"max_mismatch": 1.0}})
    ),
    "trained_mismatch": Fault(("ended",), Training(wrong_from=5, num_steps=8)),
    "trained_failures": Fault(
        ("failures", "ended"),
        Training(num_turns=2, breaks=True, settings={"train": {"max_failed_share": 1.0}}),
    ),
    "trained_control": Fault(
        ("reward",), Training(num_steps=40, settings={"algorithm": {"name": "zero"}})
    ),
}
"""Name to a fault in a run that really trains."""

HEALTHY: Mapping[str, Training] = {
    "trained_letters": Training(),
    "trained_below_zero": Training(rewards=(below_zero,)),
    "trained_0_8": Training(rewards=(most_is_0_8,)),
    "trained_one_token": Training(rewards=(starts_early,), max_tokens=1),
    "trained_two_turns": Training(num_turns=2, num_steps=10),
    "trained_held_out": Training(num_held_out=8, settings={"eval": {"every": 2}}),
    "trained_metrics": Training(metrics=(letters, long)),
    "trained_async": Training(settings={"train": {"async_steps": 2}}, num_steps=24),
    "trained_weighted": Training(rewards=(early, letters), weights=(1.0, 0.2)),
    "trained_long_answers": Training(max_tokens=24, num_steps=10),
}
"""Name to a healthy run that really trains."""
