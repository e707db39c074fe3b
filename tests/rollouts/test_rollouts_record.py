"""Records: a result goes into the store and comes back, exactly and in O(unique tokens)."""

import asyncio
import json
import math
import threading
from contextlib import aclosing
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_source import Model, Source, a_request

import rolltree as rt
from rolltree.gateway.program import ProgramOutcome
from rolltree.rollouts import RolloutEngine
from rolltree.rollouts.decode import decode_results, decode_rollout, export_line
from rolltree.rollouts.message_table import MessageTable
from rolltree.rollouts.record import encode_result, run_stored
from rolltree.store import Opaque, Run
from rolltree.testing import ScriptedClient
from rolltree.tokens import TokenStream, TokenTree, Trajectory
from rolltree.values.errors import StoreError, TokenError
from rolltree.values.types import (
    ErrorRecord,
    FinishReason,
    ModelResponse,
    RolloutRequest,
    RolloutResult,
    SamplingParams,
    State,
)


def make_response(prompt, completion, call_id=0, *, extends=None, version=0, **fields):
    ids = lambda values: None if values is None else np.asarray(values, dtype=np.int32)  # noqa: E731
    count = len(completion or ())
    given = {
        "message": {"role": "assistant", "content": "x"},
        "text": "x",
        "finish_reason": FinishReason.STOP,
        "prompt_ids": ids(prompt),
        "completion_ids": ids(completion),
        "logprobs": np.linspace(-0.1, -2.0, count, dtype=np.float32),
        "versions": np.full(count, version, dtype=np.int32),
        "temperature": 0.7,
        "call_id": call_id,
        "extends": extends,
    }
    return ModelResponse(**{**given, **fields})


def request(**fields):
    given = {
        "request_id": "eval/e/0/0",
        "env_id": "e",
        "input": {
            "prompt": [{"role": "user", "content": "7 + 5 ="}],
            "example_id": 0,
            "task": "add",
            "answer": "12",
            "info": {"level": 1, "pair": (7, 5)},
        },
        "seed": 2**63 + 1,
        "sampling_seed": 8,
        "group_id": "eval/e/0",
        "index_in_group": 0,
        "sampling": SamplingParams(temperature=0.7, stop=("\n",), extra={"min_p": 0.1}),
    }
    return RolloutRequest(**{**given, **fields})


def conversation(num_turns, *, ids_per_turn=3):
    """An append-only rollout: what the environment and the token session make of it."""
    trajectory, messages, ids = Trajectory(), [], []
    for turn in range(num_turns):
        messages = [*messages, {"role": "user", "content": f"question {turn}"}]
        ids = [*ids, *range(1000 * turn, 1000 * turn + ids_per_turn)]
        sampled = list(range(1000 * turn + 500, 1000 * turn + 500 + ids_per_turn))
        answer = [{"role": "assistant", "content": f"answer {turn}"}]
        trajectory.append_call(
            prompt=messages,
            completion=answer,
            response=make_response(ids, sampled, turn, extends=turn - 1 if turn else None),
            turn=turn,
        )
        messages, ids = [*messages, *answer], [*ids, *sampled]
    return trajectory


def state_of(trajectory, rollout_request=None, **fields):
    given = {
        "input": deepcopy((rollout_request or request()).input),
        "is_completed": True,
        "stop_condition": "max_turns_reached",
        "oai_tools": [],
        "trajectory": trajectory,
        "completion": [{"role": "assistant", "content": "12"}],
        "reward": 0.5,
        "advantage": None,
        "metrics": {"correct": 0.5, "length": 2},
        "timing": {
            "start_time": 1.5e9,
            "generation_ms": 10.0,
            "scoring_ms": 2.0,
            "total_ms": 12.0,
        },
        "error": None,
        "terminated": True,
        "truncated": False,
        "truncation_reason": None,
    }
    return State({**given, **fields})


def stored_and_read(result, tmp_path):
    with Run.create(tmp_path / "run") as run:
        run.add_rollouts(encode_result(result))
        (back,) = decode_results(run.rollouts())
    return back


