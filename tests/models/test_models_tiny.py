from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig

from rolltree.inference.models import TinyConfig, eos_token_ids, load_model, make_tiny
from rolltree.inference.models.made import MARKUP_TOKENS, SPECIAL_TOKENS, byte_tokenizer

torch.set_num_threads(1)
TOKENIZER = byte_tokenizer()
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    options.setdefault("add_generation_prompt", True)
    return str(TOKENIZER.apply_chat_template(messages, tokenize=False, **options))


@given(st.text())
def test_every_text_is_its_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text.replace("<", ""), add_special_tokens=False)
    assert ids == list(text.replace("<", "").encode())
    assert TOKENIZER.decode(ids) == text.replace("<", "")


def test_special_and_markup_tokens_have_one_id_each() -> None:
    tokens = [*SPECIAL_TOKENS, *MARKUP_TOKENS]
    assert [TOKENIZER.encode(token) for token in tokens] == [[256 + n] for n in range(9)]
    assert TOKENIZER.eos_token_id == 258
    assert TOKENIZER.pad_token_id == 256
    text = "<think>a</think><tool_call>b<|im_end|>"
    ids = TOKENIZER.encode(text)
    assert len(ids) == 6
    assert TOKENIZER.decode(ids) == text
    kept = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert kept == "<think>a</think><tool_call>b"


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    small = TinyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
    other = TinyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, seed=1)
    before = torch.random.get_rng_state()
    for name, config in (("a", small), ("b", small), ("c", other)):
        make_tiny(tmp_path / name, config)
    assert torch.equal(torch.random.get_rng_state(), before)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["model.norm.weight"] * 0 + 1, a["model.embed_tokens.weight"][0])
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert small.key() != other.key()


def test_the_default_has_qwen3s_architecture_and_learnable_weights() -> None:
    model, tokenizer = load_model("tiny")
    config = AutoConfig.from_pretrained(model.config.name_or_path)
    assert config.model_type == "qwen3"
    assert config.vocab_size == 265 == len(tokenizer)
    assert sum(parameter.numel() for parameter in model.parameters()) == 821_760
    assert 0.075 < model.model.layers[0].mlp.up_proj.weight.std().item() < 0.085
    assert eos_token_ids(model, tokenizer) == (256, 258)
    assert not model.training
    ids = torch.tensor([tokenizer.encode("7 + 5 =")])
    assert model(ids).logits.shape == (1, 7, 265)


def test_a_conversation_renders_as_chatml() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "7 + 5 ="},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "3 + 4 ="},
    ]
    assert render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n7 + 5 =<|im_end|>\n"
        "<|im_start|>assistant\n12<|im_end|>\n<|im_start|>user\n3 + 4 =<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n12"},
        {"role": "assistant", "content": "12", "reasoning_content": "add"},
    ],
)
def test_reasoning_is_kept_in_the_turn_and_stripped_from_earlier_ones(
    answer: dict[str, Any],
) -> None:
    turn = [{"role": "user", "content": "7 + 5 ="}, answer]
    kept = "<|im_start|>assistant\n<think>\nadd\n</think>\n\n12<|im_end|>\n"
    assert kept in render(turn)
    later = render([*turn, {"role": "user", "content": "And 3 + 4?"}])
    assert "<think>" not in later
    assert "<|im_start|>assistant\n12<|im_end|>\n" in later


def test_reasoning_survives_tool_answers_of_the_same_turn() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "ask", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "warm"},
    ]
    assert render(messages, tools=[WEATHER]).endswith(
        "<|im_start|>assistant\n<think>\nask\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>"
        "\n<tool_response>\nwarm\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_listed_in_the_system_message() -> None:
    text = render(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        tools=[WEATHER],
    )
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools:\n<tools>\n{")
    assert '"name": "weather"' in text
    assert text.count("<|im_start|>system") == 1


def test_thinking_can_be_switched_off() -> None:
    text = render([{"role": "user", "content": "Hi"}], enable_thinking=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
