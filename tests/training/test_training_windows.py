"""Models whose layers look back only so far, or have sinks or caps: gradients against float64."""

import numpy as np
import pytest
import torch
from test_training_tree_attention import gradient
from training_kit import SIZES, Call, check_exact, difference, flat, gradient_of, states, trainer
from training_kit import tree as tree_of
from transformers import AutoConfig, AutoModelForCausalLM

from rolltree.samples import build_samples
from rolltree.training.forward import LogprobModel
from rolltree.training.layout import Pattern, collate
from rolltree.training.tree_attention import tree_attention
from rolltree.training.tree_blocks import TreeLayout
from rolltree.training.tree_support import why_not_tree
from rolltree.values.errors import TrainingError

WINDOW = 20
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWED = {"sliding_window": WINDOW, "head_dim": 8}
MIXED = {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}
CAPS = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}
CHUNKS = {
    "head_dim": 8,
    "attention_chunk_size": WINDOW,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "floor_scale": 7,
    "attn_scale": 0.5,
    "intermediate_size_mlp": 48,
    **EXPERTS,
}
MODELS = {
    "gemma2": {**MIXED, **CAPS},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 8},
    "gpt_oss": {**MIXED, **EXPERTS},
    "mistral": WINDOWED,
    "phi3": {**WINDOWED, "pad_token_id": 0, "eos_token_id": 1},
    "qwen2": {**WINDOWED, "use_sliding_window": True, "max_window_layers": 1},
    "olmo3": MIXED,
    "exaone4": MIXED,
    "cohere2": MIXED,
    "llama4_text": CHUNKS,
    "smollm3": {**MIXED, "use_sliding_window": True, "no_rope_layers": [1, 0], "pad_token_id": 0},
    "granite_swa": MIXED,
}
"""Model type -> its configuration beside `SIZES`."""


