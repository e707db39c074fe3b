"""Small models and slow, obvious references for the tests of the embedded engine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tests_models.reference import call_logprobs, double, float32_allows, in_double
from transformers import Qwen3Config, Qwen3ForCausalLM

from rolltree.inference.models.made import byte_tokenizer
from rolltree.values.types import GenerateRequest, SamplingParams

torch.set_num_threads(1)

VOCAB = 265


def new_model(seed: int = 0) -> Any:
    """Return a fresh two-layer Qwen3 with a byte vocabulary; nobody else holds its weights."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=258,
        pad_token_id=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


@functools.cache
def shared_model() -> Any:
    """Return one model for the tests that do not change it."""
    return new_model()


@functools.cache
def tokenizer() -> Any:
    return byte_tokenizer()


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def random_prompt(seed: int, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


def ask(prompt: Sequence[int] | Any, **sampling: Any) -> GenerateRequest:
    sampling.setdefault("temperature", 0.0)
    sampling.setdefault("max_tokens", 6)
    return GenerateRequest(np.array(prompt, np.int32), SamplingParams(**sampling))


@torch.inference_mode()
def next_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after `tokens`, by a plain forward pass without any cache."""
    logits: torch.Tensor = model(torch.tensor([list(map(int, tokens))]), use_cache=False).logits
    return logits[0, -1].float()


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return the likeliest continuation, computed from scratch for every token."""
    tokens = list(map(int, prompt))
    for _ in range(count):
        tokens.append(int(next_logits(model, tokens).argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def teacher_forced(
    model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> np.ndarray[Any, Any]:
    """Return the logprobs of `completion` after `prompt` in one plain forward pass."""
    whole = torch.tensor([[*map(int, prompt), *map(int, completion)]])
    logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    scored = (logits / temperature).log_softmax(-1)
    return scored.gather(-1, whole[0, len(prompt) :, None])[:, 0].numpy()


def check(model: Any, outputs: list[Any], prompts: list[Any]) -> None:
    """Check that logprobs are as near to float64 as float32 arithmetic on these weights gets."""
    calls = [(prompt, out.completion_ids) for out, prompt in zip(outputs, prompts, strict=True)]
    with in_double(), torch.no_grad():
        exact = double(model)
        for call, out, bound in zip(calls, outputs, float32_allows(exact, calls), strict=True):
            away = np.abs(out.logprobs - call_logprobs(exact, *call, 1.0).numpy())
            assert (away < bound.numpy()).all(), (away, bound)
