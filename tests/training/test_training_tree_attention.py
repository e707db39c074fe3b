from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_training_layout import (
    depths,
    forests,
    patterns,
    seen_by_definition,
    seen_with_pattern,
)
from torch.nn.functional import scaled_dot_product_attention
from training_kit import (
    FLOAT32,
    Call,
    check_exact,
    difference,
    flat,
    gradient_of,
    group,
    states,
    tiny_model,
    trainer,
    tree,
)

from rolltree.samples import build_samples, prune_sample
from rolltree.training import forward
from rolltree.training import tree_attention as room
from rolltree.training.forward import LogprobModel, choose_forward
from rolltree.training.layout import Pattern, collate
from rolltree.training.logprobs import gather_logprobs
from rolltree.training.tree_blocks import TreeLayout, forest_attention
from rolltree.training.tree_support import check_tree_support, why_not_tree
from rolltree.values.errors import ConfigError, TrainingError


def layout_of(end, max_block):
    return TreeLayout(end, depths(end), max_block=max_block)


def dense(inputs, seen, scale, softcap=None, sinks=None):
    """Attention as its formula says, over every pair: `[1, _T, _H, e]`."""
    q, k, v = inputs
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~torch.from_numpy(seen), float("-inf"))
    if sinks is not None:
        column = sinks[None, :, None, None].expand(1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : len(seen)]
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)


@given(
    forests(),
    st.integers(1, 9),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    patterns(),
    st.sampled_from([None, 0.7]),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_attention_and_gradients_equal_the_dense_mask(
    end, max_block, heads, pattern, softcap, has_sinks
):
    torch.manual_seed(len(end))
    num_heads, num_kv = heads
    shapes = [(1, num_heads, len(end), 5), (1, num_kv, len(end), 5), (1, num_kv, len(end), 4)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    sinks = torch.randn(num_heads, dtype=torch.float64, requires_grad=True) if has_sinks else None
    wrt = [*inputs, sinks] if has_sinks else inputs
    expected = dense(inputs, seen_with_pattern(end, pattern), 0.9, softcap, sinks)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), wrt)
    extras = {"pattern": pattern, "softcap": softcap, "sinks": sinks}
    got = forest_attention(*inputs, layout_of(end, max_block), 0.9, **extras)
    assert got.shape == expected.shape
    assert difference(got.detach(), expected.detach()) < 1e-12
    for ours, theirs in zip(torch.autograd.grad((got * weight).sum(), wrt), wanted, strict=True):
        assert difference(ours, theirs) < 1e-12 or float(theirs.norm()) < 1e-12


@pytest.mark.parametrize("max_block", [1, 2, 64])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_pass_torchs_own_check(max_block, softcap):
    torch.manual_seed(0)
    end = np.array([7, 7, 5, 4, 5, 7, 7], np.int32)
    shapes = [(1, 4, 7, 3), (1, 2, 7, 3), (1, 2, 7, 3), (4,)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    layout = layout_of(end, max_block)
    extras = {"pattern": Pattern(window=2), "softcap": softcap}
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: forest_attention(q, k, v, layout, 0.5, sinks=s, **extras), inputs
    )


def test_a_path_with_a_window_is_not_seen_whole():
    end = np.full(9, 9, np.int32)
    inputs = [torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3)]
    got = forest_attention(*inputs, layout_of(end, 4), 0.5, pattern=Pattern(window=3))
    expected = dense(inputs, seen_with_pattern(end, Pattern(window=3)), 0.5)
    assert difference(got, expected) < 1e-12
    whole = forest_attention(*inputs, layout_of(end, 4), 0.5, pattern=Pattern(window=9))
    assert difference(whole, dense(inputs, seen_by_definition(end), 0.5)) < 1e-12
    assert difference(whole, expected) > 0.1


def test_values_may_be_wider_or_narrower_than_keys():
    end = np.array([5, 5, 3, 5, 5], np.int32)
    q, k = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
    v = torch.randn(1, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    got = forest_attention(q, k, v, layout_of(end, 2), 1.0)
    seen = torch.from_numpy(seen_by_definition(end))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0).transpose(1, 2)
    assert got.shape == (1, 5, 2, 6)
    assert difference(got.detach(), expected.detach()) < 1e-12
    (ours,) = torch.autograd.grad(got.sum(), v, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected.sum(), v)
    assert difference(ours, theirs) < 1e-12


