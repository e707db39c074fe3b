import numpy as np
import pytest
import torch
from hybrid_kit import HYBRIDS, ONE_PER_KERNEL, bushy, tiny_hybrid, without_casts
from training_kit import FLOAT32, Call, check_exact, difference, flat, tree

from rolltree.training.forward import LogprobModel
from rolltree.training.layout import collate
from rolltree.training.models.recompute import recomputation
from rolltree.training.models.recurrent_layers import recurrent_layers
from rolltree.training.tree_attention import tree_attention
from rolltree.training.tree_support import why_not_tree
from rolltree.values.errors import TrainingError

one_per_kernel = pytest.mark.parametrize("kind", ONE_PER_KERNEL)


def gradient(model, packs, forward="tree", dtype=torch.float32):
    """d(sum of weighted logprobs) / d(parameter), by name."""
    model.zero_grad()
    run = LogprobModel(model, forward, compute_dtype=dtype)
    for pack in packs:
        with run.context():
            forest = collate(pack)
            weight = torch.from_numpy(forest.records.advantage)
            (run(forest).logprob * weight).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def joined(gradients):
    return torch.cat([gradient.flatten().double() for gradient in gradients.values()])


@pytest.mark.parametrize("kind", HYBRIDS)
def test_gradients_are_those_of_each_call_alone(kind, monkeypatch):
    model = tiny_hybrid(kind)
    assert why_not_tree(model) is None
    calls = bushy() if kind in ONE_PER_KERNEL else bushy(8)[2:9]
    one_by_one = [[flat(call)] for call in calls]
    forest = [[tree(calls[:-3]), flat(calls[-3]), tree(calls[-2:])]]
    ours = gradient(model, forest)
    model.double()
    ours64 = gradient(model, forest)
    without_casts(monkeypatch, model)
    exact = gradient(model, one_by_one, "rows")
    check_exact(joined(ours), joined(exact))
    assert ours64.keys() == exact.keys()
    for name in exact:  # norms and the like are float32 inside
        if float(exact[name].norm()) > 1e-6 * float(joined(exact).norm()):
            assert difference(ours64[name], exact[name]) < 1e-5, name


@one_per_kernel
def test_gradient_checkpointing_gives_the_same_gradient(kind):
    model = tiny_hybrid(kind)
    plain = gradient(model, [[tree(bushy())]])
    with recomputation(model):
        again = gradient(model, [[tree(bushy())]])
    assert difference(joined(again), joined(plain)) < FLOAT32


@pytest.mark.parametrize("kind", ["lfm2", "nemotron_h", "mamba"])  # without experts to choose
def test_bf16_compute_keeps_fp32_gradients(kind):
    model = tiny_hybrid(kind)
    exact = gradient(model, [[tree(bushy())]])
    rough = gradient(model, [[tree(bushy())]], dtype=torch.bfloat16)
    assert {grad.dtype for grad in rough.values()} == {torch.float32}
    assert 1e-6 < difference(joined(rough), joined(exact)) < 0.2


@one_per_kernel
def test_a_branch_is_blind_to_its_siblings(kind):
    model = tiny_hybrid(kind)
    run = LogprobModel(model)
    left, right = Call([3, 4], [5, 6, 7]), Call([3, 4], [8, 9, 10], rollout=1)

    def logprobs(samples):
        with torch.no_grad(), run.context():
            return run(collate(samples)).logprob.numpy()

    for other in ([8, 9, 10], [8], [9, 50, 51, 52, 53]):
        got = logprobs([tree([left, Call([3, 4], other, rollout=1)]), flat(right)])
        np.testing.assert_allclose(got[:3], logprobs([flat(left)]), atol=1e-4)
        np.testing.assert_allclose(got[-3:], logprobs([flat(right)]), atol=1e-4)


@one_per_kernel
def test_the_model_is_itself_again_afterwards(kind):
    model = tiny_hybrid(kind)
    ids = torch.tensor([[1, 2, 3, 4]])
    before = model(ids, use_cache=False).logits
    gradient(model, [[tree(bushy())]])
    assert not any("forward" in vars(layer) for layer in recurrent_layers(model))
    assert torch.equal(model(ids, use_cache=False).logits, before)


@one_per_kernel
def test_a_layer_without_the_layout_does_not_run(kind):
    model = tiny_hybrid(kind)
    with tree_attention(model), pytest.raises(TrainingError, match="did not"):
        model(torch.tensor([[1, 2, 3]]), use_cache=False)
