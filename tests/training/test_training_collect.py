import asyncio
import time
from dataclasses import replace

import pytest
from training_kit import LetterSource

from rolltree.inference.retry import RetryPolicy
from rolltree.rollouts import RolloutEngine
from rolltree.store import Run
from rolltree.testing import ScriptedClient
from rolltree.training import load_train_config, plan, step_requests
from rolltree.training.plan import gather, until_enough
from rolltree.values.errors import TrainingError
from rolltree.values.types import ErrorRecord, State

CONFIG = load_train_config(
    {
        "algorithm": {"group_size": 2, "groups_per_step": 3},
        "train": {"max_failed_share": 0.25},
    }
)
NOTICES = []


class Source(LetterSource):
    """Plays without a model: the reward is the index in the group."""

    async def run_request(self, request, client):
        self.played.append(request.request_id)
        state = State(input=dict(request.input), trajectory=[], error=None, reward=None)
        if request.request_id in self.fail:
            state["error"] = ErrorRecord("Boom", "it broke", "trace", "environment")
        else:
            state["reward"] = float(request.index_in_group)
        return [state]


class Compared(Source):
    has_group_rewards = True

    async def score_group(self, states):
        for state in states:
            state["reward"] += 10


class Dying(Source):
    """Model calls fail: those of rollout `name` as often as `calls[name]` says."""

    def __init__(self, calls, name="ConnectionFailed", kind="infrastructure"):
        super().__init__()
        self.calls, self.name, self.kind = dict(calls), name, kind

    async def run_request(self, request, client):
        (state,) = await super().run_request(request, client)
        if self.calls.get(request.request_id, 0) > 0:
            self.calls[request.request_id] -= 1
            state["error"] = ErrorRecord(self.name, "gone", "trace", "model", self.kind)
            state["reward"] = None
        return [state]


class ComparedDying(Dying, Compared):
    pass


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    NOTICES.clear()
    monkeypatch.setattr("rolltree.inference.retry.WHILE_AWAY", RetryPolicy(first_wait_s=0))


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run") as run:
        yield run


def engine(source):
    return RolloutEngine(source, ScriptedClient(["x"]), max_concurrent=4)


def requests(step=1):
    return step_requests(CONFIG, Source(), step)


async def collect(requests, engine, run, on_progress=lambda done: None):
    share = CONFIG.train.max_failed_share
    found = await gather(requests, engine, run, on_progress, max_failed_share=share)

    async def again():
        return (await gather(requests, engine, run, on_progress, max_failed_share=share)).results

    results = await until_enough(found.results, again, CONFIG, NOTICES.append)
    return replace(found, results=results)


async def test_results_come_in_request_order_and_are_stored(run):
    seen = []
    source = Source()
    collected = await collect(requests(), engine(source), run, seen.append)
    assert [r.request for r in collected.results] == requests()
    assert collected.num_reused == 0
    assert (seen[0], seen[-1]) == (0, 6)
    assert seen == sorted(set(seen))
    assert run.finished_ids("train") == {r.request_id for r in requests()}


async def test_stored_results_are_used_and_equal_what_was_stored(run):
    first = await collect(requests(), engine(Source()), run)
    source, seen = Source(), []
    again = await collect(requests(), engine(source), run, seen.append)
    assert source.played == []
    assert again.num_reused == 6
    assert seen == [6]
    assert [r.request for r in again.results] == [r.request for r in first.results]
    assert [r.states[0]["reward"] for r in again.results] == [0.0, 1.0] * 3


async def test_only_what_is_missing_is_run(run):
    await collect(requests()[:4], engine(Source()), run)
    source = Source()
    collected = await collect(requests(), engine(source), run)
    assert sorted(source.played) == [r.request_id for r in requests()[4:]]
    assert collected.num_reused == 4
    assert [r.request for r in collected.results] == requests()