def same_tree(a: TokenTree, b: TokenTree) -> bool:
    if (a.num_calls, a.num_tokens) != (b.num_calls, b.num_tokens):
        return False
    for call in range(a.num_calls):
        for read in ("prompt_ids", "completion_ids", "temperature", "versions", "mask", "logprobs"):
            if not np.array_equal(getattr(a, read)(call), getattr(b, read)(call)):
                return False
        if (a.agent(call), a.turn(call)) != (b.agent(call), b.turn(call)):
            return False
    return True


texts = st.text(max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
message = st.fixed_dictionaries({"role": texts, "content": texts}, optional={"name": json_values})
message_lists = st.lists(message, max_size=3)
token_lists = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def trajectories(draw):
    trajectory = Trajectory()
    prompt, ids = draw(message_lists), draw(token_lists)
    for call in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):  # history rewritten
            prompt, ids = draw(message_lists), draw(token_lists)
        completion, sampled = draw(message_lists), draw(token_lists)
        known = draw(st.booleans())
        step = trajectory.append_call(
            prompt=prompt,
            completion=completion,
            response=make_response(
                ids if known else None,
                sampled if known else None,
                call,
                version=draw(st.integers(0, 3)),
                logprobs=None if draw(st.booleans()) else np.full(len(sampled), -0.5, np.float32),
                finish_reason=draw(st.sampled_from(FinishReason)),
                raw={"id": "r", "choices": [1]} if draw(st.booleans()) else None,
            ),
            agent=draw(st.sampled_from(["", "a", "b"])),
            extras=draw(st.dictionaries(texts, json_values, max_size=2)),
        )
        step["reward"] = draw(st.none() | st.floats(allow_nan=False))
        step["advantage"] = draw(st.none() | st.just(-1.5))
        if known and draw(st.booleans()):
            step["tokens"]["completion_mask"] = [0] * len(sampled)
        prompt, ids = [*prompt, *completion], [*ids, *sampled]
    return trajectory


states = st.builds(
    lambda trajectory, fields: state_of(trajectory, **fields),
    trajectories(),
    st.fixed_dictionaries(
        {},
        optional={
            "reward": st.none() | st.floats(allow_nan=False),
            "completion": message_lists | texts | st.none(),
            "metrics": st.none() | st.dictionaries(texts, st.floats(allow_nan=False), max_size=2),
            "custom": json_values | st.tuples(st.integers(), st.binary(max_size=3)),
            "error": st.none() | st.just(ErrorRecord("E", "m", "t", "model")),
            "scoring_errors": st.just({"f": {"type": "E"}}),
            "input": st.just({"prompt": "changed", "example_id": 3, "task": "t"}),
        },
    ),
)
results = st.builds(
    RolloutResult,
    st.builds(
        request,
        seed=st.integers(0, 2**64),
        phase=st.sampled_from(["eval", "train"]),
        train_step=st.none() | st.integers(0, 9),
        input=st.fixed_dictionaries(
            {"prompt": message_lists | texts, "example_id": st.integers(), "task": texts},
            optional={"answer": texts, "info": st.dictionaries(texts, json_values, max_size=2)},
        ),
        sampling=st.builds(
            SamplingParams,
            temperature=st.floats(0, 2),
            max_tokens=st.none() | st.integers(1, 9),
            stop_token_ids=st.lists(st.integers(0, 9), max_size=2).map(tuple),
            extra=st.dictionaries(texts, json_values, max_size=2),
        ),
    ),
    st.lists(states, max_size=2).map(tuple),
    st.none() | st.just(ErrorRecord("ServerError", "500", "Traceback", "model")),
    st.integers(1, 3),
)


def without_responses(result):
    """The one thing that is left out: of a raw response only its identity is kept."""
    for state in result.states:
        for step in state["trajectory"]:
            if isinstance(step["response"], dict):
                step["response"] = {"id": step["response"]["id"]}
            elif step["response"].prompt_ids is None:  # without ids the made-up arrays mean nothing
                step["response"] = replace(step["response"], logprobs=None, versions=None)
    return result


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(results)
def test_roundtrip_through_the_store(tmp_path_factory, result):
    back = stored_and_read(result, tmp_path_factory.mktemp("r"))
    assert back == without_responses(result)
    assert [type(state) for state in back.states] == [State] * len(result.states)
    for state, was in zip(back.states, result.states, strict=True):
        assert isinstance(state["trajectory"], Trajectory)
        assert same_tree(state["trajectory"].tree, was["trajectory"].tree)


