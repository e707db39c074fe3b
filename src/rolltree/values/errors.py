"""The one exception tree of rolltree.

    RolltreeError
    ├── ConfigError            a key or value in a config file, flag or argument   (ValueError)
    │   └── UnknownArgument    a keyword argument that a call does not take        (TypeError)
    ├── UnknownName            an unknown name; the message has the nearest one    (LookupError)
    ├── ModelError             a model call that gave no usable answer
    │   ├── ServerError        the server answered with an error status; `status`, `retryable`
    │   ├── ConnectionFailed   the server could not be reached, or hung up
    │   │   └── CallTimeout    no answer before the deadline of the call, retries included
    │   ├── BadResponse        the server answered, but not with what the API promises
    │   │   └── AnswerTooLarge an answer above the client's limit; the rest was not read
    │   ├── PublishFailed      servers did not take new weights; `clients` are theirs
    │   ├── PromptTooLong      the prompt does not fit the context window
    │   └── UnsupportedSetting this engine does not support a requested setting
    ├── TokenError             token data that contradicts itself: lengths, ranges, NaN logprobs
    ├── StoreError             the run directory cannot be read or written
    ├── ClusterError           a role of a run on several processes cannot be started or kept
    ├── TrainingError          training cannot continue: non-finite loss, no rollout to learn from
    │   ├── NonFiniteStep      a step's gradient is not finite; the weights are as before
    │   └── RankLost           a process that trains with this one has ended
    ├── SandboxError           a sandbox could not do what was requested
    │   ├── SandboxFileError   a path that leaves the sandbox, is missing or is not a file
    │   └── SandboxUnavailable this machine cannot isolate untrusted code well enough
    ├── WorldUnavailable       a world's server cannot be reached, hung up or broke its protocol
    ├── ProgramError           an agent program could not be started, or never called its model
    ├── BudgetSpent            an agent has used up its model calls or its tokens
    ├── RolloutTimeout         an episode exceeded its time limit                  (TimeoutError)
    ├── Escaped                an environment's code called exit(), or raised what ends a program
    └── Stopped                the program was stopped by SIGTERM; its progress is saved

Each message says what happened, why it matters and what to do next. `types.ErrorRecord` is the
stored record of a failure; an exception's `kind` is stored with it.
"""

from __future__ import annotations

import sys
import traceback as _traceback
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import Any, Literal, TypeVar

from rolltree._helpers.lazy import import_problem
from rolltree.values.types import ErrorKind, ErrorRecord, kind_of_type

T = TypeVar("T")


class RolltreeError(Exception):
    """The root: catch it to catch everything that rolltree raises on purpose."""

    kind: ErrorKind = "episode"


class ConfigError(RolltreeError, ValueError):
    """A configuration key is unknown, or a value is not what the key takes."""

    kind: ErrorKind = "machine"


class UnknownArgument(ConfigError, TypeError):
    """A keyword argument that a call does not take; the message names the nearest one."""


class UnknownName(RolltreeError, LookupError):
    """A name is not registered."""


class ModelError(RolltreeError):
    """A model call gave no usable answer."""

    kind: ErrorKind = "machine"


class ServerError(ModelError):
    """The server answered with an error status."""

    def __init__(self, message: str, *, status: int, retryable: bool) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable
        # A request that the server refuses may quote what the model wrote, and would be refused
        # again. A wrong key or a model that is not there is the server's state.
        is_refused = not retryable and 400 <= status < 500 and status not in (401, 403, 404)
        self.kind = "episode" if is_refused else "infrastructure"


class ConnectionFailed(ModelError):
    """The server could not be reached, or hung up."""

    kind: ErrorKind = "infrastructure"


class CallTimeout(ConnectionFailed):
    """A call had no answer before its deadline, which counts its retries."""


class BadResponse(ModelError):
    """The server answered, but not with what the API promises."""

    kind: ErrorKind = "infrastructure"


class AnswerTooLarge(BadResponse):
    """An answer is larger than the client reads, as it was sent or unpacked."""

    kind: ErrorKind = "episode"


class PublishFailed(ModelError):
    """Servers did not take new weights; `clients` are the clients of those that failed."""

    def __init__(self, message: str, *, clients: tuple[Any, ...]) -> None:
        super().__init__(message)
        self.clients = clients


