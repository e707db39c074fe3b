"""The checks of an environment's contract, by name, and what one found."""

from __future__ import annotations

from dataclasses import dataclass

CHECKS: dict[str, str] = {
    "rows-differ": "two instances made with the same arguments have the same rows",
    "duplicate-ids": "no two rows of a split have one example_id",
    "overlap": "no question is in the training and in the evaluation rows",
    "leak": "prompts do not contain their own answers",
    "reward-range": "rewards are finite and in the range they are meant to be in",
    "scoring-fails": "every answer can be scored, also an empty or a nonsensical one",
    "rollout-fails": "no answer makes the environment fail",
    "empty-scores": "an empty answer earns little",
    "constant-scores": "the same answer to every question earns no more than half",
    "guessing-scores": "a list of all answers, or the prompt repeated, earns no more than half",
    "constant-reward": "rewards differ between answers",
    "nondeterministic": "one row, seed and reply give one conversation and one reward",
    "never-ends": "a rollout ends, whatever the model says",
    "cleanup-count": "each @cleanup runs once per rollout: after success, failure, cancellation",
    "cleanup-raises": "no @cleanup raises",
    "failure-hidden": "a failed model call is an error of the rollout, and no reward",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken check: its name in `CHECKS`, and what was seen."""

    check: str
    message: str
