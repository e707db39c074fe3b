"""The cost of storing the values of each trained token, in CPU time and in bytes.

    python benchmarks/token_record.py [--rollouts 32] [--check] [--json]

One step of SmolLM2-135M on rollouts of two turns, with and without the record; and the record alone
for 512 rollouts of eight turns, half a million tokens. CPU time is that of the process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from verdict import Bar, conclude, make_parser

from rolltree.inference.models import load_model
from rolltree.samples import build_samples
from rolltree.store import Run
from rolltree.tokens import Trajectory
from rolltree.training import CreditReport, Trainer, load_train_config
from rolltree.training.algorithms import resolve_algorithm
from rolltree.training.batches import build_batch
from rolltree.training.metrics import RecordStats
from rolltree.training.token_record import TokenRecord
from rolltree.values.types import FinishReason, ModelResponse, State


def play(num_rollouts: int, num_turns: int, num_tokens: int) -> list[State]:
    """Return rollouts with random tokens; every other one has a negative advantage."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(num_rollouts):
        trajectory = Trajectory()
        context = np.arange(100, 140, dtype=np.int32)
        for turn in range(num_turns):
            answer = rng.integers(1000, 40000, num_tokens).astype(np.int32)
            response = ModelResponse(
                message={},
                text="",
                finish_reason=FinishReason.STOP,
                prompt_ids=context,
                completion_ids=answer,
                logprobs=-rng.exponential(1.0, num_tokens).astype(np.float32),
                versions=np.zeros(num_tokens, np.int32),
                temperature=1.0,
            )
            trajectory.append_call(prompt=[], completion=[], response=response, turn=turn)
            context = np.concatenate([context, answer, rng.integers(1000, 40000, 12)]).astype("i4")
        state = State(trajectory=trajectory, reward=1.0, request_id=f"train/{number:06d}")
        for step in trajectory:
            step["advantage"] = 1.0 - 2.0 * (number % 2)
        made.append(state)
    return made


def record_of(states: list[State]) -> TokenRecord:
    """Return the empty record of a step on these states."""
    results: Any = [
        SimpleNamespace(request=SimpleNamespace(request_id=state["request_id"]), states=(state,))
        for state in states
    ]
    given = [np.array([step["advantage"] for step in state["trajectory"]]) for state in states]
    places = tuple((index, 0) for index in range(len(states)))
    return TokenRecord(results, CreditReport(tuple(states), tuple(given), places=places))


def store(folder: Path, record: TokenRecord | None) -> tuple[float, float]:
    """Store a step and return the CPU seconds, and the bytes per token of the blobs."""
    with Run.create(folder) as run:
        began = time.process_time()
        run.add_step(1, {"loss": 1.0}, () if record is None else record.rows(1))
        spent = time.process_time() - began
        (row,) = run.query("SELECT total(length(tokens)) / total(num_tokens) AS n FROM trained")
    return spent, row["n"] or 0.0


def on_a_model(num_rollouts: int, folder: Path) -> dict[str, float]:
    """Take a step of SmolLM2 and compare it with its record."""
    model, _ = load_model("smollm2-135m", "float32")
    trainer = Trainer(model, load_train_config({"train": {"max_mismatch": 1e9}}))
    states = play(num_rollouts, 2, 16)
    samples = build_samples(states).samples
    kept: list[Any] = []
    began = time.process_time()
    trainer.step(samples, 1, on_batch=lambda *seen: kept.append(seen))
    step_s = time.process_time() - began
    began = time.perf_counter()
    record = record_of(states)
    for seen in kept:
        record.add(*seen)
    loop_s = time.perf_counter() - began
    without_s, _ = store(folder / "without", None)
    with_s, num_bytes = store(folder / "with", record)
    return {
        "step_s": step_s,
        "loop_ms": 1000 * loop_s,
        "record_ms": 1000 * (with_s - without_s),
        "share": (loop_s + with_s - without_s) / step_s,
        "bytes_per_token": num_bytes,
    }


def at_scale(folder: Path) -> dict[str, float]:
    """Store the record of 512 rollouts of eight turns of 128 tokens."""
    states = play(512, 8, 128)
    batch = build_batch(build_samples(states).samples, resolve_algorithm("grpo"), 10**9)
    stats = RecordStats(len(batch.records))
    rng = np.random.default_rng(1)
    stats.logprob = (batch.records.logprob + rng.normal(0, 0.01, len(batch.records))).astype("f4")
    stats.entropy = rng.exponential(1.0, len(batch.records)).astype("f4")
    record = record_of(states)
    began = time.perf_counter()
    record.add(batch, stats)
    loop_s = time.perf_counter() - began
    spent, num_bytes = store(folder / "scale", record)
    num_tokens = len(batch.records)
    return {
        "num_tokens": num_tokens,
        "loop_ms": 1000 * loop_s,
        "ms_per_100k": 1e8 * spent / num_tokens,
        "bytes_per_token": num_bytes,
    }


def main() -> int:
    """Measure both."""
    parser = make_parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=32, help="rollouts of the step on SmolLM2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        step = on_a_model(options.rollouts, Path(folder))
        scale = at_scale(Path(folder))

    def show() -> None:
        for name, found in (("SmolLM2-135M", step), ("half a million tokens", scale)):
            print(name, *(f"{key} {value:.4g}" for key, value in found.items()), sep="  ")

    bars = [
        Bar.below("% of a step's CPU time is the record", 100 * step["share"], 1),
        Bar.below("ms of the event loop", max(step["loop_ms"], scale["loop_ms"]), 1),
        Bar.below("bytes per token of a rollout of 1,024", scale["bytes_per_token"], 7),
        Bar.below("bytes per token of a rollout of 32", step["bytes_per_token"], 12),
    ]
    return conclude(options, bars, {"step": step, "scale": scale}, show)


if __name__ == "__main__":
    sys.exit(main())
