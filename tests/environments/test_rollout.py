"""One rollout: the methods of verifiers, the three signals, limits, errors, seeds."""

import asyncio
import copy
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from env_scripts import ROWS, Echo, ScriptedModel, a_request, assistant, exact, single, user

from rolltree.environments import MultiTurnEnv, SingleTurnEnv, stop
from rolltree.environments.rubrics import Rubric, RubricGroup, run_inline
from rolltree.inference import OpenAIClient, RetryPolicy, as_client
from rolltree.rollouts import RolloutEngine, RolloutSource, derive_seed
from rolltree.testing import ScriptedClient, ScriptedServer
from rolltree.tokens import Trajectory
from rolltree.values.errors import ConfigError, PromptTooLong, ServerError, UnsupportedSetting
from rolltree.values.types import (
    ErrorRecord,
    ModelResponse,
    SamplingParams,
    State,
    TruncationReason,
)

INPUT = {"prompt": user("say one"), "answer": "one", "example_id": 0, "task": "t"}


async def play(env, model, **settings):
    return await env.rollout(copy.deepcopy(INPUT), model, "m", **settings)


# The state


async def test_init_state_has_every_key():
    state = await single().init_state(INPUT)
    assert isinstance(state, State)
    assert state["input"] == INPUT
    assert state["input"] is not INPUT
    assert state["prompt"] == user("say one")
    assert isinstance(state["trajectory"], Trajectory)
    assert state["trajectory"] == []
    expected = {
        "is_completed": False,
        "stop_condition": None,
        "oai_tools": [],
        "completion": None,
        "reward": None,
        "advantage": None,
        "metrics": None,
        "error": None,
        "terminated": False,
        "truncated": False,
        "truncation_reason": None,
    }
    assert {key: state[key] for key in expected} == expected
    assert state["timing"]["total_ms"] == 0.0
    assert state["timing"]["start_time"] > 1e9


async def test_the_input_is_copied_deeply():
    given = copy.deepcopy(INPUT)
    state = await single().init_state(given)
    state["prompt"][0]["content"] = "changed"
    assert given == INPUT


async def test_task_and_example_id_have_defaults():
    state = await single(env_id="mine").init_state({"prompt": user("hi")})
    assert (state["task"], state["example_id"]) == ("mine", 0)
    assert (await single().init_state({"prompt": user("hi")}))["task"] == "default"


async def test_info_may_be_json():
    state = await single().init_state({**INPUT, "info": '{"level": 3}'})
    assert state["info"] == {"level": 3}
    with pytest.raises(ConfigError, match="example 0"):
        await single().init_state({**INPUT, "info": "{"})


async def test_tools_of_the_row_win_over_the_environments():
    tool = {"type": "function", "function": {"name": "f"}}
    other = {"type": "function", "function": {"name": "g"}}
    env = single(oai_tools=[tool])
    assert (await env.init_state(INPUT))["oai_tools"] == [tool]
    row = {**INPUT, "info": {"oai_tools": [other]}}
    assert (await env.init_state(row))["oai_tools"] == [other]
    assert (await env.init_state({**INPUT, "info": {"oai_tools": []}}))["oai_tools"] == []
    as_json = {**INPUT, "info": json.dumps({"oai_tools": [other]})}
    assert (await env.init_state(as_json))["oai_tools"] == [other]


async def test_tools_reach_the_model():
    tool = {"type": "function", "function": {"name": "f"}}
    model = ScriptedModel("one")
    await play(single(oai_tools=[tool]), model)
    await play(single(), model)
    assert [call["tools"] for call in model.calls] == [[tool], None]


# The loop


async def test_a_single_turn():
    model = ScriptedModel("one")
    state = await play(single(), model)
    assert state["completion"] == assistant("one")
    assert state["is_completed"]
    assert state["stop_condition"] == "answered"
    assert (state["terminated"], state["truncated"]) == (True, False)
    assert len(model.calls) == 1
    assert model.calls[0]["messages"] == user("say one")
    assert model.calls[0]["model"] == "m"
    step = state["trajectory"][0]
    assert step["prompt"] == user("say one")
    assert step["completion"] == assistant("one")
    assert (step["reward"], step["advantage"]) == (None, None)
    assert step["extras"]["finish_reason"] == "stop"
    assert step["tokens"]["completion_ids"] == list(b"one")
    assert step["tokens"]["completion_logprobs"] == [-0.5] * 3
    assert state["timing"]["generation_ms"] > 0


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_a_clock_that_jumps_changes_no_duration(monkeypatch, jump_s):
    now = time.time

    class Jumping(SingleTurnEnv):
        async def setup_state(self, state):
            monkeypatch.setattr(time, "time", lambda: now() + jump_s)
            return await super().setup_state(state)

    env = Jumping(dataset=ROWS, rubric=Rubric([]))
    timing = (await play(env, ScriptedModel("one")))["timing"]
    for name in ("generation_ms", "scoring_ms", "total_ms"):
        assert 0 <= timing[name] < 60_000, name


