"""The rubrics of verifiers 0.1.8."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Any, TypeVar

from rolltree._helpers.tasks import contained, run_each
from rolltree._helpers.threads import run_in_pool
from rolltree.environments import rubrics as rooms
from rolltree.environments.parsers import extract_boxed_answer
from rolltree.environments.rubrics.functions import (
    RewardFunc,
    RewardFunction,
    function_name,
    scoring_error,
)
from rolltree.environments.rubrics.math_rubric import boxed_answers_are_equal
from rolltree.environments.rubrics.rubric import Scores, write_advantages, write_scores
from rolltree.rollouts.settle import KeptParts
from rolltree.values.errors import ConfigError
from rolltree.values.types import Messages, SamplingArgs, State
from rolltree.verifiers.helpers import maybe_await
from rolltree.verifiers.model_calls import async_client, request_fields
from rolltree.verifiers.parsers import MaybeThinkParser, Parser
from rolltree.verifiers.tools import convert_func_to_oai_tool

Semaphore = AbstractAsyncContextManager[Any]
F = TypeVar("F", bound=RewardFunc)
V = TypeVar("V")
# How verifiers recognizes a group function: one of these parameters, or `list` as the annotation.
_PLURALS = {"states", "prompts", "completions", "answers", "tasks", "infos"}


def in_thread(func: F) -> F:
    """Mark a function of rolltree that blocks and may run in any thread."""
    func.__rolltree_in_thread__ = True  # type: ignore[attr-defined]
    return func


class Rubric(rooms.Rubric):
    """Weighted reward functions. `funcs` and `weights` are lists that may be changed at any time.

    Raises:
        ConfigError: the numbers of weights and functions differ.
    """

    logger: logging.Logger
    logger = logging.getLogger("verifiers.rubrics")
    funcs: Any = ()
    weights: Any = ()

    def __init__(
        self,
        funcs: list[RewardFunc] | None = None,
        weights: list[float] | None = None,
        parser: Any = None,
    ) -> None:
        self.logger = logging.getLogger(f"verifiers.rubrics.{type(self).__name__}")
        # The author's own lists, not copies: as in verifiers, they may be changed at any time.
        self.funcs = funcs or []
        self.weights = weights or [1.0] * len(self.funcs)
        if len(self.weights) != len(self.funcs):
            raise ConfigError(
                f"Number of weights ({len(self.weights)}) must match number of functions "
                f"({len(self.funcs)})"
            )
        self.parser = parser or Parser()
        self.class_objects: dict[str, Any] = {"parser": self.parser}

    # In verifiers a rubric and its environment each have a parser, and they may differ.
    def adopt_parser(self, parser: Any) -> None:
        """Do nothing: the rubric keeps its own parser."""

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Add a function that scores a rollout or a group."""
        self.funcs.append(func)
        self.weights.append(weight)

    def add_metric(self, func: RewardFunc, weight: float = 0.0, **_: Any) -> None:
        """Add a function that is reported and, at weight 0, not rewarded."""
        self.add_reward_func(func, weight)

    def _add(self, function: RewardFunction) -> None:
        raise ConfigError(
            f"{function.name!r} scores steps, which verifiers' rubrics do not do. Use "
            "rolltree.Rubric."
        )

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions, in the order in which they were added."""
        return tuple(
            RewardFunction.of(
                func, weight, kind="group" if self._is_group_func(func) else "rollout"
            )
            for func, weight in zip(self._get_reward_funcs(), self._get_reward_weights())  # noqa: B905
        )

    @property
    def has_group_rewards(self) -> bool:
        """Always True: verifiers scores every group at once."""
        return True

    def _get_reward_func_names(self) -> list[str]:
        return [function_name(func) for func in self.funcs]

    def _get_reward_funcs(self) -> list[RewardFunc]:
        return list(self.funcs)

    def _get_reward_weights(self) -> list[float]:
        return list(self.weights)

    def _of_kind(self, values: Sequence[V], is_group: bool) -> list[V]:
        kinds = map(self._is_group_func, self.funcs)
        return [value for value, kind in zip(values, kinds) if kind == is_group]  # noqa: B905

    def _get_individual_reward_func_names(self) -> list[str]:
        return [function_name(func) for func in self._get_individual_reward_funcs()]

    def _get_individual_reward_funcs(self) -> list[RewardFunc]:
        return self._of_kind(self.funcs, False)

    def _get_individual_reward_weights(self) -> list[float]:
        return self._of_kind(self.weights, False)

    def _get_group_reward_func_names(self) -> list[str]:
        return [function_name(func) for func in self._get_group_reward_funcs()]

    def _get_group_reward_funcs(self) -> list[RewardFunc]:
        return self._of_kind(self.funcs, True)

    def _get_group_reward_weights(self) -> list[float]:
        return self._of_kind(self.weights, True)

    def get_reward_func_names(self) -> list[str]:
        """Return the functions' names, which are the metrics' names."""
        return self._get_reward_func_names()

    def get_reward_funcs(self) -> list[RewardFunc]:
        """Return the functions themselves."""
        return self._get_reward_funcs()

    def get_reward_weights(self) -> list[float]:
        """Return the weights, in the functions' order."""
        return self._get_reward_weights()

    def _is_group_func(self, func: RewardFunc) -> bool:
        signature = inspect.signature(func)
        # `is list`, so that `list[float]` and a string annotation do not count, as in verifiers.
        return not _PLURALS.isdisjoint(signature.parameters) or signature.return_annotation is list

    async def _call_individual_reward_func(
        self, func: RewardFunc, state: State, score_sem: Semaphore
    ) -> float:
        # These six names and `class_objects`, nothing else: rolltree's own rubrics also pass the
        # keys of the state, which would override the default of an author's parameter.
        known = {
            "prompt": state["prompt"],
            "completion": state["completion"],
            "answer": state.get("answer", ""),
            "state": state,
            "task": state["task"],
            "info": state.get("info", {}),
            **self.class_objects,
        }
        async with score_sem:
            try:
                # `float` inside the try: a function that returns None or a text scores 0.0, as in
                # verifiers.
                with contained():
                    return float(await _alone(func, known))
            except Exception as error:  # noqa: BLE001  as it was
                self._note(func, error, [state])
                return 0.0

    async def _call_group_reward_func(
        self, func: RewardFunc, states: list[State], score_sem: Semaphore
    ) -> list[float]:
        known = {
            "prompts": [state["prompt"] for state in states],
            "completions": [state["completion"] for state in states],
            "answers": [state.get("answer", "") for state in states],
            "states": list(states),
            "tasks": [state["task"] for state in states],
            "infos": [state.get("info", {}) for state in states],
            **self.class_objects,
        }
        async with score_sem:
            try:
                with contained():
                    scores: list[float] = await _alone(func, known)
            except Exception as error:  # noqa: BLE001  as it was
                self._note(func, error, states)
                return [0.0] * len(states)
        return scores

    def _note(self, func: RewardFunc, error: Exception, states: Sequence[State]) -> None:
        name = function_name(func)
        self.logger.error("Error calling reward function %s: %s", name, error)
        # A 0.0 from a typo looks like a bad answer; `rolltree eval` and `show` print this record.
        record = scoring_error(func, name, error).as_dict()
        for state in states:
            state["scoring_errors"] = {**(state.get("scoring_errors") or {}), name: record}

    def _of_each(self, func: RewardFunc, values: Any, states: Sequence[State]) -> list[Any]:
        """Return a group function's score of each rollout; one that gave none counts as raising."""
        try:
            scores = [values[index] for index in range(len(states))]
        except Exception as error:  # noqa: BLE001  what it returned may follow from an answer
            wrong = ValueError(
                f"it returned {values!r}, which has no score for each of {len(states)} rollouts. "
                "Return a list with one number per rollout, in order."
            )
            wrong.__cause__ = error
            self._note(func, wrong, states)
            return [0.0] * len(states)
        for index, state in enumerate(states):
            try:
                float(scores[index])
            except Exception as error:  # noqa: BLE001  a `__float__` may raise anything
                self._note(func, error, [state])
                scores[index] = 0.0
        return scores

    async def score_rollout(self, state: State, score_sem: Semaphore) -> None:
        """Score one rollout.

        Raises:
            AssertionError: there is no function, or one that scores groups.
        """
        is_group = [self._is_group_func(func) for func in self.funcs]
        # AssertionErrors, as in verifiers.
        assert self.funcs, "score_rollout needs at least one function of a rollout"
        assert not any(is_group), "score_rollout cannot ask functions of a group"
        started, before = time.perf_counter(), KeptParts(state)
        scores = Scores(scored=True)
        for func, weight in zip(self.funcs, self.weights):  # noqa: B905  as they may differ
            score = await self._call_individual_reward_func(func, state, score_sem)
            _add(scores, func, weight, score)
            before.settle()
        # verifiers scores states made by hand, even without steps.
        state.setdefault("trajectory", [])
        _write(state, scores, started)

    async def score_group(self, states: list[State], score_sem: Semaphore) -> None:
        """Score the rollouts of one group, and fill each advantage: reward minus the mean."""
        if not states:
            self.logger.warning("No states to score")
            return
        started, before = time.perf_counter(), [KeptParts(state) for state in states]
        found = [Scores(scored=True) for _ in states]
        for func, weight in zip(self.funcs, self.weights):  # noqa: B905  as they may differ
            if self._is_group_func(func):
                found_here = await self._call_group_reward_func(func, states, score_sem)
                values = self._of_each(func, found_here, states)
            else:
                # Function by function over the whole group: a later one may read what an earlier
                # one wrote.
                values = await asyncio.gather(
                    *(self._call_individual_reward_func(func, s, score_sem) for s in states)
                )
            for index, scores in enumerate(found):
                _add(scores, func, weight, values[index])
                # After each function: the next one may read what this one ruined.
                before[index].settle()
        for state, scores in zip(states, found, strict=True):
            _write(state, scores, started)
        # As in verifiers, values of a step are filled only if they are None.
        write_advantages(states)


