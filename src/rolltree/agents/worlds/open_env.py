"""`OpenEnvWorld`: a session of an OpenEnv server, with observations and actions as text.

It implements the protocol of `openenv` 0.10 and `openenv-core` 0.3 (`/ws`, and `/schema` for the
form of actions), and needs neither package.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from rolltree._helpers.untrusted import read_json
from rolltree.agents.worlds.interface import bad_action
from rolltree.values.errors import ConfigError, WorldUnavailable
from rolltree.values.seeds import MAX_SEED
from rolltree.values.steps import StepOutcome
from rolltree.values.types import Info

if TYPE_CHECKING:
    import aiohttp

ToAction: TypeAlias = Callable[[str], Mapping[str, Any]]
"""A function from a model's text to the fields of an action; raises ValueError without one."""
ToText: TypeAlias = Callable[[Mapping[str, Any]], str]
_MAX_MESSAGE_BYTES = 2**26
# Errors that an action, and so the model, can cause; other codes are failures of the server.
_ACTION_CODES = ("VALIDATION_ERROR", "EXECUTION_ERROR")


def observation_text(observation: Mapping[str, Any]) -> str:
    """Return the fields of an observation as text: a single text as it is, others as JSON."""
    told = {
        name: value
        for name, value in observation.items()
        if name != "metadata" and value is not None
    }
    if len(told) == 1:
        (value,) = told.values()
        if isinstance(value, str):
            return value
    return json.dumps(told, ensure_ascii=False)


def action_of_schema(schema: Mapping[str, Any]) -> ToAction:
    """Return a function from text to an action: to its only field, if that is text, or by JSON."""
    fields = {
        name: part for name, part in (schema.get("properties") or {}).items() if name != "metadata"
    }
    needed = [name for name in schema.get("required") or () if name in fields]
    texts = [name for name in (needed or fields) if fields[name].get("type") == "string"]
    if len(needed or fields) == 1 and texts:
        return lambda text: {texts[0]: text}
    return _json_action


def _json_action(text: str) -> Mapping[str, Any]:
    try:
        found = read_json(text)
    except ValueError as error:
        raise ValueError(f"an action is a JSON object ({error})") from error
    if not isinstance(found, dict):
        raise ValueError("an action is a JSON object")
    return found


