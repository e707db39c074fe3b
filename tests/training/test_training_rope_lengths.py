"""Rotary angles that depend on the sequence's length: exact up to a length, refused beyond it."""

import pytest
import torch
from test_training_tree_attention import gradient
from training_kit import SIZES, Call, check_exact, flat, group, tree
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from rolltree.training.rope_lengths import longest_exact
from rolltree.training.tree_support import why_not_tree
from rolltree.values.errors import TrainingError

LIMIT = 32


def model_of(kind):
    """`original_max_position_embeddings`, or what stands for it, is `LIMIT`."""
    torch.manual_seed(0)
    if kind == "longrope":
        half = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
        settings = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * half,
            "long_factor": [float(2 + i) for i in range(half)],
        }
        extra = {
            "max_position_embeddings": 4 * LIMIT,
            "original_max_position_embeddings": LIMIT,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "initializer_range": 0.2,
        }
        config = Phi3Config(**{**SIZES, **extra}, rope_parameters=settings)
    else:
        settings = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        extra = {"max_position_embeddings": LIMIT}
        config = LlamaConfig(**{**SIZES, **extra}, rope_parameters=settings)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
class TestLengths:
    def test_the_model_is_not_causal_beyond_the_length(self, kind):
        """What stands first in a row has other logits when the row is longer: why it is refused."""
        model = model_of(kind)
        ids = torch.arange(LIMIT + 4)[None] * 7 % SIZES["vocab_size"]
        with torch.no_grad():
            within = [model(ids[:, :n], use_cache=False).logits[0, :16] for n in (16, LIMIT)]
            beyond = model(ids, use_cache=False).logits[0, :16]
        assert torch.allclose(*within, atol=1e-5)
        assert not torch.allclose(beyond, within[0], atol=1e-2)
        assert longest_exact(model) == (LIMIT, kind)

    def test_up_to_the_length_trees_are_exact(self, kind):
        model = model_of(kind)
        assert why_not_tree(model) is None
        calls = group(3, LIMIT - 16, 2, length=4)
        assert max(len(call.prompt + call.completion) for call in calls) <= LIMIT
        ours, _ = gradient(model, [[tree(calls)]])
        exact, _ = gradient(model.double(), [[flat(call)] for call in calls], "rows")
        check_exact(ours, exact)

    @pytest.mark.parametrize("forward", ["tree", "rows"])
    def test_beyond_it_every_scope_is_refused(self, kind, forward):
        model = model_of(kind)
        long = Call(list(range(LIMIT - 2)), [5, 6, 7])
        with pytest.raises(TrainingError, match=rf"{LIMIT + 1} tokens.*max_seq_len = {LIMIT}"):
            gradient(model, [[flat(long)]], forward)
        gradient(model, [[flat(Call(list(range(LIMIT - 2)), [5, 6]))]], forward)


def test_fixed_angles_have_no_limit():
    assert longest_exact(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))) is None
