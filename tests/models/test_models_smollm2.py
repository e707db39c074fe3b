"""The real model: what was converted is what the package ships, and it can do a sum."""

import json

import pytest

from rolltree.inference.models import load_model, resolve_model
from rolltree.inference.models.made import gguf_path

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def loaded():
    import torch

    torch.set_num_threads(2)
    return load_model("smollm2-135m")


def test_the_folder_holds_safetensors_and_nothing_pickled():
    folder = resolve_model("smollm2-135m")
    suffixes = {path.suffix for path in folder.iterdir()}
    assert suffixes == {".json", ".jinja", ".safetensors"}
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == (
        "llama", 576, 30,
    )  # fmt: skip
    assert str(gguf_path()[0].parent) not in (folder / "config.json").read_text()
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == config["max_position_embeddings"] == 8192


def test_a_few_shot_sum(loaded):
    import torch

    model, tokenizer = loaded
    shots = "".join(f"{a} + {b} = {a + b}\n" for a, b in ((1, 2), (3, 4), (5, 1), (2, 6)))
    prompt = tokenizer(shots + "4 + 3 =", return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    answer = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
    assert answer.split("\n")[0].strip() in {str(number) for number in range(4, 11)}
    assert answer.startswith(" ")  # the format of the shots is followed


@pytest.mark.long
def test_logits_are_those_of_the_gguf_file(loaded):
    import torch
    from transformers import AutoModelForCausalLM

    model, tokenizer = loaded
    source, _ = gguf_path()
    original = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name).eval()
    ids = tokenizer("The capital of France is Paris. 7 + 5 = 12", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        ours, theirs = model(ids).logits, original(ids).logits
    assert ours.shape == (1, ids.shape[1], 49152)
    assert torch.equal(ours, theirs)
    for name, weight in original.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_the_chat_template_is_chatml_with_a_default_system_text(loaded):
    _, tokenizer = loaded
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
    )
    alone = tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert alone.startswith("<|im_start|>system\n")
    assert alone.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [2]


def test_every_text_round_trips(loaded):
    _, tokenizer = loaded
    for text in ("7 + 5 = 12", "  two  spaces ", "naïve café — 你好 🙂", "a\n\n\tb", "don't"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