async def _alone(func: RewardFunc, known: dict[str, Any]) -> Any:
    """Call a function in a task of its own, which it may cancel at its own cost."""
    (outcome,) = await run_each([_called(func, known)])
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


async def _called(func: RewardFunc, known: dict[str, Any]) -> Any:
    parameters = inspect.signature(func).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = known if takes_all else {k: v for k, v in known.items() if k in parameters}
    if getattr(func, "__rolltree_in_thread__", False):
        return await run_in_pool(lambda: func(**given))
    return await maybe_await(func, **given)


def _add(scores: Scores, func: RewardFunc, weight: float, value: Any) -> None:
    """Add one score. Functions of the same name share a metric: the score of the last one."""
    # In verifiers the values of a group function stay what they are; JSON needs plain numbers.
    plain = value if type(value) in (bool, int, float) else float(value)
    scores.metrics[function_name(func)] = plain
    scores.reward = (scores.reward or 0.0) + float(value) * weight


def _write(state: State, scores: Scores, started: float) -> None:
    state["metrics"] = None  # it holds this rubric's metrics only
    write_scores(state, scores, time.perf_counter() - started)


class RubricGroup(Rubric, rooms.RubricGroup):
    """The sum of its rubrics: their rewards add up, and so do metrics of the same name.

    Raises:
        ConfigError: there is no rubric.
    """

    def __init__(self, rubrics: list[rooms.Rubric], **kwargs: Any) -> None:
        if not rubrics:
            raise ConfigError("RubricGroup must have at least one rubric")
        super().__init__(**kwargs)
        self.rubrics = rubrics
        self.logger.info("Initialized RubricGroup with %d rubrics", len(rubrics))

    def _get_reward_func_names(self) -> list[str]:
        return [name for rubric in self.rubrics for name in rubric.get_reward_func_names()]

    def _get_reward_funcs(self) -> list[RewardFunc]:
        return [func for rubric in self.rubrics for func in rubric.get_reward_funcs()]

    def _get_reward_weights(self) -> list[float]:
        return [weight for rubric in self.rubrics for weight in rubric.get_reward_weights()]

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Add a function to the first rubric."""
        assert self.rubrics, "RubricGroup must have at least one rubric"
        self.logger.warning("Adding reward function to the first rubric in the group.")
        self.rubrics[0].add_reward_func(func, weight)

    async def score_rollout(self, state: State, score_sem: Semaphore) -> None:
        """Score one rollout by every rubric in turn."""
        started, total = time.perf_counter(), _Sum(state)
        for rubric in self.rubrics:
            await rubric.score_rollout(state, score_sem=score_sem)
            total.take()
        total.write(started)

    async def score_group(self, states: list[State], score_sem: Semaphore) -> None:
        """Score a group by every rubric in turn; advantages are those of the sums."""
        started, totals = time.perf_counter(), [_Sum(state) for state in states]
        for rubric in self.rubrics:
            await rubric.score_group(states, score_sem=score_sem)
            for total in totals:
                total.take()
        for total in totals:
            total.write(started, keeps_given=True)
        write_advantages(states)


class _Sum:
    """The combined scores of several rubrics, each of which writes its own into the state."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.scores = Scores(scored=True)
        state.setdefault("trajectory", [])
        # Each rubric writes into the state as if it were alone, and the next one must find the
        # state as it was.
        kept = ("reward", "metrics", "advantage", "has_step_rewards", "scoring_errors")
        self._before = {key: state[key] for key in kept if key in state}
        self._before["metrics"] = dict(state.get("metrics") or {})
        self._missing = [key for key in kept if key not in self._before]
        self._steps = [(step, step["reward"], step["advantage"]) for step in state["trajectory"]]
        self._errors: dict[str, Any] = dict(state.get("scoring_errors") or {})

    def take(self) -> None:
        """Add the scores that are now in the state, and restore the state."""
        state, scores = self.state, self.scores
        reward = state.get("reward", 0.0)
        both = reward is not None and scores.reward is not None
        scores.reward = scores.reward + reward if both else None
        for name, value in (state.get("metrics") or {}).items():
            so_far = scores.metrics.get(name, 0.0)
            known = so_far is not None and value is not None
            scores.metrics[name] = so_far + value if known else None
        self._errors.update(state.get("scoring_errors") or {})
        state.update(self._before)
        for key in self._missing:
            state.pop(key, None)
        for step, reward, advantage in self._steps:
            step["reward"], step["advantage"] = reward, advantage

    def write(self, started: float, *, keeps_given: bool = False) -> None:
        """Write the sums into the state; with `keeps_given`, its earlier metrics stay."""
        if keeps_given:
            self.scores.metrics = {**self._before["metrics"], **self.scores.metrics}
        _write(self.state, self.scores, started)
        if self._errors:
            self.state["scoring_errors"] = self._errors


