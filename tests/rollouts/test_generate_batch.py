"""`generate_batch`: metadata on every sample; one failure fails alone; whole groups."""

from functools import partial

import pytest

from rolltree.agents import Agent
from rolltree.agents.protocols import SingleAgentProtocol
from rolltree.environments import ProtocolEnvironment
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.samples import TruncationPolicy
from rolltree.testing import ScriptedAnswer, ScriptedClient
from rolltree.training import assign_credit
from rolltree.values.errors import ModelError
from rolltree.values.steps import ParseResult, StepOutcome
from rolltree.values.types import FinishReason


class Twice:
    """Ends after two actions; "cut" ends it by truncation."""

    in_thread = False

    def __init__(self, row):
        self.count = 0

    def reset(self, *, seed=None):
        return "go", {}

    def step(self, action):
        self.count += 1
        return StepOutcome(
            f"did {action}", 1.0, terminated=self.count == 2, truncated=action == "cut"
        )

    def close(self):
        pass


def some(text):
    return ParseResult(text if text != "hm" else None, 0.0, "Say something.")


def engine(answers, max_steps=3):
    environment = ProtocolEnvironment(
        SingleAgentProtocol(lambda: Agent(name="a", parser=some), max_steps=max_steps),
        Twice,
        num_train=4,
        env_id="twice",
    )
    return RolloutEngine(environment, ScriptedClient(answers)), environment


async def batch_of(answers, *, num=1, group_size=1, max_steps=3, **settings):
    ready, environment = engine(answers, max_steps)
    requests = build_requests(
        environment, "train", indices=range(num), group_size=group_size, phase="train"
    )
    return await ready.generate_batch(requests, **settings)


def flat(batch, *keys):
    return [tuple(meta[key] for key in keys) for (meta,) in batch.meta]


KEYS = ("terminated", "truncated", "episode_truncated", "truncation_reason")


class TestMetadata:
    async def test_a_true_end(self):
        batch = await batch_of(["one", "two"], scope="step")
        assert flat(batch, *KEYS) == [(False, False, False, None), (True, False, False, None)]
        assert flat(batch, "rollout_id", "agent", "calls", "reward") == [
            ("train/twice/0/0", "a", (0,), 2.0),
            ("train/twice/0/0", "a", (1,), 2.0),
        ]

    async def test_the_world_cuts(self):
        batch = await batch_of(["cut"], scope="step")
        assert flat(batch, *KEYS) == [(False, True, True, "env")]

    async def test_max_steps_marks_the_last_step_only(self):
        batch = await batch_of(["one", "hm"], scope="step", max_steps=2)
        assert flat(batch, *KEYS) == [
            (False, False, True, "max_steps"),
            (False, True, True, "max_steps"),
        ]

    async def test_the_models_finish_reason_is_its_own(self):
        answers = [ScriptedAnswer("one", FinishReason.LENGTH), "two", "three"]
        batch = await batch_of(answers, scope="step")
        assert flat(batch, "finish_reason", "incomplete_completion", "truncated") == [
            ("length", True, False),
            ("stop", False, False),
            ("stop", False, False),
        ]

    async def test_a_sample_cut_for_length(self):
        # <|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n is 21 tokens; "one" and its end 4
        batch = await batch_of(["one", "two"], scope="step", max_seq_len=30)
        assert flat(batch, *KEYS, "seq_len_truncated") == [(False, False, False, None, False)]
        batch = await batch_of(["a long answer", "two"], scope="step", max_seq_len=30)
        (meta,) = batch.meta[0]
        assert [meta[key] for key in KEYS] == [False, True, False, "max_seq_len"]
        assert meta["seq_len_truncated"]
        assert meta["seq_len_kept"] == 30
        assert meta["seq_len_original"] == 21 + 14
        assert meta["seq_len_lost"] == 5

    async def test_the_episodes_reason_stays_when_a_sample_is_cut(self):
        batch = await batch_of(["a long answer", "hm"], scope="step", max_steps=1, max_seq_len=30)
        (meta,) = batch.meta[0]
        assert (meta["truncation_reason"], meta["seq_len_truncated"]) == ("max_steps", True)

    @pytest.mark.parametrize("scope", ["turn", "interleave", "tree"])
    async def test_every_scope(self, scope):
        batch = await batch_of(["one", "two"], scope=scope)
        assert batch.meta[-1][-1]["terminated"]
        assert len(batch.meta) == len(batch.samples)

    async def test_the_truncation_policy_is_obeyed(self):
        batch = await batch_of(["cut"], truncation=TruncationPolicy("drop"))
        assert batch.samples == []


class TestFailures:
    @staticmethod
    def failing_once():
        calls = []

        def answer(messages):
            calls.append(1)
            if len(calls) == 1:
                raise ModelError("gone")
            return "one"

        return answer

    async def test_one_failed_episode_fails_alone(self):
        batch = await batch_of(self.failing_once(), num=2, group_size=2)
        assert (len(batch.results), batch.num_failed) == (4, 1)
        assert len({meta["rollout_id"] for (meta,) in batch.meta}) == 3
        assert batch.dropped == ()

    async def test_a_group_is_whole_or_dropped_visibly(self):
        batch = await batch_of(
            self.failing_once(),
            num=2,
            group_size=2,
            whole_groups=True,
            credit=partial(assign_credit, credit="dr_grpo"),
        )
        (dropped,) = batch.dropped
        assert (dropped.group_id, dropped.num_members) == ("train/twice/0", 2)
        assert dropped.errors[0].type == "ModelError"
        assert {meta["rollout_id"] for (meta,) in batch.meta} == {
            "train/twice/1/0",
            "train/twice/1/1",
        }
        assert batch.batch.report["num_calls_without_advantage"] == 0

    @pytest.mark.parametrize("credit", [None, partial(assign_credit, credit="dr_grpo")])
    async def test_a_call_whose_tokens_contradict_themselves_is_left_out_alone(self, credit):
        class Careless(ProtocolEnvironment):
            async def run_request(self, request, client):
                (state,) = await super().run_request(request, client)
                if request.index_in_group == 0:
                    step = state["trajectory"][0]
                    step["tokens"] = {**step["tokens"], "completion_logprobs": [-1.0]}
                return [state]

        environment = Careless(
            SingleAgentProtocol(lambda: Agent(name="a", parser=some)), Twice, num_train=1
        )
        requests = build_requests(environment, "train", indices=range(1), group_size=2)
        ready = RolloutEngine(environment, ScriptedClient(["one", "two"]))
        batch = await ready.generate_batch(requests, scope="step", credit=credit)
        assert len(batch.samples) == 3
        (skipped,) = batch.batch.skipped
        assert (skipped.reason, skipped.call) == ("invalid_tokens", 0)

    async def test_without_credit_it_is_counted(self):
        batch = await batch_of(["one", "two"])
        assert batch.batch.report["num_calls_without_advantage"] == 2
