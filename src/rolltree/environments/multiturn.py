"""`MultiTurnEnv` and `SingleTurnEnv`: the loop between one model and the environment."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import msgspec

from rolltree.environments.completion import appended_messages, conversation
from rolltree.environments.environment import Environment, maybe_await
from rolltree.environments.lifecycle import in_phase, stop
from rolltree.environments.openai_view import OpenAIView
from rolltree.errors import ConfigError
from rolltree.inference.client import as_client
from rolltree.inference.deadline import seeded
from rolltree.rollouts import merge_args
from rolltree.rollouts.requests import current_episode
from rolltree.seeds import CallSeeds
from rolltree.tokens import Trajectory, check_steps, num_call_tokens
from rolltree.types import (
    Messages,
    RolloutInput,
    SamplingArgs,
    State,
    TruncationReason,
    concat_messages,
)


class MultiTurnEnv(Environment):
    """A conversation: the model speaks, `env_response` answers, until a stop condition is true.

    Stop conditions are asked once per state: before the first call, after every call, and after an
    `env_response` that changed the state (one that holds objects other than plain data counts as
    changed). A game may therefore end in `env_response`: change what a `@stop` condition looks at
    in the state, or put the last message into
    `state["final_env_response"]`. No further model call is made, and what `env_response` returned
    is part of the completion.

    Args:
        max_turns: most model calls; a rollout that reaches it without an end is truncated for
            "max_steps". -1: no limit.
        settings: `Environment`'s.
    """

    ends_in_env_response: ClassVar[bool] = True
    """Whether stop conditions are asked after `env_response` too, before the next model call."""

    def __init__(self, max_turns: int = -1, **settings: Any) -> None:
        super().__init__(**settings)
        if max_turns == 0:
            raise ConfigError(
                "max_turns is 0; the model would never be called. Use -1 for no limit."
            )
        self.max_turns = max_turns

    @abstractmethod
    async def env_response(self, messages: Messages, state: State) -> Messages:
        """Return what the environment says after `messages`, the conversation so far: new messages.

        `messages` is a new list; the messages in it belong to the trajectory and must not change.
        After a prompt that is a string, what it says is a string.
        """

    @stop(priority=100, truncates=TruncationReason.MAX_SEQ_LEN)
    async def prompt_too_long(self, state: State) -> bool:
        """The prompt did not fit the model's context window."""
        return bool(state.get("prompt_too_long", False))

    @stop(priority=50)
    async def has_final_env_response(self, state: State) -> bool:
        """`final_env_response` is set."""
        return state.get("final_env_response") is not None

    @stop(priority=-100, truncates=TruncationReason.MAX_STEPS)
    async def max_turns_reached(self, state: State) -> bool:
        """The model has had its turns."""
        return len(state["trajectory"]) >= self.max_turns and self.max_turns > 0

    @stop(priority=-100, truncates=TruncationReason.MAX_SEQ_LEN)
    async def max_seq_len_reached(self, state: State) -> bool:
        """The last call used up `max_seq_len`."""
        if self.max_seq_len is None or not state["trajectory"]:
            return False
        return num_call_tokens(state["trajectory"][-1]) >= self.max_seq_len

    @stop(priority=-100, truncates=TruncationReason.TIME_LIMIT)
    async def time_limit_reached(self, state: State) -> bool:
        """The engine's time limit for the episode is over."""
        episode = current_episode()
        return episode is not None and episode.clock.expired

    async def get_prompt_messages(self, state: State) -> Messages:
        """Return the row's prompt, and later the conversation with the environment's answer.

        Override it to rewrite history: what the model is sent is what this returns.
        """
        if not state["trajectory"]:
            prompt: Messages = state["prompt"]
            return prompt
        messages = conversation(state["trajectory"])
        answer = await maybe_await(self.env_response, messages, state)
        if not _follows(messages, answer):
            raise invalid_response_error(self, messages, answer)
        return concat_messages([messages, answer])

    async def rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str = "",
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Play one rollout and return its state.

        Call i samples with the seed of `sampling_args` for i = 0, and with one derived from it
        later. A failure is in `state["error"]`; cleanups have run.
        """
        state = await self._begin(input, client, model, sampling_args)
        try:
            with in_phase("setup"):
                args = self._turn_args(sampling_args)
                session = self._session(client, model, args.get("seed"))
                state = await self._set_up(state)
            await self._play_turns(state, session, model, args)
            state["trajectory"] = Trajectory.of(state["trajectory"])
        except Exception as error:  # noqa: BLE001  a failed rollout is data
            self.record_failure(state, error)
        finally:
            await self._cleanup(state)
            if not isinstance(state.get("trajectory"), list):
                state["trajectory"] = Trajectory()
            if state.get("completion") is None:  # failed or cancelled, or ended by an override
                await self._render_timing(state)
                await self._render_completion(state)
            if isinstance(state["trajectory"], Trajectory):
                state["trajectory"].trim()
        return state

    def _turn_args(self, sampling_args: SamplingArgs | None) -> SamplingArgs:
        """Return the sampling arguments of the rollout's model calls."""
        return merge_args(self.sampling_args, sampling_args)

    async def _begin(
        self, input: RolloutInput, client: Any, model: str, sampling_args: SamplingArgs | None
    ) -> State:
        """Return the state that the rollout begins with."""
        return await self.init_state(input, client=client, model=model, sampling_args=sampling_args)

    def _session(self, client: Any, model: str, seed: int | None) -> Any:
        """Return the rollout's client, with OpenAI's methods for an override that wants them."""
        session = as_client(client, model or None).session()
        if seed is not None:
            session = seeded(session, CallSeeds(seed))
        is_own = type(self).get_model_response is Environment.get_model_response
        return session if is_own else OpenAIView(session)

    async def _play_turns(self, state: State, session: Any, model: str, args: SamplingArgs) -> None:
        # Only an override can answer with something that does not know its request.
        is_own = not isinstance(session, OpenAIView)
        check_steps(state["trajectory"])
        while not await self.is_completed(state):
            before = self._snapshot(state)
            prompt = await self.get_prompt_messages(state)
            check_steps(state["trajectory"])  # either hook may have put something else there
            may_have_ended = self.ends_in_env_response and (before is None or before.has_changed())
            if may_have_ended and await self.is_completed(state):
                await self._keep_last_response(state, prompt)
                break
            request = _NO_REQUEST if is_own else self.model_request(session, args)
            with in_phase("model"), request:
                response = await self.get_model_response(
                    session,
                    model,
                    prompt,
                    oai_tools=state["oai_tools"],
                    sampling_args=args,
                    message_type=self.message_type,
                )
                await self.add_model_response(state, prompt, response)
        if not state["is_completed"]:  # an override of is_completed ended it
            state["is_completed"] = True
            self._settle_ending(state)

    def _snapshot(self, state: State) -> _Snapshot | None:
        if self._asks_own_conditions or not self.ends_in_env_response:
            return None
        return _Snapshot(self, state)

    async def _keep_last_response(self, state: State, prompt: Messages) -> None:
        """Make what `env_response` said last part of the completion."""
        if state["trajectory"] and state.get("final_env_response") is None:
            said = conversation(state["trajectory"])
            state["final_env_response"] = appended_messages(said, prompt)
            await self._render_completion(state)


