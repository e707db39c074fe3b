"""Dynamic sampling: which groups are replaced, by what, how often, and what is said about it."""

import asyncio
from collections import Counter

import pytest
import torch
from loop_kit import make_config, start
from training_kit import LetterSource

from rolltree.rollouts import RolloutEngine
from rolltree.store import Run
from rolltree.testing import ScriptedClient
from rolltree.training import Silent, load_train_config, step_requests
from rolltree.training.credit import CREDITS
from rolltree.training.dynamic_sampling import DynamicFeed
from rolltree.training.feeds import credit_of
from rolltree.training.no_signal_warning import NoSignalWarning
from rolltree.training.plan import replacement_requests
from rolltree.values.errors import ConfigError, TrainingError
from rolltree.values.types import ErrorRecord, RolloutResult, State
from wait_kit import until

CONFIG = load_train_config(
    {"algorithm": {"group_size": 2, "groups_per_step": 3, "dynamic_sampling_max": 4}}
)


STEP = {
    "prompt": [{"role": "user", "content": "?"}],
    "completion": [{"role": "assistant", "content": "!"}],
    "response": None,
    "tokens": None,
    "reward": None,
    "advantage": None,
    "extras": {},
}


class Fixed(LetterSource):
    """Plays without a model. `useful` names the groups whose members differ."""

    def __init__(self, useful=(), **options):
        super().__init__(**options)
        self.useful = useful

    async def run_request(self, request, client):
        self.played.append(request.request_id)
        group = request.group_id.rpartition("/")[2]
        differs = group in self.useful and request.index_in_group == 1
        state = State(input=dict(request.input), error=None, reward=1.0 - differs)
        state["trajectory"] = [dict(STEP)]
        if request.request_id in self.fail:
            state["error"] = ErrorRecord("Boom", "it broke", "", "environment")
        return [state]


def feed_of(source, run, said=None, clock=None, config=CONFIG):
    said = [] if said is None else said
    warning = NoSignalWarning(said.append, clock=clock or (lambda: 0.0))
    engine = RolloutEngine(source, ScriptedClient(["x"]), max_concurrent=4)
    progress = []
    feed = DynamicFeed(
        config,
        engine,
        run,
        warning=warning,
        notify=said.append,
        on_progress=lambda *args: progress.append(args),
    )
    return feed, progress


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run") as run:
        yield run


def names(results):
    return list(dict.fromkeys(result.request.group_id[-3:] for result in results))


class TestDynamicFeed:
    async def test_flat_groups_are_replaced_until_all_are_useful(self, run):
        source = Fixed(useful=("g01", "x01", "x02"))
        feed, progress = feed_of(source, run)
        found = await feed.next(1)
        assert names(found.trained) == ["g01", "x01", "x02"]
        assert names(found.sampled) == ["g00", "g01", "g02", "x00", "x01", "x02"]
        assert found.metrics["dynamic/num_replaced"] == 3
        assert found.metrics["dynamic/num_flat_trained"] == 0
        assert progress[-1] == (1, 12, 12)
        assert run.num_rollouts(phase="train") == 12  # what was replaced stays visible

    async def test_at_the_limit_flat_groups_fill_up_and_it_is_said(self, run):
        said = []
        feed, _ = feed_of(Fixed(useful=("x01",)), run, said)
        found = await feed.next(1)
        assert names(found.trained)[0] == "x01"
        assert len(found.trained) == 6
        assert found.metrics["dynamic/num_replaced"] == 4
        assert found.metrics["dynamic/num_flat_trained"] == 2
        (message,) = said
        assert "step 1 trains on 2 of 3 groups without reward variance, after 4" in message
        assert message.endswith("6 of 7 groups have none; in these, all 12 rewards are 1.")

    async def test_at_the_limit_it_is_said_even_if_the_last_group_is_useful(self, run):
        said = []
        feed, _ = feed_of(Fixed(useful=("x03",)), run, said)
        await feed.next(1)
        (message,) = said
        assert "step 1 trains on 2 of 3 groups without reward variance, after 4" in message
        assert message.endswith("6 of 7 groups have none; in these, all 12 rewards are 1.")

    async def test_a_killed_run_asks_for_the_same_again(self, run):
        useful = ("g01", "x01", "x02")
        feed, _ = feed_of(Fixed(useful=useful), run)
        first = await feed.next(1)
        source = Fixed(useful=useful)
        feed, _ = feed_of(source, run)
        again = await feed.next(1)
        assert source.played == []
        assert [r.request for r in again.trained] == [r.request for r in first.trained]

    async def test_useful_groups_cost_nothing(self, run):
        source = Fixed(useful=("g00", "g01", "g02"))
        feed, _ = feed_of(source, run)
        found = await feed.next(1)
        assert found.trained == found.sampled
        assert found.metrics["dynamic/num_replaced"] == 0