class PromptTooLong(ModelError):
    """The prompt does not fit the context window."""

    kind: ErrorKind = "episode"


class UnsupportedSetting(ModelError):
    """The engine in use does not support a requested setting."""

    kind: ErrorKind = "episode"


class TokenError(RolltreeError, ValueError):
    """Token data contradicts itself."""

    kind: ErrorKind = "machine"


class StoreError(RolltreeError):
    """The run directory cannot be read or written."""

    kind: ErrorKind = "machine"


class ClusterError(RolltreeError):
    """A process of a run that uses several cannot be started, or does not stay alive."""


class TrainingError(RolltreeError):
    """Training cannot continue."""


class NonFiniteStep(TrainingError):
    """A step's loss or gradient is not finite; nothing was written to the weights."""


class RankLost(TrainingError):
    """A process that trains with this one has ended, so all of them end."""


class SandboxError(RolltreeError):
    """A sandbox could not do what was requested; say, it was closed."""

    kind: ErrorKind = "infrastructure"


class SandboxFileError(SandboxError):
    """A path leaves the sandbox or is not a regular file, perhaps because of code inside it."""

    kind: ErrorKind = "episode"


class SandboxUnavailable(SandboxError):
    """This machine cannot isolate untrusted code as well as requested."""

    kind: ErrorKind = "machine"


class WorldUnavailable(RolltreeError):
    """The server of a world could not be reached, hung up, or broke its protocol."""

    kind: ErrorKind = "infrastructure"


class ProgramError(RolltreeError):
    """An agent program could not be started, or ended without a model call."""


class BudgetSpent(RolltreeError):
    """An agent has used up its budget of model calls or tokens."""


class RolloutTimeout(RolltreeError, TimeoutError):
    """An episode exceeded its time limit."""


class Stopped(RolltreeError):
    """The program was stopped by SIGTERM; its progress is saved."""


class Escaped(RolltreeError):
    """What somebody's code raised to get past `except Exception`, as a failure like any other.

    Records show `raised` itself. `rolltree._helpers.tasks.contained` makes it.
    """

    def __init__(self, raised: BaseException) -> None:
        super().__init__(f"{type(raised).__name__}: {message_of(raised)}")
        self.raised = raised


_OF_OPENAI = ("APIConnectionError", "InternalServerError", "RateLimitError")
"""The openai package's failures of a server, which code of an environment may raise."""


_OF_NETWORK = {
    "httpx": ("TransportError",),
    "requests": ("ConnectionError", "Timeout"),
    "aiohttp": ("ClientConnectionError",),
    "socket": ("gaierror",),
}
"""Failures to reach some server, of packages that code of an environment may use."""


_OF_REQUEST = {"httpx": ("UnsupportedProtocol", "LocalProtocolError")}
"""Failures among these that need no network: an address or header that a model may have written."""


def _loaded(table: Mapping[str, tuple[str, ...]]) -> tuple[type[BaseException], ...]:
    # Whoever raised one of a package's exceptions has imported the package.
    packages = [(sys.modules.get(package), names) for package, names in table.items()]
    kinds = [getattr(package, name, None) for package, names in packages for name in names]
    return tuple(kind for kind in kinds if isinstance(kind, type))


def error_kind(error: BaseException) -> ErrorKind:
    """Return what failed when an exception was raised."""
    if isinstance(error, RolltreeError):
        return error.kind
    if isinstance(error, BaseExceptionGroup):
        kinds = [error_kind(part) for part in error.exceptions]
        return "episode" if "episode" in kinds else kinds[0]
    if isinstance(error, _loaded({"urllib.error": ("URLError",)})):
        reason = getattr(error, "reason", None)  # a text for an address that is none
        error = reason if isinstance(reason, BaseException) else error
    # A pipe breaks if what reads it has died, say code that a model wrote.
    if isinstance(error, (ConnectionError, *_loaded(_OF_NETWORK))) and not (
        isinstance(error, (BrokenPipeError, *_loaded(_OF_REQUEST))) or _is_of_pipe(error)
    ):
        return "machine"
    # Whoever raised one of its exceptions has imported the package.
    openai = sys.modules.get("openai")
    theirs = tuple(getattr(openai, name, ()) for name in _OF_OPENAI)
    return "infrastructure" if isinstance(error, theirs) else "episode"


