"""Redaction: cut secrets out of configs, events, error texts, logs and everything that is shown.

Two rules find them: fields whose name marks a secret (`api_key`, `hf_token`, `Authorization`,
...), and texts that look like one (provider key prefixes, bearer headers, passwords inside URLs).
A value under such a name, in settings (`remember`) or in the environment, is cut out wherever it
appears. A secret under an ordinary name has to be declared; for a run, with `Run.protect`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rolltree._helpers.untrusted import visible

REDACTED = "[redacted]"

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALWAYS = _words(
    "secret secrets password passwords passwd pwd passphrase passcode authorization credential "
    "credentials cred creds apikey apikeys cookie cookies jwt bearer otp totp mnemonic sessionid "
    "sessid phpsessid jsessionid"
)
_AT_THE_END = _words("auth oauth dsn pat pem pass pw webhook session")
# `forward_pass` is not a password, and $DESKTOP_SESSION names a window manager.
_PLAIN = {
    "pass": _words("first last second forward backward single multi num max min per one two this"),
    "session": _words("desktop per"),
}
_SERVICES = _words(
    "openai anthropic claude gemini google vertex azure aws gcp mistral cohere groq together xai "
    "fireworks deepseek openrouter replicate perplexity hf huggingface wandb github gh gitlab git "
    "bitbucket slack discord telegram bot stripe twilio sendgrid mailgun serper serpapi tavily exa "
    "brave bing firecrawl e2b daytona modal prime notion linear jira pinecone langsmith hub npm "
    "pypi nvidia ngc elevenlabs assemblyai deepgram deepl mapbox maps weather vault consul kube "
    "cosmos datadog sentry mcp"
)
_KEY_KINDS = _SERVICES | _words(
    "api access private secret auth signing account ssh master encryption decryption deploy "
    "service subscription license licence storage admin client server llm judge gateway proxy my "
    "app root consumer shared session priv rsa dsa gpg pgp tls ssl kms aes fernet hmac"
)
_TOKEN_KINDS = _SERVICES | _words(
    "auth access api bearer refresh session id security oauth csrf xsrf sas personal service admin "
    "deploy client server webhook login gateway proxy judge llm my app root registry push device"
)
# `hftoken`, `dbpass`: endings, and the words that may precede them without a separator.
_GLUED = {
    **dict.fromkeys(("key", "keys"), _KEY_KINDS),
    **dict.fromkeys(("token", "tokens"), _TOKEN_KINDS),
    **dict.fromkeys(("pass", "pwd"), _words("db user smtp ftp my admin")),
}
_GLUED_ENDS = ("password", "passwd", "apikey", "secret")
_PAIRS = {("auth", "header"), ("connection", "string"), ("webhook", "url"), ("seed", "phrase")}
# The value of `api_key_env` is a name, that of `token_count` a number.
_NAMES_ONLY = _words("var env name names file path ids id count type mode method length kind")

_TEXTS = (
    re.compile(r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}"),
    re.compile(
        r"\b(?:hf|gh[opsur]|github_pat|glpat|gsk|xai|r8|npm|tvly|pplx|dop_v1|nvapi|pypi|ntn|lin_api|"
        r"dckr_pat|sbp|e2b|rpa)[_-][\w-]{16,}"
    ),
    re.compile(r"\bSG\.[\w-]{16,}\.[\w-]{16,}|\bhvs\.[\w-]{16,}|\b\d{8,10}:AA[\w-]{32,}"),
    re.compile(r"\b(?:xox[a-z]|xapp)-[A-Za-z0-9_-]{10,}"),
    re.compile(r"\bA(?:KI|SI)A[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bya29\.[\w-]{16,}"),
    # A JSON web token.
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
    re.compile(r"(?<=-----BEGIN PRIVATE KEY-----)[^-]+|(?<= PRIVATE KEY-----)[^-]+(?=-----END )"),
    re.compile(r"(?<=hooks\.slack\.com/services/)[\w/]+"),
    # The user of a URL, which is often a token without a password.
    re.compile(r"""(?<=://)[^/\s?#<>"']+(?=@)"""),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"),
    # Only after the header's name: "basic" alone is an ordinary word.
    re.compile(
        r"""(?i)(?:(?<=authorization: basic )|(?<=authorization['"]: ['"]basic ))[\w+/=-]{4,}"""
    ),
    re.compile(
        r"(?i)(?<=[?&]key=)[^&\s]+|(?<=api_key=)(?!\.\.\.|\$)[^&\s]+|(?<=[?&]token=)[^&\s]+|"
        r"(?<=[?&]sig=)[^&\s]+|(?<=-signature=)[^&\s]+"
    ),
)
_BARE = r"[^\s\"',;)&}\]]"
# `name="value"`, `'name': 'value'` and `NAME=value1`, as errors print settings.
_FIELD = re.compile(
    r"""(?<![\w-])([\w-]{1,64})(["']?\s?[=:]\s?)(?:(["'])([^"'\s]+)(?=\3)|"""
    rf"(?={_BARE}{{0,200}}\d)({_BARE}{{8,}}))"
)