async def test_several_turns_until_the_game_is_won():
    model = ScriptedModel("two", "three", "one")
    state = await play(Echo(), model)
    assert state["stop_condition"] == "won"
    assert state["terminated"]
    assert state["completion"] == [
        *assistant("two"),
        *user("not two"),
        *assistant("three"),
        *user("not three"),
        *assistant("one"),
    ]
    assert [len(step["prompt"]) for step in state["trajectory"]] == [1, 3, 5]
    assert [step["extras"]["turn"] for step in state["trajectory"]] == [0, 1, 2]
    assert state["reward"] is None  # scoring is the source's, not the rollout's


async def test_a_turn_limit_truncates():
    state = await play(Echo(max_turns=2), ScriptedModel("two"))
    assert state["stop_condition"] == "max_turns_reached"
    assert (state["terminated"], state["truncated"]) == (False, True)
    assert state["truncation_reason"] == "max_steps"
    assert len(state["trajectory"]) == 2


async def test_a_game_won_on_its_last_turn_is_won():
    state = await play(Echo(max_turns=2), ScriptedModel("two", "one"))
    assert state["stop_condition"] == "won"
    assert (state["terminated"], state["truncated"], state["truncation_reason"]) == (
        True,
        False,
        None,
    )


async def test_one_session_per_rollout():
    model = ScriptedModel("two", "one")
    await play(Echo(), model)
    await play(Echo(), model)
    assert model.sessions == 2


class Countdown(MultiTurnEnv):
    """Ends inside `env_response`, when it has counted down."""

    async def setup_state(self, state):
        state["left"] = 2
        return state

    async def env_response(self, messages, state):
        state["left"] -= 1
        return user(f"{state['left']} left")

    @stop
    async def over(self, state):
        return state["left"] == 0


async def test_a_game_that_ends_in_env_response_costs_no_further_call():
    model = ScriptedModel("tick")
    state = await play(Countdown(dataset=ROWS), model)
    assert len(model.calls) == len(state["trajectory"]) == 2
    assert state["stop_condition"] == "over"
    assert state["final_env_response"] == user("0 left")
    assert state["completion"] == [
        *assistant("tick"),
        *user("1 left"),
        *assistant("tick"),
        *user("0 left"),
    ]


@pytest.mark.parametrize("in_state", [False, True])
async def test_stop_conditions_are_asked_once_per_state(in_state):
    """A counting condition and one that asks a model, which costs a call each time."""
    asked, judge = [], ScriptedModel("go on")

    class Counting(Echo):
        @stop
        async def asked_five_times(self, state):
            asked.append(len(state["trajectory"]))
            if in_state:
                state["num_asked"] = state.get("num_asked", 0) + 1
            return len(asked) == 5

        @stop
        async def judged(self, state):
            reply = await judge.chat(user("Is it over?"))
            return reply.text == "over"

    model = ScriptedModel("no")
    state = await play(Counting(), model)
    assert state["stop_condition"] == "asked_five_times"
    assert asked == [0, 1, 2, 3, 4]
    assert len(model.calls) == len(judge.calls) == 4


async def test_an_override_of_is_completed_is_asked_once_per_state():
    asked = []

    class Counting(Echo):
        async def is_completed(self, state, **more):
            asked.append(len(state["trajectory"]))
            return await super().is_completed(state, **more) or len(asked) == 4

    model = ScriptedModel("no")
    await play(Counting(), model)
    assert asked == [0, 1, 2, 3]
    assert len(model.calls) == 3


async def test_stop_conditions_are_asked_after_a_response_that_changes_the_state():
    asked = []

    class Watched(Countdown):
        @stop(priority=1)
        async def watch(self, state):
            asked.append((len(state["trajectory"]), state["left"]))
            return False

    await play(Watched(dataset=ROWS), ScriptedModel("tick"))
    assert asked == [(0, 2), (1, 2), (1, 1), (2, 1), (2, 0)]


async def test_a_game_may_end_by_a_change_of_the_environment():
    class Game(Echo):
        over = False

        async def env_response(self, messages, state):
            self.over = True
            return user("that was the last move")

        @stop
        async def played(self, state):
            return self.over

    model = ScriptedModel("go")
    state = await play(Game(), model)
    assert state["stop_condition"] == "played"
    assert len(model.calls) == 1


