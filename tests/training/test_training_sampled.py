"""Calls sampled from another distribution than the trainer computes are found, wherever set."""

import pytest

import rolltree as rt
from rolltree.inference import OpenAIClient
from rolltree.inference.client import sampling_from_args
from rolltree.inference.request_fields import distribution_changes
from rolltree.inference.vocabulary import Vocabulary
from rolltree.rollouts import RolloutEngine
from rolltree.samples import build_samples
from rolltree.testing import HOSTILE, ByteTokenizer, ScriptedClient, ScriptedServer
from rolltree.training import assign_credit, load_train_config
from rolltree.training.algorithms import resolve_algorithm
from rolltree.training.plan import step_requests
from rolltree.training.sampled import misspelled
from rolltree.training.untrainable import TrainableLimits, mask_untrainable, note_misspelled
from rolltree.values.errors import TrainingError

CONFIG = load_train_config({"algorithm": {"group_size": 2, "groups_per_step": 1}})
CHANGES = [
    {"top_p": 0.9},
    {"top_k": 5},
    {"temperature": 0},
    {"min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"logit_bias": {"7": 3.0}},
    {"min_tokens": 2},
    {"tool_choice": "required"},
    {"extra_body": {"min_p": 0.1}},
    {"extra_body": {"temperature": 0.5}},
    {"extra_body": {"some_new_cut": 3}},
]
NEUTRAL = [
    {},
    {"temperature": 0.7, "top_p": 1.0, "seed": 3, "stop": ["x"]},
    {"min_p": 0, "repetition_penalty": 1.0, "logit_bias": {}, "presence_penalty": 0.0},
    {"extra_body": {"top_k": -1, "return_token_ids": True, "chat_template_kwargs": {"a": 1}}},
    {"tool_choice": "auto", "user": "me", "logprobs": True, "skip_special_tokens": False},
]


class PerCall(rt.SingleTurnEnv):
    """Passes sampling settings of its own with each call, as environments do."""

    per_call: dict = {}

    async def get_model_response(self, client, model, prompt, *args, **kwargs):
        asked = {**(kwargs.pop("sampling_args", None) or {}), **self.per_call}
        return await super().get_model_response(
            client, model, prompt, *args, sampling_args=asked, **kwargs
        )


class OwnRequest(PerCall):
    """Talks to the OpenAI-shaped client itself, and hands back what that says."""

    async def get_model_response(self, client, model, prompt, *args, **kwargs):
        return await client.chat.completions.create(
            model=model or "scripted", messages=prompt, **self.per_call
        )


async def played(kind, args):
    environment = kind(
        dataset=[{"question": "2 + 2 =", "answer": "4"}],
        rubric=rt.Rubric([lambda completion, answer: float(len(str(completion)) % 7)]),
    )
    environment.per_call = args
    async with environment:
        engine = RolloutEngine(environment, ScriptedClient(["4", "5"]))
        results = await engine.run_all(step_requests(CONFIG, environment, 1))
    assert all(result.error is None for result in results), results[0].error
    return results


def masked_calls(results):
    """Return how many calls a trainer masks, with what is said about them."""
    report = assign_credit(results)
    samples = build_samples(report.trained, advantages=report.advantages).samples
    algorithm = resolve_algorithm("grpo")
    return mask_untrainable(samples, algorithm, TrainableLimits(vocab_size=1000, max_length=1000))[
        1
    ]


@pytest.mark.parametrize("args", CHANGES)
@pytest.mark.parametrize("kind", [PerCall, OwnRequest])
async def test_what_an_environment_sets_for_one_call_masks_it(kind, args):
    name = next(iter(args.get("extra_body", args)))
    found = masked_calls(await played(kind, args))
    assert found.num_calls == {"changed_sampling": 2}
    with pytest.raises(TrainingError, match=rf"call 0 of rollout 0 was sampled with .*{name} = "):
        found.check()


@pytest.mark.parametrize("args", NEUTRAL)
async def test_what_changes_no_distribution_is_trained(args):
    assert not masked_calls(await played(PerCall, args)).num_calls


async def test_a_call_that_is_masked_out_may_be_anything():
    results = await played(PerCall, {"top_p": 0.5})
    for result in results:
        for step in result.states[0]["trajectory"]:
            step["tokens"]["completion_mask"] = [0] * len(step["tokens"]["completion_ids"])
    assert not masked_calls(results).num_calls


async def test_it_is_masked_when_it_comes_back_from_the_store(tmp_path):
    from rolltree.rollouts.decode import decode_results
    from rolltree.rollouts.record import run_stored
    from rolltree.store import Run

    environment = PerCall(
        dataset=[{"question": "2 + 2 =", "answer": "4"}],
        rubric=rt.Rubric([lambda completion, answer: 1.0]),
    )
    environment.per_call = {"top_p": 0.5}
    async with environment:
        engine = RolloutEngine(environment, ScriptedClient(["4", "5"]))
        with Run.create(tmp_path / "run", config={}, kind="train") as run:
            async for _ in run_stored(engine, step_requests(CONFIG, environment, 1), run):
                pass
            stored = list(decode_results(run.rollouts()))
    found = masked_calls(stored)
    assert found.num_calls == {"changed_sampling": 2}
    assert "top_p = 0.5" in found.sentences["changed_sampling"]


@pytest.mark.parametrize("args", NEUTRAL)
def test_neutral_settings(args):
    assert distribution_changes(sampling_from_args(args)) == {}


@pytest.mark.parametrize("fault", [None, "swapped ids", "another prompt of the same length"])
async def test_ids_that_a_server_renders_must_spell_the_messages(fault):
    environment = rt.SingleTurnEnv(
        dataset=[{"question": "2 + 2 =", "answer": "4"}], rubric=rt.Rubric([lambda: 1.0])
    )
    faults = [] if fault is None else [None, HOSTILE[fault]]
    with ScriptedServer(["4, I think.", "It is 5."], faults=faults) as server:
        client = OpenAIClient(server.base_url, "scripted")
        engine = RolloutEngine(environment, client, max_concurrent=1)
        results = await engine.run_all(step_requests(CONFIG, environment, 1))
        await client.aclose()
    assert all(result.error is None for result in results)
    vocabulary = Vocabulary(ByteTokenizer())
    if fault is None:
        assert misspelled(results, vocabulary) == {}
        return
    wrong = misspelled(results, vocabulary)
    assert wrong
    assert all(
        "call 0 of train/" in text and " has the message " in text for text in wrong.values()
    )
    report = assign_credit(results)
    samples = build_samples(report.trained, advantages=report.advantages).samples
    samples = note_misspelled(samples, report.places, wrong)
    limits = TrainableLimits(vocab_size=1000, max_length=1000)
    kept, masked = mask_untrainable(samples, resolve_algorithm("grpo"), limits)
    assert masked.num_calls == {"misspelled": len(wrong)}
    assert sum(len(sample.records) > 0 for sample in kept) == 2 - len(wrong)