@lru_cache(maxsize=4096)  # names repeat in every step of a rollout
def is_secret_key(key: str) -> bool:
    """Whether the name of a field marks a secret.

    >>> [is_secret_key(k) for k in ("api_key", "apiKey", "hf_token", "max_tokens", "eos_token")]
    [True, True, True, False, False]
    """
    parts = [part.lower() for part in _PART.findall(key)]
    if not parts or parts[-1] in _NAMES_ONLY:
        return False
    # Joined as well, since "e2b" is split into three parts.
    last, kind = parts[-1], {*parts[:-1], "".join(parts[:-1])}
    if _ALWAYS.intersection(parts) or last.endswith(_GLUED_ENDS):
        return True
    if any(last.endswith(end) and last[: -len(end)] in before for end, before in _GLUED.items()):
        return True
    if last in _AT_THE_END:
        return not kind & _PLAIN.get(last, frozenset())
    if tuple(parts[-2:]) in _PAIRS:
        return True
    if last in ("key", "keys"):
        return bool(kind & _KEY_KINDS) and not kind & {"public", "primary", "foreign"}
    # Most such fields are counts: max_tokens.
    if last == "tokens":
        return bool(kind & {"access", "api", "auth", "bearer", "refresh"})
    return parts == ["token"] or (last == "token" and bool(kind & _TOKEN_KINDS))


_PLACEHOLDERS = _words(
    "password passwords disabled enabled changeme required optional anonymous undefined notneeded "
    "not-needed not_needed no-key-needed placeholder localhost anything dummy-key dummykey"
)


def environment_secrets() -> tuple[str, ...]:
    """Return the values of this process's environment variables whose names mark a secret.

    Short values, numbers, paths and words like `placeholder` are left out: cutting them out would
    damage other data.
    """
    return _values_of(tuple((name, os.environ.get(name, "")) for name in _names(tuple(os.environ))))


@lru_cache(maxsize=1)
def _names(variables: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in variables if is_secret_key(name))


