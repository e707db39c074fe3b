"""Every field of the official packages' requests: taken, noted, done, or refused for a reason."""

from typing import get_type_hints

import httpx
import pytest
from fields_kit import BASES, OFFICIAL, VALUES, request_with
from gateway_kit import openai_agent

import rolltree as rt
from rolltree.gateway.field_table import ROWS, fields_at
from rolltree.inference.client_base import DelegatingClient
from rolltree.inference.request_fields import FIELDS
from rolltree.values.errors import ConfigError

# What asks for the default in other words, and what changes the form of the answer alone.
SAME = [
    ("responses", "text", {"format": {"type": "text"}}),
    ("messages", "context_management", {"edits": []}),
    ("messages", "stop_sequences", []),
]
FORM = {"logprobs", "include"}
# The names of what engines refuse.
SETTINGS = {
    ("responses", "text"): "response_format",
    ("messages", "output_config"): "response_format",
    ("messages", "output_format"): "response_format",
    ("responses", "previous_response_id"): "gave no answer",
}


class Recording(DelegatingClient):
    """Keeps what its model is asked for."""

    def __init__(self, client):
        super().__init__(client)
        self.asked = []

    async def call(self, call):
        self.asked.append((str(call.prompt), call.tools, call.sampling))
        return await super().call(call)


async def posted(session, path, body):
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(timeout=300, headers=headers) as http:
        return await http.post(f"{session.base_url}/{path}", json=body)


def test_the_values_are_of_every_field_of_the_official_requests():
    for path, kinds in OFFICIAL.items():
        official = set().union(*(get_type_hints(kind).keys() for kind in kinds))
        assert official <= VALUES[path].keys()
        assert VALUES[path].keys() <= fields_at(path).keys()


def test_every_field_has_a_class_and_a_reason():
    wishes = {name for name, field in FIELDS.items() if field.kind == "hint"}
    assert wishes <= fields_at("chat/completions").keys()
    seen = set()
    for row in ROWS:
        assert row.why
        for place, field in row.fields.items():
            assert place not in seen, f"{place} stands in two rows"
            seen.add(place)
            assert (field.why, field.effect) == (row.why, row.effect)
            if field.effect == "changes" and field.use == "only":
                assert row.why.startswith("refused: ")
            assert not (field.effect == "hint" and field.use in ("sampling", "only"))


def parts_of(path, name, value):
    """Yield the fields that a value sets: the field itself, and those of the object that it is."""
    yield name, fields_at(path)[name], value
    inner = fields_at(path, name)
    if isinstance(value, dict):
        for key in value.keys() & inner.keys():
            yield f"{name}.{key}", inner[key], value[key]


@pytest.mark.parametrize("path", VALUES)
async def test_every_field_is_answered_or_refused_for_its_reason(path):
    client = rt.local_client(*rt.load_model("tiny"))
    try:
        async with rt.gateway(Recording(client)) as g:
            for name, values in VALUES[path].items():
                await check_field(g, path, name, values)
    finally:
        await client.aclose()


async def check_field(gateway, path, name, values):
    """Send a field alone with each of its values; the first is the API's default."""
    as_default, field = None, fields_at(path)[name]
    for value in values:
        gateway.client.asked.clear()
        async with gateway.session(seed=0) as s:
            response = await posted(s, path, request_with(path, name, value))
            what, notes = f"{name} = {value}: {response.text}", s.notes
        if response.status_code == 200:
            for key, part, given in parts_of(path, name, value):
                asks = given is not None and given not in part.values
                assert part.effect != "hint" or not asks or notes.keys() & {key, part.name}, what
            asked, as_default = list(gateway.client.asked), as_default or gateway.client.asked[:]
            is_same = value in (values[0], *field.values) or (path, name, value) in SAME
            if field.effect == "changes" and name not in FORM and not is_same and not notes:
                assert asked != as_default, f"{what}, but it is ignored"
            continue
        # The id of a response that another session gave is unknown: the field is not at fault.
        assert response.status_code == (404 if name == "previous_response_id" else 400), what
        assert value not in (values[0], *field.values), what
        assert any(part.effect == "changes" for _, part, _ in parts_of(path, name, value)), what
        named = SETTINGS.get((path, name), name)
        assert named in response.text