@pytest.mark.parametrize("value", [{"moves": []}, [[]], SimpleNamespace(moves=[])])
async def test_a_game_may_end_by_a_change_inside_a_value_of_the_state(value):
    def moves(state):
        game = state["game"]
        return game["moves"] if isinstance(game, dict) else getattr(game, "moves", game)

    class Game(Echo):
        async def setup_state(self, state):
            state["game"] = value
            moves(state).clear()
            return state

        async def env_response(self, messages, state):
            moves(state).append("x")
            return user("that was the last move")

        @stop
        async def played(self, state):
            return "x" in moves(state)

    model = ScriptedModel("go")
    state = await play(Game(), model)
    assert state["stop_condition"] == "played"
    assert len(model.calls) == 1


async def test_a_final_env_response_ends_a_game():
    class LastWords(Echo):
        async def env_response(self, messages, state):
            state["final_env_response"] = user("goodbye")
            return state["final_env_response"]

    model = ScriptedModel("two")
    state = await play(LastWords(), model)
    assert state["stop_condition"] == "has_final_env_response"
    assert state["terminated"]
    assert state["completion"] == [*assistant("two"), *user("goodbye")]
    assert len(model.calls) == 1


async def test_env_response_may_be_a_plain_function():
    class Plain(Echo):
        def env_response(self, messages, state):
            return user("again")

    state = await play(Plain(), ScriptedModel("two", "one"))
    assert state["error"] is None
    assert len(state["trajectory"]) == 2


@pytest.mark.parametrize(
    ("answer", "returned"),
    [
        ((user("hint"), {"over": True}), "a tuple (list, dict)"),
        (None, "None"),
        ([{"role": "user", "content": "hint"}, "hint"], "a list (dict, str)"),
        (7.5, "a float"),
    ],
)
async def test_an_env_response_that_is_no_messages_is_told(answer, returned):
    class Riddle(Countdown):
        async def env_response(self, messages, state):
            return answer

    riddle = Riddle(dataset=ROWS, env_id="riddles")
    state = await play(riddle, ScriptedModel("one", "two"))
    # It may have no branch for what the model wrote, or return a part of it: that counts.
    assert state["error"] is None
    error = ErrorRecord(**state["environment_errors"]["environment"])
    assert error.type == "ConfigError"
    assert error.message.startswith(f"Riddle.env_response of 'riddles' returned {returned}, ")
    assert "Return a list of messages" in error.message
    assert ("the state" in error.message) == isinstance(answer, tuple)
    assert len(state["trajectory"]) == 1


async def test_an_env_response_after_a_text_is_a_text():
    class Riddle(Countdown):
        async def env_response(self, messages, state):
            return user("hint")

    riddle = Riddle(dataset=ROWS, message_type="completion")
    text = {**INPUT, "prompt": "say one"}
    state = await riddle.rollout(text, ScriptedModel("one"), "m")
    message = state["environment_errors"]["environment"]["message"]
    assert "returned a list (dict), " in message
    assert "Return a string" in message


@pytest.mark.parametrize("answer", ["hint", {"role": "user", "content": "hint"}])
async def test_a_text_is_a_users_message_and_one_message_a_list(answer):
    class Riddle(Countdown):
        async def env_response(self, messages, state):
            return answer

    state = await play(Riddle(dataset=ROWS, max_turns=2), ScriptedModel("one", "two"))
    assert state["trajectory"][1]["prompt"][-1] == {"role": "user", "content": "hint"}


ODD_MESSAGES = {
    "no role": {"content": "x"},
    "a number": {"role": "user", "content": 5},
    "nan": {"role": "user", "content": float("nan")},
    "bytes": {"role": "user", "content": b"x"},
    "an object": {"role": "user", "content": "x", "extra": object()},
    "digits": {"role": "user", "content": 10**5000},
    "a role of a number": {"role": 5, "content": "x"},
    "calls of a text": {"role": "user", "content": "x", "tool_calls": "bad"},
    "calls of a number": {"role": "user", "content": "x", "tool_calls": 5},
    "bad arguments": {"role": "assistant", "tool_calls": [{"function": {"arguments": b"x"}}]},
}


@pytest.mark.parametrize("message", ODD_MESSAGES.values(), ids=ODD_MESSAGES)
@pytest.mark.parametrize("kind", ["rendered", "http", "sdk"])
async def test_messages_that_cannot_be_sent_after_an_answer_end_a_scored_rollout(kind, message):
    class Riddle(Echo):
        async def env_response(self, messages, state):
            return [message]

    env = Riddle(max_turns=2)
    with ScriptedServer(["one more", "two"]) as server:
        client = ScriptedClient(["one more", "two"])
        if kind == "http":
            client = OpenAIClient(server.base_url, "scripted", retry=RetryPolicy(max_retries=0))
        if kind == "sdk":
            openai = pytest.importorskip("openai")
            raw = openai.AsyncOpenAI(base_url=server.base_url, api_key="x", max_retries=0)
            client = as_client(raw, "scripted")
        (state,) = await env.run_request(a_request(env), client)
        await client.aclose()
    assert (state["error"], state["reward"]) == (None, 0.0)