class ToolRubric(Rubric, rooms.ToolRubric):
    """Metrics of weight 0: `total_tool_calls`, and `<name>_calls` for each tool."""

    def __init__(self, tools: list[Callable[..., Any]] | None = None) -> None:
        self.tools = tools or []
        self.oai_tools = [convert_func_to_oai_tool(tool) for tool in self.tools]
        self.tool_names = [function_name(tool) for tool in self.tools]
        counts = [self.get_tool_call_count_func(name) for name in self.tool_names]
        super().__init__(funcs=[self.total_tool_calls, *counts], weights=[0.0] * (1 + len(counts)))

    async def total_tool_calls(self, completion: Messages) -> float:
        """Return how many tool calls the model wrote."""
        return float(sum(len(calls) for calls in _tool_calls(completion) if type(calls) is list))

    def get_tool_call_count_func(self, tool_name: str) -> Callable[..., Any]:
        """Return a function that counts the calls of one tool."""

        async def tool_call_count_func(completion: Messages) -> float:
            return float(
                sum(
                    call.get("function", {}).get("name") == tool_name
                    for calls in _tool_calls(completion)
                    for call in calls
                )
            )

        tool_call_count_func.__name__ = f"{tool_name}_calls"
        return tool_call_count_func


def _tool_calls(completion: Messages) -> list[Any]:
    assert isinstance(completion, list), "text completions have no tool calls"
    return [m["tool_calls"] for m in completion if m["role"] == "assistant" and "tool_calls" in m]


