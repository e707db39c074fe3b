"""Runs with a planted fault, and healthy runs of every shape, for what must tell them apart.

`written` writes stores in milliseconds, with numbers drawn at random around a course; `trained`
really trains the tiny model, for seconds each. The story's benchmark and its test share both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ALARMS = ("error", "warning")
RUNS = {
    "ended": ("ended", "stopped_early"),
    "not_finite": ("nan_loss", "loss_near_zero"),
    "idle": ("rate_of_zero", "rate_decays"),
    "settings": ("other_rate", "more_steps"),
    "scale": ("other_scale", "large_rewards"),
    "same_answer": ("one_sentence", "yes_or_no"),
    "repeats": ("loops", "counts"),
    "same_questions": ("one_question", "few_questions"),
    "gaming": ("gaming", "cost_falls"),
    "form": ("format_only", "format_first"),
    "collapse": ("collapse", "reward_dips"),
    "dead_function": ("dead_function", "format_is_learned"),
    "zero_variance": ("constant_reward", "solved_below_zero"),
    "flat_groups": ("flat_groups", "sparse"),
    "task": ("one_task_lost", "several_tasks"),
    "drift": ("drift", "bfloat16"),
    "gradient": ("gradient", "gradient_noise"),
    "lost_tokens": ("clipped", "some_clipped"),
    "ess": ("ess", "asynchronous"),
    "kl": ("kl", "kl_is_spent"),
    "randomness": ("becomes_random", "explores"),
    "entropy": ("entropy", "confident"),
    "empty_answers": ("empty_answers", "empty_answers_lose"),
    "unscored": ("unscored", "delegation"),
    "waits": ("dead_judge", "slow_judge"),
    "timeouts": ("timeouts", "rare_failure"),
    "tools": ("tool_raises", "tool_is_learned"),
    "programs": ("program_fails", "program_is_learned"),
    "failures": ("failures", "rare_failure"),
    "scoring": ("scoring", "plain"),
    "breaks": ("breaks", "sliding_window"),
    "max_tokens": ("max_tokens", "one_token"),
    "length": ("length", "learns_to_think"),
    "slow": ("slow", "learns_to_think"),
    "truncated": ("truncated", "fixed_turns"),
    "shared_questions": ("shared_questions", "held_out"),
    "staleness": ("stale", "asynchronous"),
    "reward": ("reward_falls", "curriculum"),
    "held_out": ("overfit", "held_out"),
}
"""For each detector of `narrator/detectors.py`: a run that it must find, a similar healthy one."""


CLOCKED = {"slow"}
"""What the clock alone says: beside other work on the machine it is true of a healthy run that
really trains. Written runs, whose clock is written, show that it is told rightly."""


def kinds_of_alarms(sentences: Iterable[dict[str, Any]]) -> set[str]:
    """Return the kinds of the sentences that alarm."""
    return {each["kind"] for each in sentences if each["severity"] in ALARMS}
