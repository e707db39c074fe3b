"""Replayed experts: exact in every scope, refused if they cannot be, and what they fix."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from loop_kit import make_config, start
from mixtures import given_experts, mixture, routed_states
from training_kit import (
    FLOAT32,
    LetterSource,
    check_exact,
    difference,
    gradient_of,
    states,
    tiny_model,
    trainer,
)

from bench_kit import load
from rolltree.inference.local.routing import find_routers, record_routing
from rolltree.inference.models.made import byte_tokenizer
from rolltree.samples import build_samples
from rolltree.tokens import ROUTED_EXPERTS
from rolltree.training import build_parts
from rolltree.training.layout import collate
from rolltree.values.errors import ConfigError, TokenError, TrainingError
from wait_kit import until

KINDS = ("qwen3_moe", "deepseek_v2", "deepseek_v3")
ROUNDED = 64 * 16 * 2.0**-24
"""Trainer minus engine: logprobs of under 16 nats, each rounded in some 30 products and norms of
three layers on either side. Other experts for one token are 1e-3 and more."""
SCOPES = ("step", "turn", "interleave", "tree")
CROSS_ENTROPY = {"name": "sft"}


def in_scope(rollouts, scope):
    key = {"group_key": lambda state: 0} if scope == "tree" else {}
    return build_samples(rollouts, scope, **key).samples


def naive_gradient(model, kind, rollouts, known):
    """The gradient of the mean cross-entropy in float64, call by call, without rolltree's code."""
    model = model.double()
    before = model.config._experts_implementation
    model.set_experts_implementation("eager")  # the other ones know no float64
    total, count = 0.0, 0
    for state in rollouts:
        for step in state["trajectory"]:
            prompt, answer = step["tokens"]["prompt_ids"], step["tokens"]["completion_ids"]
            path = np.array(prompt + answer, np.int32)
            ids = np.stack([known[path[: end + 1].tobytes()] for end in range(len(path) - 1)])
            with given_experts(model, kind, ids):
                row = torch.from_numpy(path[:-1].astype(np.int64))[None]
                logits = model(row, use_cache=False).logits[0, len(prompt) - 1 :]
            logprobs = (logits / 0.8).log_softmax(-1)[torch.arange(len(answer)), answer]
            total = total - logprobs.sum()
            count += len(answer)
    gradient = torch.autograd.grad(total / count, list(model.parameters()), allow_unused=True)
    model.to(torch.float32)
    model.set_experts_implementation(before)
    flat = [
        (torch.zeros_like(p) if g is None else g).flatten()
        for g, p in zip(gradient, model.parameters(), strict=True)
    ]
    return torch.cat(flat)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_every_scope_are_those_of_each_call_with_the_recorded_experts(kind):
    model = mixture(kind)
    rollouts, known = routed_states()
    exact = naive_gradient(model, kind, rollouts, known)
    worker = trainer(model, algorithm=CROSS_ENTROPY, train={"replay_experts": True})
    assert worker.logprobs.forward == "tree"
    for scope in SCOPES:
        check_exact(gradient_of(worker, in_scope(rollouts, scope)), exact)
    own = trainer(model, algorithm=CROSS_ENTROPY, train={"replay_experts": False})
    assert difference(gradient_of(own, in_scope(rollouts, "tree")).double(), exact) > 0.1


@pytest.mark.parametrize("forward", ["rows", "tree"])
def test_a_layer_that_is_computed_again_for_its_gradient_takes_the_same_experts(forward):
    """Each row has experts of its own, and they are recomputed after all rows were read."""
    rollouts, _ = routed_states()
    samples = in_scope(rollouts, "interleave" if forward == "rows" else "tree")
    assert len(samples) > 1 or forward == "tree"
    gradients = [
        gradient_of(
            trainer(
                mixture(),
                algorithm=CROSS_ENTROPY,
                train={"forward": forward, "scope": "interleave", "gradient_checkpointing": again},
            ),
            samples,
        )
        for again in (False, True)
    ]
    assert difference(*gradients) < FLOAT32


def test_a_token_that_nobody_recorded_keeps_the_trainers_own_experts():
    model = mixture()
    rollouts, _ = routed_states(skip=range(1, 12))
    worker = trainer(model, algorithm=CROSS_ENTROPY)
    samples = in_scope(rollouts, "tree")
    (stream,) = [sample.info["streams"][ROUTED_EXPERTS] for sample in samples]
    assert 0 < len(stream.positions) < samples[0].num_tokens
    some = gradient_of(worker, samples)
    plain = gradient_of(worker, in_scope(routed_states(skip=range(12))[0], "tree"))
    every = gradient_of(worker, in_scope(routed_states()[0], "tree"))
    assert difference(some, plain) > 0.01
    assert difference(some, every) > 0.01
    metrics = worker.step(samples, 1)
    expected = len(stream.positions) / samples[0].num_tokens
    assert metrics["routing/replayed_share"] == pytest.approx(expected)