class MathRubric(Rubric, rooms.MathRubric):
    r"""A rubric with `correct_answer_reward_func`, of weight 1, added last.

    Answers that take more than `comparison_limit_s` seconds to compare count as different.

    Raises:
        ConfigError: the `math-verify` package is missing.
    """

    comparison_limit_s = 15.0

    def __init__(
        self,
        funcs: list[RewardFunc] | None = None,
        weights: list[float] | None = None,
        parser: Any = None,
    ) -> None:
        rooms.MathRubric.require_package()
        super().__init__(funcs, weights, parser or MaybeThinkParser(extract_boxed_answer))
        # After the author's functions, as in verifiers, so `funcs[0]` is the author's.
        self.add_reward_func(self.correct_answer_reward_func)

    @in_thread
    def correct_answer_reward_func(
        self, parser: Any, completion: Messages, answer: str, **kwargs: Any
    ) -> float:
        """Return 1.0 if the completion's answer is equivalent to the reference answer, else 0.0."""
        try:
            # An error in the comparison, or in the parser, scores 0, as in verifiers.
            response = parser.parse_answer(completion) or ""
            if response == "":
                return 0.0
            limit_s = self.comparison_limit_s
            return float(boxed_answers_are_equal(f"{answer}", f"{response}", time_limit_s=limit_s))
        except Exception:  # noqa: BLE001  as it was
            return 0.0


# A judge's prompt changes its verdicts, so this is that of verifiers 0.1.8, to the letter.
DEFAULT_JUDGE_PROMPT = """Given a ground truth answer \
and a response, determine if the response is correct.

Question:
```
{question}
```

Ground truth answer:
```
{answer}
```

Response:
```
{response}
```

Respond either "yes" or "no" only."""


