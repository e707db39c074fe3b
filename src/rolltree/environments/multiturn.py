"""`MultiTurnEnv` and `SingleTurnEnv`: the loop between one model and the environment."""

from __future__ import annotations

import json
import operator
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from types import NoneType
from typing import Any, ClassVar

import msgspec

from rolltree._helpers.tasks import contained
from rolltree.environments.completion import appended_messages, conversation
from rolltree.environments.environment import Environment, is_overlong, maybe_await
from rolltree.environments.lifecycle import (
    end_raised,
    in_phase,
    is_scored,
    stop,
)
from rolltree.environments.openai_view import OpenAIView
from rolltree.inference.client import as_client, is_refusal
from rolltree.inference.deadline import seeded
from rolltree.rollouts import merge_args
from rolltree.rollouts.requests import current_episode
from rolltree.rollouts.settle import settle_state
from rolltree.tokens import Trajectory, check_steps, num_call_tokens
from rolltree.values.errors import ConfigError, ModelError, message_of
from rolltree.values.seeds import CallSeeds
from rolltree.values.types import (
    Messages,
    MessageType,
    ModelResponse,
    RolloutInput,
    SamplingArgs,
    State,
    TruncationReason,
    concat_messages,
)


class MultiTurnEnv(Environment):
    """A conversation: the model speaks, `env_response` answers, until a stop condition is true.

    Stop conditions are evaluated once per state: before the first call, after every call, and after
    an `env_response` that changed the state (a state with objects other than plain data counts as
    changed). A game may therefore end in `env_response`: change what a `@stop` condition reads in
    the state, or put the last message into `state["final_env_response"]`. No further model call is
    made then, and the messages that `env_response` returned are part of the completion.

    Args:
        max_turns: maximum number of model calls; a rollout that reaches it unfinished is truncated
            for "max_steps". -1: no limit.
        settings: `Environment`'s.
    """

    ends_in_env_response: ClassVar[bool] = True
    """Whether stop conditions are also evaluated after `env_response`, before the next call."""

    def __init__(self, max_turns: int = -1, **settings: Any) -> None:
        super().__init__(**settings)
        if max_turns == 0:
            raise ConfigError(
                "max_turns is 0; the model would never be called. Use -1 for no limit."
            )
        self.max_turns = max_turns
        kind = type(self)
        self._settles = (
            kind.rollout is MultiTurnEnv.rollout and kind.rollouts is Environment.rollouts
        )

    @abstractmethod
    async def env_response(self, messages: Messages, state: State) -> Messages:
        """Return the environment's new messages after `messages`, the conversation so far.

        `messages` is a new list; the messages in it belong to the trajectory and must not change.
        If the prompt is a string, return a string. Otherwise a string is a user's message, and a
        single message is a list of one.
        """

    @stop(priority=100, truncates=TruncationReason.MAX_SEQ_LEN)
    async def prompt_too_long(self, state: State) -> bool:
        """The prompt did not fit the model's context window."""
        return bool(state.prompt_too_long)

    @stop(priority=50)
    async def has_final_env_response(self, state: State) -> bool:
        """`final_env_response` is set."""
        return state.final_env_response is not None

    @stop(priority=-100, truncates=TruncationReason.MAX_STEPS)
    async def max_turns_reached(self, state: State) -> bool:
        """The model has made `max_turns` calls."""
        return len(state.trajectory) >= self.max_turns and self.max_turns > 0

    @stop(priority=-100, truncates=TruncationReason.MAX_SEQ_LEN)
    async def max_seq_len_reached(self, state: State) -> bool:
        """The last call had `max_seq_len` tokens or more."""
        if self.max_seq_len is None or not state.trajectory:
            return False
        return num_call_tokens(state.trajectory[-1]) >= self.max_seq_len

    @stop(priority=-100, truncates=TruncationReason.TIME_LIMIT)
    async def time_limit_reached(self, state: State) -> bool:
        """The engine's time limit for the episode has passed."""
        episode = current_episode()
        return episode is not None and episode.clock.expired

    async def get_prompt_messages(self, state: State) -> Messages:
        """Return the row's prompt, and later the conversation with the environment's answer.

        Override it to rewrite the history: the model gets the messages that it returns.
        """
        if not state.trajectory:
            prompt: Messages = state.prompt
            return prompt
        messages = conversation(state.trajectory)
        answer = await maybe_await(self.env_response, messages, state)
        if not isinstance(messages, str):
            answer = _as_messages(answer)
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

        The first call samples with the seed of `sampling_args`, later calls with seeds derived
        from it. A failure is in `state["error"]`; cleanups have run.
        """
        # Outside of the `try`: without a state there is nothing to record a failure in.
        state = await self._begin(input, client, model, sampling_args)
        calls = state.trajectory
        try:
            # A client that cannot be used is a failure of this rollout, like a world that cannot be
            # made.
            with in_phase("setup"), contained():
                args = self._turn_args(sampling_args)
                session = self._session(client, model, args.get("seed"))
                state = await self._set_up(state)
            with contained():
                await self._play_turns(state, session, model, args)
            # An environment may have assigned a plain list, or steps that it made itself.
            state.trajectory = Trajectory.of(state.trajectory)
        except Exception as error:  # noqa: BLE001  a failed rollout is data
            settle_state(state, input, calls)
            if state.is_answered and is_scored(error):
                self._end_raised(state, error)
            else:
                self.record_failure(state, error)
        finally:
            # Before the completion is rendered: a cleanup may still change the state.
            await self._cleanup(state)
            settle_state(state, input, calls)
            # The rollout failed, was cancelled, or was ended by an override.
            if state.completion is None:
                await self._render_timing(state)
                await self._render_completion(state)
            if isinstance(state.trajectory, Trajectory):
                # Buffers grow by doubling; their unused part is freed, since a run keeps many
                # rollouts.
                state.trajectory.trim()
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
        """Return the rollout's client, with OpenAI's methods for a custom `get_model_response`."""
        # A session remembers the tokens of this rollout, so that the next prompt continues them
        # exactly.
        session = as_client(client, model or None).session()
        # One stream of seeds per rollout, counted over all its calls: a seed per rollout would
        # replay the same random numbers in every call.
        if seed is not None:
            session = seeded(session, CallSeeds(seed))
        is_own = type(self).get_model_response is Environment.get_model_response
        return session if is_own else OpenAIView(session)

    async def _play_turns(self, state: State, session: Any, model: str, args: SamplingArgs) -> None:
        # Only an override can return a response that does not carry its request's settings.
        is_own = not isinstance(session, OpenAIView)
        check_steps(state.trajectory)
        while not await self.is_completed(state):
            # rolltree's own conditions only read the state, so evaluating them twice has no effect.
            compares = self.ends_in_env_response and not self._asks_own_conditions
            before = _StopInputs(self, state) if compares else None
            prompt = await self.get_prompt_messages(state)
            # Either hook may have replaced the trajectory.
            try:
                check_steps(state.trajectory)
            except ConfigError as error:
                error.kind = "episode"  # perhaps only after some answers
                raise
            # A game that ends in `env_response` must not cost one more model call. Conditions are
            # evaluated once per state, because an author's condition may count its calls.
            may_have_ended = self.ends_in_env_response and (before is None or before.has_changed())
            if may_have_ended and await self.is_completed(state):
                await self._keep_last_response(state, prompt)
                break
            request = _NO_REQUEST if is_own else self.model_request(session, args)
            with request, contained():
                try:
                    response: Any = await self.get_model_response(
                        session,
                        model,
                        prompt,
                        oai_tools=state.oai_tools,
                        sampling_args=args,
                        message_type=self.message_type,
                    )
                except Exception as error:
                    # An override may raise after it has got an answer.
                    state.was_answered = state.was_answered or _has_answers()
                    problem = _problem_of(prompt, state.oai_tools, self.message_type)
                    if state.is_answered and problem:
                        raise unsendable_error(self, problem) from error
                    # The request may be refused because of what it quotes of earlier answers.
                    if not state.is_answered or not is_refusal(error):
                        raise
                    await self._end_refused(state, prompt, error)
                    break
                state.was_answered = state.was_answered or not is_overlong(response)
                if response is None or isinstance(response, str):
                    raise wrong_response_error(self, response)
                overrides = type(self).add_model_response is not Environment.add_model_response
                try:
                    with in_phase("environment" if overrides else "model"):
                        await self.add_model_response(state, prompt, response)
                except Exception as error:
                    # What a server sent is the server's; what an override made of it is not.
                    if isinstance(response, ModelResponse) or not _has_answers():
                        raise
                    if overrides and not isinstance(error, ModelError):
                        raise
                    raise wrong_response_error(self, response) from error
        # An override of `is_completed` ended the rollout.
        if not state.is_completed:
            state.is_completed = True
            self._settle_ending(state)

    async def _end_refused(self, state: State, prompt: Messages, error: Exception) -> None:
        """End a rollout as truncated, since its next request is refused."""
        state["refused_request"] = message_of(error)
        state.truncated, state.truncation_reason = True, TruncationReason.ENV.value
        state.stop_condition = "refused_request"
        await self._keep_last_response(state, prompt)

    def _end_raised(self, state: State, error: Exception) -> None:
        """End a rollout as truncated, since the environment's own code raised after an answer."""
        end_raised(state, error)
        state.trajectory = Trajectory.of(state.trajectory)
        if not state.is_completed:
            state.is_completed = True
            self._settle_ending(state)

    async def _keep_last_response(self, state: State, prompt: Messages) -> None:
        """Add the last messages of `env_response` to the completion."""
        # If `final_env_response` is set, the environment has set its last message itself, and
        # `env_response` only repeats it.
        if state.trajectory and state.final_env_response is None:
            said = conversation(state.trajectory)
            state.final_env_response = appended_messages(said, prompt)
            await self._render_completion(state)


