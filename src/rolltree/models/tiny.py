"""A tiny model for tests: Qwen3's architecture, a byte-level vocabulary, a reasoning template.

Everything is made here from a seed, in a second: no download, no training. The weights are random
with a standard deviation of 0.08: at this width 0.02 does not learn. The module knows nothing
about caching. It leaves out teaching the model anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltree.models.template import CHAT_TEMPLATE

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257, 258: padding, the opening and the end of a message."""
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Ids 259 to 264: one token each, but text: decoding keeps them when it skips special tokens."""


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """The shape of a tiny model and the seed of its weights; the default has 0.8M parameters."""

    seed: int = 0
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 384
    max_context: int = 4096
    initializer_range: float = 0.08

    def key(self) -> str:
        """Return a folder name that two different configurations never share."""
        return (
            f"tiny-{self.hidden_size}x{self.num_layers}-h{self.num_heads}-{self.num_kv_heads}"
            f"-i{self.intermediate_size}-c{self.max_context}-r{self.initializer_range}-s{self.seed}"
        )


def make_tiny(folder: Path, config: TinyConfig = TinyConfig()) -> None:
    """Write a tiny model and its tokenizer into `folder`. The same config gives the same bytes."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer(config.max_context)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.hidden_size // config.num_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_context,
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen3ForCausalLM(shape).to(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer(max_context: int = 4096) -> Any:
    """Return a tokenizer whose id 0 to 255 is that byte of UTF-8, then `SPECIAL_TOKENS` and markup.

    Every text round-trips. A `PreTrainedTokenizerFast` with a chat template.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(token, special=False) for token in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_context,
    )


def _byte_alphabet() -> list[str]:
    """Return the printable stand-in of each byte that byte-level BPE uses (GPT-2's scheme)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]
