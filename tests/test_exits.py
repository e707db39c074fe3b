"""The hunt for exits: whatever a model answers, and whatever plays it, there is a reward.

Only what the test itself breaks (a server that hangs up) leaves a rollout without one. Every chat
template and tool-call format of the tests, and every kind of environment, is played with odd
answers of many kinds, through real rendering: templates refuse what they refuse in a real run.
"""

import asyncio
import itertools
import os
from collections import Counter
from contextlib import contextmanager
from functools import cache

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import all_templates
from hostile_text import answers
from odd_kit import ENVIRONMENTS, MORE_ENVIRONMENTS, SPELLINGS, odd_answers
from rolltree.inference import (
    TOOL_PARSERS,
    ChatRenderer,
    OpenAIClient,
    RetryPolicy,
    as_client,
)
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.testing import HttpFault, ScriptedClient, ScriptedServer
from rolltree.values.errors import UnsupportedSetting

IS_LONG = os.environ.get("ROLLTREE_HYPOTHESIS") == "long"
ALL = {**ENVIRONMENTS, **MORE_ENVIRONMENTS}
TEMPLATES = all_templates()
STRICTEST = ("one call", "alternating", "channels", "items")
SLOW = ("program", "over HTTP")
"""Environments whose plays take 20 ms and more: the short form plays a third of them."""
KINDS = list(odd_answers("hermes"))
PLAYED: Counter[str] = Counter()
"""How many sessions got answers of each kind; several agents of a rollout have one each."""


@cache
def renderer_of(template, style="auto", history="keep"):
    if style == "auto" and not TEMPLATES[template].renderer(with_tools=True).reads_calls:
        style = "none"  # a model with tools whose calls nobody can read is refused
    return TEMPLATES[template].renderer(with_tools=True, tool_parser=style, history=history)


class Odd(ScriptedClient):
    """A model whose sessions give odd answers, each as `kinds` and `answers` say, and then "4".

    It has no JSON mode, as rolltree's own engine.
    """

    def __init__(self, plays, renderer):
        super().__init__(["4"], renderer=renderer)
        self.plays = itertools.cycle(plays)

    def new_memory(self):
        kind, said = next(self.plays)
        PLAYED[kind] += 1
        turns = itertools.chain(said, itertools.repeat("4"))
        memory = super().new_memory()
        memory.script.source = lambda messages: next(turns)
        return memory

    async def respond(self, call, memory):
        if "response_format" in call.sampling.extra:
            raise UnsupportedSetting("response_format is not supported here.")
        return await super().respond(call, memory)


def plays_in(style):
    """Return what sessions answer, with its kind: an odd answer first, twice, and after a call."""
    kinds = odd_answers(style)
    (good, *_), plays = kinds["two calls"], []
    for kind, said in kinds.items():
        for index, answer in enumerate(said):
            plays.append((kind, [answer, said[index - 1]]))
        plays.append((kind, [good, *said[:2]]))
    return plays


async def play(env, client, num):
    """Play so many rollouts; return the errors that left one without a reward."""
    requests = build_requests(env, "eval", num_examples=1, group_size=num)
    results = await RolloutEngine(env, client, max_concurrent=16).run_all(requests)
    assert len(results) == num
    return list(exits_of(results))


def exits_of(results):
    """Yield the error of each rollout without a reward, or that a refusal of its history cut."""
    for result in results:
        for state in result.states or ({},):
            error = result.error or state.get("error")
            told = {**state.get("rollout_meta", {}), **state}
            refused = told.get("refused_request")
            if error is not None:
                yield error.type, error.message, error.traceback
            elif refused or not isinstance(state.get("reward"), float):
                yield "Refused" if refused else "None", refused or "", ""


def no_exits(exits):
    """Fail with each kind of exit once, and how often it was taken."""
    kinds = Counter((kind, message[:200]) for kind, message, _ in exits)
    if exits:
        told = [f"{num} times {kind}" for kind, num in kinds.items()]
        pytest.fail("\n".join([*told, exits[0][2]]), pytrace=False)


