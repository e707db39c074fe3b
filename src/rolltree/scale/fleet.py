"""The servers that sample for a run: what is known of each, and which of their answers count.

The client of a server knows nothing of this; an `EndpointPool` with a fleet makes its calls through
`Fleet.counted`. Rollout workers use it without torch.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from rolltree.inference import ChatRenderer
from rolltree.inference.openai_client import OpenAIClient
from rolltree.inference.reachable import served_version
from rolltree.inference.retry import ONCE
from rolltree.training.config import TrainConfig
from rolltree.values.errors import (
    BadResponse,
    ConfigError,
    ConnectionFailed,
    ServerError,
)
from rolltree.values.types import ModelResponse

LABEL_TIMEOUT_S = 60.0
"""How long a server may take to report the version of its weights."""


@dataclass(slots=True, eq=False)
class ServerState:
    """What a fleet knows of one of its servers.

    Attributes:
        is_suspect: a call failed, so the server may be gone or restarted. Calls wait until this is
            known.
        needs_weights: it does not have the published weights.
        is_new: it was added during the run, and has not been ready yet.
        epoch: how often it was seen with other weights. Answers from before do not count.
        away_since_s: when it stopped answering (`time.monotonic`), if it did.
        revival: the task that waits for it and gives it the weights.
        label: the task that last asked it for its version.
    """

    is_suspect: bool = False
    needs_weights: bool = False
    is_new: bool = False
    epoch: int = 0
    away_since_s: float | None = None
    revival: asyncio.Task[None] | None = None
    label: asyncio.Task[str] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it answers and has the published weights, as far as is known."""
        return not (self.is_suspect or self.needs_weights)


class Fleet(ABC):
    """Decides when a server gets a call, and whether its answer counts.

    `states` has a row for each server that calls wait for; `labels` are the versions that servers
    may report.
    """

    def __init__(self) -> None:
        self.states: dict[OpenAIClient, ServerState] = {}
        self.version = -1
        self.labels: Collection[str] = ()

    @abstractmethod
    async def ready(self, client: OpenAIClient) -> float:
        """Wait until a server can be called; return the seconds.

        Raises:
            ConnectionFailed: another server can be called instead, or none could for too long.
        """

    @abstractmethod
    def check(self, client: OpenAIClient) -> None:
        """Check that a healthy server has the published weights, too.

        Raises:
            ConnectionFailed: it is not known to have them.
        """

    async def counted(
        self, client: OpenAIClient, ask: Callable[[], Awaitable[ModelResponse]]
    ) -> ModelResponse:
        """Return the answer that `ask` gets, which counts only if it has the published weights.

        Raises:
            ConnectionFailed: the server is away.
            BadResponse: it answered with other weights; it gets the published ones.
            ModelError: as `ask` does.
        """
        waited_s = await self.ready(client)
        state = self.states[client]
        # Noted before the request: an answer from before a restart does not count, although the
        # restarted server has the right label again by the time it is asked.
        epoch = state.epoch
        try:
            answer = await ask()
            # Asked after the answer: a process cannot get its label back by itself, so a label that
            # is right now was right while the tokens were sampled (design/0014).
            label = await self._label(client, state)
            if state.epoch != epoch or label not in self.labels:
                raise BadResponse(
                    f"{client.server.root_url} answered with weights that it calls {label!r}, but "
                    f"version {self.version} was published, so the answer is not used."
                )
        except (ConnectionFailed, BadResponse):
            state.is_suspect = True
            raise
        # A 4xx is about the request and says nothing about the process.
        except ServerError as error:
            state.is_suspect = state.is_suspect or error.status >= 500
            raise
        return answer.annotated(wait_s=waited_s) if waited_s else answer

    async def _label(self, client: OpenAIClient, state: ServerState) -> str:
        """Return the version that a server reports, in answer to a request after this call.

        Callers that come while a request is in flight share the next one.
        """
        # An answer in flight may be older than the caller's tokens, so only the next request
        # counts. A server has at most one of these at a time (design/0014).
        running = state.label
        if running is not None and not running.done():
            await asyncio.wait([running])
        # The first caller to wake asks; the others find its task.
        if state.label is running or state.label is None:
            state.label = asyncio.create_task(
                served_version(client.server, timeout_s=LABEL_TIMEOUT_S)
            )
            state.label.add_done_callback(_retrieved)
        # Several calls wait for this task, and one of them may be cancelled.
        return await asyncio.shield(state.label)


def server_client(
    config: TrainConfig, url: str, renderer: ChatRenderer, vocab_size: int
) -> OpenAIClient:
    """Return the client of one server of a run.

    Raises:
        ConfigError: the environment variable of a key is not set.
    """
    section = config.engine
    return OpenAIClient(
        url,
        section.served_model or config.model.name,
        api_key=_key("api_key_env", section.api_key_env),
        admin_key=_key("admin_key_env", section.admin_key_env),
        renderer=renderer,
        token_ids="vllm",
        # After the temperature, as the trainer computes them.
        logprobs_mode="processed",
        vocab_size=vocab_size,
        # The pool repeats calls, after the fleet has checked the server, which may have been
        # restarted.
        retry=ONCE,
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