class TestColumns:
    def test_what_can_be_asked_in_sql(self, tmp_path):
        state = state_of(conversation(3), truncated=True, truncation_reason="max_steps")
        state["trajectory"].append_call(
            prompt="p",
            completion="c",
            response=make_response([1], [2], 77, version=4, finish_reason=FinishReason.LENGTH),
            agent="critic",
        )
        result = RolloutResult(request(phase="train", train_step=2), (state,), None, 2)
        (row,) = encode_result(result)
        assert row.request_id == "eval/e/0/0"
        assert (row.phase, row.train_step, row.env_id, row.example_id) == ("train", 2, "e", 0)
        assert (row.task, row.agent, row.reward, row.status) == ("add", "critic", 0.5, "ok")
        assert (row.terminated, row.truncated, row.truncation_reason) == (True, True, "max_steps")
        assert (row.stop_condition, row.finish_reason) == ("max_turns_reached", "length")
        # prompts of 3, 9, 15 and 1 tokens, three answers of 3 and one of 1; 18 + 2 unique
        assert (row.num_calls, row.num_prompt_tokens, row.num_completion_tokens) == (4, 28, 10)
        assert row.num_unique_tokens == 20
        assert (row.min_version, row.max_version, row.num_attempts) == (0, 4, 2)
        assert (row.generation_ms, row.total_ms, row.started_at) == (10.0, 12.0, 1.5e9)
        assert row.metrics == {"correct": 0.5, "length": 2}
        assert row.input == {k: v for k, v in request().input.items() if k != "prompt"}

    def test_a_failure_before_any_state(self, tmp_path):
        error = ErrorRecord("ConnectionFailed", "refused", "Traceback", "model")
        result = RolloutResult(request(), (), error)
        (row,) = encode_result(result)
        assert (row.status, row.error_type, row.error_phase) == ("error", error.type, "model")
        assert (row.reward, row.num_calls, row.is_completed) == (None, 0, False)
        assert row.errors == (error.as_dict(),)
        assert stored_and_read(result, tmp_path) == result

    def test_a_failed_request_fails_all_its_trajectories(self):
        error = ErrorRecord("ServerError", "500", "", "model")
        pair = (state_of(conversation(1)), state_of(conversation(1), error=error, reward=None))
        rows = encode_result(RolloutResult(request(), pair, error))
        assert [row.status for row in rows] == ["error", "error"]
        assert [row.trajectory_index for row in rows] == [0, 1]
        assert {row.num_trajectories for row in rows} == {2}

    @pytest.mark.parametrize("error", ["it broke", ValueError("it broke")])
    def test_an_error_that_an_environment_wrote_itself(self, error):
        state = state_of(Trajectory(), error=error)
        (row,) = encode_result(RolloutResult(request(), (state,), None))
        assert (row.status, row.error_type) == ("error", type(error).__name__)
        assert row.errors[0]["message"] == "it broke"

    def test_scoring_errors_are_listed_by_function(self):
        state = state_of(conversation(1), scoring_errors={"judge": {"type": "KeyError"}})
        (row,) = encode_result(RolloutResult(request(), (state,), None))
        assert row.errors == ({"function": "judge", "type": "KeyError"},)

    @pytest.mark.parametrize("reward", ["high", object(), [1, 2]])
    def test_a_reward_that_is_no_number_has_no_column(self, reward):
        (row,) = encode_result(
            RolloutResult(request(), (state_of(Trajectory(), reward=reward),), None)
        )
        assert row.reward is None

    def test_nan_rewards_survive_in_the_record(self, tmp_path):
        result = RolloutResult(request(), (state_of(Trajectory(), reward=math.nan),), None)
        back = stored_and_read(result, tmp_path)
        assert math.isnan(back.states[0]["reward"])


class TestSpace:
    def size(self, num_turns, ids_per_turn=100):
        state = state_of(conversation(num_turns, ids_per_turn=ids_per_turn), completion=None)
        (row,) = encode_result(RolloutResult(request(), (state,), None))
        return len(row.record) + len(row.tokens)

    def test_linear_in_turns(self):
        """64 turns restate 6,400 prompt tokens each at the end: 400,000 in all, 12,800 unique."""
        assert self.size(64) < 2.2 * self.size(32)
        assert self.size(64) - self.size(32) < 1.1 * 2 * (self.size(32) - self.size(16))

    def test_bytes_per_token(self):
        assert self.size(64, ids_per_turn=500) / (64 * 1000) < 10  # id 2, logprob 4, little else


