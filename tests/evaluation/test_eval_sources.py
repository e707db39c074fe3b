"""Sources of other kinds: several agents, nothing scored, slow, flaky, writing while we watch."""

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest

from rolltree.evaluation import Settings, build_report, evaluate_async, runner, stored_report
from rolltree.rollouts import current_episode
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run
from rolltree.testing import ScriptedClient
from rolltree.tokens import Trajectory
from rolltree.values.errors import ConfigError, ServerError, StoreError
from rolltree.values.types import State
from wait_kit import wait_until


class Source:
    """Plays one call per agent; subclasses say what becomes of it."""

    env_id = "source"
    agents = ("",)

    def __init__(self, num=4):
        self.num = num

    def num_examples(self, split):
        return self.num

    def example(self, split, index):
        prompt = [{"role": "user", "content": f"{split} {index}"}]
        return {"prompt": prompt, "example_id": index, "task": "t"}

    async def run_request(self, request, client):
        states = []
        for agent in self.agents:
            state = State(input=dict(request.input), trajectory=Trajectory(), error=None)
            current_episode().states.append(state)
            response = await client.chat(request.input["prompt"], sampling=request.sampling)
            state["trajectory"].append_call(
                prompt=request.input["prompt"],
                completion=[response.message],
                response=response,
                agent=agent,
            )
            state["reward"] = self.reward(agent, request)
            states.append(state)
        return states

    def reward(self, agent, request):
        return 1.0


def client():
    return ScriptedClient(lambda messages: "fine")


class Debate(Source):
    """Two agents with opposite rewards: one episode, two trajectories."""

    agents = ("pro", "con")

    def reward(self, agent, request):
        return float((agent == "pro") == (request.input["example_id"] != 0))


class TestSeveralAgents:
    async def test_episodes_are_counted_and_all_trajectories_stored(self, tmp_path):
        with Run.create(tmp_path) as run:
            report = await evaluate_async(Debate(), client(), run=run)
            rows = list(run.rollouts())
            results = list(decode_results(run.rollouts()))
        assert (report.num_rollouts, len(rows)) == (4, 8)
        assert report.reward.mean == 0.5  # every episode's mean
        assert [row.agent for row in rows] == ["pro", "con"] * 4
        assert [len(result.states) for result in results] == [2] * 4
        assert report.results["usage"]["num_calls"] == 8

    async def test_continuing_counts_an_episode_as_finished(self, tmp_path):
        with Run.create(tmp_path) as run:
            await evaluate_async(Debate(), client(), run=run, num_examples=2)
            report = await evaluate_async(Debate(), client(), run=run)
            assert (report.num_resumed, run.num_rollouts()) == (2, 8)


class Unscored(Source):
    def reward(self, agent, request):
        return None if request.input["example_id"] % 2 else 0.5


async def test_unscored_rollouts_are_neither_failures_nor_zeros(tmp_path):
    with Run.create(tmp_path) as run:
        report = await evaluate_async(Unscored(), client(), run=run)
        assert run.query("SELECT count(*) AS n FROM rollouts WHERE reward IS NULL") == [{"n": 2}]
    assert (report.num_failed, report.num_unscored) == (0, 2)
    assert report.reward.mean == 0.5


class Slow(Source):
    """Example 0 hangs in its world."""

    async def run_request(self, request, client):
        states = await super().run_request(request, client)
        if request.input["example_id"] == 0:
            await asyncio.sleep(60)
        return states


async def test_a_rollout_that_hangs_times_out_without_blocking_others(tmp_path, monkeypatch):
    engine = runner.RolloutEngine
    monkeypatch.setattr(
        runner, "RolloutEngine", lambda *args, **options: engine(*args, grace_s=0.0, **options)
    )
    start = time.monotonic()
    with Run.create(tmp_path) as run:
        report = await evaluate_async(Slow(), client(), run=run, time_limit_s=0.5)
        (late,) = run.rollouts(status="error")
    assert time.monotonic() - start < 50
    assert report.results["failures"] == {"RolloutTimeout": 1}
    assert report.reward.num_examples == 3
    assert (late.truncated, late.truncation_reason, late.num_calls) == (True, "time_limit", 1)


class Flaky(Source):
    """The first attempt of every episode fails on the way to the model."""

    def __init__(self, num=4):
        super().__init__(num)
        self.attempts = {}

    async def run_request(self, request, client):
        number = self.attempts[request.request_id] = self.attempts.get(request.request_id, 0) + 1
        if number == 1:
            raise ServerError("the server is restarting", status=503, retryable=True)
        return await super().run_request(request, client)


