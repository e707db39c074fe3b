"""Rollouts with tools, thoughts and rewritten history, through the store, into training samples.

What is checked needs no knowledge of how any room works: every token that the scripted model said
is in exactly one record, behind exactly the ids that its call was given, before and after the run
was written to disk and read back by another object.
"""

import asyncio
import json
import re
import tempfile
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltree.environments import ToolEnv, stop
from rolltree.environments.rubrics import Rubric
from rolltree.inference import ChatRenderer
from rolltree.inference.models.made import CHAT_TEMPLATE
from rolltree.rollouts import RolloutEngine
from rolltree.rollouts.decode import decode_results
from rolltree.rollouts.record import encode_result
from rolltree.rollouts.requests import build_requests
from rolltree.samples import build_samples
from rolltree.store import Run
from rolltree.testing import SPECIAL_TOKENS, ByteTokenizer, ScriptedClient, scripted_logprobs
from rolltree.tokens import StepTokens, Trajectory

SCOPES = ("step", "turn", "interleave", "tree")
ACTIONS = ("say", "shout", "think", "tool", "tools", "forget")
VERSION = 7


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


class Chatty(ToolEnv):
    """The first message lists what the model does at each turn; the world answers accordingly."""

    def plan(self, state):
        return state["prompt"][0]["content"].split()

    @stop
    async def no_tools_called(self, state):
        return len(state["trajectory"]) >= len(self.plan(state))

    async def env_response(self, messages, state):
        if messages[-1].get("tool_calls"):
            return await super().env_response(messages, state)
        return [{"role": "user", "content": f"go on after {len(state['trajectory'])}"}]

    async def get_prompt_messages(self, state):
        turn = len(state["trajectory"])
        messages = await super().get_prompt_messages(state)
        if turn and self.plan(state)[turn - 1] == "forget":
            return [messages[0], {"role": "user", "content": f"({turn} answers forgotten)"}]
        return messages


def script(messages):
    """Say what the plan in the first message has for this turn."""
    forgotten = re.findall(r"\((\d+) answers forgotten\)", json.dumps(messages))
    turn = int(forgotten[-1]) if forgotten else 0
    turn += sum(message["role"] == "assistant" for message in messages)
    action = messages[0]["content"].split()[turn]
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": turn + n})}}
        for n in range({"tool": 1, "tools": 2}.get(action, 0))
    ]
    if action == "fail":
        raise ValueError("the engine is gone")
    text = {
        "shout": f"WELL {turn}! " * 9,
        "think": f"<think>\nhm {turn}\n</think>\n\nso {turn}",
        "tool": "",
        "tools": "both:",
    }.get(action, f"said {turn}")
    return {"role": "assistant", "content": text, "tool_calls": calls}


def num_calls(state):
    return float(len(state["trajectory"]))


def play(plans, history, group_size=1):
    """Return the client, and the results of all plans, in the order they were asked for."""
    rows = [{"question": " ".join(plan), "answer": ""} for plan in plans]
    environment = Chatty(tools=[add], dataset=rows, rubric=Rubric([num_calls]))
    markup = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer = ByteTokenizer(CHAT_TEMPLATE, [*SPECIAL_TOKENS, *markup])
    renderer = ChatRenderer(tokenizer, history=history)
    client = ScriptedClient(script, renderer=renderer, version=VERSION)
    requests = build_requests(environment, "train", group_size=group_size, phase="train")
    results = asyncio.run(RolloutEngine(environment, client).run_all(requests))
    order = {request.request_id: place for place, request in enumerate(requests)}
    results.sort(key=lambda result: order[result.request.request_id])
    for result in results:
        for state in result.states:
            state["advantage"] = state["reward"] if state["error"] is None else None
    return client, results


def stored_and_read(results, folder):
    """Write the results into a run in two batches, one of them twice, and read them back."""
    with Run.create(folder) as run:
        half = len(results) // 2
        for part in (results[:half], results[half:], results[:half]):
            run.add_rollouts(row for result in part for row in encode_result(result))
        assert run.num_rollouts() == sum(len(result.states) for result in results)
    with Run.open(folder, mode="r") as run:
        return list(decode_results(run.rollouts()))


def states_of(results):
    return [state for result in results for state in result.states]


def context(sample, position):
    """Return the ids that the token at `position` attends to, itself included."""
    order = np.arange(sample.num_tokens)
    return sample.ids[(order <= position) & (position < sample.subtree_end)].tolist()


def check(batch, states):
    """Every sampled token once, after what its call was given, with its own logprob."""
    said = {
        (rollout, call): step["tokens"]
        for rollout, state in enumerate(states)
        for call, step in enumerate(state["trajectory"])
    }
    expected = Counter(
        (*key, offset)
        for key, tokens in said.items()
        for offset in range(len(tokens["completion_ids"]))
    )
    seen = Counter()
    for sample in batch.samples:
        records = sample.records
        keys = zip(
            records.rollout.tolist(), records.call.tolist(), records.offset.tolist(), strict=True
        )
        for at, (rollout, call, offset) in enumerate(keys):
            tokens = said[rollout, call]
            path = [*tokens["prompt_ids"], *tokens["completion_ids"][:offset]]
            assert context(sample, int(records.source[at])) == path
            assert records.target[at] == tokens["completion_ids"][offset]
            seen[rollout, call, offset] += 1
        assert np.array_equal(records.logprob, scripted_logprobs(records.target))
        assert set(records.version.tolist()) <= {VERSION}
        for rollout in set(records.rollout.tolist()):
            weights = records.weight[records.rollout == rollout]
            assert set(weights.tolist()) == {0.0 if states[rollout]["error"] else 1.0}
    assert seen == expected