def test_a_token_is_blind_to_other_branches():
    """Changing one branch changes nothing in its sibling, forward or backward."""
    model = tiny_model()
    left, right = Call([3, 4], [5, 6, 7]), Call([3, 4], [8, 9, 10], rollout=1)
    run = LogprobModel(model)

    def logprobs(other):
        with torch.no_grad(), run.context():
            got = run(collate([tree([left, other])]))
        return got.logprob[:3]

    changed = Call([3, 4], [8, 50, 51, 52, 53], rollout=1)
    assert torch.allclose(logprobs(right), logprobs(changed), atol=FLOAT32)
    assert torch.allclose(logprobs(right), logprobs(left), atol=FLOAT32)


def test_scores_far_apart_do_not_overflow():
    end = np.array([6, 6, 4, 4, 6, 6], np.int32)
    q, k, v = (200 * torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    got = forest_attention(q, k, v, layout_of(end, 2), 1.0)
    expected = scaled_dot_product_attention(
        q, k, v, attn_mask=torch.from_numpy(seen_by_definition(end)), scale=1.0
    )
    assert torch.isfinite(got).all()
    assert difference(got, expected.transpose(1, 2)) < 1e-9
    single = forest_attention(q.float(), k.float(), v.float(), layout_of(end, 2), 1.0)
    assert torch.isfinite(single).all()


def gradient(model, samples, forward="tree", dtype=torch.float32):
    """d(sum of weighted logprobs) / d(parameters), pack by pack."""
    model.zero_grad()
    run = LogprobModel(model, forward, compute_dtype=dtype)
    total = 0.0
    for pack in samples:
        with run.context():
            forest = collate(pack)
            got = run(forest)
            loss = (got.logprob * torch.from_numpy(forest.records.advantage)).sum()
            loss.backward()
            total += float(loss.detach())
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]), total


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("shape", [(4, 20, 2), (8, 100, 1), (3, 4, 4)])
def test_tree_gradients_equal_row_by_row_training(kind, shape):
    model = tiny_model(kind)
    calls = group(*shape)
    _, loss = gradient(model, [[flat(call)] for call in calls], "rows")
    ours, tree_loss = gradient(model, [[tree(calls)]])
    assert tree_loss == pytest.approx(loss, rel=FLOAT32)
    exact, _ = gradient(model.double(), [[flat(call)] for call in calls], "rows")
    check_exact(ours, exact)
    for pack in ([tree(calls)], [prune_sample(tree(calls))], [flat(call) for call in calls]):
        assert difference(gradient(model, [pack])[0], exact) < FLOAT32  # norms are float32 inside


def test_the_law_is_about_float64_and_allows_what_float32_rounds():
    """On some CPUs rows round more than trees do: 5.5e-5 and 1.4e-5 of SmolLM2's gradient."""
    rng = np.random.default_rng(0)
    exact = torch.from_numpy(rng.normal(size=2000))
    rows = (exact * (1 + torch.from_numpy(5.5e-5 * rng.normal(size=2000)))).float()
    check_exact(rows, exact)
    with pytest.raises(AssertionError):
        check_exact(rows * 1.01, exact)


def test_packs_of_trees_and_paths_give_the_same_gradient():
    model = tiny_model()
    one, two = group(3, 12, 2, seed=1), group(4, 9, 1, seed=2)
    packed, _ = gradient(model, [[tree(one), flat(two[0]), tree(two[1:])]])
    exact, _ = gradient(model.double(), [[flat(call)] for call in one + two], "rows")
    check_exact(packed, exact)


def test_small_chunks_of_logits_change_nothing(monkeypatch):
    model = tiny_model()
    calls = group(4, 10, 2)
    for call in calls[::2]:
        call.temperature = 0.7
    whole, loss = gradient(model, [[tree(calls)]])
    monkeypatch.setattr(forward, "gather_logprobs", partial(gather_logprobs, chunk_rows=3))
    chunked, chunked_loss = gradient(model, [[tree(calls)]])
    assert difference(chunked, whole) < FLOAT32
    assert chunked_loss == pytest.approx(loss, rel=FLOAT32)


def test_logprobs_are_those_of_the_plain_model_at_their_temperature():
    model = tiny_model()
    call = Call([3, 4, 5], [6, 7], temperature=0.5)
    got = LogprobModel(model)(collate([flat(call)]))
    logits = model(torch.tensor([[3, 4, 5, 6]])).logits[0, 2:] / 0.5
    expected = logits.log_softmax(-1)
    assert torch.allclose(got.logprob, expected[[0, 1], [6, 7]], atol=FLOAT32)
    entropy = -(expected.exp() * expected).sum(-1)
    assert torch.allclose(got.entropy, entropy, atol=FLOAT32)
    assert not got.entropy.requires_grad