def hunt(environment, template, style="auto", history="keep", texts=()):
    """Play all odd answers, or `texts`, in one environment, with one template."""
    renderer = renderer_of(template, style, history)
    plays = [("random", [text, text]) for text in texts] or plays_in(renderer._parser.tool_parser)
    if environment in SLOW and not IS_LONG:
        plays = plays[::3]
    no_exits(asyncio.run(play(ALL[environment](), Odd(plays, renderer), len(plays))))


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_answer_ends_a_rollout_with_any_template(template):
    for history in ("keep", "template"):
        hunt("tools", template, history=history)


@pytest.mark.parametrize("style", SPELLINGS)
def test_no_answer_ends_a_rollout_in_any_tool_call_format(style):
    for template in TEMPLATES if IS_LONG else STRICTEST[:2]:
        hunt("tools", template, style)


@pytest.mark.parametrize("kind", ALL)
def test_no_answer_ends_a_rollout_in_any_environment(kind):
    for template in TEMPLATES if IS_LONG else STRICTEST[:2]:
        # Without a system role the first prompt is refused, before anything is answered.
        if (kind, template) != ("react", "two roles"):
            hunt(kind, template)


class AsWritten(ChatRenderer):
    """Renders a history only as it is, as other servers do."""

    def render(self, messages, tools=None, *, add_generation_prompt=True):
        template = self._templates[self._kind(tools)]
        text = template.render(messages, tools, add_generation_prompt=add_generation_prompt)
        return self.vocabulary.encode_start(text)


@contextmanager
def served(template, plays):
    """Serve the answers one after the other, over HTTP, from a server with this template."""
    said = itertools.cycle([answer for _, turns in plays for answer in turns])
    renderer = TEMPLATES[template].renderer(kind=AsWritten, with_tools=True)
    with ScriptedServer(lambda messages: next(said), renderer=renderer, model="m") as server:
        yield server


CLIENTS = {
    "ids": lambda url, renderer: OpenAIClient(url, "m", renderer=renderer),
    "messages": lambda url, renderer: OpenAIClient(url, "m"),
    "messages without ids": lambda url, renderer: OpenAIClient(url, "m", token_ids="off"),
    "openai": lambda url, renderer: as_client(openai.AsyncOpenAI(base_url=url, api_key="x"), "m"),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_no_answer_of_a_server_ends_a_rollout(name):
    async def check(kind, template):
        renderer = renderer_of(template)
        plays = plays_in(renderer._parser.tool_parser)
        PLAYED.update(kind for kind, _ in plays)
        with served(template, plays) as server:
            client = CLIENTS[name](server.base_url, renderer)
            exits = await play(ALL[kind](), client, len(plays))
            await client.aclose()
        no_exits(exits)

    for template in STRICTEST[:2]:
        asyncio.run(check("tools", template))


def test_a_server_that_hangs_up_ends_a_rollout():
    """The hunt can see an exit: here it makes one itself."""

    async def check():
        fault = HttpFault(reset=True)
        with ScriptedServer(["4"] * 9, faults=lambda number: fault, model="m") as server:
            client = OpenAIClient(server.base_url, "m", retry=RetryPolicy(max_retries=0))
            exits = await play(ALL["single"](), client, 2)
            await client.aclose()
        return exits

    assert [kind for kind, _, _ in asyncio.run(check())] == ["ConnectionFailed"] * 2


@pytest.mark.parametrize("kind", ALL)
def test_no_random_answer_ends_a_rollout(kind):
    @settings(max_examples=100 if IS_LONG else 2)
    @given(st.lists(answers, min_size=6, max_size=12), st.sampled_from(list(TEMPLATES)))
    def check(texts, template):
        hunt(kind, template, texts=texts)

    check()


def test_the_hunt_is_as_wide_as_it_says():
    """Prints its size (pytest -rP); as the last test of a whole run, it counts what was played."""
    print(
        f"{sum(PLAYED.values())} sessions with odd answers of {len(KINDS)} kinds and random ones: "
        f"{len(TEMPLATES)} chat templates, {len(SPELLINGS)} tool-call formats, {len(ALL)} "
        f"environments, {len(CLIENTS)} clients of servers. {dict(PLAYED)}"
    )
    assert len(KINDS) >= 10
    assert set(SPELLINGS) == set(TOOL_PARSERS)
    for style in SPELLINGS:
        assert {kind for kind, _ in plays_in(style)} == set(KINDS)
