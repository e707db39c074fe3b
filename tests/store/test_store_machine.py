"""Any order of operations, reopenings included, leaves what a plain model of the run says."""

import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from rolltree.store import Run, StoredRollout, TrainedRollout, summarize
from rolltree.values.errors import StoreError

request_ids = st.sampled_from(["a", "b", "c", "d", "e"])
phases = st.sampled_from(["eval", "train"])
rewards = st.none() | st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def batches(draw):
    """Rows as results make them: all trajectories of a request together, failed or not."""
    rows = []
    for request_id in draw(st.lists(request_ids, max_size=3)):
        failed = draw(st.booleans())
        phase, step = draw(phases), draw(st.none() | st.integers(1, 5))
        for index in range(draw(st.integers(1, 2))):
            rows.append(
                StoredRollout(
                    request_id=request_id,
                    trajectory_index=index,
                    depth=draw(st.integers(0, 2)),
                    phase=phase,
                    train_step=step,
                    reward=None if failed else draw(rewards),
                    status="error" if failed else "ok",
                    error_type="E" if failed else None,
                    num_completion_tokens=draw(st.integers(0, 9)),
                    record=draw(st.binary(max_size=9)),
                )
            )
    return rows


class StoreMachine(RuleBasedStateMachine):
    """The model: rows in order of arrival, steps by number, a list of event kinds."""

    tokens = Bundle("tokens")

    @initialize()
    def create(self):
        self.folder = Path(tempfile.mkdtemp())
        self.run = Run.create(self.folder / "run", config={"a": 1})
        self.rows: list[StoredRollout] = []
        self.steps: dict[int, float] = {}
        self.trained: dict[int, list[str]] = {}
        self.events: list[str] = []

    def teardown(self):
        if hasattr(self, "run"):
            self.run.close()
            shutil.rmtree(self.folder)

    def insert(self, rows):
        known = {(row.request_id, row.trajectory_index) for row in self.rows}
        added = 0
        for row in rows:
            key = (row.request_id, row.trajectory_index)
            if key not in known:
                known.add(key)
                self.rows.append(row)
                added += 1
        return added

    @rule(rows=batches())
    def add(self, rows):
        assert self.run.add_rollouts(rows) == self.insert(rows)

    @rule(rows=batches())
    def replace_failed(self, rows):
        for request_id in dict.fromkeys(row.request_id for row in rows):
            stored = [row for row in self.rows if row.request_id == request_id]
            if any(row.status == "error" for row in stored):
                self.rows = [row for row in self.rows if row.request_id != request_id]
                # One event for all of the same cause and place.
                if "retried" not in self.events:
                    self.events.append("retried")
        assert self.run.add_rollouts(rows, replace_failed=True) == self.insert(rows)

    @rule(rows=batches())
    def a_batch_that_cannot_be_stored_changes_nothing(self, rows):
        bad = StoredRollout(request_id="z", phase=None)
        with pytest.raises(StoreError, match="nothing of this batch"):
            self.run.add_rollouts([*rows, bad])

    @rule(step=st.integers(1, 5), value=st.floats(), names=st.lists(request_ids, unique=True))
    def add_step(self, step, value, names):
        one, calls = np.ones(1, np.float32), np.ones(1, np.int32)
        columns = dict.fromkeys(("advantage", "weight", "logprob", "entropy"), one * step)
        trained = [
            TrainedRollout(request_id=name, step=step, num_sampled=calls, **columns)
            for name in names
        ]
        self.run.add_step(step, {"loss": value}, trained)
        self.steps[step] = value
        self.trained[step] = names

    @rule(after=st.integers(0, 5), of=st.lists(phases, unique=True))
    def truncate(self, after, of):
        gone = [step for step in self.steps if step > after]
        kept = [
            row
            for row in self.rows
            if row.phase not in of or row.train_step is None or row.train_step <= after
        ]
        assert self.run.truncate_steps(after, rollout_phases=of) == len(gone)
        if gone or len(kept) < len(self.rows):
            self.events.append("truncated")
        self.rows = kept
        for step in gone:
            del self.steps[step], self.trained[step]

    @rule(kind=st.sampled_from(["note", "mark"]))
    def add_event(self, kind):
        self.run.add_event(kind, {"n": len(self.events)})
        self.events.append(kind)

    @rule()
    def reopen(self):
        self.run.close()
        self.run = Run.open(self.folder / "run")

    @rule()
    def continue_it(self):
        self.run.close()
        self.run = Run.open_or_create(self.folder / "run", config={"a": 1})
        self.events.append("resumed")

    @invariant()
    def rows_agree(self):
        assert list(self.run.rollouts()) == self.rows

    @invariant()
    def a_reader_sees_the_same(self):
        with Run.open(self.folder / "run", mode="r") as reader:
            assert reader.num_rollouts() == len(self.rows)
            assert [event.kind for event in reader.events()] == self.events

    @invariant()
    def filters_agree(self):
        for phase in ("eval", "train"):
            expected = [row for row in self.rows if row.phase == phase]
            assert list(self.run.rollouts(phase=phase)) == expected
            assert self.run.finished_ids(phase) == {row.request_id for row in expected}
            assert self.run.finished_ids(phase, failed=False) == {
                row.request_id for row in expected if row.status == "ok"
            }

    @invariant()
    def steps_agree(self):
        found = {row.step: row.metrics["loss"] for row in self.run.steps()}
        assert list(found) == sorted(self.steps)
        for step, value in self.steps.items():
            assert found[step] == value or (math.isnan(found[step]) and math.isnan(value))

    @invariant()
    def trained_tokens_agree(self):
        found = {(row.step, row.request_id): row.weight[0] for row in self.run.trained()}
        assert found == {(step, n): step for step, names in self.trained.items() for n in names}

    @invariant()
    def the_summary_agrees(self):
        found = {phase.phase: phase for phase in summarize(self.run).phases}
        for phase, summary in found.items():
            rows = [row for row in self.rows if row.phase == phase]
            scored = [row.reward for row in rows if row.reward is not None and not row.depth]
            assert summary.num_rollouts == len(rows)
            assert summary.num_errors == sum(row.status == "error" for row in rows)
            assert summary.num_completion_tokens == sum(r.num_completion_tokens for r in rows)
            if scored:
                mean = math.fsum(scored) / len(scored)
                assert summary.mean_reward == pytest.approx(mean, rel=1e-6, abs=1e-6)
            else:
                assert summary.mean_reward is None


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestStoreMachine = StoreMachine.TestCase