class FailingReplacements(Fixed):
    """Three of the five rollouts of every replacement fail, until the cause is gone."""

    is_broken = True

    async def run_request(self, request, client):
        group = request.group_id.rpartition("/")[2]
        if self.is_broken and group[0] == "x" and request.index_in_group > 1:
            self.fail.add(request.request_id)
        else:
            self.fail.discard(request.request_id)
        return await super().run_request(request, client)


class TestFailedReplacements:
    WIDE = load_train_config(
        {"algorithm": {"group_size": 5, "groups_per_step": 2, "dynamic_sampling_max": 4}}
    )

    async def test_they_count_in_the_share_that_stops_a_step(self, run):
        source = FailingReplacements(useful=("x00", "x01"))
        feed, _ = feed_of(source, run, config=self.WIDE)
        with pytest.raises(TrainingError, match=r"6 of 10 rollouts of step 1 failed, 6 of them"):
            await feed.next(1)
        source.is_broken, source.played = False, []
        feed, _ = feed_of(source, run, config=self.WIDE)
        found = await feed.next(1)  # the cause is gone: what failed is played again, nothing else
        assert sorted(source.played) == sorted(
            f"train/000001/x0{group}/{member}" for group in range(2) for member in (2, 3, 4)
        )
        assert names(found.trained) == ["x00", "x01"]

    async def test_a_bad_group_beside_a_good_one_is_trained_also_after_a_kill(self, run):
        source = FailingReplacements(useful=("g00", "x00"))
        feed, _ = feed_of(source, run, config=self.WIDE)
        first = await feed.next(1)
        assert names(first.trained) == ["g00", "x00"]
        source.is_broken, source.played = False, []
        feed, _ = feed_of(source, run, config=self.WIDE)
        again = await feed.next(1)
        assert source.played == []
        assert [r.error for r in again.trained] == [r.error for r in first.trained]


class TestReplacements:
    def test_they_are_tasks_that_the_step_did_not_plan(self):
        source = LetterSource(num_train=8)
        planned = {r.input["example_id"] for r in step_requests(CONFIG, source, 2)}
        extra = replacement_requests(CONFIG, source, 2, first=0, count=5)
        assert {r.input["example_id"] for r in extra} == set(range(8)) - planned
        assert [r.request_id for r in extra[:2]] == ["train/000002/x00/0", "train/000002/x00/1"]
        seeds = {r.sampling_seed for r in (*extra, *step_requests(CONFIG, source, 2))}
        assert len(seeds) == 10 + 6

    def test_more_of_them_continue_and_repeat_with_other_worlds(self):
        source = LetterSource(num_train=3)
        whole = replacement_requests(CONFIG, source, 1, first=0, count=4)
        parts = [
            request
            for first in range(4)
            for request in replacement_requests(CONFIG, source, 1, first=first, count=1)
        ]
        assert parts == whole
        assert len({r.seed for r in whole}) == 4

    def test_the_control_has_nothing_to_replace(self):
        with pytest.raises(
            ConfigError, match=r"dynamic_sampling_max is set, but the credit 'zero'"
        ):
            load_train_config({"algorithm": {"name": "zero", "dynamic_sampling_max": 1}})


def results_of(rewards, error=None):
    requests = step_requests(CONFIG, LetterSource(), 1)
    made = []
    for request, reward in zip(requests, rewards, strict=False):
        failed = ErrorRecord(error, "no", "", "model") if reward is None else None
        state = State(input={}, reward=reward, error=failed)
        state["trajectory"] = [dict(STEP)]
        made.append(RolloutResult(request, (state,), failed))
    return made


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [((1.0, 0.0), True), ((0.5, 0.5), False), ((1.0, None), False), ((None, None), False)],
)
def test_spread_is_an_advantage_that_is_not_zero(rewards, expected):
    assert credit_of(tuple(results_of(rewards, "Boom")), CONFIG).has_signal is expected


