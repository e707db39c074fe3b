"""Redaction: cut secrets out of configs, events, error texts, logs and what a person is shown.

Two rules find them: fields whose name marks a secret (`api_key`, `hf_token`, `Authorization`,
...), and texts that look like one (provider key prefixes, bearer headers, passwords inside URLs).
What stood under such a name is remembered (`remember`) and cut out wherever it turns up. A secret
under an ordinary name has to be named; a run is told with `Run.protect`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rolltree.untrusted import visible

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
    text = cut_text(text, (*secrets, *_remembered))
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


_remembered: set[str] = set()
_SCHEME = re.compile(r"(?i)\s*(?:bearer|basic|token|key)\s+")


def remember(*secrets: str) -> None:
    """Note secrets of this process: `redact`, `redact_text` and `shown` cut them out.

    As everywhere, texts of fewer than eight characters are ignored.
    """
    _remembered.update(known_secrets(secrets))


def secrets_in(config: Any) -> tuple[str, ...]:
    """Return the texts that stand under secret keys of a config, the longest first.

    >>> secrets_in({"args": {"judge_api_key": "plain-word", "n": 3}})
    ('plain-word',)
    """
    return known_secrets(_secrets_in(config, False))


def _secrets_in(value: Any, hidden: bool) -> Iterator[str]:
    if isinstance(value, str) and hidden:
        yield value
        yield _SCHEME.sub("", value, count=1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets_in(item, hidden or (isinstance(key, str) and is_secret_key(key)))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _secrets_in(item, hidden)


def _setting(word: str) -> tuple[str, Any] | None:
    """Return the key and value of a word like `env.args={api_key = "x"}`; None of other words."""
    key, equals, text = word.partition("=")
    if not equals or not key or key.startswith("{"):
        return None
    if is_secret_key(key):
        return key, text
    import tomllib

    with contextlib.suppress(ValueError, KeyError, RecursionError):
        return key, tomllib.loads(f"value = {text}")["value"]
    with contextlib.suppress(ValueError, RecursionError):
        return key, json.loads(text)
    return key, text


def secrets_in_words(words: Iterable[str]) -> tuple[str, ...]:
    """Return the secrets in settings of a command line, `key=value`."""
    found = [_setting(word) for word in words]
    return secrets_in([{key: value} for key, value in filter(None, found)])


def shown_command(words: Sequence[str]) -> str:
    """Return a command as a person is shown it: quoted for a shell, without secrets.

    >>> shown_command(["train", "a b.toml", "env.args.api_key=abc", "run.seed=1"])
    "train 'a b.toml' 'env.args.api_key=[redacted]' run.seed=1"
    """
    return shlex.join(_shown_word(word) for word in words)


def _shown_word(word: str) -> str:
    option, equals, rest = word.partition("=")
    if option.startswith("-") and equals and not is_secret_key(option):  # --set=key=value
        return f"{option}={_shown_word(rest)}"
    setting = _setting(word)
    if setting is not None:
        key, value = setting
        kept = redact({key: value})[key]
        if kept != value:
            return f"{key}={kept if isinstance(kept, str) else json.dumps(kept)}"
        return redact_text(word)
    try:
        data = json.loads(word)
    except (ValueError, RecursionError):
        return redact_text(word)
    return json.dumps(redact(data)) if isinstance(data, dict) else word


def shown(text: str) -> str:
    """Return text as a person may be shown it: no secrets, nothing that a terminal obeys.

    Everything that the command line prints or logs goes through here.
    """
    return visible(redact_text(text))


def _rebuilt(value: Any, items: list[Any]) -> Any:
    kinds = (tuple, set, frozenset)
    return next((kind(items) for kind in kinds if isinstance(value, kind)), items)


def _redact_field(key: Any, item: Any, secrets: tuple[str, ...]) -> Any:
    kinds = (str, bytes, Mapping, list, tuple, set, frozenset)
    hides = isinstance(item, kinds) and len(item) > 0
    if isinstance(key, str) and hides and is_secret_key(key):
        return REDACTED
    return redact(item, secrets)