async def test_a_tuple_of_messages_is_as_good_as_a_list():
    class Riddle(Countdown):
        async def env_response(self, messages, state):
            return tuple(user("hint"))

    state = await play(Riddle(dataset=ROWS, max_turns=2), ScriptedModel("one", "two"))
    assert state["error"] is None


async def test_a_stop_condition_that_is_true_at_once():
    class Never(Echo):
        @stop
        async def closed(self, state):
            return True

    model = ScriptedModel("one")
    state = await play(Never(), model)
    assert state["error"] is None
    assert state["stop_condition"] == "closed"
    assert state["completion"] == []
    assert state["trajectory"] == []
    assert model.calls == []


async def test_the_world_may_truncate():
    class Cut(Echo):
        async def env_response(self, messages, state):
            state["truncated"] = True
            return user("enough")

        @stop
        async def cut(self, state):
            return state["truncated"]

    state = await play(Cut(), ScriptedModel("two"))
    assert (state["terminated"], state["truncated"]) == (False, True)
    assert state["truncation_reason"] == "env"


async def test_an_override_of_is_completed():
    class Old(MultiTurnEnv):
        async def is_completed(self, state, **kwargs):
            if await super().is_completed(state, **kwargs):
                return True
            return len(state["trajectory"]) == 2

        async def env_response(self, messages, state):
            return user("go on")

    state = await play(Old(dataset=ROWS), ScriptedModel("a"))
    assert len(state["trajectory"]) == 2
    assert state["is_completed"]
    assert state["stop_condition"] is None
    assert state["terminated"]
    assert state["completion"][-1] == assistant("a")[0]
    state = await play(Old(dataset=ROWS, max_turns=1), ScriptedModel("a"))
    assert state["stop_condition"] == "max_turns_reached"


async def test_rewritten_history_keeps_the_whole_completion():
    class Forgetful(Echo):
        async def get_prompt_messages(self, state):
            if not state["trajectory"]:
                return state["prompt"]
            return user(f"turn {len(state['trajectory'])}, say one")

    replies = iter(["two", "three", "one"])
    state = await play(Forgetful(), ScriptedModel(lambda messages: next(replies)))
    assert state["completion"] == [
        *assistant("two"),
        *user("turn 1, say one"),
        *assistant("three"),
        *user("turn 2, say one"),
        *assistant("one"),
    ]


async def test_completion_type_prompts_are_strings():
    model = ScriptedModel(" one")
    env = SingleTurnEnv(
        dataset=[{"prompt": "say", "answer": " one"}],
        message_type="completion",
        rubric=Rubric([lambda completion, answer: float(completion == answer)]),
    )
    states = await env.run_request(a_request(env), model)
    assert model.calls[0]["messages"] == "say"
    assert model.calls[0]["message_type"] == "completion"
    assert states[0]["completion"] == " one"
    assert states[0]["reward"] == 1.0


async def test_setup_state_may_return_another_state():
    class Fresh(Countdown):
        async def setup_state(self, state):
            fresh = state.copy()
            fresh["left"] = 1
            return fresh

    state = await play(Fresh(dataset=ROWS), ScriptedModel("a"))
    assert state["error"] is None
    assert len(state["trajectory"]) == 1


def test_max_turns_zero_is_an_error():
    with pytest.raises(ConfigError, match="max_turns"):
        Echo(max_turns=0)


def test_an_unknown_setting_is_an_error():
    with pytest.raises(TypeError, match="max_turn"):
        Echo(max_turn=3)


async def test_a_single_turn_env_has_no_second_turn():
    class Endless(SingleTurnEnv):
        answered = None
        max_turns_reached = None

    state = await play(Endless(dataset=ROWS), ScriptedModel("a"))
    error = state["environment_errors"]["environment"]
    assert (state["error"], error["type"]) == (None, "ConfigError")
    assert "MultiTurnEnv" in error["message"]


# Limits


async def test_a_prompt_that_does_not_fit_adds_no_step():
    model = ScriptedModel("two", PromptTooLong("4097 of 4096 tokens"))
    state = await play(Echo(), model)
    assert state["error"] is None
    assert state["prompt_too_long"] is True
    assert state["stop_condition"] == "prompt_too_long"
    assert (state["terminated"], state["truncated"]) == (False, True)
    assert state["truncation_reason"] == "max_seq_len"
    assert len(state["trajectory"]) == 1
    assert state["completion"] == assistant("two")