class TestNoSignalWarning:
    def warning(self):
        self.now, self.said = 0.0, []
        return NoSignalWarning(self.said.append, clock=lambda: self.now)

    def test_the_first_notice_comes_within_a_minute_but_not_at_once(self):
        warning = self.warning()
        warning.begin(3)
        spoke = None
        for second in range(0, 61, 5):  # as `watching` does
            self.now = float(second)
            warning.check()
            spoke = spoke if spoke is not None or not self.said else second
        assert spoke is not None
        assert 30 <= spoke < 60
        assert self.said == [
            "step 3 has waited 45 s for a group with reward variance: no group of rollouts has "
            "ended. Check the engine and the environment."
        ]

    def test_it_names_equal_rewards(self):
        warning = self.warning()
        warning.begin(1)
        for _ in range(3):
            warning.no_signal(results_of((0.0, 0.0)))
        self.now = 50.0
        warning.check()
        assert "none of 3 groups has any; all 6 rewards are 0" in self.said[0]

    def test_it_names_errors_and_several_rewards(self):
        warning = self.warning()
        warning.begin(1)
        warning.no_signal(results_of((None, None), "ServerError"))
        warning.no_signal(results_of((1.0, 1.0)))
        warning.no_signal(results_of((0.0, 0.0)))
        assert warning.reason() == (
            "none of 3 groups has any; 2 of 6 rollouts failed, 2 of them with ServerError; the "
            "most frequent rewards are 1 (2 times), 0 (2 times), equal within each group."
        )

    def test_a_useful_group_starts_the_wait_anew(self):
        warning = self.warning()
        warning.begin(1)
        self.now = 40.0
        warning.signal()
        self.now = 80.0
        warning.check()
        assert self.said == []
        self.now = 86.0
        warning.check()
        assert "no group of rollouts has ended since the last one with variance." in self.said[0]
        self.now = 100.0
        warning.check()
        assert len(self.said) == 1  # not every five seconds
        self.now = 132.0
        warning.check()
        assert len(self.said) == 2

    async def test_the_warning_repeats_until_watching_ends(self):
        said = []
        warning = NoSignalWarning(said.append, patience_s=0.02)
        warning.begin(1)
        async with warning.watching():
            await until(lambda: len(said) >= 2)
        count = len(said)
        assert count >= 2
        await asyncio.sleep(0.06)
        assert len(said) == count

    async def test_a_cancellation_while_it_stops_looking_is_not_lost(self):
        async def look():
            async with NoSignalWarning(lambda said: None).watching():
                pass

        task = asyncio.create_task(look())
        await asyncio.sleep(0)  # it waits for the task that looks
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class Alike(LetterSource):
    """On the real engine: from `last` groups on, every reward is 1."""

    async def run_request(self, request, client):
        (state,) = await super().run_request(request, client)
        if request.train_step >= 2:
            state["reward"] = 1.0
        return [state]


class Notices(Silent):
    def __init__(self):
        self.said = []

    def on_notice(self, message):
        self.said.append(message)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_real_run_that_starves_says_so_and_ends(model, tmp_path, monkeypatch, ahead):
    monkeypatch.setattr("rolltree.training.no_signal_warning.PATIENCE_S", 1e-4)
    threads = torch.get_num_threads()
    config = make_config(
        model,
        tmp_path / "run",
        algorithm={"dynamic_sampling_max": 3},
        train={"num_steps": 2, "async_steps": ahead},
    )
    notices = Notices()
    report = start(config, Alike(), reporter=notices)
    torch.set_num_threads(threads)
    assert len(report.metrics) == 2
    assert report.metrics[1]["dynamic/num_replaced"] == 3
    assert report.metrics[1]["dynamic/num_flat_trained"] == 2
    assert report.metrics[1]["train/grad_norm"] == 0
    text = "\n".join(notices.said)
    assert "rewards are 1" in text
    assert "step 2" in text
    with Run.open(tmp_path / "run", "r") as run:
        assert [event.data["message"] for event in run.events("notice")] == notices.said
        assert run.num_rollouts(phase="train") >= (2 + 2 + 3) * 3


@pytest.mark.parametrize(("limit", "ahead"), [(0, 0), (3, 0), (0, 1), (3, 1)])
def test_credit_of_a_group_is_computed_once(model, tmp_path, monkeypatch, limit, ahead):
    """Looking for signal and making the samples of a step read the same credit."""
    computed, grpo = Counter(), CREDITS["grpo"]

    def counted(rollouts, discount):
        computed[tuple(sorted(rollout.episode for rollout in rollouts))] += 1
        return grpo(rollouts, discount)

    monkeypatch.setitem(CREDITS, "grpo", counted)
    config = make_config(
        model,
        tmp_path / "run",
        algorithm={"dynamic_sampling_max": limit},
        train={"num_steps": 2, "async_steps": ahead},
    )
    start(config, Alike())
    assert len(computed) >= 4
    assert set(computed.values()) == {1}
