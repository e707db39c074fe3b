"""What an environment's rows show without playing: other rows each time, doubles, leaks."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rolltree.environments import Environment, Rows
from rolltree.testing.findings import Finding

_MAX_ROWS = 2000


def row_findings(first: Environment, second: Environment, num_examples: int) -> list[Finding]:
    """Return what the rows of two instances of one environment show."""
    findings = []
    splits = [("training", first.dataset, second.dataset)]
    splits.append(("evaluation", first.eval_dataset, second.eval_dataset))
    for name, rows, again in splits:
        if rows is None or again is None:
            continue
        if len(rows) != len(again) or _texts(rows, num_examples) != _texts(again, num_examples):
            findings.append(
                Finding(
                    "rows-differ",
                    f"the {name} rows of two instances differ; seed whatever draws or orders them",
                )
            )
        ids = Counter((r["task"], r["example_id"]) for r in rows[:_MAX_ROWS])
        (task, example_id), times = ids.most_common(1)[0]
        if times > 1:
            findings.append(
                Finding(
                    "duplicate-ids",
                    f"{times} {name} rows have the example_id {example_id} (task {task!r}); their "
                    "rollouts would be compared as one group",
                )
            )
    return findings + _overlap(first)


def leak_rate(shown: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """Return the share of prompts that contain their own answer, and that of others' answers.

    `shown` is (prompt, answer). The second number tells a leak from a choice that all prompts
    offer.
    """
    if not shown:
        return 0.0, 0.0
    own = sum(_contains(prompt, answer) for prompt, answer in shown) / len(shown)
    pairs = [
        _contains(prompt, other)
        for i, (prompt, answer) in enumerate(shown)
        for j, (_, other) in enumerate(shown)
        if i != j and other != answer
    ]
    return own, sum(pairs) / len(pairs) if pairs else 0.0


def _overlap(env: Environment) -> list[Finding]:
    if env.dataset is None or env.eval_dataset is None:
        return []
    train = {_prompt(row) for row in env.dataset[:_MAX_ROWS]}
    tested = [_prompt(row) for row in env.eval_dataset[:_MAX_ROWS]]
    if len(train) == 1 and set(tested) == train:
        return []  # worlds: the seed makes the difference, not the row
    shared = [prompt for prompt in tested if prompt in train]
    if not shared:
        return []
    return [
        Finding(
            "overlap",
            f"{len(shared)} of {len(tested)} evaluation questions are training questions, such as "
            f"{shared[0][-80:]!r}",
        )
    ]


def _contains(prompt: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", prompt, re.IGNORECASE) is not None


def _texts(rows: Rows, num: int) -> list[str]:
    return [json.dumps(row, sort_keys=True, default=str) for row in rows[:num]]


def _prompt(row: Any) -> str:
    return json.dumps(row["prompt"], sort_keys=True, default=str)