class TestOddTrajectories:
    def test_hand_made_steps_with_token_lists(self, tmp_path):
        steps = [
            {
                "prompt": "p" * n,
                "completion": "c",
                "response": None,
                "tokens": {
                    "prompt_ids": [1] * n,
                    "prompt_mask": [0] * n,
                    "completion_ids": [9],
                    "completion_mask": [1],
                    "completion_logprobs": [-0.25],
                },
                "reward": 1.0,
                "advantage": None,
                "extras": {},
                "note": "own key",
            }
            for n in (1, 2)
        ]
        result = RolloutResult(request(), (state_of(steps),), None)
        before = deepcopy(steps)
        back = stored_and_read(result, tmp_path)
        assert steps == before  # encoding changed nothing
        assert back.states[0]["trajectory"] == steps
        assert back.states[0]["trajectory"].tree.num_tokens == 4

    def test_steps_of_several_trees(self, tmp_path):
        merged = [*conversation(2), *conversation(1)]
        merged[0]["tokens"]["completion_mask"] = [0, 1, 0]
        back = stored_and_read(RolloutResult(request(), (state_of(merged),), None), tmp_path)
        trajectory = back.states[0]["trajectory"]
        assert list(trajectory) == merged
        assert [trajectory.call_of(i) for i in range(3)] == [0, 1, 2]
        assert trajectory.tree.temperature(0).tolist() == [np.float32(0.7)] * 3

    def test_tokens_that_contradict_themselves_stay_visible(self, tmp_path):
        step = {
            "prompt": [], "completion": [], "response": None, "reward": None, "advantage": None,
            "extras": {}, "tokens": {"prompt_ids": [1], "completion_ids": [2, 3],
                                     "completion_logprobs": [-0.5]},
        }  # fmt: skip
        with pytest.raises(TokenError):
            Trajectory([dict(step)])
        back = stored_and_read(RolloutResult(request(), (state_of([step]),), None), tmp_path)
        assert back.states[0]["trajectory"] == [step]

    def test_a_slice_keeps_its_tree(self, tmp_path):
        trajectory = conversation(3)
        back = stored_and_read(
            RolloutResult(request(), (state_of(trajectory[1:]),), None), tmp_path
        )
        assert back.states[0]["trajectory"] == trajectory[1:]

    def test_extra_streams(self, tmp_path):
        trajectory = Trajectory()
        experts = np.arange(6, dtype=np.int16).reshape(2, 3)
        trajectory.append_call(
            prompt=[], completion=[], response=make_response([1], [2, 3]),
            streams={"experts": experts},
        )  # fmt: skip
        back = stored_and_read(RolloutResult(request(), (state_of(trajectory),), None), tmp_path)
        stream = back.states[0]["trajectory"].tree.stream("experts", 0)
        assert isinstance(stream, TokenStream)
        assert stream.values.tolist() == experts.tolist()

    def test_no_trajectory_at_all(self, tmp_path):
        state = State(reward=1.0)
        back = stored_and_read(RolloutResult(request(), (state,), None), tmp_path)
        assert back.states == (state,)