async def test_a_first_prompt_that_does_not_fit():
    state = await play(single(), ScriptedModel(PromptTooLong("too long")))
    assert state["trajectory"] == []
    assert state["completion"] == []
    assert state["truncated"]
    assert state["error"] is None


async def test_max_seq_len_ends_a_rollout():
    model = ScriptedModel("two")
    state = await play(Echo(max_seq_len=120), model)
    assert state["stop_condition"] == "max_seq_len_reached"
    assert state["truncation_reason"] == "max_seq_len"
    used = [
        step["extras"]["num_prompt_tokens"] + step["extras"]["num_completion_tokens"]
        for step in state["trajectory"]
    ]
    assert used[-1] >= 120
    assert all(count < 120 for count in used[:-1])


async def test_the_time_limit_ends_a_rollout_between_turns_and_it_is_scored():
    env = Echo()
    engine = RolloutEngine(env, ScriptedModel("two", delay_s=0.1), time_limit_s=0.5, grace_s=30)
    result = (await engine.run_all([a_request(env)]))[0]
    state = result.states[0]
    assert result.error is None
    assert state["stop_condition"] == "time_limit_reached"
    assert (state["truncated"], state["truncation_reason"]) == (True, "time_limit")
    assert len(state["trajectory"]) >= 2
    assert state["reward"] == 0.0


async def test_waiting_for_the_server_is_no_time_of_the_episode():
    env = Echo(max_turns=4)
    model = ScriptedModel("two", delay_s=0.15, wait_s=0.15)
    engine = RolloutEngine(env, model, time_limit_s=0.5, grace_s=0)
    result = (await engine.run_all([a_request(env)]))[0]
    assert result.states[0]["truncation_reason"] == "max_steps"


async def test_a_slow_judge_is_no_time_of_the_episode():
    async def judge(completion):
        await asyncio.sleep(0.6)
        return 1.0

    env = single(rubric=Rubric([judge]))
    engine = RolloutEngine(env, ScriptedModel("one"), time_limit_s=0.5, grace_s=0)
    result = (await engine.run_all([a_request(env)]))[0]
    assert result.error is None
    assert result.states[0]["reward"] == 1.0


async def test_tokens_that_contradict_each_other_are_the_models_failure():
    class Wrong(Echo):
        async def get_model_response(self, *args, **kwargs):
            response = await super().get_model_response(*args, **kwargs)
            return replace(response, logprobs=response.logprobs[:1])

    state = await play(Wrong(), ScriptedModel("two"))
    assert (state["error"].type, state["error"].phase) == ("TokenError", "model")


async def test_a_world_that_hangs_is_cancelled_with_what_it_has():
    class Hangs(Echo):
        async def env_response(self, messages, state):
            await asyncio.sleep(60)

    env = Hangs()
    engine = RolloutEngine(env, ScriptedModel("two"), time_limit_s=0.5, grace_s=0)
    result = (await engine.run_all([a_request(env)]))[0]
    assert result.error.type == "RolloutTimeout"
    state = result.states[0]
    assert len(state["trajectory"]) == 1
    assert state["completion"] == assistant("two")
    assert (state["truncation_reason"], state["reward"]) == ("time_limit", None)


# Failures are data


async def test_a_failed_model_call_keeps_the_steps():
    failure = ServerError("500 from the server", status=500, retryable=True)
    state = await play(Echo(), ScriptedModel("two", failure))
    assert (state["error"].type, state["error"].phase) == ("ServerError", "model")
    assert "Traceback" in state["error"].traceback
    assert len(state["trajectory"]) == 1
    assert state["completion"] == assistant("two")
    assert state["reward"] is None
    assert not state["is_completed"]
    assert (state["terminated"], state["truncated"]) == (False, False)


async def test_a_setup_that_raises_is_recorded():
    class Broken(Echo):
        async def setup_state(self, state):
            raise KeyError("board")

    state = await play(Broken(), ScriptedModel("two"))
    assert (state["error"].type, state["error"].phase) == ("KeyError", "setup")


async def test_a_stop_condition_that_raises_without_an_answer_is_recorded():
    class Broken(Echo):
        @stop
        async def odd(self, state):
            raise IndexError("no move")

    state = await play(Broken(), ScriptedModel("two"))
    assert state["error"].type == "IndexError"


async def raises(self, *args):
    raise KeyError("board")


