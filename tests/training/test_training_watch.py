"""What is watched per step: numbers worked out by hand."""

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_kit import Call, flat, group

from rolltree._helpers.tasks import run_shielded
from rolltree.training.batches import mask_stale
from rolltree.training.metrics import RecordStats, mismatch_metrics
from rolltree.training.publishing import WeightLock


def versioned(versions, call=None):
    """A sample whose tokens were sampled by `versions`."""
    call = call or Call([1, 2], list(range(3, 3 + len(versions))))
    sample = flat(call)
    sample.records.version[:] = versions
    return sample


class TestPlaces:
    def test_ranges_of_positions_and_calls(self):
        calls = [Call([1, 2], list(range(20))), Call([1, 2], [5, 6], call=5)]
        records = flat(calls[0]).records, flat(calls[1]).records
        joined = type(records[0])(
            **{
                name: np.concatenate([getattr(part, name) for part in records])
                for name in type(records[0]).__dataclass_fields__.keys() - {"extra"}
            }
        )
        difference = np.concatenate([np.arange(20.0) * (-1) ** np.arange(20), [100.0, 200.0]])
        assert mismatch_metrics(joined, difference) == pytest.approx(
            {
                "mismatch/at_0": (0 + 100) / 2,
                "mismatch/at_1-3": (1 + 2 + 3 + 200) / 4,
                "mismatch/at_4-15": sum(range(4, 16)) / 12,
                "mismatch/at_16-63": (16 + 17 + 18 + 19) / 4,
                "mismatch/call_0": sum(range(20)) / 20,
                "mismatch/call_4-7": 150.0,
            }
        )

    def test_the_last_range_is_open(self):
        records = flat(Call([1], [1], call=300)).records
        records.offset[:] = 5000
        assert mismatch_metrics(records, np.array([-2.0])) == {
            "mismatch/at_1024+": 2.0,
            "mismatch/call_16+": 2.0,
        }


class TestTails:
    def stats(self, records, difference):
        stats = RecordStats(len(records))
        stats.logprob = (records.logprob + np.asarray(difference)).astype(np.float32)
        return stats

    def test_ratios_and_their_tails(self):
        records = versioned([0, 0, 0, 0]).records
        difference = np.log([0.25, 1.0, 1.0, 4.0])
        found = self.stats(records, difference).metrics(records)
        assert found["ratio/mean"] == pytest.approx(6.25 / 4)
        assert found["ratio/outside_share"] == 0.5
        assert found["ratio/ess"] == pytest.approx(6.25**2 / (4 * (0.0625 + 1 + 1 + 16)))
        assert found["ratio/p01"] == pytest.approx(0.25 + 0.03 * 0.75, rel=1e-5)
        assert found["ratio/p99"] == pytest.approx(1 + 0.97 * 3, rel=1e-5)

    def test_mismatch_is_of_the_current_version_only(self):
        records = versioned([3, 3, 4, 4]).records
        stats = self.stats(records, [1.0, 1.0, 0.25, -0.25])
        found = stats.metrics(records, 4)
        assert found["train/sampling/sampling_logp_difference/mean"] == pytest.approx(0.25)
        assert found["mismatch/mean"] == pytest.approx(0.0, abs=1e-7)
        assert found["ratio/max"] == pytest.approx(np.e, rel=1e-5)  # ratios are of all tokens
        assert found["mismatch/at_1-3"] == pytest.approx(0.25)
        assert "mismatch/at_0" not in found
        none = stats.metrics(records, 5)
        assert not any(name.startswith("mismatch/") for name in none)
        assert stats.metrics(records)[
            "train/sampling/sampling_logp_difference/mean"
        ] == pytest.approx(0.625)


class TestStaleness:
    def test_old_tokens_lose_their_weight_and_are_counted(self):
        samples = [versioned([2, 3, 5]), versioned([5, 5])]
        masked, found = mask_stale(samples, version=5, max_lag=2)
        assert [sample.records.weight.tolist() for sample in masked] == [[0, 1, 1], [1, 1]]
        assert samples[0].records.weight.tolist() == [1, 1, 1]  # the input is as it was
        assert masked[1] is samples[1]
        assert found == {
            "async/lag_max": 3.0,
            "async/stale_share": 0.2,
            "async/num_stale_tokens": 1.0,
        }

    def test_what_does_not_train_anyway_is_not_counted(self):
        sample = versioned([0, 4])
        sample.records.weight[0] = 0
        _, found = mask_stale([sample], version=4, max_lag=0)
        assert found == {
            "async/lag_max": 0.0,
            "async/stale_share": 0.0,
            "async/num_stale_tokens": 0.0,
        }

    @given(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=4),
        st.integers(0, 9),
    )
    def test_exactly_the_tokens_above_the_bound(self, versions, max_lag):
        samples = [versioned(row) for row in versions]
        masked, found = mask_stale(samples, version=9, max_lag=max_lag)
        for row, sample in zip(versions, masked, strict=True):
            assert sample.records.weight.tolist() == [float(9 - v <= max_lag) for v in row]
        flat_versions = [v for row in versions for v in row]
        assert found["async/num_stale_tokens"] == sum(9 - v > max_lag for v in flat_versions)

    def test_masked_tokens_count_in_no_normalizer(self):
        """Half the tokens masked: the rest weigh as if they had been sampled alone."""
        from rolltree.training.algorithms import resolve_algorithm
        from rolltree.training.batches import build_batch

        calls = group(num=2, turns=1, length=4)
        samples = [flat(call) for call in calls]
        samples[0].records.version[:1] = -9
        masked, _ = mask_stale(samples, version=0, max_lag=1)
        batch = build_batch(masked, resolve_algorithm("dapo"), 1000)
        total = sum(len(call.completion) for call in calls)
        assert len(batch.records) == total - 1
        assert batch.records.weight == pytest.approx(1 / (total - 1))


class Engine:
    """Records what is done to it and from which thread."""

    def __init__(self):
        self.log = []

    def paused(self):
        engine = self

        class Pause:
            async def __aenter__(self):
                engine.log.append("pause")

            async def __aexit__(self, *error):
                engine.log.append("go")

        return Pause()


class TestWeightLock:
    async def made(self):
        engine = Engine()

        async def publish():
            engine.log.append(("publish", threading.current_thread() is threading.main_thread()))

        return engine, WeightLock(engine.paused, publish)

    async def test_pause_write_publish_go(self):
        engine, lock = await self.made()

        def work():
            with lock():
                engine.log.append(("write", threading.current_thread() is threading.main_thread()))
            return 7

        assert await asyncio.to_thread(work) == 7
        assert engine.log == ["pause", ("write", False), ("publish", True), "go"]
        assert lock.paused_s > 0

    async def test_a_failed_write_publishes_nothing_and_stays_paused(self):
        engine, lock = await self.made()

        def work():
            with lock():
                raise RuntimeError("half written")

        with pytest.raises(RuntimeError, match="half written"):
            await asyncio.to_thread(work)
        assert engine.log == ["pause"]
        await lock.aclose()
        assert engine.log == ["pause", "go"]

    async def test_a_cancelled_step_is_finished_first(self):
        engine, lock = await self.made()
        began, release = threading.Event(), threading.Event()

        def work():
            began.set()
            release.wait(60)
            with lock():
                engine.log.append("write")

        task = asyncio.create_task(run_shielded(asyncio.to_thread(work)))
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()  # the thread holds the weights
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.log == ["pause", "write", ("publish", True), "go"]
