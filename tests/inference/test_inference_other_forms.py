"""What a model may write never makes its history impossible to render."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from inference_templates import TOOLS, complete, user

from chat_templates import all_templates
from rolltree.inference import OpenAIClient, TemplateError, TokenSession
from rolltree.inference.other_forms import other_forms
from rolltree.testing import DirectTransport, Reply, Request
from rolltree.values.errors import ServerError
from rolltree.values.types import ChatMessage, FinishReason

TWO = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'


def call(arguments: Any, name: str = "add", call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content: Any = "", *calls: dict[str, Any], **fields: Any) -> ChatMessage:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


def result(call_id: str = "call_1", content: str = "done") -> ChatMessage:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


TEMPLATES = all_templates()
RENDERERS = {
    (name, mode): template.renderer(history=mode)
    for name, template in TEMPLATES.items()
    for mode in ("keep", "template")
}
ODD: dict[str, list[ChatMessage]] = {
    "two calls": [answer("", call("{}"), call("{}", "b", "call_2")), result(), result("call_2")],
    "two calls with one id": [answer("", call("{}"), call("{}", "b")), result(), result()],
    "two calls and one result": [answer("", call("{}"), call("{}", "b", "2")), result("2")],
    **{
        f"arguments {arguments!r}": [answer("", call(arguments)), result()]
        for arguments in ("", "  ", "{oops", "[1]", '"text"', "1e999", None, [1], 7, "null")
    },
    "no name": [answer("", call("{}", "")), result()],
    "an empty answer": [answer(""), user("go on")],
    "a null answer": [answer(None), user("go on")],
    "an empty list": [answer([]), user("go on")],
    "only reasoning": [answer("", reasoning_content="hm"), user("go on")],
    "text, reasoning and a call": [answer("so", call("{}"), reasoning_content="hm"), result()],
    "a call and a complaint": [answer("", call("{}")), result(), user("the other is unreadable")],
    "two complaints": [answer("x"), user("no"), user("no!")],
    "marks": [answer("<|channel|>final<|message|>hm<|end|>"), user("go on")],
    "everything": [
        answer("<|channel|>", call(""), call("{oops", "b", "call_2"), reasoning_content="hm"),
        *(result(), result("call_2"), user("x"), user("y"), answer(None), user("z")),
    ],
}


@pytest.mark.parametrize("history", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_history_of_odd_answers_has_a_prompt(name: str, history: list[ChatMessage]) -> None:
    asked = [user("7 + 5?"), *history]
    for mode, tools in itertools.product(("keep", "template"), (None, TOOLS)):
        renderer = RENDERERS[name, mode]
        assert len(renderer.render(asked, tools))
        assert len(renderer.extend(renderer.render(asked[:1], tools), asked, 2, tools))


def test_two_messages_of_a_user_are_joined_where_roles_take_turns() -> None:
    renderer = RENDERERS["two roles", "keep"]
    text = renderer.decode(renderer.render([user("The task."), user("What you see.")]))
    assert text.count("<start_of_turn>user") == 1
    assert "The task.\n\nWhat you see." in text
    with pytest.raises(TemplateError, match="roles take turns"):
        renderer.render([{"role": "system", "content": "a"}, user("b")])


def test_split_calls_are_followed_by_their_results() -> None:
    renderer = RENDERERS["one call", "keep"]
    text = renderer.decode(renderer.render([user("7 + 5?"), *ODD["two calls with one id"]]))
    turns = [turn.partition("<|end_header_id|>\n\n")[::2] for turn in text.split("<|eot_id|>")]
    assert [(role.rpartition("|>")[2], said) for role, said in turns[1:]] == [
        ("assistant", '{"name": "add", "parameters": {}}'),
        ("ipython", '"done"'),
        ("assistant", '{"name": "b", "parameters": {}}'),
        ("ipython", '"done"'),
        ("assistant", ""),
    ]


def test_a_broken_call_still_shows_what_the_model_wrote() -> None:
    renderer = RENDERERS["items", "keep"]
    text = renderer.decode(renderer.render([user("?"), *ODD["arguments '{oops'"]]))
    assert "<parameter=arguments>\n{oops\n</parameter>" in text
    text = renderer.decode(renderer.render([user("?"), *ODD["arguments ''"]]))
    assert "<function=add>\n</function>" in text


@pytest.mark.parametrize("first", ["one", "two"])
def test_two_calls_of_one_message_extend_the_sampled_ids(first: str) -> None:
    """The history has them as they were sampled, whichever kind of answer comes first."""
    renderer = RENDERERS["one call", "keep"]
    session = TokenSession(renderer)
    messages = [user("7 + 5?")]
    spelled = {"one": TWO.partition(";")[0], "two": TWO}
    order = [first, "two" if first == "one" else "one"]
    known: list[int] = []
    for each in order:
        prompt = session.prepare(messages, TOOLS)
        assert prompt.reason is None
        assert prompt.ids.tolist()[: len(known)] == known
        ids = [*spelled[each].encode(), renderer.end_ids[0]]
        got = complete(session, prompt, ids, None, FinishReason.STOP)
        known = [*prompt.ids.tolist(), *ids]
        calls = got.message["tool_calls"]
        assert len(calls) == (2 if each == "two" else 1)
        messages += [got.message, *(result(call["id"]) for call in calls)]
    final = session.prepare(messages, TOOLS)
    assert final.reason is None
    shown = renderer.decode(final.ids[len(known) :])
    assert shown.count("<|start_header_id|>ipython") == len(calls)


def test_other_forms_are_distinct_and_leave_the_messages_alone() -> None:
    for history in ODD.values():
        asked = [user("?"), *history]
        before = json.dumps(asked)
        forms = list(other_forms(asked))
        assert all(form != asked for form in forms)
        assert all(forms.count(form) == 1 for form in forms)
        assert json.dumps(asked) == before


async def test_a_server_that_refuses_what_a_model_wrote_is_sent_another_form() -> None:
    template = RENDERERS["one call", "keep"]._variants["default"].template
    asked: list[int] = []

    async def serve(request: Request) -> Reply:
        body = json.loads(request.body)
        asked.append(len(body["messages"]))
        try:
            if "never" in str(body):
                raise TemplateError("never")
            template.render(body["messages"])
        except TemplateError as error:
            return Reply(400, json.dumps({"error": {"message": str(error)}}).encode())
        message = {"role": "assistant", "content": "12"}
        choice = {"message": message, "finish_reason": "stop", "index": 0}
        return Reply(200, json.dumps({"choices": [choice]}).encode())

    client = OpenAIClient("http://x/v1", "m", transport=DirectTransport(serve), token_ids="off")
    got = await client.chat([user("7 + 5?"), *ODD["two calls"]])
    assert (got.text, asked) == ("12", [4, 5])
    with pytest.raises(ServerError, match="never"):
        await client.chat([user("never"), *ODD["everything"]])
    assert len(asked) <= 2 + 10