def test_the_experts_of_a_shared_token_are_those_that_the_first_rollout_recorded():
    first, second = routed_states(seed=0)[0][:1], routed_states(seed=0)[0][1:2]
    tree = second[0]["trajectory"].tree
    tree.extra.buffers[ROUTED_EXPERTS].view(0, 3)[:] = 7
    (sample,) = in_scope([*first, *second], "tree")
    (alone,) = in_scope(first, "tree")
    joint, own = (s.info["streams"][ROUTED_EXPERTS].values[:6] for s in (sample, alone))
    assert np.array_equal(joint, own)


def spoiled(change):
    rollouts, _ = routed_states()
    samples = in_scope(rollouts, "tree")
    for sample in samples:
        stream = sample.info["streams"][ROUTED_EXPERTS]
        sample.info["streams"][ROUTED_EXPERTS] = type(stream)(
            stream.positions, change(stream.values)
        )
    return samples


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v[:, :2], "has 2 layers with 3 experts each, but the model 3 with 3"),
        (lambda v: v[..., :1], "has 3 layers with 1 experts each, but the model 3 with 3"),
        (lambda v: v + 5, "names expert 12 of 8 in layer 0"),
        (lambda v: np.zeros_like(v), "names an expert of layer 0 twice"),
        (lambda v: v.astype(np.float32), "not one array of integers"),
    ],
)
def test_experts_that_are_not_the_models_are_refused(change, message):
    worker = trainer(mixture(), algorithm=CROSS_ENTROPY)
    with pytest.raises((TrainingError, TokenError), match=message):
        worker.step(spoiled(change), 1)


@pytest.mark.parametrize("scope", ["step", "turn"])
@pytest.mark.parametrize("of", ["mixture", "dense"])
def test_a_call_with_experts_of_another_model_is_masked_and_the_others_train(scope, of):
    """One of several servers may serve another model, or write its field wrongly."""
    samples = in_scope(routed_states()[0], scope)
    first, *others = samples
    stream = first.info["streams"][ROUTED_EXPERTS]
    first.info["streams"][ROUTED_EXPERTS] = replace(stream, values=stream.values[:, :2])
    model = mixture() if of == "mixture" else tiny_model()
    if of == "dense":
        others = in_scope(states(model=model), scope)[1:]
    worker = trainer(model, algorithm=CROSS_ENTROPY)
    kept, masked = worker.trainable([first, *others])
    assert len(kept) == len(others)
    assert masked.metrics()["masked/routing"] == masked.metrics()["masked/num_calls"] > 0
    said = "has 2 layers" if of == "mixture" else "is not a mixture"
    assert said in masked.sentences["routing"]
    assert difference(gradient_of(worker, kept), gradient_of(worker, others)) < FLOAT32