def columns(values):
    return {
        field.name: np.asarray(getattr(values, field.name)).tolist() for field in fields(values)
    }


def same_batch(one, two):
    assert len(one.samples) == len(two.samples)
    for left, right in zip(one.samples, two.samples, strict=True):
        for name in ("ids", "positions", "subtree_end"):
            assert np.array_equal(getattr(left, name), getattr(right, name)), name
        assert columns(left.records) == columns(right.records)
        assert left.origins == right.origins
    assert one.report == two.report
    assert [str(each) for each in one.breaks] == [str(each) for each in two.breaks]


plans = st.lists(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=6), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans=plans, history=st.sampled_from(["keep", "template"]), fails=st.booleans())
def test_nothing_is_lost_doubled_or_changed_from_the_model_to_the_samples(plans, history, fails):
    if fails:
        plans = [*plans, [*plans[0], "fail"]]
    client, results = play(plans, history)
    states = states_of(results)
    assert [len(state["trajectory"]) for state in states] == [
        len(plan) - ("fail" in plan) for plan in plans
    ]
    assert [state["error"] is not None for state in states] == ["fail" in plan for plan in plans]
    assert len(client.calls) == sum(map(len, plans))
    with tempfile.TemporaryDirectory() as folder:
        restored = states_of(stored_and_read(results, folder))
    for scope in SCOPES:
        before, after = build_samples(states, scope), build_samples(restored, scope)
        check(before, states)
        check(after, states)  # the ids of before: the store is checked, not believed
        same_batch(before, after)


@settings(max_examples=10, deadline=None)
@given(plans=plans)
def test_what_comes_back_is_the_same_conversation(plans):
    _, results = play(plans, "keep", group_size=2)
    with tempfile.TemporaryDirectory() as folder:
        restored = stored_and_read(results, folder)
    assert [result.request for result in restored] == [result.request for result in results]
    for one, two in zip(states_of(results), states_of(restored), strict=True):
        assert isinstance(two["trajectory"], Trajectory)
        assert two["completion"] == one["completion"]
        assert (two["reward"], two["metrics"]) == (one["reward"], one["metrics"])
        tree, twin = one["trajectory"].tree, two["trajectory"].tree
        assert twin.to_bytes() == tree.to_bytes()
        for before, after in zip(one["trajectory"], two["trajectory"], strict=True):
            assert isinstance(after["tokens"], StepTokens)
            for key in ("prompt", "completion", "tokens", "reward", "advantage", "extras"):
                assert after[key] == before[key], key


def test_a_group_shares_its_prompt_in_one_forest():
    _, results = play([["say", "tool", "say"], ["shout"]], "keep", group_size=3)
    with tempfile.TemporaryDirectory() as folder:
        states = states_of(stored_and_read(results, folder))
    key = lambda state: state["example_id"]  # noqa: E731
    forest = build_samples(states, "tree", group_key=key)
    check(forest, states)
    assert len(forest.samples) == 2  # one for each example
    alone = build_samples(states, "tree")
    assert len(alone.samples) == 6
    # Three equal rollouts are one path of tokens, trained three times.
    assert [sample.num_tokens for sample in forest.samples] == [
        alone.samples[0].num_tokens, alone.samples[3].num_tokens,
    ]  # fmt: skip
    assert sum(len(sample.records) for sample in forest.samples) == sum(
        len(sample.records) for sample in alone.samples
    )


def test_how_many_samples_each_scope_makes():
    plan = ["think", "tool", "tool", "say", "forget", "say"]
    sizes = {}
    for history in ("keep", "template"):
        _, results = play([plan], history)
        states = states_of(results)
        sizes[history] = {scope: len(build_samples(states, scope).samples) for scope in SCOPES}
    # Exact continuation breaks where the world forgot. The template also drops the thought, and
    # spells the two calls in its own manner.
    assert sizes["keep"] == {"step": 6, "turn": 6, "interleave": 2, "tree": 1}
    assert sizes["template"] == {"step": 6, "turn": 6, "interleave": 5, "tree": 1}


@pytest.mark.parametrize("scope", SCOPES)
def test_a_damaged_store_is_no_sample(scope, tmp_path):
    """The checks above can fail: one token changed on the way is noticed."""
    _, results = play([["say", "say"]], "keep")
    states = states_of(results)
    twin = states_of(stored_and_read(results, tmp_path))
    tree = twin[0]["trajectory"].tree
    tree.arena.ids[tree.num_tokens - 2] += 1
    with pytest.raises(AssertionError):
        check(build_samples(twin, scope), states)
