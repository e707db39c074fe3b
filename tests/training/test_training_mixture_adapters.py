"""Adapters in mixtures and in GPT-2: what is served and exported is what is trained."""

import asyncio
import copy
from functools import partial

import numpy as np
import peft
import pytest
import torch
import transformers
from loop_kit import make_config, make_model
from tests_models.architectures import make_model as make_row
from training_kit import FLOAT32, LetterSource
from transformers import AutoConfig, AutoModelForCausalLM

from rolltree.inference.models import load_model
from rolltree.training import (
    Checkpoints,
    Trainer,
    build_parts,
    export_model,
    load_train_config,
    open_run,
    run_training,
)
from rolltree.training.checkpoint_formats import trained_tensors, write_full
from rolltree.training.checkpoint_reading import read_weights
from rolltree.training.models.lora import adapters_off, add_adapter, check_copy
from rolltree.training.models.plain_weights import ADAPTER_FILE, copy_weights, plain_tensors
from rolltree.values.errors import ConfigError, TrainingError
from rolltree.values.types import GenerateRequest, SamplingParams

VOCAB = 99
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
SHARED = {**SIZES, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
KINDS = {
    "deepseek_v2": {**SHARED, **MLA, "topk_method": "greedy"},
    "deepseek_v3": {**SHARED, **MLA},
    "glm4_moe": {**SHARED, "head_dim": 8, "n_group": 1, "topk_group": 1},
    "dots1": {**SHARED, "head_dim": 8, "n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {
        **SIZES,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "qwen2_moe": {**SIZES, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**SIZES, "num_experts": 4, "head_dim": 8},
    "mixtral": {**SIZES, "num_local_experts": 4},
    "gpt_oss": {**SIZES, "num_local_experts": 4, "head_dim": 8, "rope_parameters": None},
    "llama4_text": {**SIZES, "num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
READ_BY_PEFT = {"qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "llama4_text", "gpt2"}
LEFT_OUT = {  # -> what has no adapter unless it is named: only its weight is read
    "jamba": {"dt_proj"},
    "mamba": {"dt_proj"},
    "longcat_flash": {"classifier"},
    "zamba": set(),  # layers that share their attention share its adapters
    "falcon": set(),  # a linear layer of its own class
    "emu3": set(),  # transformers has no model for its configuration
    "laguna": set(),  # peft renames its shared experts when it reads them
}
REFUSED_BY_PEFT = {"mamba", "longcat_flash", "laguna"}
IDS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))


def made(kind, **changes):
    torch.manual_seed(0)
    sizes = {**KINDS[kind], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changes}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float().eval()


def adapted(kind, *targets, model=None):
    """Return a model with adapters away from 0, and a copy of what is below them."""
    model = model or made(kind)
    plain = copy.deepcopy(model)
    config = load_train_config({"model": {"lora_rank": 2, "lora_targets": list(targets)}})
    add_adapter(model, config.model, 0)
    check_copy(model, copy.deepcopy(plain))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".lora_B." in name:
                tensor.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return model, plain


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def targets_of(kind):
    return ((), ("c_proj",)) if kind == "gpt2" else ((), ("down_proj",))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_the_copy_and_the_export_compute_what_is_trained(kind, tmp_path):
    from peft import PeftModel

    for number, targets in enumerate(targets_of(kind)):
        model, served = adapted(kind, *targets)
        wanted, before = logits(model), logits(served)
        assert (wanted - before).abs().amax() > 0.05
        base = tmp_path / f"base-{number}"
        served.save_pretrained(base)
        with adapters_off(model):
            assert torch.allclose(logits(model), before, atol=FLOAT32, rtol=0)
        copy_weights(model, served)
        assert torch.allclose(logits(served), wanted, atol=FLOAT32, rtol=0)
        if number:
            break
        path = export_model(model, None, tmp_path / f"{number}" / "model")
        exported = AutoModelForCausalLM.from_pretrained(path)
        assert torch.allclose(logits(exported), wanted, atol=FLOAT32, rtol=0)
        folder = tmp_path / f"{number}" / "adapter"
        assert folder.is_dir() == (kind in READ_BY_PEFT)
        if folder.is_dir():
            below = AutoModelForCausalLM.from_pretrained(base)
            read = PeftModel.from_pretrained(below, folder)
            assert torch.allclose(logits(read), wanted, atol=FLOAT32, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LEFT_OUT)
def test_default_adapters_are_those_that_work(kind, tmp_path):
    from peft import PeftModel

    model, served = adapted(kind, model=make_row(kind))
    plain = copy.deepcopy(served)
    wanted = logits(model)
    linear = {
        n.rpartition(".")[2] for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear)
    }
    with_adapter = {n.split(".lora_")[0].rpartition(".")[2] for n in trained_tensors(model)}
    assert linear - with_adapter == {*LEFT_OUT[kind], "lm_head"}
    copy_weights(model, served)
    effect = float((wanted - logits(plain)).abs().amax())
    assert effect > 0.05
    same = partial(torch.allclose, atol=1e-2 * effect, rtol=0)  # any one adapter does more
    assert same(logits(served), wanted)
    export_model(model, None, tmp_path / "model")
    assert (tmp_path / "adapter").is_dir() == (kind not in REFUSED_BY_PEFT)
    if kind not in REFUSED_BY_PEFT:
        read = PeftModel.from_pretrained(plain, tmp_path / "adapter")
        assert same(logits(read), wanted)


@pytest.mark.parametrize("kind", ["jamba", "longcat_flash"])
def test_a_weight_that_is_read_past_its_layer_is_refused_if_it_is_named(kind):
    (target,) = LEFT_OUT[kind]
    with pytest.raises(ConfigError, match=f"the adapters of {target} as with a change"):
        adapted(kind, target, model=make_row(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_of_that_name_is_adapted(kind):
    everything, one = (adapted(kind, *targets)[0] for targets in targets_of(kind))
    before = made(kind).state_dict()
    moved = [
        {name for name, tensor in plain_tensors(model) if not tensor.equal(before[name])}
        for model in (everything, one)
    ]
    others = ("embed", "lm_head", "wte", "wpe", "bias", ".gate.weight", "router")
    weights = {
        name
        for name, tensor in before.items()
        if tensor.ndim > 1 and not any(part in name for part in others)
    }
    assert moved[0] == weights
    assert moved[1] == {n for n in weights if targets_of(kind)[1][0] in n}


def test_a_layer_that_reads_its_weight_past_the_module_is_refused():
    model = made("qwen3_moe")
    attention = model.model.layers[1].self_attn

    class Past(type(attention)):
        """Multiplies with `q_proj.weight`, as fused kernels do."""

        def forward(self, *args, **kwargs):
            module = self.q_proj
            self.q_proj = torch.nn.Linear(1, 1, bias=False)
            self.q_proj.weight = getattr(module, "base_layer", module).weight
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.q_proj = module

    attention.__class__ = Past
    with pytest.raises(ConfigError, match=r"adapters of q_proj as with a change of the weights"):
        adapted("qwen3_moe", "q_proj", "k_proj", model=model)


def test_a_copy_that_would_keep_a_part_is_refused():
    model, served = adapted("qwen3_moe")
    served.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(TrainingError, match=r"1 tensors of the copy.* extra among them"):
        copy_weights(model, served)
    del served.extra, served.model.layers[1].mlp.experts.down_proj
    with pytest.raises(TrainingError, match=r"no tensor model.layers.1.mlp.experts.down_proj"):
        copy_weights(model, served)


def test_tied_layers_share_an_adapter():
    model = made("gpt2")
    block = model.transformer.h
    block[1].mlp.c_fc.weight = block[0].mlp.c_fc.weight
    model, served = adapted("gpt2", model=model)
    assert block[1].mlp.c_fc.lora_A is block[0].mlp.c_fc.lora_A
    copy_weights(model, served)
    assert torch.allclose(logits(served), logits(model), atol=FLOAT32, rtol=0)


def test_a_layer_that_is_tied_to_something_else_is_left_out_or_refused():
    def tied():
        model = made("gpt2")
        model.transformer.wpe.weight = model.transformer.h[1].mlp.c_proj.weight
        return model

    model, _ = adapted("gpt2", model=tied())
    blocks = model.transformer.h
    assert [hasattr(block.mlp.c_proj, "lora_A") for block in blocks] == [True, False]
    with pytest.raises(ConfigError, match=r"wpe.weight is used in several places"):
        adapted("gpt2", "c_proj", model=tied())


def test_what_can_have_an_adapter_is_said():
    with pytest.raises(ConfigError, match=r"'gate_proj', which is not .* of experts of Qwen3Moe"):
        adapted("qwen3_moe", "gate_proj")


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_after_a_run_the_exported_model_says_what_the_engine_says(kind, tmp_path):
    folder = make_model(tmp_path / "model")
    tokenizer = load_model(str(folder))[1]
    made(kind, vocab_size=len(tokenizer)).save_pretrained(folder)
    data = make_config(folder, tmp_path / "run").as_dict()
    data["model"] |= {"lora_rank": 4}
    data["train"] |= {"num_steps": 2}
    data["checkpoint"] |= {"export": True}
    config = load_train_config(data)
    parts = build_parts(config)
    prompt = np.arange(10, 30, dtype=np.int32)

    async def main():
        with open_run(config) as run:
            try:
                report = await run_training(config, parts, source=LetterSource(), run=run)
                request = GenerateRequest(prompt, SamplingParams(max_tokens=12, seed=1))
                return report, await parts.client.generate(request)
            finally:
                await parts.aclose()

    report, answer = asyncio.run(main())
    assert (
        report.metrics[-1]["publish/probe_error"] < 1e-5 < report.metrics[-1]["publish/probe_step"]
    )
    moved = [t for n, t in parts.model.named_parameters() if ".experts." in n and ".lora_B." in n]
    assert moved
    assert all(tensor.abs().max() > 1e-3 for tensor in moved)
    again = build_parts(config).model
    store = Checkpoints(tmp_path / "run" / "checkpoints")
    store.load(store.latest(), again, Trainer(again, config).optimizer)
    assert all(
        torch.equal(one, other)
        for one, other in zip(again.parameters(), parts.model.parameters(), strict=True)
    )
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    ids = torch.tensor([[*prompt.tolist(), *answer.completion_ids.tolist()]])
    with torch.no_grad():
        logprobs = exported(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    wanted = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    assert np.abs(wanted - answer.logprobs).max() < 1e-5


def test_adapters_do_not_depend_on_which_peft_transformers_likes(tmp_path, monkeypatch):
    """transformers 5.24 asks for peft 0.22, which is not released."""

    def refuse(*_, **__):
        raise ValueError("the version of PEFT is not compatible")

    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", refuse)
    model, other = adapted("gpt2")[0], adapted("gpt2")[0]
    with torch.no_grad():
        for tensor in trained_tensors(model).values():
            tensor.add_(0.1)
    optimizer = Trainer(model, load_train_config({"model": {"lora_rank": 2}})).optimizer
    write_full(tmp_path, model, optimizer, None)
    assert {file.name for file in tmp_path.iterdir()} >= {"adapter_config.json", ADAPTER_FILE}
    read_weights(tmp_path, other)
    for name, tensor in trained_tensors(model).items():
        assert torch.equal(trained_tensors(other)[name], tensor)
    export_model(model, None, tmp_path / "final" / "model")
    assert (tmp_path / "final" / "adapter" / ADAPTER_FILE).is_file()


def test_what_peft_cannot_do_names_both_versions(monkeypatch):
    def fail(*_, **__):
        raise ValueError("no such layer")

    monkeypatch.setattr("peft.inject_adapter_in_model", fail)
    both = (
        rf"peft {peft.__version__} with transformers {transformers.__version__} could not .*layer\."
    )
    with pytest.raises(ConfigError, match=both):
        adapted("gpt2")