def test_bf16_compute_keeps_fp32_gradients():
    model = tiny_model()
    calls = group(4, 10, 1)
    exact, _ = gradient(model, [[tree(calls)]])
    rough, _ = gradient(model, [[tree(calls)]], dtype=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert 1e-6 < difference(rough, exact) < 0.2


def test_the_model_is_itself_again_afterwards():
    model = tiny_model()
    ids = torch.tensor([[1, 2, 3, 4]])
    before = model(ids).logits
    implementation = model.config._attn_implementation
    gradient(model, [[tree(group())]])
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(ids).logits, before)


def test_other_callers_of_the_registered_attention_get_sdpa():
    model = tiny_model()
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    before = model(ids, attention_mask=mask).logits
    model.config._attn_implementation = room.register_tree_attention(
        "sdpa"
    )  # as an engine thread sees it meanwhile
    assert torch.equal(model(ids, attention_mask=mask).logits, before)


def test_a_model_that_swallows_the_layout_is_refused():
    model = tiny_model()
    with room.tree_attention(model), pytest.raises(TrainingError, match="did not pass"):
        model(torch.tensor([[1, 2, 3]]))


def test_attention_extras_are_refused():
    model = tiny_model("llama", attention_dropout=0.5)
    run = LogprobModel(model)
    model.train()
    with pytest.raises(TrainingError, match="dropout"), run.context():
        run(collate([tree(group())]))
    q = torch.randn(1, 2, 3, 4)
    layout = layout_of(np.array([3, 2, 3], np.int32), 64)
    with pytest.raises(TrainingError, match="sliding_window"):
        room._attention(model, q, q, q, None, own="sdpa", tree_layout=layout, sliding_window=2)


def recurrent():
    """A model whose states are computed token by token inside its own code."""
    from transformers import AutoModelForCausalLM, RwkvConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"attention_hidden_size": 32, "intermediate_size": 48, "context_length": 256}
    return AutoModelForCausalLM.from_config(RwkvConfig(**sizes)).eval()


class TestSupport:
    def test_plain_models_are_supported(self):
        assert why_not_tree(tiny_model("qwen3")) is None
        assert why_not_tree(tiny_model("llama")) is None

    def test_layers_of_an_unknown_type_are_refused(self):
        model = tiny_model("qwen3")
        model.config.layer_types = ["heavily_compressed_attention", "full_attention"]
        with pytest.raises(TrainingError, match=r"heavily_compressed_attention.*interleave"):
            check_tree_support(model)

    def test_states_that_do_not_follow_a_tree_are_refused(self):
        assert "carry a state" in why_not_tree(recurrent())

    def test_the_probe_finds_what_the_configuration_hides(self):
        model = tiny_model()
        layer = model.model.layers[0].mlp.down_proj
        layer.register_forward_hook(lambda m, i, out: out + out.roll(1, dims=1))  # leaks neighbours
        assert "differ" in why_not_tree(model)

    def test_choosing_a_forward(self):
        model = tiny_model()
        assert choose_forward(model, "auto", "interleave") == "tree"
        assert choose_forward(model, "rows", "interleave") == "rows"
        with pytest.raises(ConfigError, match="cannot hold branches"):
            choose_forward(model, "rows", "tree")
        model.config.layer_types = ["linear_attention"] * 2
        assert choose_forward(model, "auto", "interleave") == "rows"
        with pytest.raises(TrainingError, match="linear_attention"):
            choose_forward(model, "auto", "tree")

    def test_rows_refuse_branches(self):
        with pytest.raises(TrainingError, match="branches"):
            gradient(tiny_model(), [[tree(group())]], "rows")


class TestOtherModels:
    """State that is not attention alone: refused for trees, trained in `interleave`."""

    def test_interleaved_rows_give_the_gradient_of_each_call_alone(self):
        model = recurrent()
        with pytest.raises(TrainingError, match=r"cannot be trained on token trees.*'interleave'"):
            trainer(model)
        rollouts = states(3)
        gradients = {}
        for scope in ("interleave", "step"):
            worker = trainer(model, train={"scope": scope})
            assert worker.logprobs.forward == "rows"
            built = build_samples(rollouts, scope).samples
            gradients[scope] = gradient_of(worker, built)
        assert difference(gradients["interleave"], gradients["step"]) < FLOAT32
        before = [p.clone() for p in model.parameters()]
        trainer(model, train={"scope": "interleave"}).step(built, 1)
        assert any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