async def raises_after_an_answer(self, state):
    if state["trajectory"]:
        raise KeyError("board")
    return await Echo.get_prompt_messages(self, state)


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("env_response", raises),
        ("get_prompt_messages", raises_after_an_answer),
        ("add_model_response", None),
        ("is_wrong", stop(lambda self, state: bool(state["trajectory"]) and {}["board"])),
    ],
)
async def test_code_that_raises_on_an_answer_ends_a_rollout_which_counts(method, code):
    """The answer may be the cause, and a model must not be able to choose to have no reward."""

    async def recorded(self, *args):
        await Echo.add_model_response(self, *args)
        raise KeyError("board")

    env = type("Broken", (Echo,), {method: code or recorded})()
    state = await play(env, ScriptedModel("two"))
    assert (state["error"], state["is_completed"], len(state["trajectory"])) == (None, True, 1)
    assert (state["truncated"], state["truncation_reason"]) == (True, "env")
    assert state["stop_condition"] == "environment_raised"
    assert state["completion"] == assistant("two")
    assert state["environment_errors"]["environment"]["type"] == "KeyError"


async def test_a_setting_of_ones_own_that_is_wrong_for_an_answer_ends_a_scored_rollout():
    class Chosen(Echo):
        async def env_response(self, messages, state):
            raise ConfigError(f"there is no level {messages[-1]['content']!r}")

    env = Chosen()
    (state,) = await env.run_request(a_request(env), ScriptedModel("two"))
    assert (state["error"], state["reward"]) == (None, 0.0)
    assert state["environment_errors"]["environment"]["type"] == "ConfigError"


async def test_code_whose_network_is_away_fails_the_rollout():
    class Remote(Echo):
        async def env_response(self, messages, state):
            raise ConnectionRefusedError("no service")

    state = await play(Remote(), ScriptedModel("two"))
    assert (state["error"].type, state["reward"]) == ("ConnectionRefusedError", None)


async def test_something_that_is_no_client_is_recorded():
    state = await play(single(), object())
    assert (state["error"].type, state["error"].phase) == ("ConfigError", "setup")


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        ({2}, None),
        ({1}, "ServerError"),  # no answer can be the cause
    ],
)
async def test_a_request_that_is_refused_after_an_answer_ends_a_scored_rollout(refused, error):
    class Refusing(ScriptedClient):
        async def respond(self, call, memory):
            if len(self.calls) + 1 in refused:
                raise ServerError("content_filter", status=400, retryable=False)
            return await super().respond(call, memory)

    env = Echo()
    (state,) = await env.run_request(a_request(env), Refusing(["two", "three"]))
    assert getattr(state["error"], "type", None) == error
    assert (state["reward"] is None) is (error is not None)
    if error is None:
        assert state["refused_request"] == "content_filter"
        assert (state["stop_condition"], state["truncation_reason"]) == ("refused_request", "env")
        assert len(state["trajectory"]) == 1
        assert [m["role"] for m in state["completion"]] == ["assistant", "user"]


async def test_run_request_never_raises_for_an_overridden_rollout():
    class Raises(Echo):
        async def rollout(self, input, client, model, sampling_args=None):
            state = await self.init_state(input)
            state["seen"] = True
            raise LookupError("old style")

    env = Raises()
    states = await env.run_request(a_request(env), ScriptedModel())
    assert states[0]["error"].type == "LookupError"
    assert states[0]["seen"]
    assert states[0]["reward"] is None


async def test_run_request_survives_a_failure_before_the_state():
    class Raises(Echo):
        async def init_state(self, input, **kwargs):
            raise ServerError("no sandbox", status=503, retryable=True)

    env = Raises()
    states = await env.run_request(a_request(env), ScriptedModel())
    assert (states[0]["error"].type, states[0]["error"].phase) == ("ServerError", "model")
    assert states[0]["prompt"] == user("say one")
    assert states[0]["seed"] == 11


async def test_cancellation_is_raised():
    class Hangs(Echo):
        async def env_response(self, messages, state):
            await asyncio.sleep(60)

    env = Hangs()
    task = asyncio.create_task(env.run_request(a_request(env), ScriptedModel("two")))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# Scoring of a request


async def test_run_request_scores():
    env = Echo()
    assert isinstance(env, RolloutSource)
    state = (await env.run_request(a_request(env), ScriptedModel("two", "one")))[0]
    assert state["reward"] == 1.0
    assert state["metrics"] == {"exact": 1.0}
    assert [step["reward"] for step in state["trajectory"]] == [1.0, 1.0]


async def test_failed_rollouts_are_not_scored():
    env = Echo()
    failure = ServerError("500", status=500, retryable=True)
    state = (await env.run_request(a_request(env), ScriptedModel(failure)))[0]
    assert state["metrics"] is None
    assert state["reward"] is None


