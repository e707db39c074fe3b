"""The environments of verifiers 0.1.8 on rolltree's engine: `Environment` and its simple children.

They take the same arguments as in verifiers, and call the same methods in the same order.
`generate` records a failed rollout as data, and raises only if all have failed; `rollout` itself
raises, as in verifiers.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, cast

from rolltree import environments as rooms
from rolltree._helpers.tasks import contained
from rolltree.environments import lifecycle
from rolltree.environments.completion import conversation
from rolltree.environments.dataset import Data, RowFormat, Rows
from rolltree.environments.lifecycle import Mark, Role, mark_of, register
from rolltree.environments.multiturn import invalid_response_error
from rolltree.environments.rubrics import as_rubric
from rolltree.environments.scoring import check_scored
from rolltree.inference.wire import read
from rolltree.rollouts import Split, current_episode
from rolltree.tokens import record_call
from rolltree.values.errors import BadResponse, ConfigError
from rolltree.values.types import (
    OVERLONG_PROMPT,
    ChatMessage,
    Messages,
    MessageType,
    ModelResponse,
    RolloutInput,
    SamplingArgs,
    State,
    ToolSchema,
)
from rolltree.verifiers.batches import (
    Batches,
    RunGroup,
    args_of_rollout,
    current_batch,
    note_failure,
)
from rolltree.verifiers.datasets import as_rows, is_hub_dataset, with_example_ids, with_prompts
from rolltree.verifiers.helpers import (
    NullAsyncContext,
    WrongResponse,
    concat_messages,
    cut_tokens,
    maybe_await,
)
from rolltree.verifiers.model_calls import as_sent, ask, is_direct, is_sendable
from rolltree.verifiers.own_names import OwnNames, set_for_author
from rolltree.verifiers.parsers import Parser
from rolltree.verifiers.rubrics import Rubric
from rolltree.verifiers.types import AT_THE_END, CompatState, PlainState, as_engine_state

Method = Callable[..., Any]


def stop(func: Method | None = None, *, priority: int = 0) -> Any:
    """Mark `method(self, state) -> bool` as a stop condition."""
    return _marked(func, "stop", priority)


def cleanup(func: Method | None = None, *, priority: int = 0) -> Any:
    """Mark `method(self, state)` to run after each rollout."""
    return _marked(func, "cleanup", priority)


def teardown(func: Method | None = None, *, priority: int = 0) -> Any:
    """Mark `method(self)` to run when the process ends."""
    return _marked(func, "teardown", priority)


def _marked(func: Method | None, role: Role, priority: int) -> Any:
    # Attributes on the function, as in verifiers: an author's `hasattr(method, "stop")` finds them.
    def decorate(target: Method) -> Any:
        setattr(target, role, True)
        setattr(target, f"{role}_priority", priority)
        return target

    return decorate if func is None else decorate(func)


def marked_methods(environment: object, role: Role) -> list[Method]:
    """Return an environment's methods of one role, in the order in which they are called."""
    found: list[tuple[int, str, Method]] = []
    # On the instance and not the class, so that methods an author binds to it are found.
    for _, method in inspect.getmembers(environment, inspect.ismethod):
        mark = lifecycle.mark_of(method)
        if hasattr(method, role):  # also methods that were marked by hand
            found.append((-getattr(method, f"{role}_priority", 0), method.__name__, method))
        elif mark is not None and mark.role == role:
            found.append((-mark.priority, method.__name__, method))
    return [method for _, _, method in sorted(found, key=lambda item: item[:2])]


# The arguments that verifiers adds to every request; a server may refuse others.
_DEFAULT_ARGS: SamplingArgs = {"n": 1, "extra_body": {}}
# Whether rolltree plays, and not a caller of `rollout`.
_IN_AN_EPISODE = ContextVar("_IN_AN_EPISODE", default=False)


