"""Logits that are capped, scaled or cut off after the output embedding."""

import copy
from functools import partial

import pytest
import torch
from training_kit import Call, check_exact, flat, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from rolltree.training import forward
from rolltree.training.forward import LogprobModel
from rolltree.training.head import LARGE_LOGIT, head_logits
from rolltree.training.layout import collate
from rolltree.training.logprobs import gather_logprobs
from rolltree.training.models.lora import adapters_off, add_adapter
from rolltree.training.sections import ModelSection
from rolltree.values.errors import TrainingError

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
SHAPED = {
    "nanochat": {},
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "gemma4_text": {"final_logit_softcapping": 3.0, "vocab_size_per_layer_input": 61},
    "vaultgemma": {"final_logit_softcapping": 3.0},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "logits_soft_cap": 3.0},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "granite": {"logits_scaling": 4.0},
    "minicpm3": {**MLA, "v_head_dim": 8, "dim_model_base": 8},
    "hyperclovax": {"logits_scaling": 4.0},
    "falcon_h1": {"lm_head_multiplier": 3.0, "mamba_n_heads": 4, "mamba_d_ssm": 32},
}


def shaped(kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **SHAPED[kind]})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.02)
    return model


def grow(model):
    """Make logits far larger than any cap, as training does."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2500)


def gradient(model, total):
    model.zero_grad()
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def naive(model, calls):
    """The sum of logprobs, one call at a time through the whole model."""
    total = 0.0
    for call in calls:
        ids = torch.tensor([call.prompt + call.completion])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0] / call.temperature
        picked = logits.log_softmax(-1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        total = total + picked[len(call.prompt) - 1 :].sum()
    return total


CALLS = [Call([3, 4, 5], [6, 7, 9]), Call([8, 2], [1, 60], temperature=0.7)]


@pytest.mark.parametrize("kind", SHAPED)
def test_the_gradient_is_that_of_the_logits_the_model_makes(kind, monkeypatch):
    model = shaped(kind)
    monkeypatch.setattr(forward, "gather_logprobs", partial(gather_logprobs, chunk_rows=2))
    read = LogprobModel(model, "rows")  # judges the fresh model, with small logits
    grow(model)
    forest = collate([flat(call) for call in CALLS])
    ours = gradient(model, read(forest).logprob.sum())
    model.double()
    check_exact(ours, gradient(model, naive(model, CALLS)))


def test_the_kl_is_to_the_capped_distribution_of_the_teacher():
    model, teacher = tiny_model(), shaped("gemma2")
    grow(teacher)
    ids = torch.tensor([CALLS[0].prompt + CALLS[0].completion])[:, :-1]
    forest = collate([flat(CALLS[0])])
    got = LogprobModel(model)(forest, teacher=LogprobModel(teacher, "rows"))
    p, q = (
        m(input_ids=ids, use_cache=False).logits[0, 2:].log_softmax(-1) for m in (model, teacher)
    )
    expected = (p.exp() * (p - q)).sum(-1)
    assert torch.allclose(got.kl, expected, rtol=1e-4)


def test_the_model_is_not_changed_by_asking_its_head():
    model = shaped("cohere")
    before = dict(model._modules)
    logits = head_logits(model, torch.randn(4, 32))
    assert logits.shape == (4, 61)
    assert dict(model._modules) == before


class TestRefused:
    """What a model does to its logits outside its own forward pass is not known here."""

    def wrapped(self, change):
        model = tiny_model()
        inner = model.forward

        def forward(*args, **kwargs):
            out = inner(*args, **kwargs)
            out.logits = change(out.logits)
            return out

        model.forward = forward
        return model

    def test_a_scale(self):
        with pytest.raises(TrainingError, match="does more to its logits"):
            LogprobModel(self.wrapped(lambda logits: logits * 2))

    def test_a_cap_that_only_large_logits_meet(self):
        with pytest.raises(TrainingError, match="once they are large"):
            LogprobModel(self.wrapped(lambda logits: logits.clamp(-LARGE_LOGIT / 2, 150)))

    def test_a_head_that_looks_at_other_positions(self):
        with pytest.raises(TrainingError, match="does more to its logits"):
            LogprobModel(self.wrapped(lambda logits: logits.cumsum(1)))

    def test_a_model_that_cannot_be_asked(self):
        def broken(logits):
            raise ZeroDivisionError("no head")

        with pytest.raises(TrainingError, match=r"ZeroDivisionError.*no head"):
            LogprobModel(self.wrapped(broken))


def test_a_teacher_below_adapters_has_its_head_below_them_too():
    """ModernBERT's decoder computes a dense layer after its body, which has an adapter as well."""
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in SIZES if name != "num_key_value_heads"}
    kind = AutoConfig.for_model("modernbert-decoder", **sizes)
    model = AutoModelForCausalLM.from_config(kind).eval()
    plain = copy.deepcopy(model)
    add_adapter(model, ModelSection(lora_rank=2), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    student, teacher = LogprobModel(model, "rows"), LogprobModel(plain, "rows")
    below = LogprobModel(model, "rows")
    below.around = partial(adapters_off, model)
    forest = collate([flat(Call(list(range(5, 20)), list(range(30, 40))))])
    with student.context():
        found = student(forest, teacher=below).kl
        expected = student(forest, teacher=teacher).kl
    assert expected.max() > 0.1
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
