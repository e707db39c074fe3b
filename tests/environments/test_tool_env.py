import asyncio
import json
import threading
import time

import pytest
from env_scripts import ROWS, ScriptedModel, assistant, user

from rolltree.environments import ToolEnv
from rolltree.environments.rubrics import ToolRubric, run_inline
from rolltree.inference import ChatRenderer, OpenAIClient
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.testing import ByteTokenizer, DirectTransport, Reply, ScriptedClient
from rolltree.values.errors import ConfigError

INPUT = {"prompt": user("say one"), "answer": "one", "example_id": 0, "task": "t"}


async def none_left(name):
    """Fail if a thread of this name is still there after ten seconds; ending takes a moment."""
    for _ in range(1000):
        if not [thread for thread in threading.enumerate() if thread.name == name]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"a thread {name} is left")


def calling(*calls):
    """Return an assistant message with tool calls: (name, arguments) each."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"c{index}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
            for index, (name, arguments) in enumerate(calls)
        ],
    }


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


async def shout(text: str) -> str:
    await asyncio.sleep(0)
    return text.upper()


def explode(text: str) -> str:
    raise RuntimeError(f"cannot {text}")


async def play(env, *replies):
    return await env.rollout(INPUT, ScriptedModel(*replies), "m")


def env(*tools, **settings):
    return ToolEnv(tools=list(tools or (add, shout, explode)), dataset=ROWS, **settings)


def answers(state):
    return [m["content"] for m in state["completion"] if m["role"] == "tool"]


async def test_a_tool_is_called_and_its_result_returned():
    state = await play(env(), calling(("add", {"a": 2, "b": 3})), "five")
    assert state["error"] is None
    assert state["completion"] == [
        calling(("add", {"a": 2, "b": 3})),
        {"role": "tool", "tool_call_id": "c0", "content": "5"},
        *assistant("five"),
    ]
    assert state["stop_condition"] == "no_tools_called"
    assert state["terminated"]


async def test_the_model_sees_the_schemas():
    model = ScriptedModel("done")
    environment = env(add)
    await environment.rollout(INPUT, model, "m")
    assert [tool["function"]["name"] for tool in model.calls[0]["tools"]] == ["add"]


async def test_parallel_calls_are_answered_in_order():
    message = calling(("shout", {"text": "a"}), ("add", {"a": 1}), ("shout", {"text": "b"}))
    state = await play(env(), message, "done")
    assert answers(state) == ["A", "2", "B"]
    assert [m["tool_call_id"] for m in state["completion"] if m["role"] == "tool"] == [
        "c0",
        "c1",
        "c2",
    ]


async def test_asynchronous_tools_run_side_by_side():
    arrived = asyncio.Event()

    async def wait() -> str:
        await asyncio.wait_for(arrived.wait(), 5)
        return "waited"

    async def release() -> str:
        arrived.set()
        return "released"

    state = await play(env(wait, release), calling(("wait", {}), ("release", {})), "done")
    assert answers(state) == ["waited", "released"]


async def test_synchronous_tools_run_in_order_outside_the_loop():
    order, threads = [], []

    def note(text: str) -> str:
        time.sleep(0.01 if text == "a" else 0)
        order.append(text)
        threads.append(threading.current_thread())
        return text

    message = calling(("note", {"text": "a"}), ("note", {"text": "b"}))
    await play(env(note), message, "done")
    assert order == ["a", "b"]
    assert threading.main_thread() not in threads


def spin(path: str = "") -> str:
    while True:
        time.sleep(0.001)


async def test_a_tool_that_takes_too_long_is_stopped_and_the_model_is_told():
    state = await play(env(spin, tool_limit_s=0.03), calling(("spin", {})), "done")
    assert answers(state) == ["spin took longer than 0.03 s and was stopped."]
    assert state["error"] is None
    await none_left("rolltree-tool-spin")


async def test_a_rollout_out_of_time_leaves_no_tool_behind():
    made = env(spin)
    engine = RolloutEngine(
        made, ScriptedModel(calling(("spin", {}))), time_limit_s=0.5, grace_s=0.0
    )
    (result,) = await engine.run_all(build_requests(made, "eval", num_examples=1))
    assert result.error.type == "RolloutTimeout"
    await none_left("rolltree-tool-spin")


async def test_cheap_tools_stay_in_the_loop():
    threads = []

    @run_inline
    def note(text: str) -> str:
        threads.append(threading.current_thread())
        return text

    await play(env(note), calling(("note", {"text": "a"})), "done")
    assert threads == [threading.main_thread()]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("add", '{"a": 1'), "not valid JSON"),
        (("add", {"a": "x"}), "wrong arguments for add"),
        (("add", {}), "required field `a`"),
        (("add", {"a": 1, "c": 2}), "`c`"),
        (("ad", {"a": 1}), "Did you mean 'add'"),
        (("", {}), "no tool named ''"),
        (("explode", {"text": "this"}), "cannot this"),
    ],
)
async def test_mistakes_are_answers_to_the_model(call, told):
    state = await play(env(), calling(call), "sorry")
    assert state["error"] is None
    assert told in answers(state)[0]
    assert state["terminated"]


GOOD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
OOPS = "<tool_call>{oops}</tool_call>"


@pytest.mark.parametrize(
    ("said", "role", "result"), [(OOPS, "user", ""), (GOOD + OOPS, "tool", "2\n\n")]
)
async def test_a_call_that_cannot_be_read_is_told_to_the_model(said, role, result):
    """In an answer that continues the sampled ids; the rollout goes on."""
    renderer = ChatRenderer(ByteTokenizer(), tool_parser="hermes")
    client = ScriptedClient([said, "done"], renderer=renderer)
    state = await env(rubric=ToolRubric()).rollout(INPUT, client, "m")
    assert state["error"] is None
    first, second = state["trajectory"]
    told = state["completion"][1]
    assert told["role"] == role
    assert told["content"].startswith(f"{result}Your tool call could not be read: tool call ")
    assert state["completion"][-1]["content"] == "done"
    one, two = first["tokens"], second["tokens"]
    ids = [*one["prompt_ids"], *one["completion_ids"]]
    assert two["prompt_ids"][: len(ids)] == ids
    await ToolRubric().score_rollout(state)
    assert state["metrics"]["unreadable_tool_calls"] == 1.0


async def test_a_model_that_never_writes_a_call_that_can_be_read_is_truncated():
    renderer = ChatRenderer(ByteTokenizer(), tool_parser="hermes")
    client = ScriptedClient(lambda messages: OOPS, renderer=renderer)
    state = await env(max_turns=3).rollout(INPUT, client, "m")
    assert (len(state["trajectory"]), state["truncation_reason"]) == (3, "max_steps")


async def test_a_tool_that_raises_leaves_its_traceback():
    state = await play(env(), calling(("explode", {"text": "this"})), "sorry")
    error = state["tool_errors"][0]
    assert (error["tool"], error["type"]) == ("explode", "RuntimeError")
    assert "in explode" in error["traceback"]


async def test_the_error_text_can_be_chosen():
    environment = env(error_formatter=lambda error: f"failed: {type(error).__name__}")
    state = await play(environment, calling(("explode", {"text": "x"})), "sorry")
    assert answers(state) == ["failed: RuntimeError"]


async def test_one_bad_call_does_not_spoil_the_others():
    message = calling(("explode", {"text": "x"}), ("add", {"a": 1}), ("nothing", {}))
    state = await play(env(), message, "done")
    assert answers(state)[1] == "2"
    assert len(answers(state)) == 3


async def test_arguments_may_be_an_object_already():
    message = calling(("add", {"a": 1}))
    message["tool_calls"][0]["function"]["arguments"] = {"a": 41}
    assert answers(await play(env(), message, "done")) == ["42"]


async def test_malformed_calls_do_not_crash():
    message = calling(("add", {"a": 1}))
    message["tool_calls"] = [{"id": None}, {"function": None}, {"function": {}}]
    state = await play(env(), message, "done")
    assert state["error"] is None
    assert len(answers(state)) == 3


async def test_a_model_that_never_stops_calling_is_truncated():
    state = await play(env(max_turns=3), calling(("add", {"a": 1})))
    assert len(state["trajectory"]) == 3
    assert state["truncation_reason"] == "max_steps"


def test_ten_turns_unless_told_otherwise():
    assert env().max_turns == 10


async def test_tools_of_a_row_choose_what_is_offered():
    environment = env()
    only = [environment.tool_map["add"].schema]
    model = ScriptedModel("done")
    await environment.rollout({**INPUT, "info": {"oai_tools": only}}, model, "m")
    assert model.calls[0]["tools"] == only


async def test_tools_can_be_added_and_removed():
    environment = env(add)
    environment.add_tool(shout)
    assert environment.tools == [add, shout]
    assert [tool["function"]["name"] for tool in environment.oai_tools] == ["add", "shout"]
    environment.remove_tool(add)
    environment.remove_tool("shout")
    assert environment.tools == environment.oai_tools == []
    with pytest.raises(ConfigError, match="no tool 'add'"):
        environment.remove_tool(add)


def test_two_tools_with_one_name():
    with pytest.raises(ConfigError, match="'add'"):
        env(add, add)


def test_tools_need_chat():
    with pytest.raises(ConfigError, match="chat"):
        env(message_type="completion", system_prompt=None)


async def test_hidden_arguments_come_from_the_state():
    def write(text: str, board: list) -> str:
        board.append(text)
        return f"{len(board)} lines"

    class Boards(ToolEnv):
        async def setup_state(self, state):
            state["board"] = []
            return state

        def complete_arguments(self, tool, arguments, state):
            return {**arguments, "board": state["board"]}

    environment = Boards(dataset=ROWS)
    environment.add_tool(write, hidden=["board"])
    shown = environment.oai_tools[0]["function"]["parameters"]["properties"]
    assert list(shown) == ["text"]
    first = await play(environment, calling(("write", {"text": "a"})), "done")
    second = await play(environment, calling(("write", {"text": "b"})), "done")
    assert (first["board"], second["board"]) == (["a"], ["b"])
    assert answers(second) == ["1 lines"]
    refused = await play(environment, calling(("write", {"text": "a", "board": []})), "done")
    assert "board" in answers(refused)[0]


@pytest.mark.parametrize("arguments", [{"a": 41}, [1], 7, None])
async def test_arguments_that_a_server_sends_as_data_are_one_answer(arguments):
    """Not a failed request, which would be made again and leave the rollout without a reward."""

    async def handle(request):
        asked.append(json.loads(request.body)["messages"])
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
        message = {"content": None, "tool_calls": [call]} if len(asked) == 1 else {"content": "42"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return Reply(200, json.dumps({"choices": [choice]}).encode())

    asked = []
    client = OpenAIClient("http://m/v1", "m", transport=DirectTransport(handle), token_ids="off")
    state = await env().rollout(INPUT, client, "m")
    await client.aclose()
    assert state["error"] is None
    assert len(asked) == 2
    (sent,) = asked[1][1]["tool_calls"]
    assert isinstance(sent["function"]["arguments"], str)
    told = {"[1]": "must be a JSON object", "7": "must be a JSON object", "": "required field `a`"}
    assert told.get(sent["function"]["arguments"], "42") in answers(state)[0]