def model_of(kind):
    """Random weights, all of them moved away from what initialisation gives them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind]})
    config._experts_implementation = "eager"  # the others have no float64
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def calls_of(seed=0):
    """Paths of up to 150 tokens that branch from each other farther and nearer than a window."""
    rng = np.random.default_rng(seed)

    def words(count):
        return rng.integers(0, SIZES["vocab_size"], count).tolist()

    trunk = words(135)
    made = [Call(trunk, words(4)), Call(trunk, words(WINDOW + 3)), Call(trunk[:132], words(6))]
    made += [Call(trunk[:70], words(count)) for count in (1, 3, WINDOW - 1, 80)]
    deeper = made[-1].prompt + made[-1].completion[:76]
    made += [Call(deeper, words(3)), Call(trunk[:8], words(2))]
    for rollout, call in enumerate(made):
        call.rollout, call.advantage = rollout, float(np.float32(rng.normal()))
    return made


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_each_call_alone(kind):
    model = model_of(kind)
    assert why_not_tree(model) is None
    calls = calls_of()
    one_by_one = [[flat(call)] for call in calls]
    forest = [[tree_of(calls[:7]), flat(calls[7]), tree_of(calls[8:])]]
    ours, _ = gradient(model, forest)
    paths, _ = gradient(model, one_by_one)
    exact, _ = gradient(model.double(), one_by_one, "rows")
    check_exact(ours, exact)
    check_exact(paths, exact)


def test_the_window_matters_here():
    """Without it the gradient is another one, so the test above can fail."""
    windowed, full = model_of("mistral"), model_of("mistral")
    full.config.sliding_window = None
    calls = calls_of()
    ours, _ = gradient(windowed, [[tree_of(calls)]])
    theirs, _ = gradient(full, [[tree_of(calls)]])
    assert difference(ours, theirs) > 0.05


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
def test_every_scope_gives_the_same_gradient(kind):
    model = model_of(kind)
    worker = trainer(model)
    rollouts = states(3, model=model)
    found = {}
    for scope in ("step", "interleave", "tree"):
        key = {"group_key": lambda state: 0} if scope == "tree" else {}
        found[scope] = gradient_of(worker, build_samples(rollouts, scope, **key).samples)
    for scope in ("interleave", "tree"):
        assert difference(found[scope], found["step"]) < 1e-4


def test_what_the_model_had_before_attends_elsewhere():
    """An engine that decodes with the same configuration meanwhile keeps sinks and windows."""
    import threading

    model = model_of("gpt_oss")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        found = []
        with tree_attention(model):
            other = threading.Thread(
                target=lambda: found.append(model(ids, use_cache=False).logits.detach())
            )
            other.start()
            other.join()
    assert torch.equal(found[0], before)


class TestRefusals:
    def refused(self, module, mask=None, **kwargs):
        layout = TreeLayout(np.array([3, 2, 3], np.int32), np.array([0, 1, 1], np.int32))
        inputs = [torch.randn(1, 4, 3, 8) for _ in range(3)]
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        model = model_of("mistral")
        with tree_attention(model):
            attend = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
            with pytest.raises(TrainingError) as caught:
                attend(module, *inputs, mask, tree_layout=layout, **kwargs)
        return str(caught.value)

    def test_what_the_blocks_do_not_compute(self):
        module = torch.nn.Linear(1, 1)
        assert "position_bias" in self.refused(module, position_bias=torch.zeros(1))
        assert "dropout" in self.refused(module, dropout=0.1)
        assert "its own attention mask" in self.refused(module, torch.zeros(1, 1, 3, 3))
        assert "sliding_window of 2" in self.refused(module, sliding_window=2)
        assert "sliding_window of 2" in self.refused(module, Pattern(window=3), sliding_window=2)
        assert "after them" in self.refused(module, is_causal=False)
        module.is_causal = False
        assert "after them" in self.refused(module)

    @pytest.mark.parametrize("name", ["or_mask_function", "and_mask_function"])
    def test_masks_of_unknown_parts(self, name):
        from transformers.masking_utils import create_causal_mask

        model = model_of("mistral")
        other = {name: lambda batch, head, query, key: key < 2}
        embeds = torch.zeros(1, 3, 32)
        with tree_attention(model), pytest.raises(TrainingError, match="attention mask that is"):
            create_causal_mask(model.config, embeds, None, None, **other)

    def test_a_mask_that_looks_ahead(self):
        from transformers.masking_utils import create_bidirectional_mask

        model = model_of("mistral")
        with tree_attention(model), pytest.raises(TrainingError, match="attention mask that is"):
            create_bidirectional_mask(model.config, torch.zeros(1, 3, 32), None)

    def test_doge_chooses_keys_by_its_weights(self):
        config = AutoConfig.for_model("doge", **SIZES, keep_window_size=4, is_moe=False)
        model = AutoModelForCausalLM.from_config(config).eval()
        assert "its own attention mask" in why_not_tree(model)


def test_windows_are_read_from_the_masks_that_models_ask_for():
    """Packed positions, as a tree has, wrap the mask; the pattern is found inside."""
    from transformers.masking_utils import (
        create_causal_mask,
        create_chunked_causal_mask,
        create_sliding_window_causal_mask,
    )

    model = model_of("mistral")
    model.config.attention_chunk_size = 9
    positions = torch.tensor([[0, 1, 2, 1, 2]])
    args = (model.config, torch.zeros(1, 5, 32), None, None)
    with tree_attention(model):
        for given in (None, positions):
            windowed = create_sliding_window_causal_mask(*args, position_ids=given)
            assert windowed == Pattern(window=WINDOW)
            assert create_chunked_causal_mask(*args, position_ids=given) == Pattern(chunk=9)
            assert create_causal_mask(*args, position_ids=given) is None


def test_a_path_longer_than_the_window_is_not_taken_for_a_full_one():
    model = model_of("gemma3_text")
    call = calls_of()[1]
    run = LogprobModel(model)
    with torch.no_grad(), run.context():
        found = run(collate([flat(call)])).logprob
    ids = torch.tensor([call.prompt + call.completion])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(call.prompt) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(call.completion)[:, None])[:, 0]
    assert torch.allclose(found, wanted, atol=1e-4)
