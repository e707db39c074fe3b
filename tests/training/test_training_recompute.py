"""Gradient checkpointing: the same gradient, and nothing that only training mode switches on."""

import pytest
import torch
from test_training_head import gradient
from training_kit import (
    FLOAT32,
    SIZES,
    difference,
    flat,
    gradient_of,
    group,
    tiny_model,
    trainer,
    tree,
)
from transformers import AutoConfig, AutoModelForCausalLM

from rolltree.training.forward import LogprobModel
from rolltree.training.layout import collate
from rolltree.training.models.recompute import recomputable_layers
from rolltree.values.errors import ConfigError

NOISY = {
    "opt": {"dropout": 0.3, "layerdrop": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "bloom": {"hidden_dropout": 0.3, "n_layer": 2, "n_head": 4},
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.3},
    "mixtral": {"router_jitter_noise": 0.3, "num_local_experts": 4, "sliding_window": None},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3, "num_local_experts": 4},
}


def noisy(kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, "pad_token_id": 0, **NOISY[kind]})
    return AutoModelForCausalLM.from_config(config)  # in training mode, as a user may give it


@pytest.mark.parametrize("kind", NOISY)
def test_what_training_mode_switches_on_stays_off(kind):
    model, sample = noisy(kind), flat(group(1, 30, 1)[0])
    sections = {"scope": "interleave", "forward": "rows"}
    exact = gradient_of(trainer(model, train=sections), [sample])
    saving = trainer(model, train={**sections, "gradient_checkpointing": True})
    for _ in range(2):
        assert difference(gradient_of(saving, [sample]), exact) < FLOAT32
    assert not any(module.training for module in model.modules())


def test_layers_run_again_in_the_backward_pass_and_only_in_the_context():
    model = tiny_model("llama")
    read, forest = LogprobModel(model), collate([tree(group(4, 30, 2))])
    with read.context():
        plain = gradient(model, read(forest).logprob.sum())
    read.recompute_layers()
    layers, runs = recomputable_layers(model), []
    assert len(layers) == 2
    layers[0].input_layernorm.register_forward_hook(lambda *_: runs.append(1))
    with read.context():
        total = read(forest).logprob.sum()
        assert len(runs) == 1
        assert difference(gradient(model, total), plain) < FLOAT32
    assert len(runs) == 2
    assert "forward" not in layers[0].__dict__


def test_a_layer_that_computes_something_else_the_second_time_is_refused():
    model = tiny_model()
    read = LogprobModel(model, "rows")
    noise = iter(range(1, 1000))
    model.model.layers[0].mlp.register_forward_hook(lambda m, i, out: out * (1 + 0.1 * next(noise)))
    with pytest.raises(ConfigError, match="different results when it is recomputed"):
        read.recompute_layers()


def test_a_model_without_such_layers_is_refused():
    model = tiny_model()
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(ConfigError, match="no layers that transformers can recompute"):
        LogprobModel(model, "rows").recompute_layers()


def test_a_layer_that_fails_the_second_time_is_refused():
    """Whatever it raises, the user reads one line of it."""
    model = tiny_model()
    read = LogprobModel(model, "rows")
    layer, calls = model.model.layers[0], []

    def once(module, inputs, output):
        calls.append(1)
        if torch.is_grad_enabled() and len(calls) > 1:
            raise RuntimeError("a shape that does not fit\nand more")
        return output

    layer.mlp.register_forward_hook(once)
    with pytest.raises(ConfigError, match=r"recomputed \(RuntimeError: a shape that does not"):
        read.recompute_layers()


def test_a_model_that_changes_its_embeddings_in_place_is_probed():
    model = tiny_model()
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda module, args: (args[0].add_(0.5), *args[1:]))
    LogprobModel(model, "rows").recompute_layers()
