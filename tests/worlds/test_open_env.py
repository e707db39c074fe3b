"""`OpenEnv` against a small server of the same protocol; tests_agents has the real one."""

import pytest
from open_env_kit import SCHEMA, Countdown, serving

import rolltree as rt
from rolltree.agents.worlds.open_env import OpenEnvWorld, action_of_schema, observation_text
from rolltree.testing import ScriptedClient
from rolltree.values.errors import ConfigError, WorldUnavailable


def play(env, *replies, num=1):
    return env.evaluate_sync(ScriptedClient(list(replies)), num_examples=num).state


def open_env(url, **settings):
    return rt.OpenEnv(url, num_train=0, num_eval=4, **settings)


def test_a_game_is_played_to_its_end():
    game = Countdown()
    with serving(game) as url:
        (state,) = play(open_env(url, headers={"X-Key": "k"}), "3", "9", "2", "1")
    assert (state["error"], state["reward"], state["truncated"]) == (None, 3.0, False)
    assert [m["content"] for m in state["prompt"]] == ["Count down from 3."]
    assert [m["content"] for m in state["completion"]] == [
        *("3", "Next.", "9", "No.", "2", "Next.", "1", "Next.")
    ]
    assert state["world_info"]["state"] == {"episode_id": "e", "step_count": 4}
    assert all(headers["X-Key"] == "k" for headers in game.headers)
    assert "X-Key" not in str(state)


def test_seeds_and_what_rows_say_reach_reset():
    game = Countdown()
    with serving(game) as url:
        rows = [{"prompt": [], "info": {"reset": {"first": 1}}}]
        env = rt.OpenEnv(url, eval_dataset=rows, reset_args={"level": "easy"})
        (state,) = env.evaluate_sync(ScriptedClient(["1"])).state
    assert state["reward"] == 1.0
    (told,) = game.resets
    assert (told["first"], told["level"]) == (1, "easy")
    assert told["seed"] >= 0


def test_actions_that_the_server_rejects_are_told_to_the_model():
    schema = {"action": {"properties": {"message": {"type": "string"}, "n": {"type": "integer"}}}}
    with serving(Countdown(schema=schema)) as url:
        (state,) = play(
            open_env(url, max_turns=4), "three", '{"n": 1}', '{"message": "boom"}', "[3]"
        )
    said = [m["content"] for m in state["completion"] if m["role"] == "user"]
    assert "a JSON object" in said[0]
    assert "Invalid message" in said[1]
    assert "division by zero" in said[2]
    assert "a JSON object" in said[3]
    assert (state["error"], state["reward"]) == (None, 0.0)
    assert state["truncation_reason"] == "max_steps"


@pytest.mark.parametrize("word", ["die", "lie"])
def test_a_server_that_dies_or_lies_is_a_typed_failure(word):
    with serving(Countdown()) as url:
        (state,) = play(open_env(url), "3", word)
    assert state["error"].type == "WorldUnavailable"
    assert state["reward"] is None
    assert url in state["error"].message


def test_a_server_that_is_not_there_is_a_typed_failure():
    with serving(Countdown()) as url:
        pass
    (state,) = play(open_env(url), "3")
    assert state["error"].type == "WorldUnavailable"
    assert "cannot be reached" in state["error"].message


async def test_a_reset_after_one_that_failed_leaves_no_connection_open():
    with serving(Countdown()) as url:
        pass
    world, opened = OpenEnvWorld(url), []
    for _ in range(2):
        with pytest.raises(WorldUnavailable):
            await world.reset()
        opened.append(world._http)
    await world.close()
    assert [http.closed for http in opened] == [True, True]


def test_a_server_that_does_not_answer_is_a_typed_failure():
    class Deaf(Countdown):
        async def session(self, request):
            from aiohttp import web

            socket = web.WebSocketResponse()
            await socket.prepare(request)
            async for _ in socket:
                pass
            return socket

    with serving(Deaf()) as url:
        (state,) = play(open_env(url, message_limit_s=0.2), "3")
    assert state["error"].type == "WorldUnavailable"
    assert "0.2 s" in state["error"].message


def test_an_action_that_never_ends_is_scored_if_the_server_is_well():
    with serving(Countdown()) as url:
        (state,) = play(open_env(url, message_limit_s=0.5), "3", "hang")
    assert (state["error"], state["reward"], state["truncation_reason"]) == (None, 1.0, "env")
    assert "0.5 s" in state["completion"][-1]["content"]


def test_sessions_are_limited_and_given_back():
    game = Countdown(max_sessions=2)
    with serving(game) as url:
        states = play(open_env(url, max_sessions=2), "3", "2", "1", num=4)
        assert [state["reward"] for state in states] == [3.0] * 4
        assert game.most_open == 2
        game.max_sessions = 0
        (state,) = play(open_env(url), "3")
    assert state["error"].type == "WorldUnavailable"
    assert "max_sessions" in state["error"].message


def test_text_of_observations_and_form_of_actions():
    assert observation_text({"text": "hello", "metadata": {"a": 1}, "more": None}) == "hello"
    assert observation_text({"a": "b", "n": 1}) == '{"a": "b", "n": 1}'
    assert observation_text({"n": 1}) == '{"n": 1}'
    assert action_of_schema(SCHEMA["action"])("hi") == {"message": "hi"}
    optional = {"properties": {"code": {"type": "string"}, "metadata": {}}}
    assert action_of_schema(optional)("x = 1") == {"code": "x = 1"}
    two = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a"]}
    assert action_of_schema(two)("x") == {"a": "x"}
    number = {"properties": {"cell": {"type": "integer"}}, "required": ["cell"]}
    assert action_of_schema(number)('{"cell": 3}') == {"cell": 3}
    for text in ("3", "[" * 60_000):
        with pytest.raises(ValueError, match="JSON object"):
            action_of_schema(number)(text)


async def test_the_world_by_itself():
    with serving(Countdown()) as url:
        world = OpenEnvWorld(url)
        text, _ = await world.reset(seed=2)
        assert text == "Count down from 3."
        outcome = await world.step("3")
        assert (outcome.obs, outcome.reward, outcome.terminated) == ("Next.", 1.0, False)
        assert (await world.state())["step_count"] == 1
        await world.close()
        await world.close()
        with pytest.raises(WorldUnavailable, match="reset"):
            await world.step("2")


def test_settings_that_cannot_work():
    with pytest.raises(ConfigError, match="http"):
        rt.OpenEnv("localhost:8000")
    with pytest.raises(ConfigError, match="max_sessions"):
        rt.OpenEnv("http://localhost:8000", max_sessions=0)