class TestRetries:
    async def test_without_them_a_failure_stays(self):
        report = await evaluate_async(Flaky(), client())
        assert report.num_failed == 4
        assert report.reward is None

    async def test_with_them_it_shows_how_many_it_took(self, tmp_path):
        with Run.create(tmp_path) as run:
            report = await evaluate_async(Flaky(), client(), run=run, retries=1)
            assert {row.num_attempts for row in run.rollouts()} == {2}
        assert report.num_failed == 0
        assert report.results["usage"]["num_retried"] == 4


class TestResuming:
    @pytest.mark.parametrize(
        ("error", "is_stored_without_kind", "num_failed"),
        [
            (ServerError("away", status=503, retryable=True), False, 0),
            (ServerError("away", status=503, retryable=True), True, 0),
            (type("ServerError", (Exception,), {})("the author's"), False, 4),
        ],
    )
    async def test_what_a_server_failed_is_played_again(
        self, error, is_stored_without_kind, num_failed, tmp_path
    ):
        class Broken(Source):
            async def run_request(self, request, client):
                raise error

        with Run.create(tmp_path / "first") as run:
            await evaluate_async(Broken(), client(), run=run)
            rows = list(run.rollouts())
        if is_stored_without_kind:  # as before failures had kinds
            rows = [replace(row, errors=(_without_kind(row.errors[0]),)) for row in rows]
        with Run.create(tmp_path / "second") as run:
            run.add_rollouts(rows)
            report = await evaluate_async(Source(), client(), run=run)
        assert report.num_failed == num_failed


def _without_kind(error):
    return {name: value for name, value in error.items() if name != "kind"}


class TestCallbacks:
    async def test_a_result_is_stored_before_it_is_told(self, tmp_path):
        with Run.create(tmp_path) as run:
            told = []

            def on_result(result):
                assert result.request.request_id in run.finished_ids()
                told.append(result)

            await evaluate_async(Source(), client(), run=run, on_result=on_result, max_concurrent=2)
        assert len(told) == 4

    async def test_what_a_callback_raises_ends_it_and_keeps_what_is_stored(self, tmp_path):
        def on_result(result):
            raise RuntimeError("enough")

        with Run.create(tmp_path) as run:
            with pytest.raises(RuntimeError, match="enough"):
                await evaluate_async(Source(), client(), run=run, on_result=on_result)
            assert run.num_rollouts() >= 1
            report = await evaluate_async(Source(), client(), run=run)
            assert report.num_rollouts == 4

    async def test_the_event_loop_stays_free_while_rows_are_written(self, tmp_path, monkeypatch):
        """A slow disk must not hold back the other episodes."""
        add, ticks, during = Run.add_rollouts, 0, []

        def slowly(self, rows, **options):
            before = ticks
            with contextlib.suppress(AssertionError):
                wait_until(lambda: ticks > before, limit_s=30)
            during.append(ticks - before)
            return add(self, rows, **options)

        monkeypatch.setattr(Run, "add_rollouts", slowly)

        async def watch():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        with Run.create(tmp_path) as run:
            watcher = asyncio.create_task(watch())
            await evaluate_async(Source(), client(), run=run)
            watcher.cancel()
        assert min(during) > 0


class TestRunsOfAllKinds:
    async def test_a_run_opened_for_reading_is_refused(self, tmp_path):
        Run.create(tmp_path).close()
        with (
            Run.open(tmp_path, mode="r") as run,
            pytest.raises(StoreError, match="opened for reading"),
        ):
            await evaluate_async(Source(), client(), run=run)

    async def test_phases_share_a_run_and_do_not_mix(self, tmp_path):
        with Run.create(tmp_path, config={"model": "m"}) as run:
            first = await evaluate_async(
                Source(), client(), run=run, phase="before", num_examples=1
            )
            second = await evaluate_async(Source(), client(), run=run, phase="after", split="train")
            again = stored_report(run, "before")
        assert (first.num_rollouts, second.num_rollouts) == (1, 4)
        assert again.outcomes == first.outcomes
        assert again.reward == first.reward

    async def test_the_report_can_be_built_again_with_other_settings(self, tmp_path):
        with Run.create(tmp_path) as run:
            await evaluate_async(Unscored(), client(), run=run)
            strict, lenient = (
                build_report(run.rollouts(blobs=False), settings=Settings(pass_threshold=bar))
                for bar in (1.0, 0.5)
            )
        assert (strict.pass_at[1].mean, lenient.pass_at[1].mean) == (0.0, 1.0)

    async def test_more_rollouts_per_example_add_to_what_is_there(self, tmp_path):
        with Run.create(tmp_path) as run:
            await evaluate_async(Source(), client(), run=run, rollouts_per_example=1)
            report = await evaluate_async(Source(), client(), run=run, rollouts_per_example=3)
            assert (report.num_rollouts, report.num_resumed) == (12, 4)
            other = ScriptedClient(lambda messages: "x", model="other")
            with pytest.raises(ConfigError, match="model = 'scripted'"):
                await evaluate_async(Source(), other, run=run, rollouts_per_example=3)