def _follows(said: Messages, answer: Any) -> bool:
    if isinstance(said, str):
        return isinstance(answer, str)
    return isinstance(answer, list | tuple) and all(isinstance(m, Mapping) for m in answer)


def invalid_response_error(environment: MultiTurnEnv, said: Messages, answer: Any) -> ConfigError:
    """Return the error of an `env_response` that returned `answer`, which cannot follow `said`."""
    parts = list(dict.fromkeys(type(part).__name__ for part in answer)) if _holds(answer) else []
    kinds = f" ({', '.join(parts[:4])})" if parts else ""
    found = "None" if answer is None else f"a {type(answer).__name__}{kinds}"
    wanted = (
        "a string, as the prompt is one"
        if isinstance(said, str)
        else 'a list of messages, such as [{"role": "user", "content": "..."}]'
    )
    more = "; the state is changed in place and not returned" if isinstance(answer, tuple) else ""
    return ConfigError(
        f"{type(environment).__name__}.env_response of {environment.env_id!r} returned {found}, "
        f"which the model cannot be sent. Return {wanted}{more}."
    )


def _holds(answer: Any) -> bool:
    return isinstance(answer, list | tuple)


class SingleTurnEnv(MultiTurnEnv):
    """One question, one answer. The answer is the end: `terminated`, not truncated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(max_turns=1, **settings)

    @stop
    async def answered(self, state: State) -> bool:
        """The model has answered."""
        return bool(state["trajectory"])

    async def env_response(self, messages: Messages, state: State) -> Messages:
        """Never asked: the rollout ends with the answer."""
        raise ConfigError(
            "a SingleTurnEnv has no second turn; something removed its stop condition 'answered'. "
            "Subclass MultiTurnEnv to answer the model."
        )


_NO_REQUEST = nullcontext()
_NOT_COMPARED = frozenset({"trajectory", "client", "timing"})
_PLAIN = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = (dict, list, tuple, set, frozenset)
_ENCODE = msgspec.msgpack.Encoder().encode


class _Snapshot:
    """What stop conditions may look at, to see whether it has changed since.

    That is the state, the last step's reward and extras, the clock, and the environment's
    attributes, if they are set anew. A state that holds objects other than plain data counts as
    changed: they cannot be compared.
    """

    __slots__ = ("_attributes", "_containers", "_data", "_env", "_ids", "_state", "_values")

    def __init__(self, env: Environment, state: State) -> None:
        self._env, self._state = env, state
        self._attributes = list(vars(env).values())
        self._values = dict(state)
        self._ids = list(map(id, self._values.values()))
        self._containers = [
            value
            for key, value in self._values.items()
            if type(value) not in _PLAIN and key not in _NOT_COMPARED
        ]
        is_plain = all(isinstance(value, _CONTAINERS) for value in self._containers)
        self._data = self._encode() if is_plain else None

    def has_changed(self) -> bool:
        """Whether something is, or may be, another now."""
        if self._data is None or self._state.keys() != self._values.keys():
            return True
        if list(map(id, dict.values(self._state))) != self._ids and self._has_other_values():
            return True
        attributes = vars(self._env).values()
        if len(attributes) != len(self._attributes):
            return True
        if not all(map(operator.is_, attributes, self._attributes)):
            return True
        return self._encode() != self._data

    def _has_other_values(self) -> bool:
        for key, was in self._values.items():
            now = dict.__getitem__(self._state, key)
            if now is not was and not (type(now) is type(was) in _PLAIN and now == was):
                return True
        return False

    def _encode(self) -> bytes | None:
        """Return everything that can change without being replaced; None for other objects."""
        kept: list[Any] = [self._containers]
        steps, episode = self._state["trajectory"], current_episode()
        if steps:
            extras = dict.get(steps[-1], "extras")  # built when they are first read
            last = extras if type(extras) is dict else None
            kept.append([len(steps), steps[-1]["reward"], last])
        kept.append(episode is not None and episode.clock.expired)
        try:
            return _ENCODE(kept)
        except (TypeError, ValueError, RecursionError):
            return None