async def test_other_steps_and_phases_are_not_mixed_in(run):
    await collect(requests(step=2), engine(Source()), run)
    source = Source()
    collected = await collect(requests(step=1), engine(source), run)
    assert len(source.played) == 6
    assert collected.num_reused == 0


async def test_a_failed_rollout_is_data_and_stays(run):
    name = requests()[2].request_id
    collected = await collect(requests(), engine(Source(fail=[name])), run)
    assert [r.error is not None for r in collected.results] == [False, False, True] + [False] * 3
    source = Source()
    again = await collect(requests(), engine(source), run)
    assert source.played == []  # it is not re-rolled silently
    assert again.results[2].error.message == "it broke"


async def test_a_step_of_failures_stops_and_is_run_again_with_a_trace(run):
    names = [r.request_id for r in requests()]
    with pytest.raises(TrainingError) as caught:
        await collect(requests(), engine(Source(fail=names)), run)
    assert "all 6 rollouts of step 1 failed, 6 of them with Boom: it broke. Nothing" in str(
        caught.value
    )
    assert run.num_rollouts(status="error") == 6
    source = Source()
    collected = await collect(requests(), engine(source), run)
    assert sorted(source.played) == names
    assert all(r.error is None for r in collected.results)
    assert run.num_rollouts() == run.num_rollouts(status="ok") == 6
    assert sum(each.data["times"] for each in run.events("retried")) == 6


async def test_what_servers_and_sandboxes_failed_is_run_again_in_the_same_start(run):
    names = [r.request_id for r in requests()]
    source = Dying({names[1]: 1, names[3]: 2, names[4]: 3})
    collected = await collect(requests(), engine(source), run)
    assert [r.error for r in collected.results] == [None] * 6
    assert [r.request for r in collected.results] == requests()  # with the same seeds
    assert sorted(source.played) == sorted(names + names[1:2] + names[3:4] * 2 + names[4:5] * 3)
    assert run.num_rollouts() == run.num_rollouts(status="ok") == 6
    assert sum(each.data["times"] for each in run.events("retried")) == 6
    assert NOTICES == []


async def test_a_failure_that_only_has_the_name_of_a_servers_ends_the_step_at_once(run):
    names = [r.request_id for r in requests()]
    source = Dying(dict.fromkeys(names, 99), "ServerError", "episode")
    with pytest.raises(TrainingError, match="all 6 rollouts of step 1 failed"):
        await collect(requests(), engine(source), run)
    assert sorted(source.played) == names
    assert NOTICES == []


async def test_failed_model_calls_of_an_earlier_start_are_made_again(run):
    names = [r.request_id for r in requests()]
    await gather(requests(), engine(Dying({names[1]: 99})), run)
    assert run.num_rollouts(status="error") == 1
    source = Source()
    collected = await collect(requests(), engine(source), run)
    assert source.played == [names[1]]
    assert collected.num_reused == 5
    assert [r.error for r in collected.results] == [None] * 6


async def test_a_rollout_whose_calls_never_work_fails_alone(run):
    names = [r.request_id for r in requests()]
    source = Dying({names[1]: 99})
    collected = await collect(requests(), engine(source), run)
    assert source.played.count(names[1]) == 4
    assert [r.error is not None for r in collected.results] == [False, True] + [False] * 4


async def test_a_step_waits_while_too_many_model_calls_fail(run):
    names = [r.request_id for r in requests()]
    source = Dying({names[1]: 7, names[2]: 5})
    collected = await collect(requests(), engine(source), run)
    assert [r.error for r in collected.results] == [None] * 6
    (notice,) = NOTICES
    assert "step 1 waits: servers or sandboxes failed 2 of its 6 rollouts" in notice


async def test_a_step_that_waits_too_long_ends_the_run(run, monkeypatch):
    now = iter(range(0, 10_000, 600))
    monkeypatch.setattr(plan, "monotonic", lambda: next(now))
    names = [r.request_id for r in requests()]
    with pytest.raises(TrainingError, match=r"2 of 6 rollouts of step 1 failed, 2 .* favour"):
        await collect(requests(), engine(Dying({names[1]: 99, names[2]: 99})), run)
    assert next(now) == 2400  # began, and three looks at the clock