@pytest.mark.parametrize("method", ["score_rollout", "score_group", "evaluate"])
@pytest.mark.parametrize("error", [TypeError("judge"), ConnectionError("judge")])
async def test_an_overridden_rubric_that_raises_counts_as_a_function_that_does(method, error):
    async def raises(self, *given, **named):
        raise error

    def rank(states) -> list[float]:
        return [1.0 for _ in states]

    bad = type("Bad", (Rubric,), {method: raises})([rank] if method == "score_group" else [exact])
    for rubric in (bad, RubricGroup([bad, Rubric([run_inline(lambda state: 0.5)])])):
        env = single(rubric=rubric)
        requests = [a_request(env, index) for index in range(2)]
        for result in await RolloutEngine(env, ScriptedModel("one")).run_all(requests):
            (state,) = result.states
            assert state["scoring_errors"]["Bad"]["type"] == type(error).__name__
            if isinstance(error, TypeError):
                assert state["error"] is None
                expected = 0.0 if rubric is bad else 0.5
                assert (state["reward"], state["trajectory"][0]["reward"]) == (expected, expected)
            else:  # a judge that is away says nothing about the answer
                assert (result.error.type, result.error.phase) == ("ConnectionError", "scoring")
                assert state["reward"] is None


async def test_with_group_rewards_the_reward_waits_for_the_group():
    def rank(states) -> list[float]:
        return [float(i) for i in range(len(states))]

    env = single(rubric=Rubric([rank]))
    assert env.has_group_rewards
    state = (await env.run_request(a_request(env), ScriptedModel("one")))[0]
    assert (state["reward"], state["metrics"]) == (None, None)
    requests = [a_request(env, index) for index in range(3)]
    results = await RolloutEngine(env, ScriptedModel("one")).run_all(requests)
    assert [result.states[0]["reward"] for result in results] == [0.0, 1.0, 2.0]
    assert [result.states[0]["advantage"] for result in results] == [-1.0, 0.0, 1.0]


# Seeds and sampling


async def test_the_world_seed_comes_with_the_request():
    env = single()
    state = (await env.run_request(a_request(env, seed=99), ScriptedModel("one")))[0]
    assert state["seed"] == 99
    states = [await play(env, ScriptedModel("one")) for _ in range(2)]
    assert states[0]["seed"] == states[1]["seed"]


async def test_every_call_of_a_request_has_its_own_sampling_seed():
    env = Echo(max_turns=3)
    model = ScriptedModel("two")
    await env.run_request(a_request(env, sampling_seed=22), model)
    seeds = [call["sampling"].seed for call in model.calls]
    assert seeds == [22, derive_seed(22, "turn", 1), derive_seed(22, "turn", 2)]


async def test_a_seed_in_the_sampling_params_is_mixed_with_the_members():
    env = single()
    model = ScriptedModel("one")
    for index, seed in enumerate((5, 5, 6)):
        request = a_request(
            env, index, sampling=SamplingParams(seed=seed), sampling_seed=100 + index % 2
        )
        await env.run_request(request, model)
    seeds = [call["sampling"].seed for call in model.calls]
    assert len(set(seeds)) == 3
    assert seeds[0] == derive_seed(5, 100)


async def test_the_sampling_of_the_request_reaches_the_model_unchanged():
    wanted = SamplingParams(
        temperature=0.3,
        top_p=0.9,
        top_k=7,
        max_tokens=12,
        stop=("\n",),
        stop_token_ids=(3, 4),
        extra={"min_p": 0.1, "extra_body": {"guided": "x"}},
    )
    env = single(sampling_args={"temperature": 0.9, "max_tokens": 99})
    model = ScriptedModel("one")
    await env.run_request(a_request(env, sampling=wanted, sampling_seed=1), model)
    sent = model.calls[0]["sampling"]
    assert sent.seed == 1
    for field in ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "extra"):
        assert getattr(sent, field) == getattr(wanted, field), field


async def test_the_callers_sampling_args_win_and_are_not_changed():
    env = Echo(sampling_args={"temperature": 0.2, "max_tokens": 5}, max_turns=2)
    model = ScriptedModel("two")
    args = {"temperature": 0.8, "seed": 3, "extra_body": {"top_k": 2}}
    before = copy.deepcopy(args)
    await play(env, model, sampling_args=args)
    assert args == before
    assert env.sampling_args == {"temperature": 0.2, "max_tokens": 5}
    sent = [call["sampling"] for call in model.calls]
    assert [(s.temperature, s.max_tokens, s.top_k) for s in sent] == [(0.8, 5, 2)] * 2
    assert sent[0].seed == 3


