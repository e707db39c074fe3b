"""FlexAttention as far as a CPU goes: its mask, and its forward pass against the blocks'."""

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
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from training_kit import FLOAT32, config, difference, group, states, tiny_model, trainer, tree

from rolltree.samples import build_samples
from rolltree.training import forward
from rolltree.training.forward import LogprobModel, choose_forward
from rolltree.training.layout import Pattern, collate
from rolltree.training.models.tree_flex import flex_forest_attention, flex_mask
from rolltree.training.tree_blocks import forest_attention, tree_layout
from rolltree.values.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@given(forests(), st.sampled_from([2, 4, 7]))
@settings(max_examples=60, deadline=None)
def test_the_blocks_are_those_torch_finds_by_looking_at_every_pair(end, block):
    seen = torch.from_numpy(seen_by_definition(end))
    count = len(end)
    wanted = create_block_mask(
        lambda b, h, q, k: seen[q, k], 1, 1, count, count, device="cpu", BLOCK_SIZE=block
    )
    got = flex_mask(end, block=block)
    assert torch.equal(got.to_dense(), wanted.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    index = torch.arange(count)
    rule = got.mask_mod(None, None, index[:, None], index[None, :])
    assert torch.equal(rule, seen)


@given(forests(), st.sampled_from([2, 4, 7]), patterns())
@settings(max_examples=60, deadline=None)
def test_blocks_with_a_pattern_hide_no_pair_and_show_none(end, block, pattern):
    seen = torch.from_numpy(seen_with_pattern(end, pattern))
    mask = flex_mask(end, block=block, depth=depths(end), pattern=pattern)
    index = torch.arange(len(end))
    assert torch.equal(mask.mask_mod(None, None, index[:, None], index[None, :]), seen)
    computed = mask.to_dense()[0, 0].bool().repeat_interleave(block, 0).repeat_interleave(block, 1)
    assert not (seen & ~computed[: len(end), : len(end)]).any()
    whole = BlockMask.from_kv_blocks(
        mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=block
    ).to_dense()
    whole = whole[0, 0].bool().repeat_interleave(block, 0).repeat_interleave(block, 1)
    assert seen[whole[: len(end), : len(end)]].all()


@pytest.mark.parametrize("pattern", [Pattern(), Pattern(window=70), Pattern(chunk=90)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -1.0, 3.0, 0.5])])
def test_windows_caps_and_sinks_are_those_of_the_blocks(pattern, softcap, sinks):
    torch.manual_seed(0)
    forest = collate([tree(group(3, 150, 2, seed=1)), tree(group(2, 40, 3, seed=2))])
    shapes = [(1, num, forest.num_tokens, 16) for num in (4, 2, 2)]
    inputs = [torch.randn(shape) for shape in shapes]
    extras = {"pattern": pattern, "softcap": softcap, "sinks": sinks}
    got = forest_attention(*inputs, tree_layout(forest, flex=True), 0.5, **extras)
    expected = forest_attention(*inputs, tree_layout(forest), 0.5, **extras)
    assert difference(got, expected) < FLOAT32


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_the_forward_pass_is_that_of_the_blocks(heads):
    torch.manual_seed(0)
    forest = collate([tree(group(6, 150, 2, seed=1)), tree(group(2, 40, 3, seed=2))])
    num_heads, num_kv = heads
    shapes = [(1, num, forest.num_tokens, 16) for num in (num_heads, num_kv, num_kv)]
    query, key, value = (torch.randn(shape) for shape in shapes)
    assert forest.num_tokens > 2 * 128
    got = flex_forest_attention(query, key, value, flex_mask(forest.subtree_end), 0.3)
    expected = forest_attention(query, key, value, tree_layout(forest), 0.3)
    assert got.shape == expected.shape
    assert difference(got, expected) < FLOAT32


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_logprobs_of_a_model_are_the_same(kind):
    model = tiny_model(kind)
    samples = build_samples(states(5), "tree", group_key=lambda state: 0).samples
    forest = collate(samples)
    found = {}
    for name in ("tree", "tree_flex"):
        run = LogprobModel(model, name)
        with torch.no_grad(), run.context():
            found[name] = run(forest).logprob.numpy()
    np.testing.assert_allclose(found["tree_flex"], found["tree"], atol=FLOAT32)


class TestSetting:
    def test_a_cpu_is_refused_because_it_has_no_gradient(self):
        with pytest.raises(ConfigError, match="no gradient for FlexAttention"):
            trainer(train={"tree_attention": "flex"})

    def test_torch_has_none_indeed(self):
        """When this fails, the refusal can go."""
        model = tiny_model()
        run = LogprobModel(model, "tree_flex")
        with run.context(), pytest.raises(NotImplementedError, match="backward on CPU"):
            run(collate([tree(group())])).logprob.sum().backward()

    def test_rows_have_no_use_for_it(self):
        with pytest.raises(ConfigError, match="row by row"):
            choose_forward(tiny_model(), "rows", "interleave", "flex")

    def test_another_device_gets_it(self, monkeypatch):
        monkeypatch.setattr(forward, "_tree_or_rows", lambda *args: "tree")  # meta cannot be probed
        model = tiny_model().to("meta")
        assert choose_forward(model, "tree", "tree", "flex") == "tree_flex"
        assert choose_forward(model, "tree", "tree") == "tree"

    def test_unknown_kinds_are_refused(self):
        with pytest.raises(ConfigError, match="tree_attention"):
            config(train={"tree_attention": "dense"})
