"""Tokens that see what follows them would be trained on logprobs that nobody sampled with."""

import pytest
import torch
from training_kit import tiny_model
from transformers import AutoModelForCausalLM, CpmAntConfig, Gemma4TextConfig

from rolltree.training.forward import choose_forward
from rolltree.training.layout import FULL
from rolltree.training.tree_support import why_not_tree
from rolltree.values.errors import TrainingError

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_rows_of_a_model_that_looks_ahead_are_refused():
    """CPM-Ant's tokens see each other's segments before the end."""
    torch.manual_seed(0)
    config = CpmAntConfig(**SMALL, dim_head=8, dim_ff=32, prompt_length=4, prompt_types=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    for forward in ("rows", "auto"):
        with pytest.raises(TrainingError, match="changes with what follows them"):
            choose_forward(model, forward, "interleave")


def test_rows_of_a_causal_model_are_not():
    assert choose_forward(tiny_model(), "rows", "interleave") == "rows"


def test_layers_that_share_keys_are_trained_on_trees():
    """Gemma 4 cuts its masks where layers begin to reuse keys of earlier ones."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma4TextConfig(
        **{**SMALL, "num_hidden_layers": 4},
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=8,
        intermediate_size=32,
        layer_types=kinds,
        num_kv_shared_layers=2,
        sliding_window=8,
        vocab_size_per_layer_input=40,
        hidden_size_per_layer_input=4,
        pad_token_id=0,
    )
    assert why_not_tree(AutoModelForCausalLM.from_config(config).eval()) is None
    assert FULL[:, :, slice(0, None), :] is FULL
    with pytest.raises(TypeError, match="needs them all"):
        FULL[:, :, slice(-1, None), :]
