"""What a model may write never makes its history impossible to render."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from inference_templates import TOOLS, complete, user

from chat_templates import LEADING, all_templates, extended
from rolltree import MultiTurnEnv
from rolltree.inference import ChatRenderer, OpenAIClient, TemplateError, TokenSession
from rolltree.inference.other_forms import other_forms
from rolltree.testing import ByteTokenizer, DirectTransport, Reply, Request, ScriptedServer
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
        assert len(extended(renderer, renderer.render(asked[:1], tools), asked, 2, tools))


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


def shown(name: str, messages: list[ChatMessage], tools: Any = None) -> str:
    """Return the prompt's text as a rollout's session makes it."""
    session = TokenSession(RENDERERS[name, "keep"])
    return session.renderer.decode(session.prepare(messages, tools).ids)


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


def turns(*messages: tuple[str, str]) -> str:
    """Return what ChatML makes of roles and texts, and the opening of an answer."""
    closed = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages]
    return "".join(closed) + "<|im_start|>assistant\n"


SYSTEM: ChatMessage = {"role": "system", "content": "Be brief."}
LATER: ChatMessage = {"role": "system", "content": "Now in French."}
DEVELOPER: ChatMessage = {"role": "developer", "content": "Be brief."}
SAID: ChatMessage = {"role": "assistant", "content": "Yes."}
BEGUN = [("system", "Be brief."), ("user", "a"), ("assistant", "Yes.")]


@pytest.mark.parametrize("name", ["leading", "mute"])
def test_a_later_system_message_becomes_a_turn_of_the_user(name: str) -> None:
    text = shown(name, [SYSTEM, user("a"), SAID, LATER])
    assert text == turns(*BEGUN, ("user", reminder("Now in French.")))
    parts = [{"type": "text", "text": "Now"}, {"type": "text", "text": "in French."}]
    text = shown(name, [SYSTEM, user("a"), SAID, {**LATER, "content": parts}])
    assert text == turns(*BEGUN, ("user", reminder("Now\nin French.")))
    # An agent may have marked it itself.
    marked = reminder("Now in French.")
    assert shown(name, [SYSTEM, user("a"), {**LATER, "content": marked}]).count(marked[:17]) == 1


def test_a_template_that_takes_later_system_messages_gets_them_as_they_are() -> None:
    assert shown("made", [SYSTEM, user("a"), SAID, LATER]).count("Now in French.") == 1
    for name in ("made", "chatml"):
        assert "reminder" not in shown(name, [SYSTEM, user("a"), SAID, LATER])
        assert RENDERERS[name, "keep"].notes([SYSTEM, user("a"), SAID, LATER]) == {}


@pytest.mark.parametrize("name", ["leading", "mute"])
@pytest.mark.parametrize("mode", ["keep", "template"])
def test_a_reminder_is_noted_and_its_prefix_continues_by_ids(name: str, mode: str) -> None:
    renderer = RENDERERS[name, mode]
    session = TokenSession(renderer)
    messages, known, notes = [SYSTEM, user("a")], list[int](), []
    for new in ([LATER], [user("b")], [DEVELOPER, user("c")], []):
        prompt = session.prepare(messages)
        assert prompt.reason is None
        assert prompt.ids.tolist()[: len(known)] == known
        ids = [*b"Yes.", renderer.end_ids[0]]
        got = complete(session, prompt, ids, None, FinishReason.STOP)
        known = [*prompt.ids.tolist(), *ids]
        notes.append(got.info.get("notes", {}))
        messages = [*messages, got.message, *new]
    text = renderer.decode(known)
    assert text.index(reminder("Now in French.")) < text.index("user\nb") < text.index("user\nc")
    assert [list(each) for each in notes] == [[], *3 * [["messages.system"]]]
    assert "system-reminder" in notes[1]["messages.system"]


@pytest.mark.parametrize("name", ["leading", "mute"])
def test_a_developer_is_the_system_or_later_a_user(name: str) -> None:
    assert shown(name, [DEVELOPER, user("a")]) == turns(*BEGUN[:2])
    later = [DEVELOPER, user("a"), SAID, {"role": "developer", "content": "Go on."}]
    assert shown(name, later) == turns(*BEGUN, ("user", reminder("Go on.")))
    # Instructions beside a developer's, which comes second.
    assert shown(name, [SYSTEM, DEVELOPER, user("a")]) == turns(
        BEGUN[0], ("user", reminder("Be brief.")), BEGUN[1]
    )


def test_a_history_that_ends_with_an_answer_asks_for_more() -> None:
    assert shown("leading", [SYSTEM, user("a"), SAID]) == turns(*BEGUN, ("user", "Continue."))
    assert shown("mute", [SYSTEM, user("a"), SAID]) == turns(*BEGUN)


def test_calls_and_results_that_a_template_leaves_out_are_shown_as_text() -> None:
    history = [user("a"), answer("So:", call('{"a": 1}')), result("call_1", "12")]
    spoken = 'So:\n{"name": "add", "arguments": {"a": 1}}'
    assert shown("mute", history) == turns(("user", "a"), ("assistant", spoken), ("user", "12"))


# Only the first call of a message is shown (GigaChat 3's manner).
FIRST_CALL = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- if m.tool_calls %}{{- m.tool_calls[0].function | tojson }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def test_calls_after_the_first_get_messages_of_their_own_where_only_that_is_shown() -> None:
    renderer = ChatRenderer(ByteTokenizer(FIRST_CALL))
    text = renderer.decode(renderer.render([user("a"), *ODD["two calls"]]))
    add, other = (json.dumps({"name": name, "arguments": {}}) for name in ("add", "b"))
    assert text == turns(
        *(("user", "a"), ("assistant", add), ("tool", "done")),
        *(("assistant", other), ("tool", "done")),
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_fields_that_are_null_or_empty_are_as_if_they_were_absent(name: str) -> None:
    """Clients write them, and templates ask whether `tool_calls` is defined."""
    bare = [user("a"), SAID, user("b")]
    empty = {"tool_calls": None, "function_call": None, "name": None, "reasoning_content": None}
    assert shown(name, [bare[0], {**SAID, **empty}, bare[2]]) == shown(name, bare)
    assert shown(name, [bare[0], {**SAID, "tool_calls": []}, bare[2]]) == shown(name, bare)


@pytest.mark.parametrize(("content", "text"), [(None, ""), ([], ""), (["a", "b"], "a\nb")])
def test_results_are_made_text_or_refused_by_name(content: Any, text: str) -> None:
    done: ChatMessage = {"role": "tool", "tool_call_id": "call_1", "content": content}
    assert f"<|im_start|>tool\n{text}<|im_end|>" in shown(
        "leading", [user("a"), answer("", call("{}")), done]
    )
    for odd in ({"a": 1}, 7, [3], [{"type": "text"}]):
        with pytest.raises(TemplateError, match="not text"):
            shown("leading", [user("a"), answer("", call("{}")), {**done, "content": odd}])


def test_several_results_stand_in_their_order() -> None:
    calls = answer("", call('{"a": 1}'), call("", "b", "call_2"))
    done = [user("a"), calls, result("call_1", "one"), result("call_2", "two")]
    text = shown("leading", done)
    assert text.endswith(turns(("tool", "one"), ("tool", "two")))
    assert '{"name": "b", "arguments": {}}' in text


@pytest.mark.parametrize(
    ("name", "history", "rule"),
    [
        ("leading", [user("a"), {"role": "critic", "content": "Bad."}], "unknown role"),
        ("two roles", [SYSTEM, user("a")], "roles take turns"),
        ("alternating", [SAID, user("a")], "roles take turns"),
    ],
)
def test_what_has_no_other_form_is_an_error_that_names_the_rule(
    name: str, history: list[ChatMessage], rule: str
) -> None:
    with pytest.raises(TemplateError, match=rule) as caught:
        shown(name, history)
    assert caught.value.kind == "episode"
    assert "Traceback" not in str(caught.value)


class Odd(MultiTurnEnv):
    """A world that says one thing of its own, whatever the answer was."""

    def __init__(self, reply: ChatMessage) -> None:
        super().__init__(dataset=[{"question": "a"}], env_id="odd", max_turns=2)
        self.reply = reply

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [self.reply]


@pytest.mark.parametrize("role", ["system", "developer", "critic"])
async def test_what_a_world_says_is_rendered_or_ends_its_rollout_with_the_rule(role: str) -> None:
    renderer = ChatRenderer(ByteTokenizer(LEADING))
    with ScriptedServer(lambda prompt: "Yes.") as server:
        client = OpenAIClient(server.base_url, "scripted", renderer=renderer)
        env = Odd({"role": role, "content": "Now in French."})
        out = await env.generate(env.get_dataset(), client=client, model="scripted")
        await client.aclose()
    (state,) = out["state"]
    if role == "critic":
        assert "unknown role" in state["refused_request"]
        assert state["stop_condition"] == "refused_request"
        return
    assert state["error"] is None
    prompt = renderer.decode(state["trajectory"][-1]["tokens"]["prompt_ids"])
    later = ("user", reminder("Now in French."))
    assert prompt == turns(("user", "a"), ("assistant", "Yes."), later)


def test_other_forms_are_distinct_and_leave_the_messages_alone() -> None:
    for history in ODD.values():
        asked = [user("?"), *history]
        before = json.dumps(asked)
        forms = list(other_forms(asked))
        assert all(form != asked for form in forms)
        assert all(forms.count(form) == 1 for form in forms)
        assert json.dumps(asked) == before


async def test_a_server_that_refuses_what_a_model_wrote_is_sent_another_form() -> None:
    template = RENDERERS["one call", "keep"]._templates["default"]
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