class JudgeRubric(Rubric, rooms.JudgeRubric):
    """A rubric whose functions may have an argument `judge`, and call it.

    `await judge(prompt, completion, answer, state)` returns the judge's reply; replies are kept in
    `state["judge_response"]` by the prompt that was sent. It reads `judge_client`, `judge_model`,
    `judge_prompt` and `judge_sampling_args` when it is called, so they can be replaced; functions
    with arguments of these names get the constructor's.

    Args:
        parser: finds the response that the judge sees.
        parallelize_scoring: not used, as in verifiers.
        judge_client: an `openai.AsyncOpenAI` (the default), a blocking `OpenAI`, which is called
            in threads, or a model client of rolltree.
        judge_model: the name of the judge model.
        judge_sampling_args: OpenAI fields of the judge's requests.
        judge_prompt: a template with the fields `{question}`, `{answer}` and `{response}`, or one
            that only the rubric's functions fill in.

    Raises:
        ConfigError: there is no client, and the openai package is missing.
    """

    def __init__(
        self,
        parser: Any = None,
        parallelize_scoring: bool = False,
        judge_client: Any = None,
        judge_model: str = "gpt-4.1-nano",
        judge_sampling_args: SamplingArgs | None = None,
        judge_prompt: str = DEFAULT_JUDGE_PROMPT,
    ) -> None:
        # Not rolltree's own constructor, which refuses templates with other fields: verifiers lets
        # functions fill those in.
        Rubric.__init__(self, parser=parser)
        self.judge_client = judge_client if judge_client is not None else _default_client()
        self.judge_model = judge_model
        self.judge_prompt = judge_prompt
        self.judge_sampling_args = judge_sampling_args or {}
        self.class_objects = {
            "parser": self.parser,
            "judge": self.judge,
            "judge_client": self.judge_client,
            "judge_model": self.judge_model,
            "judge_prompt": self.judge_prompt,
            "judge_sampling_args": self.judge_sampling_args,
        }

    async def judge(self, prompt: Messages, completion: Messages, answer: str, state: State) -> str:
        """Return the judge's reply about one completion.

        Raises:
            KeyError: the template has an unknown field.
            RuntimeError: the judge gave no answer; the client's error is its cause.
        """
        request = self.judge_prompt.format(
            question=_question(prompt),
            answer=answer,
            response=self.parser.parse_answer(completion),
        )
        # Keyed by the prompt that was sent, so functions that ask the same share one answer.
        replies = state.get("judge_response")
        if isinstance(replies, dict) and request in replies:
            return str(replies[request])
        reply = await self._ask(request)
        state["judge_response"] = (
            {**replies, request: reply} if isinstance(replies, dict) else {request: reply}
        )
        return reply

    async def _ask(self, request: str) -> str:
        try:
            response = await maybe_await(
                async_client(self.judge_client).chat.completions.create,
                model=self.judge_model,
                messages=[{"role": "user", "content": request}],
                **request_fields(self.judge_sampling_args or {}, "chat"),
            )
            return str(response.choices[0].message.content)
        except Exception as error:
            # verifiers raises a RuntimeError for each kind of failure, with these words at the
            # front.
            problem = next(
                (text for kind, text in _PROBLEMS.items() if kind in _kinds(error)),
                f"Unexpected error when calling judge model '{self.judge_model}'",
            )
            text = f"{problem}. Model: {self.judge_model}, Error: {error}"
            self.logger.warning(text)
            raise RuntimeError(text) from error


_PROBLEMS = {
    "RateLimitError": "Judge model rate limit exceeded: ask it less often, or later",
    "APITimeoutError": "Judge model timeout: give its client more time, or look at its server",
    "APIError": "Judge model API error: is there such a model, and is the API key right?",
}
"""Messages for exceptions of the openai package, the more specific ones first."""


def _kinds(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _question(prompt: Messages) -> str:
    """Return the content of the last message, as text."""
    if not isinstance(prompt, list):
        return str(prompt)
    last = prompt[-1]
    return str(last["content"]) if isinstance(last, dict) and "content" in last else ""


def _default_client() -> Any:
    try:
        return import_module("openai").AsyncOpenAI()
    except ImportError as error:
        raise ConfigError(
            "a JudgeRubric without a judge_client asks through the openai package, which is "
            "missing. Install it with `pip install 'rolltree[compat]'`, or pass judge_client."
        ) from error
