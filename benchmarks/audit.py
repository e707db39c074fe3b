"""The cost of an audit: a stored training run of 100,000 rollouts, every check but a recomputation.

    python benchmarks/audit.py                the figures
    python benchmarks/audit.py --check        exit 1 when a bar is missed
    python benchmarks/audit.py --num 10000    a smaller run

The run is made of copies of the rollouts of a real run (two turns of arithmetic), each with its own
name, seeds, step and version, so that it is clean. Making it is not measured.
"""

from __future__ import annotations

import json
import resource
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from verdict import Bar, conclude, make_parser

import rolltree as rt
from rolltree.insight.auditing.run import processes_for
from rolltree.rollouts.decode import decode_rollout
from rolltree.samples.resolve import resolve_tokens
from rolltree.store import Run, StoredRollout
from rolltree.store.trained import TrainedRollout
from rolltree.tokens import TokenTree
from rolltree.training import TrainConfig, assign_credit
from rolltree.values.seeds import derive_seed

GROUPS, MEMBERS = 8, 8
MOST_S = 60.0
"""Of 100,000 rollouts: the CPU time of all processes over how many there are."""


def at_version(data: bytes, version: int) -> bytes:
    """Return a token tree whose tokens were all sampled by `version`."""
    old, new = TokenTree.from_bytes(data), TokenTree()
    for call in range(old.num_calls):
        new.insert(
            old.prompt_ids(call),
            old.completion_ids(call),
            logprobs=old.logprobs(call),
            temperature=old.temperature(call),
            versions=version,
            agent=old.agent(call),
            turn=old.turn(call),
        )
    return new.to_bytes()


def copies(
    rows: list[StoredRollout], num: int, *, for_audit: bool = True
) -> Iterator[StoredRollout]:
    """Yield `num` rollouts in the places of a training run: step, group, member."""
    source, began = cycle(rows), time.time()
    for index in range(num):
        row = next(source)
        step, place = index // (GROUPS * MEMBERS) + 1, index % (GROUPS * MEMBERS)
        group, member = place // MEMBERS, place % MEMBERS
        name = f"train/{step:06d}/g{group:02d}"
        seed = derive_seed(0, "train", step, group)
        names: dict[str, Any] = {
            "request_id": f"{name}/{member}",
            "group_id": name,
            "index_in_group": member,
            "phase": "train",
            "train_step": step,
        }
        record = json.loads(row.record)
        sampling_seed = derive_seed(derive_seed(seed, "sampling"), "member", member)
        record["request"] |= names | {"seed": seed, "sampling_seed": sampling_seed}
        for call in record["state"]["steps"]:
            call["extras"] |= dict.fromkeys(("policy_version_min", "policy_version_max"), step - 1)
        record["state"]["fields"]["timing"]["start_time"] = began + index / 1e4
        yield replace(
            row,
            **names,
            min_version=step - 1,
            max_version=step - 1,
            started_at=began + index / 1e4,
            created_at=time.time(),
            record=json.dumps(record, separators=(",", ":")).encode(),
            tokens=at_version(row.tokens, step - 1) if for_audit else row.tokens,
        )


def trained(rows: list[StoredRollout], step: int) -> list[TrainedRollout]:
    """Return what a step knew of its tokens: the credit's advantages, the engine's logprobs."""
    results = [decode_rollout(row) for row in rows]
    report = assign_credit(results)
    found = []
    for result, advantages in zip(results, report.advantages, strict=True):
        steps = result.states[0]["trajectory"]
        tree, calls = resolve_tokens(0, steps)
        sizes = np.array([tree.num_sampled(call) for call in calls], np.int32)
        logprob = np.concatenate([tree.logprobs(call) for call in calls])
        found.append(
            TrainedRollout(
                request_id=result.request.request_id,
                step=step,
                num_sampled=sizes,
                advantage=np.repeat(advantages, sizes),
                # Every rollout counts the same, as the run's settings say: `rollout_mean`.
                weight=np.full(len(logprob), 1 / (len(logprob) * len(results)), np.float32),
                logprob=logprob,
                entropy=np.zeros(len(logprob), np.float32),
            )
        )
    return found


def make_run(path: Path, source: Path, num: int, *, for_audit: bool = True) -> Path:
    """Store a clean training run of `num` rollouts and return its directory.

    One that is not for an audit is made faster: its tokens keep the versions that sampled them, and
    no token is recorded as trained.
    """
    with Run.open(source, "r") as real:
        rows = list(real.rollouts(phase="train"))
    # Group after group, so that the copies of a group have one question.
    rows.sort(key=lambda row: (row.group_id, row.index_in_group))
    size = GROUPS * MEMBERS
    config = TrainConfig().as_dict()
    config["train"]["num_steps"] = num // size
    with Run.create(path, config=config, kind="train") as run:
        batch: list[StoredRollout] = []
        for row in copies(rows, num - num % size, for_audit=for_audit):
            batch.append(row)
            if len(batch) == size:
                step = row.train_step or 0
                run.add_rollouts(batch)
                metrics = {
                    "policy/version": float(step),
                    "reward/mean": float(np.mean([item.reward for item in batch])),
                }
                run.add_step(step, metrics, trained(batch, step) if for_audit else ())
                batch = []
    return path


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num", type=int, default=100_000, help="rollouts of the run")
    options = parser.parse_args()
    golden = Path(__file__).resolve().parents[1] / "tests" / "golden" / "demo.tar.xz"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "demo"
        with tarfile.open(golden) as archive:
            archive.extractall(source, filter="data")
        path = make_run(Path(folder) / "run", source, options.num)
        began, cpu = time.monotonic(), cpu_time_s()
        report = rt.audit(path, tokenizer=source / "model" if has_model(source) else None)
        spent_s, cpu_s = time.monotonic() - began, cpu_time_s() - cpu
        num = processes_for(report.num_rollouts)
    figures = {
        "num_rollouts": report.num_rollouts,
        "num_findings": len(report.findings),
        "findings": [f"{each.cause}: {each.message}" for each in report.findings[:5]],
        "wall_s": spent_s,
        "cpu_s": cpu_s,
        "processes": num,
        "checked": {check.name: check.num_checked for check in report.checks},
    }
    limit = MOST_S * report.num_rollouts / 100_000
    bars = [
        Bar.at_most("findings in a clean run", float(len(report.findings)), 0),
        Bar.at_most(
            f"s of CPU time a process, {report.num_rollouts:,} rollouts", cpu_s / num, limit
        ),
    ]
    return conclude(options, bars, figures, lambda: print_figures(figures))


def cpu_time_s() -> float:
    """Return the CPU time of this process and of those it has waited for."""
    usage = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(item.ru_utime + item.ru_stime for item in usage)


def has_model(folder: Path) -> bool:
    return (folder / "model" / "tokenizer.json").is_file()


def print_figures(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        print(f"{name:14} {value}")


if __name__ == "__main__":
    sys.exit(main())