WISHES = {
    "chat/completions": {"reasoning_effort": "low", "parallel_tool_calls": False},
    "responses": {"reasoning": {"effort": "low"}, "parallel_tool_calls": False},
    "messages": {
        "output_config": {"effort": "low"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    },
}


@pytest.mark.parametrize("path", WISHES)
async def test_wishes_are_noted_once_and_the_same_in_every_protocol(path):
    async with rt.gateway(rt.ScriptedClient(["a", "b"])) as g, g.session() as s:
        for _ in range(2):
            assert (await posted(s, path, {**BASES[path], **WISHES[path]})).status_code == 200
        assert s.notes.keys() == {"reasoning_effort", "parallel_tool_calls"}
        assert "notes" not in s.trajectory[1]["response"].info


NUMBERS = {
    "chat/completions": "max_completion_tokens",
    "completions": "max_tokens",
    "responses": "max_output_tokens",
    "messages": "max_tokens",
}


@pytest.mark.parametrize("path", NUMBERS)
async def test_a_refused_setting_has_the_name_that_the_protocol_gives_it(path):
    async with rt.gateway(rt.ScriptedClient(["a"])) as g, g.session() as s:
        response = await posted(s, path, {**BASES[path], NUMBERS[path]: 0})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"].startswith(f"{NUMBERS[path]} = 0 cannot be used")
        assert error.get("param", NUMBERS[path]) == NUMBERS[path]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_options_of_a_stream_are_noted_if_nothing_is_streamed(path):
    options = {"include_obfuscation": False}
    async with rt.gateway(rt.ScriptedClient(["a", "b"])) as g, g.session() as s:
        body = {**BASES[path], "stream_options": options}
        assert (await posted(s, path, {**body, "stream": True})).status_code == 200
        assert s.notes.keys() == set()
        assert (await posted(s, path, body)).status_code == 200
        assert s.notes.keys() == {"stream_options"}


async def test_an_answer_does_not_both_continue_a_message_and_begin_a_turn():
    both = {"continue_final_message": True, "add_generation_prompt": True}
    async with rt.gateway(rt.ScriptedClient(["a"])) as g, g.session() as s:
        response = await posted(s, "chat/completions", {**BASES["chat/completions"], **both})
    assert response.status_code == 400
    assert "either continues the final message or begins a turn" in response.text


async def test_a_note_does_not_have_the_key_that_a_field_has():
    servers = [{"type": "url", "url": "https://a", "name": "a", "authorization_token": "secret"}]
    async with rt.gateway(rt.ScriptedClient(["a"])) as g, g.session() as s:
        response = await posted(s, "messages", {**BASES["messages"], "mcp_servers": servers})
        assert response.status_code == 200
        assert s.notes.keys() == {"mcp_servers"}
        assert "secret" not in str(s.notes)


# -- fields that a session drops -----------------------------------------------------------------

REFUSED = {
    "chat/completions": ("suffix", {"suffix": "!"}),
    "responses": ("reasoning.context", {"reasoning": {"context": "all_turns", "effort": "low"}}),
    "messages": ("messages.name", {"messages": [{"role": "user", "content": "?", "name": "a"}]}),
}


@pytest.mark.parametrize("path", REFUSED)
async def test_a_session_drops_fields_and_notes_them(path):
    name, fields = REFUSED[path]
    body = {**BASES[path], **fields, "made_up": 1}
    client = rt.ScriptedClient(lambda messages: "a")
    async with rt.gateway(client) as g:
        async with g.session() as s:
            refusal = await posted(s, path, body)
            assert refusal.status_code == 400
        async with g.session(drop_fields=[name, "made_up", "not.sent"]) as s:
            for _ in range(2):
                assert (await posted(s, path, body)).status_code == 200
            assert s.notes.keys() - {"reasoning_effort"} == {name, "made_up"}
            assert s.notes[name] == "the session drops it"


async def test_dropped_fields_come_over_http_and_survive_a_restart(tmp_path):
    client = rt.ScriptedClient(lambda messages: "a")
    body = {**BASES["completions"], "best_of": 3}
    async with rt.gateway(client, directory=tmp_path, admin_key="k") as g:
        async with httpx.AsyncClient(headers={"Authorization": "Bearer k"}) as http:
            asked = {"id": "a", "drop_fields": ["best_of"]}
            opened = await http.post(f"{g.url}/sessions", json=asked)
            assert opened.status_code == 201
            wrong = await http.post(f"{g.url}/sessions", json={"drop_fields": "best_of"})
            assert wrong.status_code == 400
        g.sessions["a"].api_key = key = opened.json()["api_key"]
        assert (await posted(g.sessions["a"], "completions", body)).status_code == 200
    async with rt.gateway(client, directory=tmp_path) as g:
        session = g.sessions["a"]
        session.api_key = key
        assert session.drop_fields == ("best_of",)
        assert (await posted(session, "completions", body)).status_code == 200
        assert session.notes.keys() == {"best_of"}


async def test_a_program_drops_fields():
    async def agent(session, state):
        async with openai_agent(session) as client:
            await client.completions.create(model="m", prompt="7", echo=True)

    rows = [{"question": "7 + 5 ="}]
    env = rt.ProgramEnv(agent, dataset=rows, drop_fields=["echo"])
    state = (await env.evaluate(rt.ScriptedClient(lambda messages: "12"))).state[0]
    assert state["program"]["error"] is None
    assert state["trajectory"][0]["response"].info["notes"] == {"echo": "the session drops it"}


@pytest.mark.parametrize("names", ["best_of", [""], [1], ["a..b"], [".a"], {"best_of": 1}])
async def test_what_is_no_list_of_names_is_refused(names):
    async with rt.gateway(rt.ScriptedClient(["a"])) as g:
        with pytest.raises(ConfigError, match="drop_fields is"):
            g.session(drop_fields=names)
    with pytest.raises(ConfigError, match="drop_fields is"):
        rt.ProgramEnv(["true"], dataset=[{"question": "?"}], drop_fields=names)