class TestWhatIsLeftOut:
    def test_objects_leave_their_type(self, tmp_path):
        state = state_of(Trajectory(), game=object(), sandbox={"client": TokenTree})
        back = stored_and_read(RolloutResult(request(), (state,), None), tmp_path)
        assert back.states[0]["game"] == Opaque("builtins.object")
        assert isinstance(back.states[0]["sandbox"]["client"], Opaque)

    def test_responses_keep_their_identity(self, tmp_path):
        class Response:
            id, model, choices = "chat-1", "m", ["long"]

        trajectory = Trajectory()
        for call, response in enumerate(
            ({"id": "a", "usage": {"n": 1}, "choices": []}, Response())
        ):
            trajectory.append_call(
                prompt=[], completion=[], response=make_response([1], [2], call, raw=response)
            )
        back = stored_and_read(RolloutResult(request(), (state_of(trajectory),), None), tmp_path)
        assert [step["response"] for step in back.states[0]["trajectory"]] == [
            {"id": "a", "usage": {"n": 1}},
            {"id": "chat-1", "model": "m"},
        ]

    def test_secrets(self, tmp_path):
        key = "sk-" + "a1" * 12
        error = ErrorRecord("ServerError", f"bad key {key}", f"Traceback: {key}", "model")
        asked = request(
            sampling=SamplingParams(extra={"extra_headers": {"Authorization": f"Bearer {key}"}})
        )
        result = RolloutResult(asked, (state_of(Trajectory(), error=error),), error)
        with Run.create(tmp_path / "run") as run:
            run.add_rollouts(encode_result(result))
            (back,) = decode_results(run.rollouts())
        assert key not in repr(back)
        for row in encode_result(result):
            assert key.encode() not in row.record
        assert back.error.type == "ServerError"

    def test_secrets_in_the_errors_of_tools_and_rewards(self):
        error = ErrorRecord(
            "ValueError", "no http://TOKEN@host/", "see http://TOKEN@host/", "model"
        )
        state = state_of(Trajectory())
        state["tool_errors"] = [{"tool": "get", **error.as_dict()}]
        state["scoring_errors"] = {"right": error.as_dict()}
        state["program"] = ProgramOutcome(error=error).as_dict()
        (row,) = encode_result(RolloutResult(request(), (state,), None))
        assert row.record.count(b"http://[redacted]@host/") == 6
        assert b"TOKEN" not in row.record


class TestReading:
    def test_rows_without_blobs_are_refused(self, tmp_path):
        with Run.create(tmp_path / "run") as run:
            run.add_rollouts(encode_result(RolloutResult(request(), (), None)))
            with pytest.raises(StoreError, match="blobs=True"):
                decode_rollout(next(run.rollouts(blobs=False)))

    def test_newer_records_are_refused(self):
        (row,) = encode_result(RolloutResult(request(), (), None))
        newer = replace(row, record=row.record.replace(b'"version":1', b'"version":2'))
        with pytest.raises(StoreError, match="Upgrade"):
            decode_rollout(newer)

    def test_trajectories_of_one_request_come_together(self, tmp_path):
        pair = (state_of(conversation(1)), state_of(conversation(2)))
        first = RolloutResult(request(), pair, None)
        second = RolloutResult(request(request_id="other"), (), None)
        with Run.create(tmp_path / "run") as run:
            run.add_rollouts([*encode_result(first), *encode_result(second)])
            assert list(decode_results(run.rollouts())) == [first, second]

    def test_export_lines_are_spec_1_json(self, tmp_path):
        result = RolloutResult(request(), (state_of(conversation(2)),), None)
        with Run.create(tmp_path / "run") as run:
            run.add_rollouts(encode_result(result))
            run.export(tmp_path / "out.jsonl", render=export_line)
        line = json.loads((tmp_path / "out.jsonl").read_text())
        assert line["prompt"] == request().input["prompt"]
        assert line["completion"] == [{"role": "assistant", "content": "12"}]
        step = line["trajectory"][1]
        assert step["tokens"]["prompt_ids"] == [0, 1, 2, 500, 501, 502, 1000, 1001, 1002]
        assert step["tokens"]["completion_mask"] == [1, 1, 1]
        assert line["reward"] == 0.5
        assert step["response"]["choices"] == [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "x",
                    "reasoning_content": None,
                    "tool_calls": None,
                },
                "text": "x",
                "finish_reason": "stop",
            }
        ]
        assert "ids" not in json.dumps(step["response"])  # those are in tokens

    def test_export_lines_have_tool_calls_times_and_foreign_responses(self, tmp_path):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        trajectory = conversation(1)
        said = make_response([0, 1, 2, 500], [9], 1)
        said = replace(said, message=answer, text="", time_s=0.5, info={"num_retries": 2})
        said = replace(said, num_prompt_tokens=4, num_completion_tokens=1)
        prompt = trajectory[0]["prompt"]
        trajectory.append_call(prompt=prompt, completion=[answer], response=said, turn=1)
        trajectory.append(
            {
                "prompt": prompt,
                "completion": [answer],
                "response": {"id": "theirs", "usage": {"prompt_tokens": 7}},
                "tokens": None,
                "reward": None,
                "advantage": None,
                "extras": {},
            }
        )
        result = RolloutResult(request(), (state_of(trajectory),), None)
        with Run.create(tmp_path / "run") as run:
            run.add_rollouts(encode_result(result))
            run.export(tmp_path / "out.jsonl", render=export_line)
        _, mine, theirs = json.loads((tmp_path / "out.jsonl").read_text())["trajectory"]
        (choice,) = mine["response"]["choices"]
        assert choice["message"]["tool_calls"] == [call]
        assert mine["response"]["usage"] == {
            "prompt_tokens": 4,
            "completion_tokens": 1,
            "total_tokens": 5,
        }
        assert mine["response"]["time_s"] == 0.5
        assert mine["response"]["info"] == {"num_retries": 2}
        assert theirs["response"] == {"id": "theirs", "usage": {"prompt_tokens": 7}}


