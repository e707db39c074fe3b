"""A history with tools is rendered, answered, read and continued alike in every family's format.

The templates here have only the marks. `ROLLTREE_TEMPLATES=FOLDER` takes those (`*.jinja`) of a
folder, as their vendors publish them.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, tool
from inference_templates import complete, user
from manners import MANNERS, Manner

from chat_templates import Template
from rolltree.inference import ChatRenderer, TemplateError, TokenSession
from rolltree.samples import build_samples
from rolltree.tokens import BreakCause, Trajectory
from rolltree.values.types import ChatMessage, FinishReason, State

TOOLS = [tool("write", path="string", text="string"), tool("delete", path="string")]
for each in TOOLS:
    each["function"]["description"] = "Change a file."
    for parameter in each["function"]["parameters"]["properties"].values():
        parameter["description"] = "Text."
ARGUMENTS = {"path": "b.txt", "text": "42"}
EACH = pytest.mark.parametrize("name", MANNERS)


def call(name: str, call_id: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str, content: str) -> ChatMessage:
    return {"role": "tool", "name": "write", "tool_call_id": call_id, "content": content}


HISTORY: list[ChatMessage] = [
    {"role": "system", "content": "Be brief."},
    user("Replace a.txt."),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            call("delete", "callaaaa1", path="a.txt"),
            call("write", "callaaaa2", path="a.txt", text="x = 1"),
        ],
    },
    result("callaaaa1", "deleted"),
    result("callaaaa2", "written"),
]


def answer_ids(manner: Manner, renderer: ChatRenderer, text: str) -> list[int]:
    """Return the ids of an answer up to the token that ends it."""
    whole = text + manner.call_close + manner.result[0]
    ids = [int(token) for token in renderer.vocabulary.encode(whole)]
    end = next(index for index, token in enumerate(ids) if token in renderer.end_ids)
    return ids[: end + 1]


def played(manner: Manner, history: str) -> tuple[ChatRenderer, Trajectory, Any, list[ChatMessage]]:
    """Play two calls of a rollout; return also the second prompt and its messages."""
    renderer = manner.renderer(history=history)
    session = TokenSession(renderer)
    trajectory = Trajectory()
    messages = HISTORY
    thought = "Hm.\n</think>\n\n" if manner.opened else ""
    text = thought + manner.spelled("write", ARGUMENTS)
    for _ in range(2):
        prompt = session.prepare(messages, TOOLS)
        ids = answer_ids(manner, renderer, text)
        got = complete(session, prompt, ids, [-1.0] * len(ids), FinishReason.STOP)
        trajectory.append_call(prompt=messages, completion=[got.message], response=got, turn=0)
        assert "parse_problems" not in got.message
        (made,) = got.message["tool_calls"]
        assert made["function"]["name"] == "write"
        assert json.loads(made["function"]["arguments"]) == ARGUMENTS
        assert got.message["content"] == ""
        assert got.message.get("reasoning_content", "") == ("Hm." if thought else "")
        messages = [*messages, got.message, result(made["id"], "done")]
    return renderer, trajectory, session.prepare(messages, TOOLS), messages


@EACH
def test_the_history_shows_every_call_as_the_family_spells_it(name: str) -> None:
    manner = MANNERS[name]
    renderer = manner.renderer()
    assert renderer.formats[0] == manner.row
    text = renderer.decode(renderer.render(HISTORY, TOOLS))
    spelled = [
        manner.spelled("delete", {"path": "a.txt"}),
        manner.spelled("write", {"path": "a.txt", "text": "x = 1"}),
    ]
    shown = [
        each if manner.one_call else each.removeprefix(manner.wrap[0]).removesuffix(manner.wrap[1])
        for each in spelled
    ]
    results = [manner.result[0] + said + manner.result[1] for said in ("deleted", "written")]
    # One call each, or both before the results.
    order = [shown[0], results[0], shown[1], results[1]] if manner.one_call else [*shown, *results]
    at = 0
    for part in order:
        found = text.find(part, at)
        assert found >= 0, (part, text[at:])
        at = found + len(part)
    assert text.endswith(manner.assistant + manner.opened)


@EACH
def test_sampled_tokens_and_a_whole_rendering_are_one_prompt_or_a_named_break(name: str) -> None:
    manner = MANNERS[name]
    renderer, _, prompt, messages = played(manner, "keep")
    assert prompt.reason is None
    kept, whole = renderer.decode(prompt.ids), renderer.decode(renderer.render(messages, TOOLS))
    if manner.thinks != "strips":
        assert kept == whole
        assert prompt.ids.tolist() == renderer.render(messages, TOOLS).tolist()
    else:
        # Only the reasoning and its marks are gone.
        thought = manner.opened + "Hm.\n</think>\n\n"
        assert kept.replace(thought, "") == whole.replace(thought, "")
        assert kept != whole


@EACH
def test_following_the_template_breaks_only_where_it_rewrites_and_says_so(name: str) -> None:
    manner = MANNERS[name]
    renderer, trajectory, prompt, _ = played(manner, "template")
    batch = build_samples([State(trajectory=trajectory)], "interleave", decode=renderer.decode)
    causes = [each.cause for each in batch.breaks]
    if manner.thinks == "strips":
        assert "rewrites the history" in str(prompt.reason)
        assert causes == [BreakCause.REASONING_STRIPPED]
    else:
        assert prompt.reason is None
        assert causes == []


OWN = Path(__file__).parents[2] / "samples" / "templates"
VENDORS = sorted(Path(os.environ.get("ROLLTREE_TEMPLATES", OWN)).glob("*.jinja"))


def spellings(renderer: ChatRenderer) -> list[Callable[..., str]]:
    """Return how the families of the format that a template shows spell a call."""
    return [spell for row, spell in FAMILIES.values() if row == renderer.formats[0]]


@pytest.mark.parametrize("path", VENDORS, ids=lambda path: path.stem)
def test_a_vendors_template_is_continued_with_every_word_of_the_history(path: Path) -> None:
    template = Template(path.stem, path.read_text(encoding="utf-8"))
    first = template.renderer()
    if not first.shows_tools(TOOLS):
        return
    # Calls that nobody can read are refused before the first rollout.
    assert bool(spellings(first)) == first.reads_calls
    for history, spell in itertools.product(("keep", "template"), spellings(first)):
        renderer = template.renderer(history=history)
        try:
            whole = renderer.decode(renderer.render(HISTORY, TOOLS))
        except TemplateError:
            # The template does not take these tools in any history.
            with pytest.raises(TemplateError, match="cannot render roles"):
                renderer.render(HISTORY[:2], TOOLS)
            return
        shown = whole.partition("Replace a.txt.")[2]
        assert all(said in shown for said in ("delete", "x = 1", "deleted", "written"))
        thought = renderer._parser.thoughts.end if renderer._parser.starts_inside else ""
        # gpt-oss's answers begin where the prompt ends.
        text = thought + spell("write", ARGUMENTS).removeprefix("<|start|>assistant")
        continue_with(renderer, text)


def continue_with(renderer: ChatRenderer, text: str) -> None:
    """Sample an answer with a call, and check the next prompt."""
    session = TokenSession(renderer)
    prompt = session.prepare(HISTORY, TOOLS)
    ids = [*renderer.vocabulary.encode(text).tolist(), renderer.end_ids[0]]
    got = complete(session, prompt, ids, [-1.0] * len(ids), FinishReason.STOP)
    (made,) = got.message["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == ARGUMENTS
    messages = [*HISTORY, got.message, result(made["id"], "finished")]
    following = session.prepare(messages, TOOLS)
    if following.reason is not None:
        assert renderer.history == "template"
        assert "rewrites the history" in following.reason
        assert following.ids.tolist() == renderer.render(messages, TOOLS).tolist()
        return
    known = [*prompt.ids.tolist(), *ids]
    assert following.ids.tolist()[: len(known)] == known
    new = renderer.decode(following.ids[len(known) :])
    # The result, and the opening of an answer as before.
    assert renderer.decode(prompt.ids).endswith(new.rpartition("finished")[2][-8:])
    assert "finished" in new