class OpenEnvWorld:
    """One session of a server; `reset` opens it.

    Args:
        url: the address of the server, with http or https.
        to_action: from text to an action's fields; None: according to the server's `/schema`.
        to_text: from an observation's fields to text.
        reset_args: arguments of `reset` in addition to the seed.
        headers: of every request; they are not stored anywhere.
        message_limit_s: how long the server may take for an answer.
        slot: is held while a session is open, if the server has a limited number of them.
    """

    in_thread = False

    def __init__(
        self,
        url: str,
        *,
        to_action: ToAction | None = None,
        to_text: ToText = observation_text,
        reset_args: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        message_limit_s: float = 60.0,
        slot: asyncio.Semaphore | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{url!r} is not the address of an OpenEnv server. Write it with http:// or "
                "https://; the WebSocket at /ws is found from it."
            )
        self.url, self.to_action, self.to_text = url.rstrip("/"), to_action, to_text
        self.reset_args, self.headers = dict(reset_args or {}), dict(headers or {})
        self.message_limit_s, self._slot, self._holds_slot = message_limit_s, slot, False
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        """Open a session if none is open, begin an episode, and return the first observation.

        Raises:
            WorldUnavailable: the server cannot be reached, has no free session, or failed.
        """
        import aiohttp

        if self._socket is None:
            # A reset that failed to connect leaves its client open.
            await self.close()
            if self._slot is not None:
                await self._slot.acquire()
                self._holds_slot = True
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.message_limit_s)
            self._http = aiohttp.ClientSession(timeout=timeout, headers=self.headers)
            if self.to_action is None:
                self.to_action = action_of_schema(await self._action_schema())
            self._socket = await self._opened()
        data = dict(self.reset_args)
        if seed is not None:
            data["seed"] = seed % MAX_SEED
        answer = await self._ask("reset", data)
        if answer["type"] == "error":
            raise self._broken(f"could not reset: {_message_of(answer)}")
        outcome = self._outcome(answer["data"])
        return outcome.obs or "", dict(outcome.info)

    async def step(self, action: Any) -> StepOutcome:
        """Take the action in the model's text; if the server rejects it, the outcome says so.

        An action to which there is no answer in time ends the episode, if the server is well.

        Raises:
            WorldUnavailable: the server hung up or failed.
        """
        assert self.to_action is not None
        try:
            fields = self.to_action(action) if isinstance(action, str) else action
        except ValueError as error:
            return bad_action(error)
        try:
            answer = await self._ask("step", dict(fields))
        except WorldUnavailable as error:
            if not isinstance(error.__cause__, TimeoutError) or not await self._is_well():
                raise
            told = f"Your action had no result in {self.message_limit_s:g} s."
            return StepOutcome(told, truncated=True)
        if answer["type"] == "error":
            if _code_of(answer) in _ACTION_CODES:
                return bad_action(ValueError(_message_of(answer)))
            raise self._broken(f"could not step: {_message_of(answer)}")
        outcome = self._outcome(answer["data"])
        if not outcome.terminated:
            return outcome
        return replace(outcome, info={**outcome.info, "state": await self.state()})

    async def state(self) -> dict[str, Any]:
        """Return the server's state of the episode: its id, number of steps, and further fields.

        Raises:
            WorldUnavailable: the server hung up or failed.
        """
        answer = await self._ask("state")
        if answer["type"] == "error":
            raise self._broken(f"did not return its state: {_message_of(answer)}")
        return dict(answer["data"])

    async def close(self) -> None:
        """End the session; a second call does nothing."""
        socket, self._socket = self._socket, None
        http, self._http = self._http, None
        try:
            if socket is not None:
                await socket.close()
            if http is not None:
                await http.close()
        finally:
            if self._slot is not None and self._holds_slot:
                self._holds_slot = False
                self._slot.release()

    async def _is_well(self) -> bool:
        """Whether the server answers a request."""
        import aiohttp

        assert self._http is not None
        limit = aiohttp.ClientTimeout(total=min(self.message_limit_s, 5.0))
        try:
            async with self._http.get(f"{self.url}/schema", timeout=limit):
                return True
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _action_schema(self) -> Mapping[str, Any]:
        import aiohttp

        assert self._http is not None
        try:
            async with self._http.get(f"{self.url}/schema") as response:
                found = await response.json()
            schema: Mapping[str, Any] = found["action"]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreached(error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._broken(f"has no schema of its actions at /schema ({error!r})") from error
        return schema

    async def _opened(self) -> aiohttp.ClientWebSocketResponse:
        import aiohttp

        assert self._http is not None
        try:
            return await self._http.ws_connect(
                f"{self.url}/ws", max_msg_size=_MAX_MESSAGE_BYTES, heartbeat=20.0
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreached(error) from error

    async def _ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a message and return the answer, a dict with `type` and `data`."""
        import aiohttp

        if self._socket is None:
            raise self._broken("has no open session: reset() opens one")
        message: dict[str, Any] = {"type": kind}
        if data is not None:
            message["data"] = data
        try:
            await self._socket.send_json(message)
            got = await self._socket.receive(timeout=self.message_limit_s)
        except TimeoutError as error:
            raise self._broken(f"gave no answer in {self.message_limit_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(f"hung up ({error})") from error
        if got.type is not aiohttp.WSMsgType.TEXT:
            raise self._broken("hung up")
        try:
            answer = json.loads(got.data)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"answered with something that is not JSON ({error})") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise self._broken("answered without data")
        if answer.get("type") not in ("observation", "state", "error"):
            raise self._broken(f"answered with the unknown type {answer.get('type')!r}")
        if _code_of(answer) == "CAPACITY_REACHED":
            raise self._broken(
                f"has no session left ({_message_of(answer)}). Pass max_sessions to OpenEnv: as "
                "many as the server has (its max_concurrent_envs)"
            )
        return answer

    def _outcome(self, data: Mapping[str, Any]) -> StepOutcome:
        observation, reward = data.get("observation"), data.get("reward")
        if not isinstance(observation, dict):
            raise self._broken("answered without an observation")
        info: Info = dict(data.get("metadata") or {})
        return StepOutcome(
            self.to_text(observation),
            0.0 if reward is None else reward,
            terminated=bool(data.get("done")),
            info=info,
        )

    def _broken(self, what: str) -> WorldUnavailable:
        return WorldUnavailable(
            f"the OpenEnv server {self.url} {what}. The episode is lost; see the server's log, and "
            "run the same command again for the failed rollouts."
        )

    def _unreached(self, error: BaseException) -> WorldUnavailable:
        return WorldUnavailable(
            f"the OpenEnv server {self.url} cannot be reached ({error or type(error).__name__}), "
            "so no episode can begin. Start it, or correct the address."
        )


def _code_of(answer: Mapping[str, Any]) -> str:
    return str(answer["data"].get("code", "")) if answer.get("type") == "error" else ""


def _message_of(answer: Mapping[str, Any]) -> str:
    data = answer["data"]
    errors = data.get("errors")
    return f"{data.get('message', '')}{f': {errors}' if errors else ''}"[:2000]