class Environment(OwnNames, Batches, rooms.Environment):
    """`verifiers.Environment`; keywords that it does not know become attributes."""

    logger: logging.Logger
    logger = logging.getLogger("rolltree.environments")
    row_format = RowFormat()
    state_type = CompatState
    _closed = False
    # verifiers evaluates every condition before every call, and some count their calls.
    _asks_own_conditions = False
    _stop_marks: dict[str, Mark] = {}

    def __init__(
        self,
        dataset: Data | None = None,
        eval_dataset: Data | None = None,
        system_prompt: str | None = None,
        few_shot: list[ChatMessage] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        sampling_args: SamplingArgs | None = None,
        message_type: MessageType = "chat",
        oai_tools: list[ToolSchema] | None = None,
        max_workers: int = 512,
        env_id: str | None = None,
        env_args: dict[str, Any] | None = None,
        map_kwargs: dict[str, Any] = {},  # noqa: B006  (never changed)
        max_seq_len: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.logger = logging.getLogger(f"verifiers.envs.{type(self).__name__}")
        self.message_type = message_type
        self.oai_tools: list[ToolSchema] | None = oai_tools  # type: ignore[assignment]
        self.system_prompt = system_prompt
        self.few_shot = few_shot  # type: ignore[assignment]
        self.parser = parser or Parser()
        self.rubric = as_rubric(rubric, Rubric)
        # verifiers compares only classes, so two parsers of one class with different fields pass.
        if type(self.parser) is not type(self.rubric.parser):
            self.logger.warning(
                "The parser and rubric parser are different. This may cause unexpected behavior."
            )
        # Empty, not "default": in verifiers only `task` becomes "default", and results show "".
        self.env_id = env_id or ""
        self.env_args = env_args or {}
        self.max_seq_len = max_seq_len
        self.row_format = RowFormat(self.env_id, system_prompt, tuple(few_shot or ()), message_type)
        if message_type == "completion" and (system_prompt or few_shot):
            raise ConfigError(
                "system_prompt and few_shot are not supported for completion tasks: a prompt that "
                "is one string has no place for messages. Write them into the prompt."
            )
        self.dataset = self._formatted(dataset, map_kwargs)
        self.eval_dataset = self._formatted(eval_dataset, map_kwargs)
        # Authors change these in place, including `extra_body`, so both are copied.
        self.sampling_args = deepcopy(_DEFAULT_ARGS)
        for name, value in (sampling_args or {}).items():
            self.sampling_args[name] = dict(value or {}) if name == "extra_body" else value
        self.max_workers = max_workers
        # verifiers sets keywords that it does not know as attributes, and environments read them.
        for name, value in kwargs.items():
            set_for_author(self, name, value)
        if self.dataset is None and self.eval_dataset is None:
            raise ConfigError(
                f"{type(self).__name__} got neither dataset nor eval_dataset, so there is nothing "
                "to run. Either dataset or eval_dataset must be provided."
            )
        self.rollouts_per_example = None
        self.__post_init__()

    def __post_init__(self) -> None:
        """Find the methods marked `stop`, `cleanup` and `teardown`. An override must call this."""
        self._stop_conditions = marked_methods(self, "stop")
        self._cleanup_handlers = marked_methods(self, "cleanup")
        self._teardown_handlers = marked_methods(self, "teardown")
        self._stop_marks = {
            condition.__name__: _inherited_mark(type(self), condition.__name__)
            for condition in self._stop_conditions
        }
        if self._teardown_handlers:
            register(self)

    def set_loaded_name(self, env_id: str, env_args: Mapping[str, Any]) -> None:
        """Set the name and arguments that it was loaded with, unless it has its own."""
        self.env_id = self.env_id or env_id
        self.env_args = self.env_args or dict(env_args)

    # Data

    def _formatted(self, dataset: Any, map_kwargs: dict[str, Any]) -> Any:
        # verifiers formats chat data only: rows of text completions reach the author's code
        # untouched.
        if dataset is None or self.message_type == "completion":
            return dataset if dataset is None or is_hub_dataset(dataset) else self.rows(dataset)
        return self.format_dataset(
            dataset, self.system_prompt, self.few_shot, map_kwargs=map_kwargs
        )

    def format_dataset(
        self,
        dataset: Any,
        system_prompt: str | None = None,
        few_shot: list[ChatMessage] | None = None,
        question_key: str = "question",
        answer_key: str = "answer",
        map_kwargs: dict[str, Any] = {},  # noqa: B006  (never changed)
    ) -> Any:
        """Return a data set with the columns `example_id`, `prompt` and `task`."""
        if not is_hub_dataset(dataset):
            few = tuple(few_shot or ())
            form = RowFormat(self.env_id, system_prompt, few, "chat", question_key, answer_key)
            return as_rows(dataset, form)
        dataset = self._ensure_example_id(dataset)
        dataset = self._ensure_prompt(
            dataset, system_prompt, few_shot, question_key, answer_key, map_kwargs
        )
        return self._ensure_task(dataset, map_kwargs)

    # The three `_ensure_*` methods are private in verifiers, but environments override them.
    def _ensure_example_id(self, dataset: Any) -> Any:
        return with_example_ids(dataset)

    def _ensure_prompt(
        self,
        dataset: Any,
        system_prompt: str | None = None,
        few_shot: list[ChatMessage] | None = None,
        question_key: str = "question",
        answer_key: str = "answer",
        map_kwargs: dict[str, Any] = {},  # noqa: B006  (never changed)
    ) -> Any:
        return with_prompts(dataset, system_prompt, few_shot, question_key, answer_key, map_kwargs)

    def _ensure_task(self, dataset: Any, map_kwargs: dict[str, Any] = {}) -> Any:  # noqa: B006
        if "task" in dataset.column_names:
            return dataset
        # `map` hashes the function and all that it refers to, so it must not refer to `self`.
        task = self.env_id or "default"
        return dataset.map(lambda row: {"task": task}, **map_kwargs)

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Any:
        """Return `n` training rows (-1: all), shuffled by `seed` when there is one.

        Raises:
            ConfigError: the environment has evaluation data only.
        """
        if self.dataset is None:
            raise ConfigError(
                f"dataset is not set: environment {self.env_id!r} has evaluation data only, so it "
                "cannot be trained on. Pass dataset=..."
            )
        return _taken(self.dataset, n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Any:
        """Return `n` evaluation rows (-1: all); training rows if there are no others."""
        if self.eval_dataset is None:
            return self.get_dataset(n, seed)
        return _taken(self.eval_dataset, n, seed)

    def rows(self, data: Data) -> Rows:
        """Return `data` as rows; complete rows stay as they are."""
        return as_rows(data, self.row_format)

    def _split(self, split: Split) -> Rows:
        return self.rows(self.get_dataset() if split == "train" else self.get_eval_dataset())

    def own_rows(self, split: Split) -> Rows | None:
        """Return a split's own rows; None if it has none."""
        data = self.dataset if split == "train" else self.eval_dataset
        return None if data is None else self.rows(data)

    def group_of(self, row: Mapping[str, Any]) -> str:
        """Return the group of a row: its `example_id`, whatever its task."""
        return str(row["example_id"])

    def input_of(self, row: Mapping[str, Any]) -> RolloutInput:
        """Return a rollout's input: the whole row."""
        return cast(RolloutInput, dict(row))

    # One rollout

    async def init_state(
        self,
        input: RolloutInput,
        client: Any = None,
        model: str = "",
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Return the state before the first turn. A row's `info` can replace the tools."""
        state = await super().init_state(input, client, model, sampling_args)
        # verifiers looks for `info.oai_tools` with hasattr, which is always false for a dict, and
        # so ignores a row's tools; here they are used. Without tools, verifiers has None instead of
        # an empty list.
        state["oai_tools"] = state["oai_tools"] or self.oai_tools
        # verifiers sets these keys at the end: `"completion" in state` means that the rollout is
        # over.
        for key in AT_THE_END:
            dict.pop(state, key, None)
        return state

    async def _set_up(self, state: State) -> State:
        # verifiers takes whatever `setup_state` returns; authors return plain dicts, or nothing.
        made = await maybe_await(self.setup_state, state)
        if made is None or isinstance(made, State):
            return state if made is None else made
        return as_engine_state(made)

    async def get_model_response(
        self,
        client: Any,
        model: str,
        prompt: Messages,
        oai_tools: Sequence[ToolSchema] | None = None,
        sampling_args: SamplingArgs | None = None,
        message_type: MessageType | None = None,
    ) -> Any:
        """Call the model once, with the given `sampling_args` only.

        A prompt that is too long for the model gives a response whose `id` is "overlong-prompt".

        Raises:
            Exception: the client's error; a `ModelError` if it is a client of rolltree.
        """
        kind = message_type or self.message_type
        return await ask(client, model, prompt, oai_tools, sampling_args, kind)

    async def add_model_response(
        self, state: State, prompt_messages: Messages, response: Any
    ) -> None:
        """Append the step of one model call; tokens beyond `max_seq_len` are cut from it."""
        # Outside of an engine's rollout, the author runs the loop and expects the arguments as
        # passed.
        if current_episode() is not None:
            self._note_sent(state)
        # Unlike rolltree's own environments, verifiers keeps the step of a prompt that is too long,
        # with the text "Prompt too long.", and reward functions read it.
        if getattr(response, "id", None) == OVERLONG_PROMPT:
            state["prompt_too_long"] = True
        answer = self._recorded(state, response)
        chat = self.message_type == "chat"
        step = record_call(
            state["trajectory"],
            prompt=prompt_messages,
            completion=[answer.message] if chat else answer.text,
            response=answer,
            turn=len(state["trajectory"]),
        )
        if step["tokens"] is not None:
            cut_tokens(step["tokens"], self.max_seq_len)

    def _note_sent(self, state: State) -> None:
        """Write the sampling arguments into the state as they were sent."""
        args = state.get("sampling_args")
        if isinstance(args, dict):
            sent = as_sent(args, self.message_type)
            # verifiers renames `max_tokens` in the caller's dict itself, which shows in states and
            # metadata.
            args.clear()
            args.update(sent)

    def _recorded(self, state: State, response: Any) -> ModelResponse:
        """Return the record of a response, with the message that verifiers would keep."""
        if isinstance(response, ModelResponse):
            return response
        choices = read(response, "choices")
        if self.message_type == "chat" and isinstance(choices, list) and len(choices) > 1:
            raise WrongResponse(
                f"the response has {len(choices)} choices, and a step is one answer. Ask with "
                "n = 1, or hand on a response with the choice that you want."
            )
        try:
            made = self.response_record(state, response)
        except BadResponse as error:
            raise WrongResponse(str(error)) from error
        # verifiers has tokens with logprobs or none at all.
        if made.logprobs is None and made.completion_ids is not None:
            made = replace(made, prompt_ids=None, completion_ids=None, versions=None)
        message = {**made.message}
        # verifiers keeps role, content and tool calls of an answer; a parser must not find more
        # text here.
        message.pop("reasoning_content", None)
        return replace(made, message=message)

    async def _render_completion(self, state: State) -> None:
        # As in verifiers: the last prompt and answer without the row's prompt, by number of
        # messages.
        steps, prompt = state["trajectory"], state["prompt"]
        if steps:
            said = concat_messages([steps[-1]["prompt"], steps[-1]["completion"]])
            state["completion"] = said[len(prompt) :]
        if not state.get("completion"):  # no step, or a history that was shortened
            await super()._render_completion(state)

    async def is_completed(self, state: State | dict[str, Any], **kwargs: Any) -> bool:
        """Evaluate the stop conditions in order; the first that is true ends the rollout."""
        if not isinstance(state, State):
            # verifiers takes plain dicts here; rolltree's own loop reads attributes of a `State`.
            made = PlainState(state)
            try:
                return await self.is_completed(made, **kwargs)
            finally:
                state.update(made)
        # verifiers runs the cleanups inside `is_completed`, before scoring: reward functions see
        # what `@cleanup` methods put into the state.
        if not await super().is_completed(state, **kwargs):
            return False
        await self._cleanup(state)
        return True

    def record_failure(self, state: State, error: Exception) -> None:
        """Write a failure into the state and raise it."""
        # verifiers has no failed states: a caller of `rollout` gets the exception itself, and
        # `rollouts` below turns it into data for the engine.
        super().record_failure(state, error)
        raise error

    async def rollouts(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> list[State]:
        """Play one episode and return the state of its rollout."""
        if self._own_run_group() is not None:
            _warn_of_run_group(type(self))
        args = args_of_rollout(self.sampling_args, sampling_args)
        batch = current_batch()
        # If `generate` got the author's own client, that one is passed on, not the engine's view.
        client = batch.client if batch is not None and batch.is_own else client
        played = _IN_AN_EPISODE.set(True)
        try:
            with contained():
                state = await self.run_rollout(NullAsyncContext(), input, client, model, args)
        except Exception as error:  # any failure of the author's code is noted
            note_failure(error)
            raise
        finally:
            _IN_AN_EPISODE.reset(played)
        state = as_engine_state(state)
        # An author's `rollout` may not set it, and verifiers reads it with `get`.
        state.setdefault("completion", None)
        return [state]

    async def run_rollout(
        self,
        sem: AbstractAsyncContextManager[Any],
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Play one rollout within the semaphore."""
        async with sem:
            return await self.rollout(input, client, model, sampling_args)

    # Scoring

    @property
    def has_group_rewards(self) -> bool:
        """Always True: verifiers scores every group at once, with `rubric.score_group`."""
        return True

    async def run_request(self, request: Any, client: Any) -> Sequence[State]:
        """Play one episode; its group is scored later."""
        return await self.play_request(request, client)

    async def score_group(self, states: Sequence[State]) -> None:
        """Score the finished rollouts of one group, in place."""
        batch = current_batch()
        # In training and evaluation the engine limits scoring; only `generate` has its own limit.
        limit = NullAsyncContext() if batch is None else batch.scoring
        await self.rubric.score_group(list(states), score_sem=limit)
        check_scored(states, self.rubric, "score_group")

    def _own_run_group(self) -> RunGroup | None:
        is_ours = getattr(self.run_group, "__func__", None) is Environment.run_group
        return None if is_ours else self.run_group

    async def run_group(
        self,
        group_inputs: list[RolloutInput],
        client: Any,
        model: str,
        gen_sampling_args: SamplingArgs,
        gen_sem: AbstractAsyncContextManager[Any],
        score_sem: AbstractAsyncContextManager[Any],
        **kwargs: Any,
    ) -> list[State]:
        """Play and score the given inputs as one group."""
        playing = (
            self.run_rollout(gen_sem, given, client, model, gen_sampling_args)
            for given in group_inputs
        )
        states = [as_engine_state(state) for state in await asyncio.gather(*playing)]
        await self.rubric.score_group(states, score_sem=score_sem)
        return states


class MultiTurnEnv(Environment, rooms.MultiTurnEnv):
    """A conversation: the model speaks, `env_response` answers, until a stop condition is true.

    Stop conditions are evaluated once per turn, before `env_response`: a game that ends in
    `env_response` gets one more model call.
    """

    # rolltree's own loop also stops right after `env_response`; verifiers does not.
    ends_in_env_response: ClassVar[bool] = False
    # Inherited stop conditions that verifiers does not have: None removes them.
    has_final_env_response = max_seq_len_reached = None  # type: ignore[assignment]

    def __init__(self, max_turns: int = -1, **kwargs: Any) -> None:
        Environment.__init__(self, **kwargs)
        self.max_turns = max_turns

    @stop
    async def prompt_too_long(self, state: State) -> bool:
        """The prompt did not fit the model's context window."""
        return bool(state.get("prompt_too_long", False))

    @stop
    async def max_turns_reached(self, state: State) -> bool:
        """The model has made `max_turns` calls."""
        return len(state["trajectory"]) >= self.max_turns and self.max_turns > 0

    @abstractmethod
    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        """Return the environment's messages after `messages`, the conversation so far."""

    async def get_prompt_messages(self, state: State) -> Messages:
        """Return the row's prompt, and later the conversation with the environment's answer.

        The environment's answer may also be a single message.
        """
        if not state["trajectory"]:
            return cast(Messages, state["prompt"])
        messages = conversation(state["trajectory"])
        answer = await maybe_await(self.env_response, messages, state)
        joined = concat_messages([messages, answer])
        # verifiers fails inside the model call with an AttributeError on a tuple or None. The class
        # of the error is kept, since authors catch it; the text says what to return.
        if self._is_sent_as_it_is() and not is_sendable(joined):
            error = invalid_response_error(self, messages, answer)
            raise AttributeError(str(error))  # as the model call of verifiers does
        return joined

    def _is_sent_as_it_is(self) -> bool:
        """Whether the prompt reaches the model call without an override in between."""
        own = (self.get_prompt_messages, self.get_model_response)
        theirs = (MultiTurnEnv.get_prompt_messages, Environment.get_model_response)
        return all(getattr(a, "__func__", None) is b for a, b in zip(own, theirs, strict=True))

    async def rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Play one rollout and return its state.

        Raises:
            Exception: the rollout's failure, which the state has, too; cleanups have run.
        """
        # A copy, because `_note_sent` changes it and a caller uses its dict for many rollouts.
        own = None if sampling_args is None else dict(sampling_args)
        state = await super().rollout(input, client, model, own)
        self._note_sent(state)
        return state

    def _end_raised(self, state: State, error: Exception) -> None:
        super()._end_raised(state, error)
        # As in `record_failure`: who calls `rollout` gets the exception itself.
        if not _IN_AN_EPISODE.get():
            raise error
        note_failure(error)

    def _turn_args(self, sampling_args: SamplingArgs | None) -> SamplingArgs:
        return dict(sampling_args or {})  # `generate` adds the environment's, as in verifiers

    def _session(self, client: Any, model: str, seed: int | None) -> Any:
        # A session numbers calls and holds tokens; the author's client has no sessions.
        is_own = client is None or is_direct(client)
        return client if is_own else super()._session(client, model, seed)

    async def _begin(
        self, input: RolloutInput, client: Any, model: str, sampling_args: SamplingArgs | None
    ) -> State:
        settings = {"client": client, "model": model, "sampling_args": sampling_args}
        signature = inspect.signature(self.init_state)
        # Overrides of `init_state` may have other names of parameters, or the input alone. The
        # first form that the signature accepts is the one that verifiers would have used.
        for args, named in (((), settings), (tuple(settings.values()), {}), ((), {})):
            try:
                signature.bind(input, *args, **named)
            except TypeError:
                continue
            return as_engine_state(await self.init_state(input, *args, **named))
        return as_engine_state(await self.init_state(input, **settings))


class SingleTurnEnv(MultiTurnEnv, rooms.SingleTurnEnv):
    """One question, one answer."""

    # rolltree's own stop condition for a single question; verifiers uses max_turns=1.
    answered = None  # type: ignore[assignment]

    def __init__(self, **kwargs: Any) -> None:
        MultiTurnEnv.__init__(self, max_turns=1, **kwargs)
        self._stop_marks["max_turns_reached"] = Mark("stop")  # an answer is not truncated by it

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        """Never called."""
        raise NotImplementedError("env_response is not implemented for SingleTurnEnv")


@cache
def _warn_of_run_group(kind: type[Environment]) -> None:
    # The engine starts each rollout when there is room for one, not when there is for a group.
    kind.logger.warning(
        "%s.run_group is called by generate and evaluate only: here, the rollouts of a group are "
        "played one by one, then scored together, so what it does for a group is missing. Do it in "
        "rollout, or in score_group of the rubric.",
        kind.__name__,
    )


def _taken(data: Any, n: int, seed: int | None) -> Any:
    if seed is not None:
        # On a copy: verifiers shuffles the data set for all later callers (docs/compat.md).
        data = data.shuffle(seed=seed)
    return data.select(range(min(n, len(data)))) if n > 0 else data


def _inherited_mark(cls: type, name: str) -> Mark:
    """Return the mark of a stop condition: that of the method it overrides, if this truncates."""
    marks = (mark_of(vars(base).get(name)) for base in cls.__mro__)
    return next((mark for mark in marks if mark is not None and mark.truncates), Mark("stop"))
