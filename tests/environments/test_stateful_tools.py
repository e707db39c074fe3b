import json

import pytest
from env_scripts import ROWS, ScriptedModel

from rolltree.environments import StatefulToolEnv
from rolltree.values.errors import ConfigError


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


def write(text: str, notes: list[str], times: int = 1) -> int:
    """Write a note.

    Args:
        text: What to write.
        notes: Where to.
    """
    notes.extend([text] * times)
    return len(notes)


class Notes(StatefulToolEnv):
    def __init__(self, **settings):
        super().__init__(dataset=ROWS, **settings)
        self.add_tool(write, args_to_skip=["notes"])
        self.seen = []

    async def setup_state(self, state):
        state["notes"] = []
        return state

    def update_tool_args(self, tool_name, tool_args, messages, state):
        self.seen.append((tool_name, dict(tool_args), messages[-1]["role"]))
        return {**tool_args, "notes": state["notes"]}


async def play(env, *replies):
    return await env.rollout(env.example("train", 0), ScriptedModel(*replies))


async def test_a_hidden_argument_comes_from_the_state_of_its_own_rollout():
    env = Notes()
    parameters = env.oai_tools[0]["function"]["parameters"]
    assert set(parameters["properties"]) == {"text", "times"}
    assert parameters["required"] == ["text"]
    for _ in range(2):
        state = await play(env, call("write", text="a", times=2), call("write", text="b"), "done")
        assert state["notes"] == ["a", "a", "b"]
        told = [m["content"] for m in state["completion"] if m["role"] == "tool"]
        assert told == ["2", "3"]
    assert env.seen[0] == ("write", {"text": "a", "times": 2}, "assistant")


async def test_the_model_cannot_set_a_hidden_argument():
    state = await play(Notes(), call("write", text="a", notes=["mine"]), "done")
    assert state["notes"] == []
    assert "notes" in state["completion"][1]["content"]
    assert state["error"] is None


async def test_an_asynchronous_hook():
    class Later(Notes):
        async def update_tool_args(self, tool_name, tool_args, messages, state):
            return {**tool_args, "notes": state["notes"]}

    state = await play(Later(), call("write", text="a"), "done")
    assert state["notes"] == ["a"]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda *_: {"text": "a"}, "did not fill it in"),
        (lambda *_: None, "returned a NoneType"),
    ],
)
async def test_a_wrong_hook_ends_a_rollout_which_counts_and_is_not_told_to_the_model(hook, message):
    env = Notes()
    env.update_tool_args = hook
    state = await play(env, call("write", text="a"), "done")
    # It may be wrong for this call only.
    assert (state["error"], len(state["trajectory"])) == (None, 1)
    assert message in state["environment_errors"]["environment"]["message"]


async def test_a_hook_that_raises_on_a_call_ends_a_rollout_which_counts():
    env = Notes()
    env.update_tool_args = lambda name, arguments, *_: {"text": arguments["absent"]}
    state = await play(env, call("write", text="a"), "done")
    assert (state["error"], len(state["trajectory"])) == (None, 1)
    assert state["environment_errors"]["environment"]["message"] == "'absent'"


def test_an_argument_to_skip_must_exist():
    env = Notes()

    def other(text: str) -> str:
        """Echo."""
        return text

    with pytest.raises(ConfigError, match="Did you mean 'text'"):
        env.add_tool(other, args_to_skip=["txt"])
