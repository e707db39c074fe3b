"""Constrained decoding in the embedded engine: forms of answers, forced calls, what is recorded."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

import rolltree as rt
from chat_templates import CHANNELS, ITEMS, LEADING, ONE_CALL
from rolltree.inference import ChatRenderer
from rolltree.inference.constraints import call_form, constrained, grammar_in
from rolltree.inference.local import LocalEngine, local_client
from rolltree.testing import ByteTokenizer
from rolltree.values.errors import UnsupportedSetting
from rolltree.values.types import FinishReason, GenerateRequest

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "y"]},
        "c": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}
ASK = [{"role": "user", "content": "7 + 5?"}]
# Random weights write white space forever.
COMPACT = {"disable_any_whitespace": True}


def as_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.fixture(scope="module")
def tiny():
    return rt.load_model("tiny")


@pytest.fixture
async def client(tiny):
    made = local_client(*tiny, max_batch=8)
    yield made
    await made.aclose()


async def asked(client: Any, tools: Any = None, max_tokens: int = 100, **extra: Any) -> Any:
    settings = {name: extra.pop(name) for name in ("seed", "temperature", "stop") if name in extra}
    sampling = rt.SamplingParams(max_tokens=max_tokens, **{"seed": 1, **settings}, extra=extra)
    return await client.chat(ASK, tools=tools, sampling=sampling)


def settled(renderer: ChatRenderer) -> ChatRenderer:
    """Return a renderer whose prompts leave no room for reasoning."""
    return ChatRenderer(renderer.tokenizer, reasoning="none", end_ids=renderer.end_ids)


@pytest.mark.parametrize("seed", range(4))
async def test_every_answer_has_the_form_that_was_asked_for(tiny, seed):
    client = local_client(*tiny)
    client.renderer = settled(client.renderer)
    options = {"seed": seed, "temperature": 1.3}
    try:
        found = await asked(client, structured_outputs={"json": SCHEMA, **COMPACT}, **options)
        value = json.loads(found.text)
        assert value.keys() == {"a", "b", "c"}
        assert value["a"] in range(100)
        assert value["b"] in "xy"
        assert all(isinstance(each, bool) for each in value["c"])
        assert found.finish_reason == FinishReason.STOP
        regex = await asked(client, guided_regex="[0-9]{3}/[a-c]+", **options)
        assert re.fullmatch("[0-9]{3}/[a-c]+", regex.text)
        choice = await asked(client, guided_choice=["yes", 'no "é"'], **options)
        assert choice.text in ("yes", 'no "é"')
        for grammar in ('start: "a" /[0-9]/', 'root ::= "a" [0-9]'):  # Lark and GBNF
            spelled = await asked(client, guided_grammar=grammar, **options)
            assert re.fullmatch("a[0-9]", spelled.text)
        form = await asked(client, response_format=as_format({"enum": [1, "two"]}), **options)
        assert json.loads(form.text) in (1, "two")
    finally:
        await client.aclose()


async def test_reasoning_may_come_before_the_form_and_is_free(tiny):
    model, tokenizer = tiny
    template = tokenizer.chat_template.replace(
        "'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"
    )
    renderer = ChatRenderer(tokenizer, template)
    assert renderer.parser.starts_inside
    client = local_client(model, tokenizer, renderer=renderer)
    end = tokenizer.convert_tokens_to_ids("</think>")
    try:
        got = await asked(client, guided_choice=["yes"], logit_bias={str(end): 4.0}, max_tokens=200)
    finally:
        await client.aclose()
    assert got.message["content"] == "yes"
    assert got.message["reasoning_content"]
    assert end in got.completion_ids


async def test_an_answer_that_is_cut_is_reported_as_cut(client):
    cut = await asked(client, response_format={"type": "json_object"}, max_tokens=2)
    assert cut.finish_reason == FinishReason.LENGTH
    called = await asked(client, [ADD], tool_choice="required", max_tokens=4)
    assert called.finish_reason == FinishReason.LENGTH
    assert "tool_calls" not in called.message


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"guided_json": {"type": "strange"}}, "guided_json.*Invalid type: strange"),
        ({"response_format": as_format({"if": {"const": 1}})}, 'response_format.*Unimpl.*"if"'),
        ({"guided_json": {"$ref": "https://a.b/c"}}, "guided_json cannot.*leads out of the schema"),
        ({"guided_regex": "(["}, "guided_regex cannot be compiled.*unclosed character class"),
        ({"guided_regex": "(?=a)a"}, "guided_regex cannot be compiled.*look-around"),
        ({"guided_json": {"pattern": "(b"}}, "guided_json cannot be.* [(]b: unclosed group"),
        ({"guided_grammar": 'start: "a'}, "guided_grammar cannot be compiled"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {}, "guided_regex": "a", "guided_choice": ["a"]}, "one form"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_object.*'schema'"),
        ({"response_format": as_format(SCHEMA, stritc=True)}, "'stritc'.*Did you mean 'strict'"),
        ({"response_format": {**as_format(SCHEMA), "strict": True}}, "'strict'"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": 5}}, "whitespace_pattern = 5"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " ", **COMPACT}}, "Give one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"guided_choice": ["a"], "min_tokens": 9}, "min_tokens"),
        ({"tool_choice": "required"}, "offers no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "'mul'"),
        ({"tool_choice": "any"}, "tool_choice = 'any'"),
    ],
)
async def test_what_cannot_be_held_to_is_refused_by_name_with_its_reason(client, extra, reason):
    with pytest.raises(UnsupportedSetting, match=reason):
        await asked(client, **extra)
    got = await asked(client, max_tokens=2)  # and the engine goes on
    assert len(got.completion_ids) == 2


def test_additional_properties_are_disabled_at_every_depth():
    inner = {"type": "object", "properties": {"properties": {"type": "integer"}}}
    own = {"type": "object", "properties": {"b": {}}, "additionalProperties": True}
    schema = {"properties": {"a": inner, "own": own}, "$defs": {"d": {"anyOf": [inner]}}}
    asked = {"json": schema, "disable_additional_properties": True}
    got = grammar_in({"structured_outputs": asked})
    closed = {**inner, "additionalProperties": False}
    assert got == {
        "json_schema": {
            "properties": {"a": closed, "own": own},
            "$defs": {"d": {"anyOf": [closed]}},
            "additionalProperties": False,
        }
    }


async def test_without_the_package_the_refusal_says_what_to_install(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedSetting, match=r"llguidance.*pip install 'rolltree\[constrained"):
        await asked(client, guided_choice=["a"])
    assert len((await asked(client, max_tokens=2)).completion_ids) == 2


# -- calls ---------------------------------------------------------------------------------------


def made_of(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]


@pytest.mark.parametrize("template", [None, ONE_CALL], ids=["hermes", "llama3"])
async def test_a_forced_call_is_made_in_the_model_s_own_format(tiny, template):
    model, tokenizer = tiny
    template = template and template.replace("<|eot_id|>", "<|im_end|>")
    renderer = ChatRenderer(tokenizer, template, reasoning="none")
    assert renderer.formats[0] == ("hermes" if template is None else "llama3")
    client = local_client(model, tokenizer, renderer=renderer)
    numbers = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    strict = {
        **numbers,
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": strict}}
        for name in ("add", "sub")
    ]
    named = {"type": "function", "function": {"name": "sub"}}
    only_add = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [tools[0]]},
    }
    try:
        for seed in range(3):
            got = await asked(client, tools, seed=seed, tool_choice=named, max_tokens=300)
            assert got.finish_reason == FinishReason.TOOL_CALLS
            assert [name for name, _ in made_of(got.message["tool_calls"])] == ["sub"]
            got = await asked(client, tools, seed=seed, tool_choice=only_add, max_tokens=300)
            assert {name for name, _ in made_of(got.message["tool_calls"])} == {"add"}
            one = await asked(
                client,
                tools,
                seed=seed,
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=300,
            )
            assert len(one.message["tool_calls"]) == 1
            several = await asked(client, tools, seed=seed, tool_choice="required", max_tokens=700)
            for name, arguments in made_of(several.message["tool_calls"]):
                assert name in ("add", "sub")
                assert arguments in ({"a": 1}, {"a": 2})
            assert several.info["sampling"] == {"tool_choice": "required"}
    finally:
        await client.aclose()


async def test_a_form_beside_tools_leaves_the_model_the_choice_of_a_call(tiny):
    client = local_client(*tiny)
    client.renderer = settled(client.renderer)
    mark = client.tokenizer.convert_tokens_to_ids("<tool_call>")
    form = {"guided_choice": ["yes"], "max_tokens": 300}
    try:
        said = await asked(client, [SUB], logit_bias={str(mark): -99.0}, **form)
        assert said.text == "yes"
        called = await asked(client, [SUB], logit_bias={str(mark): 99.0, "125": 20.0}, **form)
        assert made_of(called.message["tool_calls"])[0][0] == "sub"
    finally:
        await client.aclose()


@pytest.mark.parametrize("template", [ITEMS, CHANNELS], ids=["qwen_xml", "harmony"])
def test_a_format_whose_calls_are_not_json_is_refused_by_its_name(template):
    specials = ["<|im_end|>", "<|im_start|>", "<|call|>", "<|end|>", "<|return|>", "<|start|>"]
    renderer = ChatRenderer(ByteTokenizer(template, specials, specials[0]))
    with pytest.raises(UnsupportedSetting, match=renderer.formats[0]):
        constrained(rt.SamplingParams(extra={"tool_choice": "required"}), renderer, [ADD])


def test_the_form_of_calls_is_what_the_template_writes():
    renderer = ChatRenderer(ByteTokenizer(LEADING))
    form = call_form(renderer)
    assert form is not None
    assert form.head == '<tool_call>\n{"name": "'
    assert form.between_calls == form.tail + form.head


# -- what is sampled and recorded ----------------------------------------------------------------


async def test_logprobs_are_those_of_the_masked_distribution(client, tiny):
    model, _ = tiny
    client.renderer = settled(client.renderer)
    for temperature in (0.0, 0.7, 1.0):
        got = await asked(client, guided_regex="[ab]{6}", temperature=temperature)
        ids = torch.from_numpy(np.concatenate((got.prompt_ids, got.completion_ids))).long()[None]
        with torch.inference_mode():
            logits = model(ids).logits[0].double()
        allowed = [ord("a"), ord("b")]
        for at, (token, logprob) in enumerate(zip(got.completion_ids, got.logprobs, strict=True)):
            row = logits[len(got.prompt_ids) + at - 1] / (temperature or 1.0)
            mask = allowed if at < 6 else [*client.engine.eos_token_ids]
            wanted = row[token] - row[mask].logsumexp(0)
            assert abs(float(wanted) - float(logprob)) < 1e-4


async def test_others_in_the_batch_are_sampled_as_without_it(client):
    async def plain(seed: int) -> Any:
        return await asked(client, max_tokens=12, seed=seed)

    alone = [await plain(seed) for seed in range(4)]
    mixed = await asyncio.gather(
        *(plain(seed) for seed in range(4)),
        *(asked(client, guided_regex="[ab]{9}", seed=seed) for seed in range(4)),
    )
    for one, other in zip(alone, mixed[:4], strict=True):
        assert one.completion_ids.tolist() == other.completion_ids.tolist()
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert all(re.fullmatch("[ab]{9}", got.text) for got in mixed[4:])


async def test_a_stop_string_and_new_weights_in_the_middle_keep_the_form(client):
    stopped = await asked(client, guided_regex="[ab]{3};[ab]{3}", stop=[";"])
    assert re.fullmatch("[ab]{3}", stopped.text)
    engine = client.engine
    begun, seen, loop = asyncio.Event(), list[Any](), asyncio.get_running_loop()

    def see(token: Any) -> None:
        seen.append(token)
        if len(seen) == 5:
            loop.call_soon_threadsafe(begun.set)

    sampling = constrained(rt.SamplingParams(max_tokens=40, extra={"guided_regex": "[ab]{30}"}))
    request = GenerateRequest(np.arange(9, dtype=np.int32), sampling)
    pending = engine.submit(request, see)
    await begun.wait()
    async with engine.paused():
        engine.publish(7)
    output = await asyncio.wrap_future(pending)
    text = client.renderer.decode_answer(output.completion_ids)
    assert re.fullmatch("[ab]{30}", text)
    assert {0, 7} == set(output.versions.tolist())


async def test_a_grammar_that_needs_too_much_work_cuts_its_answer_alone(client, monkeypatch):
    from rolltree.inference.local import grammars

    real = grammars.GrammarMask.__call__

    def failing(self: Any, ids: Any, scores: Any) -> Any:
        if self._num_read >= ids.shape[1] - 1 and ids.shape[1] - self._first >= 3:
            self._matcher.consume_tokens([0])  # which the grammar forbids: it is broken for good
        return real(self, ids, scores)

    began = grammars.GrammarMask.__init__

    def beginning(self: Any, matcher: Any, num_prompt: int, *rest: Any) -> None:
        began(self, matcher, num_prompt, *rest)
        self._first = num_prompt

    monkeypatch.setattr(grammars.GrammarMask, "__call__", failing)
    monkeypatch.setattr(grammars.GrammarMask, "__init__", beginning)
    broken, plain = await asyncio.gather(
        asked(client, guided_regex="[ab]{9}"), asked(client, max_tokens=12)
    )
    assert broken.finish_reason == FinishReason.LENGTH
    assert len(broken.completion_ids) == 4
    assert len(plain.completion_ids) <= 12


async def test_streams_have_the_same_answer(client):
    from rolltree.inference.call import ModelCall

    for tools, extra in (
        (None, {"guided_choice": ["a yes", "a no"]}),
        ([SUB], {"guided_regex": "[ab]{9}"}),
    ):
        sampling = rt.SamplingParams(max_tokens=90, seed=4, extra=extra)
        parts: list[Any] = []
        call = ModelCall(ASK, sampling, tools=tools, on_delta=parts.append)
        got = await client.call(call)
        await asyncio.sleep(0)
        said = "".join(part.get("content", "") for part in parts)
        assert got.message["content"].startswith(said)
        again = await client.call(ModelCall(ASK, sampling, tools=tools))
        assert again.completion_ids.tolist() == got.completion_ids.tolist()


async def test_an_engine_without_a_tokenizer_says_so(tiny):
    engine = LocalEngine(tiny[0], eos_token_ids=[258])
    try:
        sampling = rt.SamplingParams(max_tokens=4, extra={"guided_choice": ["a"]})
        with pytest.raises(UnsupportedSetting, match="tokenizer"):
            await engine.generate(GenerateRequest(np.arange(9, dtype=np.int32), sampling))
    finally:
        await engine.aclose()


@pytest.mark.long
async def test_a_real_model_answers_in_json():
    client = local_client(*rt.load_model("smollm2-135m"))
    try:
        got = await client.chat(
            [{"role": "user", "content": "Name a colour and a number, as JSON."}],
            sampling=rt.SamplingParams(
                max_tokens=60, temperature=0.0, extra={"response_format": as_format(SCHEMA)}
            ),
        )
    finally:
        await client.aclose()
    assert json.loads(got.text).keys() == {"a", "b", "c"}