async def test_other_failures_above_the_share_end_the_run_and_are_run_again(run):
    names = [r.request_id for r in requests()]
    source = Source(fail=names[:2])
    with pytest.raises(TrainingError, match=r"2 of 6 .*train\.max_failed_share is 0\.25"):
        await collect(requests(), engine(source), run)
    assert len(source.played) == 6  # they would only fail again
    source = Source()
    collected = await collect(requests(), engine(source), run)
    assert sorted(source.played) == names[:2]
    assert all(r.error is None for r in collected.results)


async def test_a_compared_group_is_played_again_whole(run):
    names = [r.request_id for r in requests()]
    await gather(requests(), engine(ComparedDying({names[1]: 99})), run)
    assert run.num_rollouts() == 6
    source = ComparedDying({names[1]: 1})
    collected = await collect(requests(), engine(source), run)
    assert sorted(source.played) == sorted([*names[:2], *names[:2]])
    assert [r.states[0]["reward"] for r in collected.results] == [10.0, 11.0] * 3
    stored = plan.stored_results(requests(), run)
    assert [stored[name].states[0]["reward"] for name in names] == [10.0, 11.0] * 3


async def test_the_most_common_error_is_quoted(run):
    class Mixed(Source):
        async def run_request(self, request, client):
            (state,) = await super().run_request(request, client)
            if request.index_in_group == 0 and request.group_id.endswith("g00"):
                state["error"] = replace(state["error"], type="Rare", message="odd")
            return [state]

    names = [r.request_id for r in requests()]
    with pytest.raises(TrainingError, match=r"5 of them with Boom"):
        await collect(requests(), engine(Mixed(fail=names)), run)


async def test_a_compared_group_is_stored_in_one_transaction(run, monkeypatch):
    stored = []
    add = Run.add_rollouts

    def spy(self, rows, **options):
        rows = list(rows)
        stored.append([row.group_id for row in rows])
        return add(self, rows, **options)

    monkeypatch.setattr(Run, "add_rollouts", spy)
    collected = await collect(requests(), engine(Compared()), run)
    assert sorted(group for groups in stored for group in groups) == [
        f"train/000001/g0{g}" for g in (0, 0, 1, 1, 2, 2)
    ]
    assert all(groups.count(group) == 2 for groups in stored for group in groups)
    assert [r.states[0]["reward"] for r in collected.results] == [10.0, 11.0] * 3


async def test_what_finishes_during_a_transaction_is_stored_in_the_next_one(run, monkeypatch):
    sizes, others = [], asyncio.Event()
    add, loop = Run.add_rollouts, asyncio.get_running_loop()

    def slow(self, rows, **options):
        rows = list(rows)
        sizes.append(len(rows))
        if len(sizes) == 1:  # the first one holds its transaction until all others have finished
            loop.call_soon_threadsafe(others.set)
            while len(source.played) < 6:
                time.sleep(0.001)
        return add(self, rows, **options)

    class Waiting(Source):
        async def run_request(self, request, client):
            if request.request_id != names[0]:
                await others.wait()
            return await super().run_request(request, client)

    names = [r.request_id for r in requests()]
    source = Waiting()
    monkeypatch.setattr(Run, "add_rollouts", slow)
    await collect(requests(), engine(source), run)
    assert sizes[0] == 1
    assert sum(sizes) == run.num_rollouts() == 6
    assert len(sizes) < 6


async def test_what_cannot_be_stored_ends_the_run_and_leaves_no_task(run):
    class Full(Exception):
        pass

    def full(rows, **options):
        raise Full

    run.add_rollouts = full
    with pytest.raises(Full):
        await collect(requests(), engine(Source()), run)
    assert [t for t in asyncio.all_tasks() if "rollout" in t.get_name()] == []