def _is_of_pipe(error: BaseException) -> bool:
    """Whether a connection to another process of this machine raised it, not one to a server."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    frame = last.tb_frame
    if frame.f_globals.get("__name__") == "multiprocessing.connection":
        return True
    return type(frame.f_locals.get("self")).__name__ == "SubprocessStreamProtocol"


def follows_from_answer(error: BaseException) -> bool:
    """Whether a failure of an environment's own code may follow from what the model wrote.

    Such a rollout is scored; otherwise a model could choose to have no reward.
    """
    return error_kind(error) == "episode" and not isinstance(error, RolloutTimeout)


def stored_kind(failure: Mapping[str, Any]) -> ErrorKind:
    """Return the kind of a failure that was stored as a dict, perhaps before there were kinds."""
    kind: ErrorKind = failure.get("kind") or kind_of_type(str(failure.get("type")))
    return kind


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"`, or the list of known names if none is similar.

    >>> did_you_mean("tempreature", ["temperature", "top_p"])
    " Did you mean 'temperature'?"
    """
    names = sorted(known)
    # The search is slow in the length of a name, which may come from an untrusted source.
    close = get_close_matches(name[:200], names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if names else " None are known."


def look_up(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return a row of a table.

    Raises:
        UnknownName: the table has no row of this name.
    """
    if name not in table:
        raise UnknownName(f"there is no {kind} {name!r}.{did_you_mean(name, table)}")
    return table[name]


def refuse_unknown(
    what: str, unknown: Mapping[str, object], takes: Callable[..., object] | type
) -> None:
    """Check that a call had no keyword arguments beyond those that a function or class takes.

    Raises:
        UnknownArgument: an argument is unknown; the message names the nearest known one.
    """
    for name in unknown:
        # A class passes arguments that it does not take to its base, so all constructors count.
        classes = takes.__mro__ if isinstance(takes, type) else ()
        functions = [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)]
        known: set[str] = set()
        for function in functions or [takes]:
            parameters = signature(function).parameters.values()
            known |= {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        hint = did_you_mean(name, known - {"self"})
        raise UnknownArgument(f"{what} has no argument {name!r}; it would be ignored.{hint}")


def import_extra(module: str, what: str, extra: str, instead: str = "") -> Any:
    """Return the module of an optional package, which `what` needs and `extra` installs.

    Raises:
        ConfigError: it is not installed, or its release does not fit those beside it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(import_problem(what, module, error, extra, instead)) from error


def message_of(error: BaseException) -> str:
    """Return the message of an exception; never raises.

    >>> message_of(KeyError(7))
    '7'
    """
    try:
        return str(error)
    except Exception:  # noqa: BLE001  say, a KeyError of an integer that is too long to print
        return f"({type(error).__name__} without a readable message)"


def as_sentence(message: object) -> str:
    """Return a message that another sentence can follow: with a full stop if it has no end mark.

    >>> as_sentence(KeyError("id"))
    "'id'."
    """
    text = str(message).rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def record_error(
    error: BaseException,
    phase: Literal["setup", "model", "environment", "scoring", "cleanup", "timeout", "cancelled"],
) -> ErrorRecord:
    """Turn an exception into data, with both ends of a long message or traceback.

    They are cut because every rollout that fails at a dead server stores its own copy.
    """
    if isinstance(error, Escaped):
        error = error.raised
    lines = "".join(_traceback.format_exception(error)).splitlines(keepends=True)
    # Without the lines that only underline the previous one.
    traceback = "".join(line for line in lines if line.strip(" ~^\n"))
    message = message_of(error)
    if isinstance(error, SystemExit):
        message = f"the code called exit({message}), which would have ended the whole program"
    return ErrorRecord(
        type=type(error).__name__,
        message=_both_ends(message, 10_000),
        traceback=_both_ends(traceback, 4_000),
        phase=phase,
        kind=error_kind(error),
    )


def _both_ends(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = limit // 4, limit - limit // 4
    return f"{text[:head]}\n... ({len(text) - limit:,} characters)\n{text[-tail:]}"
