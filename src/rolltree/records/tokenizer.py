"""The tokenizer of a run, to show ids as text: the run's own, or that of the model it names.

Only `tokenizer.json` is read (with the package tokenizers), without torch, and without any code
from the run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rolltree._helpers.files import read_regular
from rolltree.inference.models.load import local_model_folder
from rolltree.store.reading import StoredRun
from rolltree.values.errors import ConfigError
from rolltree.values.types import IntArray

_MAX_BYTES = 2**28
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class RunTokenizer:
    """Decodes with the tokenizer of `folder`.

    Attributes:
        end_ids: the ids at which the model of the folder stops, as its own files name them.

    Raises:
        ConfigError: there is no tokenizer that can be read.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise ConfigError(
                "the package tokenizers is missing, so ids cannot be shown or compared as text. "
                "Install rolltree with its extra: pip install 'rolltree[view]'."
            ) from error
        self.folder = folder
        file = folder / "tokenizer.json"
        try:
            # Read with a size limit, from a regular file: the folder may have come with the run.
            self._tokenizer = Tokenizer.from_buffer(read_regular(file, _MAX_BYTES, follow=True))
        except Exception as error:  # tokenizers raises Exception itself
            raise ConfigError(
                f"{file} is not a tokenizer that can be read ({error}). Name the folder of the "
                "model that was sampled: --tokenizer FOLDER."
            ) from error
        self.end_ids = _end_ids(folder, self._tokenizer)
        self._added = set(self._tokenizer.get_added_tokens_decoder())
        self._is_byte_level = "ByteLevel" in repr(self._tokenizer.decoder)
        # What one token adds to the text; nothing for an id that the tokenizer lacks.
        self.bytes_of = cache(self._bytes_of)

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of `ids`, with special tokens spelled out or left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def as_read(self, text: str) -> str:
        """Return what the ids of `text` decode to: Unicode-normalized, if the tokenizer does so."""
        # A lone surrogate has no ids.
        valid = text.encode(errors="ignore").decode()
        return self.decode(self._tokenizer.encode(valid, add_special_tokens=False).ids)

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        # Added tokens are spelled as they are, in every kind of vocabulary.
        if token_id in self._added:
            return str(piece).encode()
        if self._is_byte_level:
            table = _byte_level()
            return b"".join(table.get(each) or each.encode() for each in piece)
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return str(piece).replace("\u2581", " ").encode()

    def pieces(self, ids: IntArray) -> tuple[list[str], list[str]]:
        """Return each token's text and its bytes in hexadecimal, of int32 `[_T]`.

        A token that holds only a part of a character reads as U+FFFD.
        """
        # A context of 200,000 tokens has a few thousand different ones.
        distinct, at = np.unique(ids, return_inverse=True)
        raw = [self.bytes_of(each) for each in distinct.tolist()]
        texts = np.array([each.decode("utf-8", "replace") for each in raw], object)
        spelled = np.array([each.hex() for each in raw], object)
        return texts[at].tolist(), spelled[at].tolist()


def local_tokenizer(run: StoredRun) -> RunTokenizer | None:
    """Return the tokenizer of the run's exported model, or of the model that its settings name.

    A model that was moved together with the run is found, too. None if no tokenizer is on this
    machine.

    Raises:
        ConfigError: a tokenizer was found, but cannot be read.
    """
    name = run.model_name
    named = local_model_folder(name) if name else None
    moved = _moved(run, name) if name else None
    # Folders that came with the run are first: the model of this name here may be a different one.
    for folder in (run.path / "model", moved, named):
        if folder is not None and (file := folder / "tokenizer.json").is_file():
            return _opened(folder, file.stat().st_mtime_ns)
    return None


def _moved(run: StoredRun, name: str) -> Path | None:
    """Return where a model is now if it was moved with the run, None if that is unknown."""
    settings = run.config.get("run")
    was = settings.get("dir") if isinstance(settings, Mapping) else None
    if not isinstance(was, str) or not was or os.path.isabs(was) != os.path.isabs(name):
        return None
    return Path(os.path.normpath(run.path.resolve() / os.path.relpath(name, was)))


# Reading a tokenizer takes longer than showing a rollout; a file that was replaced is read again.
@lru_cache(maxsize=4)
def _opened(folder: Path, written: int) -> RunTokenizer:
    return RunTokenizer(folder)


_CHOSEN: list[Path] = []
"""The folder whose tokenizer shows the ids of all runs, if the user named one."""


def choose_tokenizer(folder: Path | None) -> None:
    """Show ids with the tokenizer of this folder, whatever a run names; None: with each run's own.

    Raises:
        ConfigError: there is no tokenizer that can be read.
    """
    if folder is not None:
        _opened(folder, _written(folder))
    _CHOSEN[:] = [] if folder is None else [folder]


def _written(folder: Path) -> int:
    file = folder / "tokenizer.json"
    return file.stat().st_mtime_ns if file.is_file() else 0


def shown_tokenizer(run: StoredRun) -> RunTokenizer | None:
    """Return the chosen tokenizer, else `local_tokenizer`; None for one that cannot be read."""
    try:
        return _opened(_CHOSEN[0], _written(_CHOSEN[0])) if _CHOSEN else local_tokenizer(run)
    except ConfigError:
        return None


def why_raw(run: StoredRun) -> str | None:
    """Return why ids of a run are shown without text; None if there is a tokenizer."""
    try:
        if _CHOSEN or local_tokenizer(run) is not None:
            return None
    except ConfigError as error:
        return str(error)
    name = run.model_name
    said = f"the model {name!r} is not on this machine" if name else "the run names no model"
    return (
        f"Tokens are shown by their ids: {said}, and the run has no copy of its tokenizer. Name a "
        "folder with its tokenizer.json: rolltree view --tokenizer FOLDER."
    )


@cache
def _byte_level() -> dict[str, bytes]:
    """Return the characters that byte-level vocabularies write bytes as.

    Printable ones of Latin-1 stand for themselves, the others for U+0100 and up, in order.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    table = {chr(byte): bytes([byte]) for byte in plain}
    return table | {chr(256 + index): bytes([byte]) for index, byte in enumerate(rest)}


def _end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        try:
            data = json.loads(read_regular(folder / name, follow=True))
        except (OSError, ValueError, RecursionError):
            continue
        known = data.get("eos_token_id") if isinstance(data, dict) else None
        found.update(i for i in (known if isinstance(known, list) else [known]) if type(i) is int)
        token = data.get("eos_token") if isinstance(data, dict) else None
        spelled = token.get("content") if isinstance(token, dict) else token
        if isinstance(spelled, str) and tokenizer.token_to_id(spelled) is not None:
            found.add(int(tokenizer.token_to_id(spelled)))
    return frozenset(found)