def test_a_step_costs_its_new_messages_to_encode(monkeypatch):
    seen = []
    add = MessageTable._add_message

    def counted(table, message):
        seen.append(message)
        return add(table, message)

    monkeypatch.setattr(MessageTable, "_add_message", counted)
    encode_result(RolloutResult(request(), (state_of(conversation(200)),), None))
    assert len(seen) < 5 * 200  # and not 200 * 200


class TestRunStored:
    """Results are encoded and written beside the event loop, and are yielded once they are safe."""

    async def test_a_thread_encodes_and_what_is_yielded_is_stored(self, tmp_path, monkeypatch):
        threads = set()

        def encode(result, **settings):
            threads.add(threading.current_thread())
            return encode_result(result, **settings)

        monkeypatch.setattr("rolltree.rollouts.record.encode_result", encode)
        engine = RolloutEngine(Source(), Model())
        requests = [a_request(index) for index in range(600)]
        seen = set()
        with Run.create(tmp_path / "run") as run:
            async with aclosing(run_stored(engine, requests, run)) as batches:
                async for batch in batches:
                    for result, (row,) in batch:
                        assert row.request_id == result.request.request_id
                        assert row.reward == 1.0
                        assert not row.record
                        seen.add(row.request_id)
                    assert seen <= run.finished_ids()
            assert len(seen) == 600
            assert len(list(decode_results(run.rollouts()))) == 600
        assert threading.main_thread() not in threads

    async def test_a_write_that_has_begun_ends_though_it_is_cancelled(self, tmp_path):
        writing, go_on = threading.Event(), threading.Event()
        with Run.create(tmp_path / "run") as run:
            add = run.add_rollouts

            def slow(rows, **settings):
                writing.set()
                assert go_on.wait(60)
                return add(rows, **settings)

            run.add_rollouts = slow

            async def collect():
                engine = RolloutEngine(Source(), Model())
                async for _ in run_stored(engine, [a_request(0)], run):
                    pass

            task = asyncio.create_task(collect())
            assert await asyncio.to_thread(writing.wait, 60)
            task.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert run.finished_ids() == {"r0"}

    async def test_without_a_run_there_are_light_rows(self):
        engine = RolloutEngine(Source(), Model())
        async with aclosing(run_stored(engine, [a_request(0)], None)) as batches:
            ((_, (row,)),) = await anext(batches)
        assert (row.reward, row.record, row.tokens) == (1.0, b"", b"")


async def test_the_times_of_calls_are_stored(tmp_path):
    """What lies between two calls is the environment's own time."""

    class Slow(rt.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            await asyncio.sleep(0.05)
            return [{"role": "user", "content": "again"}]

    env = Slow(dataset=[{"question": "?", "answer": "!"}], max_turns=2)
    run = Run.create(tmp_path / "run")
    await rt.evaluate_async(env, ScriptedClient(["one", "two"]), num_examples=1, run=run)
    ((state,),) = [result.states for result in decode_results(run.rollouts())]
    run.close()
    first, second = [step["response"] for step in state["trajectory"]]
    assert first.sent_s > 0
    assert first.time_s > 0
    own_s = second.sent_s - first.sent_s - first.time_s
    assert 0.05 <= own_s <= state["timing"]["total_ms"] / 1000
