"""Redaction: cut secrets out of configs, events and error texts.

Two rules find them: fields whose name marks a secret (`api_key`, `hf_token`, `Authorization`,
...), and texts that look like one (provider key prefixes, bearer headers, passwords inside URLs).
A secret that looks like an ordinary word under an ordinary name has to be named; a run is told
with `Run.protect`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "[redacted]"

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALWAYS = _words(
    "secret secrets password passwd passphrase authorization credential credentials apikey cookie"
)
_KEY_KINDS = _words("api access private secret auth signing account")
_TOKEN_KINDS = _words(
    "hf auth access api bearer refresh session id github gh wandb hub security oauth"
)
_NAMES_ONLY = _words("var env name names file path ids id count")

_TEXTS = (
    re.compile(r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:hf|ghp|gho|ghs|xoxb|xoxp|glpat)[_-][A-Za-z0-9_-]{16,}"),
    re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    re.compile(r"(?<=://)[^/@\s:]+:[^/@\s]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(?i)(?<=[?&]key=)[^&\s]+|(?<=api_key=)[^&\s]+|(?<=[?&]token=)[^&\s]+"),
)


def is_secret_key(key: str) -> bool:
    """Say whether a field of this name holds a secret.

    >>> [is_secret_key(k) for k in ("api_key", "apiKey", "hf_token", "max_tokens", "eos_token")]
    [True, True, True, False, False]
    """
    parts = [part.lower() for part in _PART.findall(key)]
    if not parts or parts[-1] in _NAMES_ONLY:
        return False
    if _ALWAYS.intersection(parts):
        return True
    kind = set(parts[:-1])
    if parts[-1] in ("key", "keys"):
        return bool(kind & _KEY_KINDS)
    return parts == ["token"] or (parts[-1] == "token" and bool(kind & _TOKEN_KINDS))


def known_secrets(secrets: Iterable[str]) -> tuple[str, ...]:
    """Return the secrets that can be cut out of data, the longest first.

    Texts of fewer than eight characters are left out: cutting them out would tear real data.
    """
    return tuple(sorted({text for text in secrets if len(text) >= 8}, key=len, reverse=True))


def cut_text(text: str, secrets: tuple[str, ...]) -> str:
    """Replace every known secret in `text`; one that holds another goes as a whole."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED) if secret else text
    return text


def cut_secrets(value: Any, secrets: tuple[str, ...]) -> Any:
    """Return a copy of `value` with known secrets cut out of its texts, and no other change."""
    if isinstance(value, str):
        return cut_text(value, secrets)
    if isinstance(value, Mapping):
        return {cut_secrets(key, secrets): cut_secrets(value[key], secrets) for key in value}
    if isinstance(value, (list, tuple, set, frozenset)):
        return _rebuilt(value, [cut_secrets(item, secrets) for item in value])
    return value


def redact_text(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Replace every known secret, and everything that looks like one, in `text`."""
    text = cut_text(text, secrets)
    for pattern in _TEXTS:
        text = pattern.sub(REDACTED, text)
    return text


def redact(value: Any, secrets: tuple[str, ...] = ()) -> Any:
    """Return a copy of `value` without secrets.

    Under a secret key, strings and containers are replaced whole; numbers, booleans, None and
    empty strings stay (`{"token": 504}` is a token id).
    """
    if isinstance(value, str):
        return redact_text(value, secrets)
    if isinstance(value, Mapping):
        return {
            redact(key, secrets): _redact_field(key, item, secrets) for key, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return _rebuilt(value, [redact(item, secrets) for item in value])
    if hasattr(value, "model_dump"):  # pydantic: the codec stores its fields
        return redact(value.model_dump(), secrets)
    return value


def _rebuilt(value: Any, items: list[Any]) -> Any:
    kinds = (tuple, set, frozenset)
    return next((kind(items) for kind in kinds if isinstance(value, kind)), items)


def _redact_field(key: Any, item: Any, secrets: tuple[str, ...]) -> Any:
    kinds = (str, bytes, Mapping, list, tuple, set, frozenset)
    hides = isinstance(item, kinds) and len(item) > 0
    if isinstance(key, str) and hides and is_secret_key(key):
        return REDACTED
    return redact(item, secrets)
