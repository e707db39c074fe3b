"""The client of one server that samples for a run; rollout workers use it without torch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from rolltree.inference import ChatRenderer
from rolltree.inference.call import ModelCall
from rolltree.inference.openai_client import OpenAIClient, OpenAIMemory
from rolltree.inference.reachable import served_version
from rolltree.inference.retry import RetryPolicy
from rolltree.training.config import TrainConfig
from rolltree.values.errors import (
    BadResponse,
    ConfigError,
    ConnectionFailed,
    ModelError,
    ServerError,
)
from rolltree.values.types import ModelResponse

if TYPE_CHECKING:
    from rolltree.scale.servers import Servers

PROBED: ContextVar[TrainedServer | None] = ContextVar("probed", default=None)
"""The server that this task probes: the probe's calls must not wait for the probe."""
ASK_S = 60.0
"""How long a server may take to report the version of its weights."""


class TrainedServer(OpenAIClient):
    """The client of one server of a run; it takes the arguments of `OpenAIClient`.

    Attributes:
        is_suspect: a call failed, so the server may be gone or restarted. Calls wait until this is
            known.
        needs_weights: it does not have the published weights.
        is_new: it was added during the run, and has not been ready yet.
        epoch: how often it was found with other weights. Answers from before do not count.
    """

    # None outside a run, where the client is just an `OpenAIClient`.
    fleet: Servers | None = None
    is_suspect = needs_weights = is_new = False
    epoch = 0
    away_since_s: float | None = None  # time.monotonic()
    _check: asyncio.Task[str] | None = None

    async def respond(self, call: ModelCall, memory: OpenAIMemory) -> ModelResponse:
        """Make one call, which counts only if the published weights answered it.

        Raises:
            ConnectionFailed: the server is away.
            BadResponse: it answered with other weights; it gets the published ones.
            ModelError: as in `OpenAIClient`.
        """
        if self.fleet is None or PROBED.get() is self:
            return await super().respond(call, memory)
        waited_s = await self.fleet.ready(self)
        # Noted before the request: an answer from before a restart does not count, although the
        # restarted server has the right label again by the time it is asked.
        epoch = self.epoch
        try:
            answer = await super().respond(call, memory)
            await self._confirm(epoch)
        except (ConnectionFailed, BadResponse):
            self.is_suspect = True
            raise
        # A 4xx is about the request and says nothing about the process.
        except ServerError as error:
            self.is_suspect = self.is_suspect or error.status >= 500
            raise
        return answer.annotated(wait_s=waited_s) if waited_s else answer

    async def check_health(self) -> None:
        """Return if the server answers and has the published weights.

        Raises:
            ModelError: it does not answer, or does not have them yet.
        """
        await super().check_health()
        # The pool would send calls to a server that passes this check, but its weights are not
        # known yet.
        if self.fleet is not None and self.is_suspect:
            self.fleet.revive(self)
            raise ConnectionFailed(f"{self.server.root_url} has yet to get the run's weights.")

    async def is_up(self) -> bool:
        """Return whether the server answers at all."""
        try:
            await super().check_health()
        except ModelError:
            return False
        return True

    async def _confirm(self, epoch: int) -> None:
        """Raise `BadResponse` unless the server has had the published weights all along."""
        assert self.fleet is not None
        # Asked after the answer: a process cannot get its label back by itself, so a label that is
        # right now was right while the tokens were sampled (design/0014).
        label = await self._label()
        if self.epoch != epoch or label not in self.fleet.labels:
            raise BadResponse(
                f"{self.server.root_url} answered with weights that it calls {label!r}, but "
                f"version {self.fleet.version} was published, so the answer is not used."
            )

    async def _label(self) -> str:
        """Return the version that the server reports, in answer to a request after this call.

        Callers that come while a request is in flight share the next one.
        """
        # An answer in flight may be older than the caller's tokens, so only the next request
        # counts. A server has at most one of these at a time (design/0014).
        running = self._check
        if running is not None and not running.done():
            await asyncio.wait([running])
        # The first caller to wake asks; the others find its task.
        if self._check is running or self._check is None:
            self._check = asyncio.create_task(served_version(self.server, timeout_s=ASK_S))
            self._check.add_done_callback(_retrieved)
        # Several calls wait for this task, and one of them may be cancelled.
        return await asyncio.shield(self._check)


ServerT = TypeVar("ServerT", bound=TrainedServer)


def server_client(
    kind: Callable[..., ServerT],
    config: TrainConfig,
    url: str,
    renderer: ChatRenderer,
    vocab_size: int,
) -> ServerT:
    """Return the client, of that `kind`, of one server of a run.

    Raises:
        ConfigError: the environment variable of a key is not set.
    """
    section = config.engine
    return kind(
        url,
        section.served_model or config.model.name,
        api_key=_key("api_key_env", section.api_key_env),
        admin_key=_key("admin_key_env", section.admin_key_env),
        renderer=renderer,
        token_ids="vllm",
        # After the temperature, as the trainer computes them.
        logprobs_mode="processed",
        vocab_size=vocab_size,
        # The pool repeats calls, after `Servers` has checked the server, which may have been
        # restarted.
        retry=RetryPolicy(max_retries=0),
    )


def _key(setting: str, variable: str | None) -> str | None:
    """Return the value of the environment variable that a setting of the engine names."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(
            f"engine.{setting} is {variable!r}, but that variable is not set, so the servers would "
            "refuse every request. Export it, or leave the setting out."
        )
    return os.environ[variable]


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's error, which asyncio would log if nobody waits for it any more."""
    if not task.cancelled():
        task.exception()