def _has_answers() -> bool:
    """Whether a model has answered a call of the current episode."""
    episode = current_episode()
    return episode is not None and episode.clock.num_answered > 0


def _as_messages(answer: Any) -> Any:
    """Return a text as a user's message, and one message as a list of it."""
    if isinstance(answer, str):
        return [{"role": "user", "content": answer}]
    return [answer] if isinstance(answer, Mapping) else answer


def _follows(messages: Messages, answer: Any) -> bool:
    if isinstance(messages, str):
        return isinstance(answer, str)
    return isinstance(answer, list | tuple) and all(isinstance(m, Mapping) for m in answer)


def _problem_of(prompt: Messages, tools: Any, message_type: MessageType) -> str | None:
    """Return why no client can send a prompt with these tools; None if they are well formed."""
    if not _follows([], tools or []):
        return f"oai_tools is {type(tools).__name__}"
    if isinstance(prompt, str) != (message_type == "completion"):
        return f"the prompt is a {type(prompt).__name__}, and message_type is {message_type!r}"
    try:
        json.dumps(prompt, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return message_of(error)
    for message in [] if isinstance(prompt, str) else prompt:
        for name, kinds in _FIELDS.items():
            if not isinstance(message.get(name), kinds):
                return f"the {name} of a message is a {type(message.get(name)).__name__}"
        for call in message.get("tool_calls") or ():
            if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
                return "a tool call of a message has no function"
    return None


_FIELDS: dict[str, Any] = {
    "role": str,
    "content": (str, list, tuple, NoneType),
    "tool_calls": (list, NoneType),
}


def unsendable_error(environment: MultiTurnEnv, problem: str) -> ConfigError:
    """Return the error for messages of an environment that no client can send."""
    error = ConfigError(
        f"{type(environment).__name__} of {environment.env_id!r} made messages that cannot be sent "
        f"to the model ({problem}), so the rollout ends. Return messages with texts, such as "
        '[{"role": "user", "content": "..."}].'
    )
    error.kind = "episode"  # they may be what the model wrote
    return error


def wrong_response_error(environment: MultiTurnEnv, response: Any) -> ConfigError:
    """Return the error for a `get_model_response` that returned no response."""
    known = {type(None): "None", str: "a text"}
    found = known.get(type(response), f"a {type(response).__name__}, not a response")
    error = ConfigError(
        f"{type(environment).__name__}.get_model_response of {environment.env_id!r} returned "
        f"{found}, so there is no answer to record. Return the response, perhaps in a branch that "
        "some answers take."
    )
    error.kind = "episode"
    return error


def invalid_response_error(
    environment: MultiTurnEnv, messages: Messages, answer: Any
) -> ConfigError:
    """Return the error for an `env_response` whose `answer` cannot follow `messages`."""
    parts = (
        list(dict.fromkeys(type(part).__name__ for part in answer))
        if isinstance(answer, list | tuple)
        else []
    )
    kinds = f" ({', '.join(parts[:4])})" if parts else ""
    found = "None" if answer is None else f"a {type(answer).__name__}{kinds}"
    wanted = (
        "a string, as the prompt is one"
        if isinstance(messages, str)
        else 'a list of messages, such as [{"role": "user", "content": "..."}]'
    )
    more = "; change the state in place, without returning it" if isinstance(answer, tuple) else ""
    error = ConfigError(
        f"{type(environment).__name__}.env_response of {environment.env_id!r} returned {found}, "
        f"which cannot be sent to the model. Return {wanted}{more}."
    )
    # It may have no branch for what the model wrote, or return a part of it.
    error.kind = "episode"
    return error


class SingleTurnEnv(MultiTurnEnv):
    """One question, one answer. With the answer the rollout is `terminated`, not truncated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(max_turns=1, **settings)

    @stop
    async def answered(self, state: State) -> bool:
        """The model has answered."""
        return bool(state.trajectory)

    async def env_response(self, messages: Messages, state: State) -> Messages:
        """Never called: the rollout ends with the answer."""
        raise ConfigError(
            "a SingleTurnEnv has no second turn; something removed its stop condition 'answered'. "
            "Subclass MultiTurnEnv to answer the model."
        )


_NO_REQUEST = nullcontext()
# Objects that can be compared neither by value nor by content. For the trajectory, `_encode` covers
# what `env_response` may change: its length, and the last step's reward and extras.
_NOT_COMPARED = frozenset({"trajectory", "client", "timing"})
_SCALARS = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = (dict, list, tuple, set, frozenset)
_ENCODE = msgspec.msgpack.Encoder().encode


class _StopInputs:
    """A snapshot of what stop conditions may read, to detect changes later.

    It covers the state, the last step's reward and extras, the clock, and reassignments of the
    environment's attributes. A state that holds objects other than plain data counts as changed:
    they cannot be compared.
    """

    __slots__ = ("_attributes", "_containers", "_encoded", "_env", "_state", "_values")

    def __init__(self, env: Environment, state: State) -> None:
        self._env, self._state = env, state
        self._attributes = dict(vars(env))
        self._values = dict(state)
        self._containers = [
            value
            for key, value in self._values.items()
            if type(value) not in _SCALARS and key not in _NOT_COMPARED
        ]
        # A list that is changed in place stays the same object, so its content is kept, as bytes.
        is_plain = all(isinstance(value, _CONTAINERS) for value in self._containers)
        self._encoded = self._encode() if is_plain else None

    def has_changed(self) -> bool:
        """Whether anything has changed, or may have."""
        return (
            self._encoded is None
            or _has_changed(self._state, self._values)
            or _has_changed(vars(self._env), self._attributes)
            or self._encode() != self._encoded
        )

    def _encode(self) -> bytes | None:
        """Return the values that can change in place, as bytes; None if they cannot be encoded."""
        content: list[Any] = [self._containers]
        steps, episode = self._state.trajectory, current_episode()
        if steps:
            # `dict.get`, because a step builds its extras on first read; before that
            # there is nothing in them that could change.
            last: Any = steps[-1]
            extras = dict.get(last, "extras")
            content.append([len(steps), last["reward"], extras if type(extras) is dict else None])
        # A limit that runs out during `env_response` must end the rollout before the next call.
        content.append(episode is not None and episode.clock.expired)
        try:
            return _ENCODE(content)
        except (TypeError, ValueError, RecursionError):
            return None


def _has_changed(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a dict has other keys or other values; equal scalars are the same value."""
    if dict.keys(now) != before.keys():
        return True
    # Nearly always, every value is still the same object, in the same order. This runs once per
    # turn of every rollout, so that case is detected without a Python loop.
    if all(map(operator.is_, dict.values(now), before.values())):
        return False
    for key, was in before.items():
        value = dict.__getitem__(now, key)
        is_equal_scalar = type(value) is type(was) in _SCALARS and value == was
        if value is not was and not is_equal_scalar:
            return True
    return False