async def test_without_a_seed_none_is_sent():
    model = ScriptedModel("one")
    await play(single(), model)
    assert model.calls[0]["sampling"].seed is None


def test_bad_sampling_args_of_an_environment_are_found_when_it_is_built():
    with pytest.raises(ConfigError, match="temperature"):
        single(sampling_args={"temperature": -1})


# The methods on their own


async def test_get_model_response_reads_like_openais():
    response = await single().get_model_response(ScriptedModel("one"), "m", user("hi"))
    assert isinstance(response, ModelResponse)
    assert response.choices[0].message.content == "one"
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.completion_tokens == 3


async def test_get_model_response_uses_the_environments_sampling_args():
    model = ScriptedModel("one")
    env = single(sampling_args={"temperature": 0.2})
    await env.get_model_response(model, "m", user("hi"))
    assert model.calls[0]["sampling"].temperature == 0.2


async def test_the_loop_of_spec_1_works_by_hand():
    env, model = Echo(max_turns=2), ScriptedModel("two")
    state = await env.setup_state(await env.init_state(INPUT))
    while not await env.is_completed(state):
        prompt = await env.get_prompt_messages(state)
        response = await env.get_model_response(
            model,
            "m",
            prompt,
            oai_tools=state["oai_tools"],
            sampling_args=None,
            message_type=env.message_type,
        )
        await env.add_model_response(state, prompt, response)
    assert len(state["trajectory"]) == 2
    assert state["completion"][-1] == assistant("two")[0]
    assert state["truncation_reason"] == TruncationReason.MAX_STEPS


async def test_is_completed_as_spec_1_writes_it():
    """The loop over the conditions, written out in an override."""

    class Written(Echo):
        async def is_completed(self, state, **kwargs):
            for condition in self._stop_conditions:
                if await self._render_stop(state, condition):
                    await self._render_timing(state)
                    await self._render_completion(state)
                    return True
            return False

    plain = await Echo(max_turns=2).rollout(INPUT, ScriptedModel("no"), "m")
    written = await Written(max_turns=2).rollout(INPUT, ScriptedModel("no"), "m")
    for key in ("stop_condition", "truncated", "truncation_reason", "completion", "terminated"):
        assert written[key] == plain[key]
    assert written["truncation_reason"] == "max_steps"


class Budget(Echo):
    """Computes a setting of the next call from what the model wrote."""

    def __init__(self, setting):
        super().__init__()
        self.setting = setting

    async def get_model_response(self, client, model, prompt, *, sampling_args=None, **more):
        said = "".join(m["content"] for m in prompt if m["role"] == "assistant")
        args = {**(sampling_args or {}), **self.setting(said)}
        return await super().get_model_response(client, model, prompt, sampling_args=args, **more)


SETTINGS = {
    "max_tokens": lambda said: {"max_tokens": 3 - len(said)},
    "stop": lambda said: {"stop": [said[3:] if said else "x"]},
    "n": lambda said: {"n": 1 + len(said)},
    "extra_body": lambda said: {"extra_body": said or {}},
    "temperature": lambda said: {"temperature": float(said or 1)},
    "unsupported": lambda said: {"logit_bias": {"1": 5}} if said else {},
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
async def test_a_setting_that_follows_from_an_answer_and_cannot_be_used_is_scored(setting):
    env = Budget(setting)

    class Strict(ScriptedClient):
        async def respond(self, call, memory):
            if "logit_bias" in call.sampling.extra:
                raise UnsupportedSetting("no logit_bias here")
            return await super().respond(call, memory)

    (state,) = await env.run_request(a_request(env), Strict(["two"]))
    assert (state["error"], len(state["trajectory"])) == (None, 1)
    assert (state["reward"], state["stop_condition"]) == (0.0, "environment_raised")
    assert state["environment_errors"]["environment"]["phase"] in ("environment", "model")


async def test_a_setting_of_the_first_call_that_cannot_be_used_is_a_failure():
    env = Budget(lambda said: {"max_tokens": 0})
    (state,) = await env.run_request(a_request(env), ScriptedClient(["two"]))
    assert (state["error"].type, state["reward"]) == ("ConfigError", None)


async def test_a_simulated_user_whose_prompt_is_too_long_ends_a_scored_rollout():
    class Asking(Echo):
        async def env_response(self, messages, state):
            raise PromptTooLong("5,000 tokens do not fit")

    env = Asking()
    (state,) = await env.run_request(a_request(env), ScriptedClient(["two"]))
    assert (state["error"], state["reward"]) == (None, 0.0)
    assert state["environment_errors"]["environment"]["type"] == "PromptTooLong"
