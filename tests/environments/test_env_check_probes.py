"""The parts of the contract checker on their own: styles, leaks, probes, counted cleanups."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rolltree as rt
from rolltree.environments.check import counted, leak_rate
from rolltree.environments.check_probes import MAX_CALLS, EndlessRollout, Probe, styles_of
from rolltree.values.errors import UnsupportedSetting
from rolltree.values.types import GenerateRequest

answers = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=12)


@given(answers)
def test_some_style_is_read_back_by_each_parser(answer):
    parsers = [
        rt.Parser(),
        rt.XMLParser(["think", "answer"]),
        rt.XMLParser(["guess"]),  # its answer field is named otherwise: the last field is used
        rt.ThinkParser(rt.extract_boxed_answer),
        rt.Parser(rt.extract_hash_answer),
    ]
    for parser in parsers:
        if isinstance(parser, rt.XMLParser) and parser.get_fields() == ["guess"]:
            text = styles_of(parser)["tags"](answer)
            assert parser.parse(text).guess == answer
            continue
        read = [
            parser.parse_answer([{"role": "assistant", "content": style(answer)}])
            for style in styles_of(parser).values()
        ]
        assert answer in read


@pytest.mark.parametrize(
    ("shown", "own", "other"),
    [
        ([], 0.0, 0.0),
        ([("say river", "river"), ("say stone", "stone")], 1.0, 0.0),
        ([("A or B?", "A"), ("A or B?", "B")], 1.0, 1.0),  # a choice, not a leak
        ([("what is 12 + 1?", "1"), ("what is 13 + 4?", "17")], 0.5, 0.0),  # "1", not in "12"
        ([("same", "x"), ("same", "x")], 0.0, 0.0),
        ([("The CAT sat", "cat"), ("c.t", "c.t")], 1.0, 0.0),  # any case; no regular expression
    ],
)
def test_leak_rate(shown, own, other):
    assert leak_rate(shown) == (own, other)


async def test_a_probe_gives_up_on_endless_rollouts_and_starts_anew_per_session():
    probe = Probe("x")
    session = probe.session()
    for _ in range(MAX_CALLS):
        assert (await session.chat([{"role": "user", "content": "q"}])).text == "x"
    with pytest.raises(EndlessRollout, match="100 model calls"):
        await session.chat([])
    assert (await probe.session().chat([])).message == {"role": "assistant", "content": "x"}
    assert len(probe.prompts) == 2
    with pytest.raises(UnsupportedSetting):
        await probe.generate(GenerateRequest([1], rt.SamplingParams()))


async def test_a_probe_hangs_and_fails_as_told():
    failing = Probe(error=rt.ModelError("down"))
    with pytest.raises(rt.ModelError, match="down"):
        await failing.chat([])
    hanging = Probe(hang=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await hanging.chat([])
    assert hanging.is_asked.is_set()


async def test_counting_leaves_the_environment_as_it_was():
    class Held(rt.SingleTurnEnv):
        @rt.cleanup
        async def release(self, state):
            state["n"] = state.get("n", 0) + 1

    env = Held(dataset=[{"question": "q"}])
    before = list(env._cleanup_handlers)
    with counted(env) as counts:
        state = await env.rollout(env.example("train", 0), Probe("a"))
        await env.release(state)
    assert counts == {"release": 2}
    assert state["n"] == 2
    assert env._cleanup_handlers == before
    assert "release" not in vars(env)