@lru_cache(maxsize=1)
def _values_of(variables: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    values = (value.strip() for _, value in variables)
    return known_secrets(
        value
        for value in values
        if value.lower() not in _PLACEHOLDERS
        and not value.startswith(("/", "~/", "./"))
        and not value.isdigit()
    )


def known_secrets(secrets: Iterable[str]) -> tuple[str, ...]:
    """Return the secrets that can be cut out of data, the longest first.

    Texts of fewer than eight characters are left out: cutting them out would damage other data.
    """
    return tuple(sorted({text for text in secrets if len(text) >= 8}, key=len, reverse=True))


def cut_text(text: str, secrets: tuple[str, ...]) -> str:
    """Replace every known secret in `text`; a secret that contains another is replaced whole."""
    present = [secret for secret in secrets if secret and secret in text]
    # The longest first: otherwise a secret that contains another would leave a remainder.
    for secret in sorted(present, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
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
    """Replace every known secret, and everything that looks like one, in `text`.

    Known secrets are `secrets`, the remembered ones, and `environment_secrets`.
    """
    return _redact_text(text, _all_known(secrets))


def _all_known(secrets: tuple[str, ...]) -> tuple[str, ...]:
    return (*secrets, *_remembered, *environment_secrets())


def _redact_text(text: str, known: tuple[str, ...]) -> str:
    text = cut_text(text, known)
    for pattern in _TEXTS:
        text = pattern.sub(REDACTED, text)
    return _FIELD.sub(_without_value, text)


def _without_value(match: re.Match[str]) -> str:
    name, between, quote, quoted, bare = match.groups()
    value = quoted or bare
    if not is_secret_key(name) or value.startswith(("...", "$", "<", "[", "{", "(")):
        return match[0]
    return f"{name}{between}{quote or ''}{REDACTED}"


def redact(value: Any, secrets: tuple[str, ...] = ()) -> Any:
    """Return a copy of `value` without secrets.

    Under a secret key, strings and containers with strings are replaced whole; numbers, booleans,
    None and empty strings stay (`{"token": 504}` is a token id).
    """
    try:
        return _redact(value, _all_known(secrets))
    except RecursionError:  # it contains itself
        return f"<{type(value).__name__}>"


def _redact(value: Any, known: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return _redact_text(value, known)
    if isinstance(value, Mapping):
        return {
            _redact(key, known): REDACTED
            if isinstance(key, str) and is_secret_key(key) and _holds_text(each)
            else _redact(each, known)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return _rebuilt(value, [_redact(item, known) for item in value])
    # A pydantic object, whose fields the codec stores. A mock only seems to have the method.
    if hasattr(type(value), "model_dump") and not isinstance(value, type):
        return _redact(value.model_dump(), known)
    return value


_remembered: set[str] = set()
_SCHEME = re.compile(r"(?i)\s*(?:bearer|basic|token|key)\s+")


def remember(*secrets: str) -> None:
    """Note secrets of this process: `redact`, `redact_text` and `shown` cut them out.

    As in `known_secrets`, texts of fewer than eight characters are ignored.
    """
    _remembered.update(known_secrets(secrets))


def secrets_in(config: Any) -> tuple[str, ...]:
    """Return the texts under secret keys of a config, the longest first.

    >>> secrets_in({"args": {"judge_api_key": "plain-word", "n": 3}})
    ('plain-word',)
    """
    return known_secrets(_secrets_in(config, False))


def _secrets_in(value: Any, hidden: bool) -> Iterator[str]:
    if isinstance(value, str) and hidden:
        yield value
        # A header holds "Bearer KEY"; the key alone may appear elsewhere.
        yield _SCHEME.sub("", value, count=1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets_in(item, hidden or (isinstance(key, str) and is_secret_key(key)))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _secrets_in(item, hidden)


def _setting(word: str) -> tuple[str, Any] | None:
    """Return the key and value of a word like `env.args={api_key = "x"}`; None for other words."""
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
    """Return the secrets in the settings (`key=value`) of a command line."""
    settings = [_setting(word) for word in words]
    return secrets_in([{key: value} for key, value in filter(None, settings)])


def shown_command(words: Sequence[str]) -> str:
    """Return a command that is safe to show: quoted for a shell, without secrets.

    >>> shown_command(["train", "a b.toml", "env.args.api_key=abc", "run.seed=1"])
    "train 'a b.toml' 'env.args.api_key=[redacted]' run.seed=1"
    """
    return shlex.join(_shown_word(word) for word in words)


def _shown_word(word: str) -> str:
    option, equals, rest = word.partition("=")
    # --set=key=value
    if option.startswith("-") and equals and not is_secret_key(option):
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
    """Return text that is safe to show, without secrets and terminal control characters.

    Everything that the command line prints or logs goes through here.
    """
    return visible(redact_text(text))


def shown_start(text: str, limit: int) -> tuple[str, str]:
    """Return the first `limit` characters of a text as `shown`, and how many more there are.

    >>> shown_start("one two three", 7)
    ('one two', ' … (6 more)')
    """
    # Redacted before it is cut: nothing recognises the first half of a secret.
    safe = shown(text)
    more = len(safe) - limit
    return safe[:limit], f" … ({more:,} more)" if more > 0 else ""


def _rebuilt(value: Any, items: list[Any]) -> Any:
    kinds = (tuple, set, frozenset)
    return next((kind(items) for kind in kinds if isinstance(value, kind)), items)


def _holds_text(value: Any) -> bool:
    """Whether a value holds text, which could be a secret; numbers (token ids) could not."""
    if isinstance(value, Mapping):
        return any(map(_holds_text, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_holds_text, value))
    return isinstance(value, (str, bytes)) and len(value) > 0
