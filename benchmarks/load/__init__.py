"""Large runs for the page, made in about a minute: many rollouts, and one that is very long.

The rollouts of the first are copies of those of a real run under their own names, in 200 steps
whose metrics are those of the real run, moved a little; one in fifty has failed. The second has one
rollout of 20 calls, whose last context is 200,000 tokens of this project's own documentation.
"""

from __future__ import annotations

import json
import math
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

import rolltree as rt
from rolltree.inference.models import resolve_model
from rolltree.records.token_rows import state_of
from rolltree.rollouts.record import encode_result
from rolltree.samples.resolve import resolve_rollout
from rolltree.store import Run, StoredRollout, TrainedRollout
from rolltree.tokens import Trajectory
from rolltree.values.types import FinishReason, ModelResponse

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"
STEPS, MEMBERS = 200, 8
TURNS = 20
LONG = "train/000001/long/0"


def make_wide(folder: Path, num: int) -> int:
    """Store a training run of about `num` rollouts and return how many it has."""
    with tempfile.TemporaryDirectory() as source:
        with tarfile.open(REPOSITORY / "tests" / "golden" / "demo.tar.xz") as archive:
            archive.extractall(source, filter="data")
        with Run.open(source, "r") as real:
            rows = list(real.rollouts(phase="train"))
            metrics = [step.metrics for step in real.steps()]
            config = real.config
    known = [_trained(row) for row in rows]
    named = cycle(zip(rows, known, strict=True))
    groups = math.ceil(num / (STEPS * MEMBERS))
    with Run.create(folder, config=config, kind="train") as run:
        run.plan("steps", STEPS)
        for step in range(1, STEPS + 1):
            copies = list(_copies(named, step, groups))
            run.add_rollouts(row for row, _ in copies)
            run.add_step(step, _moved(metrics, step), [found for _, found in copies])
    return groups * STEPS * MEMBERS


def _copies(
    named: Iterator[tuple[StoredRollout, TrainedRollout]], step: int, groups: int
) -> Iterator[tuple[StoredRollout, TrainedRollout]]:
    """Yield the rollouts of a step, each under its own name."""
    for at, (row, known) in enumerate(islice(named, groups * MEMBERS)):
        group = f"train/{step:06d}/g{at // MEMBERS:02d}"
        names: dict[str, Any] = {
            "request_id": f"{group}/{at % MEMBERS}",
            "group_id": group,
            "index_in_group": at % MEMBERS,
            "phase": "train",
            "train_step": step,
        }
        record = json.loads(row.record)
        record["request"] |= names
        blob = json.dumps(record, separators=(",", ":")).encode()
        metrics = {**row.metrics, "noise": math.sin(step * 1000.0 + at)}
        failed = at % 50 == 49
        if failed:
            said = {
                "type": "ToolError",
                "message": "no answer",
                "traceback": "",
                "phase": "rollout",
            }
            names |= {"reward": None, "status": "error", "errors": (said,)}
            names |= {"error_type": "ToolError", "error_phase": "rollout"}
        yield (
            replace(row, **names, record=blob, metrics=metrics),
            replace(known, request_id=names["request_id"], step=step),
        )


def _trained(row: StoredRollout) -> TrainedRollout:
    """Return what a trainer might have known of a rollout's tokens."""
    state = state_of(row)
    assert state is not None
    rollout = resolve_rollout(0, state)
    tree = rollout.tree
    sizes = [tree.num_sampled(step.handle) for step in rollout.calls]
    logprob = np.concatenate([np.asarray(tree.logprobs(step.handle)) for step in rollout.calls])
    return _knowing(row.request_id, np.array(sizes, np.int32), logprob, row.reward or 0.0)


def _knowing(name: str, sizes: Any, logprob: Any, reward: float) -> TrainedRollout:
    size = len(logprob)
    return TrainedRollout(
        request_id=name,
        step=1,
        num_sampled=sizes,
        advantage=np.full(size, reward - 0.5, np.float32),
        weight=np.full(size, 1 / size, np.float32),
        logprob=(logprob + 0.01 * np.sin(np.arange(size))).astype(np.float32),
        entropy=np.abs(np.cos(np.arange(size))).astype(np.float32),
    )


def _moved(metrics: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """Return metrics for a step: those of a real one, moved a little."""
    real = metrics[(step - 1) * len(metrics) // STEPS]
    factor = 1.0 + 0.05 * math.sin(step)
    return {
        name: factor * value if isinstance(value, float) else value for name, value in real.items()
    }


def make_long(folder: Path, num_tokens: int) -> int:
    """Store a run with one long rollout and return the tokens of its last call's context."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(resolve_model(MODEL) / "tokenizer.json"))
    paths = sorted((REPOSITORY / "docs").glob("*.md")) + sorted(
        (REPOSITORY / "design").glob("*.md")
    )
    ids = tokenizer.encode("\n".join(path.read_text() for path in paths)).ids
    part = num_tokens // (2 * TURNS)
    words = cycle(ids)
    trajectory, messages = Trajectory(), []
    context: list[int] = []
    logprobs = []
    for turn in range(TURNS):
        asked, said = (list(islice(words, part)) for _ in range(2))
        context += asked
        messages.append({"role": "user", "content": tokenizer.decode(asked)})
        answer = [{"role": "assistant", "content": tokenizer.decode(said)}]
        logprobs.append(-np.abs(np.sin(np.arange(part))).astype(np.float32))
        response = ModelResponse(
            message=answer[0],
            text=answer[0]["content"],
            finish_reason=FinishReason.STOP,
            prompt_ids=np.array(context, np.int32),
            completion_ids=np.array(said, np.int32),
            logprobs=logprobs[-1],
            versions=np.full(part, turn % 3, np.int32),
            temperature=1.0,
        )
        trajectory.append_call(
            prompt=list(messages), completion=answer, response=response, turn=turn
        )
        context += said
        messages += answer
    request = rt.RolloutRequest(
        request_id=LONG,
        env_id="docs",
        input={"prompt": messages[:1], "example_id": 0, "task": "reading"},
        seed=0,
        sampling_seed=0,
        group_id=LONG.rpartition("/")[0],
        index_in_group=0,
        sampling=rt.SamplingParams(),
        phase="train",
        train_step=1,
    )
    state = rt.State(
        input=request.input,
        prompt=messages[:1],
        completion=messages[1:],
        trajectory=trajectory,
        reward=1.0,
    )
    sizes = np.full(TURNS, part, np.int32)
    known = _knowing(LONG, sizes, np.concatenate(logprobs), 1.0)
    with Run.create(folder, kind="train", config={"model": {"name": MODEL}}) as run:
        run.add_rollouts(encode_result(rt.RolloutResult(request, (state,), None, 1)))
        run.add_step(1, {"reward/mean": 1.0}, [known])
    return len(context)