def test_what_attends_to_a_token_with_another_models_experts_is_masked_too():
    (sample,) = in_scope(routed_states()[0], "tree")
    stream = sample.info["streams"][ROUTED_EXPERTS]
    at = int(sample.records.source[len(sample.records) // 2])
    wrong = stream.values.copy()
    wrong[stream.positions == at] = 99
    sample.info["streams"][ROUTED_EXPERTS] = replace(stream, values=wrong)
    worker = trainer(mixture(), algorithm=CROSS_ENTROPY)
    (kept,), masked = worker.trainable([sample])
    records = sample.records
    attends = (records.source >= at) & (records.source < sample.subtree_end[at])
    calls = {*zip(records.rollout[attends].tolist(), records.call[attends].tolist(), strict=True)}
    assert masked.num_calls["routing"] == len(calls)
    kept_calls = {*zip(kept.records.rollout.tolist(), kept.records.call.tolist(), strict=True)}
    assert kept_calls
    assert not kept_calls & calls


def test_a_layer_without_a_router_may_name_any_expert():
    """vLLM has zeros there."""

    def zeros(values):
        values = values.copy()
        values[:, 0] = 0  # the first layer of this model is dense
        return values

    worker = trainer(mixture("deepseek_v3"), algorithm=CROSS_ENTROPY)
    exact = gradient_of(worker, in_scope(routed_states()[0], "tree"))
    assert torch.equal(gradient_of(worker, spoiled(zeros)), exact)


def test_what_is_asked_for_and_missing_is_an_error():
    worker = trainer(mixture(), algorithm=CROSS_ENTROPY, train={"replay_experts": True})
    with pytest.raises(TrainingError, match=r"sample of rollouts r0 has no routed experts"):
        worker.step(in_scope(states(), "interleave"), 1)


def test_a_model_whose_router_cannot_be_replayed_is_refused_once_there_is_something_to_replay():
    rollouts, _ = routed_states()
    dense = trainer(tiny_model(), algorithm=CROSS_ENTROPY)
    dense.step(in_scope(states(), "tree"), 1)
    with pytest.raises(TrainingError, match="is not a mixture"):
        dense.step(in_scope(rollouts, "tree"), 1)
    with pytest.raises(TrainingError, match="no router was found in Qwen3ForCausalLM"):
        trainer(tiny_model(), algorithm=CROSS_ENTROPY, train={"replay_experts": True})


def test_a_reference_keeps_its_own_router():
    rollouts, _ = routed_states()
    model = mixture()
    worker = trainer(
        model,
        algorithm={"name": "grpo", "kl_coef": 0.1},
        train={"replay_experts": True, "max_mismatch": 1e9},
    )
    metrics = worker.step(in_scope(rollouts, "tree"), 1)
    assert metrics["train/kl"] > 1e-4  # one model, but two routings


def test_replaying_its_own_choice_changes_no_bit_of_a_pass():
    model = mixture("deepseek_v2")
    worker = trainer(model, algorithm=CROSS_ENTROPY)
    forest = collate(in_scope(states(), "tree"))
    with record_routing(find_routers(model)) as recorder, worker.logprobs.context():
        again = worker.logprobs(forest).logprob
        own = recorder.take().astype(np.int32)
    with worker.logprobs.context():
        replayed = worker.logprobs(replace(forest, routed_experts=own)).logprob
        others = worker.logprobs(replace(forest, routed_experts=(own + 1) % 8)).logprob
    assert torch.equal(again, replayed)
    assert not torch.allclose(again, others, atol=1e-3)


def test_a_run_records_stores_and_replays(tmp_path):
    config = make_config(
        tmp_path,
        tmp_path / "run",
        engine={"record_experts": True},
        train={"num_steps": 2, "replay_experts": True},
    )
    tokenizer = byte_tokenizer()
    model = mixture(vocab_size=len(tokenizer), norm_topk_prob=False)
    report = start(config, parts=build_parts(config, model=model, tokenizer=tokenizer))
    for step in report.metrics:
        assert 0.7 < step["routing/replayed_share"] < 1  # not the last token of each rollout
        assert step["train/sampling/sampling_logp_difference/mean"] < 1e-4


class Conversations(LetterSource):
    """Three turns; after the first, those of a step wait for the weights that it begins with."""

    def __init__(self, engine, per_step, apart):
        super().__init__(num_turns=3, apart=apart)
        self.engine, self.per_step, self.groups = engine, per_step, []

    async def run_request(self, request, client):
        """Answers of different lengths, so that slots are freed and swapped all the time."""
        size = 4 + 5 * (request.sampling_seed % 5)
        sampling = replace(request.sampling, max_tokens=size)
        return await super().run_request(replace(request, sampling=sampling), client)

    async def before_turn(self, request, turn):
        if request.group_id not in self.groups:
            self.groups.append(request.group_id)
        version = self.groups.index(request.group_id) // self.per_step
        if turn:
            await until(lambda: self.engine.version >= version, f"version {version}")


@pytest.mark.parametrize(("ahead", "scope"), [(0, "turn"), (1, "tree"), (1, "turn")])
def test_as_many_conversations_as_slots_agree_as_without_replay(tmp_path, ahead, scope):
    """Every token of the current weights does, also if these came in mid-conversation.

    In the scope "turn" each turn is a rollout's trajectory of its own, which stores all experts.
    """
    config = make_config(
        tmp_path,
        tmp_path / "run",
        engine={"record_experts": True, "max_batch": 6, "max_context": 256},
        sampling={"max_tokens": 24},
        optim={"lr": 1e-2},
        train={"num_steps": 3, "replay_experts": True, "async_steps": ahead, "scope": scope},
    )
    model = mixture(vocab_size=len(byte_tokenizer()), norm_topk_prob=False)
    parts = build_parts(config, model=model, tokenizer=byte_tokenizer())
    report = start(config, Conversations(parts.engine, 2, scope == "turn"), parts=parts)
    for step in report.metrics:
        assert step["train/sampling/sampling_logp_difference/max"] < ROUNDED
        assert step["train/sampling/sampling_logp_difference/mean"] < ROUNDED / 10
    assert all((0 < step["train/lag_mean"] < 1) == bool(ahead) for step in report.metrics[1:])


def test_a_run_that_would_have_nothing_to_replay_does_not_start(tmp_path):
    config = make_config(tmp_path, tmp_path / "run", train={"replay_experts": True})
    with pytest.raises(ConfigError, match=r"Set engine\.record_experts = true"):
        build_parts(config)
    with pytest.raises(ConfigError, match="enable-return-routed-experts"):
        make_config(
            tmp_path,
            tmp_path / "run",
            engine={
                "kind": "servers",
                "urls": ["http://x"],
                "max_batch": 64,
                "max_context": None,
                "record_experts": True,
            },
        )


def test_with_a_perturbed_router_trainer_and_engine_agree_better():
    row = load("routing_replay").measure("deepseek_v3", "router +-3 %", 4)
    assert row["other_experts"] > 0.005
    assert row["replayed"]["mean"] < 0.5 * row["own"]["mean"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_router_logits": True}, r"output_router_logits = True, router_aux_loss_coef = 0"),
        ({"z_loss_coefficient": 0.1}, "z_loss_coefficient to 0 in"),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, None),
        ({}, None),
    ],
)
def test_an_auxiliary_loss_that_would_not_be_trained_is_refused(changes, message):
    model = mixture()
    for name, value in changes.items():
        setattr(model.config, name, value)
    if message is None:
        assert trainer(model)
        return
    with pytest.raises(ConfigError, match=message):
        trainer(model)
