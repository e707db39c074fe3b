"""`Rubric`: weighted reward functions over a finished rollout.

A function that raises earns 0, since the answer may be the cause, and a model must not be able to
choose to have no reward; `state["scoring_errors"]` holds the error under the function's name. If it
cannot follow from an answer (a judge or a network that is away, a wrong setting, a rollout without
a model call), the reward is None and `state["error"]` says why. A metric of weight 0 is then None.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.environments.parsers import Parser
from rolltree.environments.rubrics.functions import (
    FunctionCall,
    Kind,
    RawScore,
    RewardFunc,
    RewardFunction,
    call_all,
    group_arguments,
    rollout_arguments,
    scoring_error,
    without_semaphore,
)
from rolltree.rollouts.settle import KeptParts
from rolltree.store.weights import ScoredPart
from rolltree.values.errors import ConfigError, record_error
from rolltree.values.state import UnscoredSnapshot
from rolltree.values.steps import MAX_REWARD, as_number
from rolltree.values.types import ErrorRecord, State


@dataclass(slots=True)
class Scores:
    """A rubric's scores of one rollout, before anything is written to its state."""

    # None if a weighted function failed, and not because of the answer.
    reward: float | None = 0.0
    metrics: dict[str, float | None] = field(default_factory=dict)
    # None if no function scores steps.
    step_rewards: list[float] | None = None
    # Errors, as dicts, by the names of the functions; and the first error of a weighted function.
    errors: dict[str, Any] = field(default_factory=dict)
    failed: ErrorRecord | None = None
    # False for a rubric without functions, which does not change the reward.
    scored: bool = False
    # Whether the model made a call, so that an error may follow from what it wrote.
    answered: bool = False
    # Functions that returned None: they do not apply to this rollout.
    left_out: list[RewardFunction] = field(default_factory=list)
    # Whether a weighted function has scored it, or failed.
    has_score: bool = False

    def add(self, function: RewardFunction, outcome: RawScore) -> None:
        """Add one function's score of this rollout; None if the function does not apply to it."""
        self.scored = True
        if outcome is None:
            self.metrics[function.name] = None
            self.left_out.append(function)
            return
        value = self._number(function, outcome)
        self.metrics[function.name] = value
        self.has_score |= bool(function.weight)
        if self.reward is not None and value is not None:
            self.reward += function.weight * value

    def finish(self) -> None:
        """Make None an error of the weighted functions if none of them has scored the rollout."""
        # A rollout without any score would count as 0, and be taken for a wrong answer: rather a
        # `return` is missing.
        if self.has_score or self.step_rewards is not None:
            return
        for function in self.left_out:
            if function.weight:
                self.metrics[function.name] = self._number(function, None)

    def add_steps(self, function: RewardFunction, outcomes: Sequence[RawScore]) -> None:
        """Add one function's score of each step; the metric is the sum over the steps."""
        self.scored = True
        weight = function.weight
        # If one score failed, the sum is unknown, not smaller.
        values = [self._number(function, outcome) for outcome in outcomes]
        known = [value for value in values if value is not None]
        self.metrics[function.name] = sum(known) if len(known) == len(values) else None
        if self.step_rewards is None:
            self.step_rewards = [0.0] * len(values)
        for index, value in enumerate(values):
            self.step_rewards[index] += weight * (value or 0.0)
        if self.reward is not None:
            self.reward += weight * sum(known)

    def _number(self, function: RewardFunction, outcome: RawScore) -> float | None:
        if not isinstance(outcome, ErrorRecord):
            try:
                return as_number(outcome, function.weight)
            except Exception as error:  # noqa: BLE001  a `__float__` may raise anything
                # A score that is not a number is an error of the function, like an exception.
                outcome = scoring_error(function.func, function.name, error)
        # A failed metric affects nothing else.
        if not function.weight:
            self.errors[function.name] = outcome.as_dict()
            return None
        return self.fail(function.name, outcome)

    def fail(self, name: str, outcome: ErrorRecord) -> float | None:
        """Add the error of what gives rewards; return what it counts as: 0, or None if unknown."""
        self.errors[name] = outcome.as_dict()
        # Without a reward the rollout would count nowhere, which the model must not be able to
        # choose.
        if self.answered and outcome.kind == "episode":
            return 0.0
        # A judge that is away says nothing about the answer.
        self.reward = None
        self.failed = self.failed or outcome
        return None


_RUBRICS = ("rolltree.environments.rubrics.rubric.Rubric", "rolltree.verifiers.rubrics.Rubric")
"""The classes whose scoring methods write rewards of steps, and advantages, as an audit expects."""
_SCORING = ("score_rollout", "score_group", "evaluate")
"""Methods that a subclass may override to give other rewards than the weighted sum."""


class Rubric:
    """Score rollouts with functions whose argument names say what they need.

    A function may ask, by argument name, for `prompt`, `completion`, `answer`, `state`, `info`,
    `task`, `example_id`, `parser`, anything in `class_objects`, and any key of the state. A
    function that asks for plurals (`completions`, `states`, ...) or returns a list scores a whole
    group at once. Step functions may also ask for `step` and `step_index`.

    Args:
        funcs: reward functions, synchronous or not.
        weights: one per function; by default 1.0 each. Weight 0 makes a metric.
        parser: passed to functions that ask for it.

    Raises:
        ConfigError: two functions have the same name, or the numbers of weights and functions
            differ.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
    ) -> None:
        funcs = [funcs] if callable(funcs) else list(funcs or ())
        if weights is not None and not hasattr(weights, "__len__"):
            raise ConfigError(
                f"the weights of a rubric are {weights!r}, not a list of one number per function. "
                "Pass several functions as a list: Rubric([first, second])."
            )
        if weights is not None and len(weights) != len(funcs):
            raise ConfigError(
                f"a rubric got {len(funcs)} functions and {len(weights)} weights. Pass one weight "
                "per function."
            )
        self._has_own_parser = parser is not None
        self.parser = parser if parser is not None else Parser()
        self.class_objects: dict[str, Any] = {"parser": self.parser}
        self._functions: list[RewardFunction] = []
        for func, weight in zip(funcs, weights or [1.0] * len(funcs), strict=True):
            self.add_reward_func(func, weight)

    def adopt_parser(self, parser: Parser) -> None:
        """Use the environment's parser, unless the rubric was created with a parser."""
        if not self._has_own_parser:
            self.parser = parser
            self.class_objects["parser"] = parser

    def add_reward_func(
        self, func: RewardFunc, weight: float = 1.0, *, run_inline: bool = False
    ) -> None:
        """Add a function that scores a rollout or a group; with `run_inline`, in the event loop.

        Raises:
            ConfigError: the rubric already has a function of that name.
        """
        self._add(RewardFunction.of(func, weight, runs_inline=run_inline))

    def add_metric(
        self, func: RewardFunc, weight: float = 0.0, *, run_inline: bool = False
    ) -> None:
        """Add a function that is reported and, at weight 0, not rewarded."""
        self.add_reward_func(func, weight, run_inline=run_inline)

    def add_step_reward_func(
        self, func: RewardFunc, weight: float = 1.0, *, run_inline: bool = False
    ) -> None:
        """Add a function that scores every step of a rollout: it may ask for `step`."""
        self._add(RewardFunction.of(func, weight, kind="step", runs_inline=run_inline))

    def _add(self, function: RewardFunction) -> None:
        if function.name in self.get_reward_func_names():
            raise ConfigError(
                f"the rubric already has a function named {function.name!r}; one metric would "
                "overwrite the other. Rename it, or wrap it in a function with its own name."
            )
        self._functions.append(function)

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions, in the order in which they were added."""
        return tuple(self._functions)

    def get_reward_func_names(self) -> list[str]:
        """Return the functions' names, which are the metrics' names."""
        return [function.name for function in self.functions]

    def get_reward_funcs(self) -> list[RewardFunc]:
        """Return the functions themselves."""
        return [function.func for function in self.functions]

    def get_reward_weights(self) -> list[float]:
        """Return the weights, in the functions' order."""
        return [function.weight for function in self.functions]

    def scored_parts(self) -> list[ScoredPart]:
        """Return which functions, with their weights, score the rollouts of which agents."""
        kind = type(self)
        is_sum = all(getattr(kind, name) is getattr(Rubric, name) for name in _SCORING)
        functions = tuple((each.name, each.weight) for each in self.functions)
        is_own = any(
            kind.score_rollout is base.score_rollout and kind.score_group is base.score_group
            for base in kind.__mro__
            if issubclass(base, Rubric) and f"{base.__module__}.{base.__name__}" in _RUBRICS
        )
        kinds = {each.kind for each in self.functions} if is_own else set()
        if kinds and self.has_group_rewards:
            kinds.add("group")
        return [ScoredPart(functions, is_sum=is_sum, kinds=tuple(sorted(kinds)))]

    @property
    def funcs(self) -> tuple[RewardFunc, ...]:
        """The functions; add one with `add_reward_func`."""
        return tuple(self.get_reward_funcs())

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights, in the functions' order."""
        return tuple(self.get_reward_weights())

    @property
    def logger(self) -> logging.Logger:
        """The logger of this rubric class."""
        return logging.getLogger("rolltree.environments.rubrics").getChild(type(self).__name__)

    @property
    def has_group_rewards(self) -> bool:
        """Whether some function needs the whole group."""
        return any(function.kind == "group" for function in self.functions)

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        # Once per subclass, so that calls need no inspection.
        for name in ("score_rollout", "score_group"):
            if name in vars(cls):
                setattr(cls, name, without_semaphore(vars(cls)[name]))

    async def score_rollout(self, state: State, score_sem: object = None) -> None:
        """Fill `reward`, `metrics`, the steps' rewards and the scoring time of one rollout.

        `score_sem` is ignored: verifiers 0.1.8 limits scoring with it, while here the engine limits
        the rollouts in flight. Group functions get a group of one; use `score_group` for whole
        groups.
        """
        started = time.perf_counter()
        before = KeptParts(state)
        scores = await self.evaluate([state])
        before.settle()
        write_scores(state, scores[0], time.perf_counter() - started)

    async def score_group(self, states: Sequence[State], score_sem: object = None) -> None:
        """Score the rollouts of one group, and fill each advantage: reward minus the mean.

        Rollouts whose reward is None get no advantage and do not count in the mean.
        """
        started = time.perf_counter()
        before = [KeptParts(state) for state in states]
        scores = await self.evaluate(states)
        elapsed_s = time.perf_counter() - started
        for state, found, each in zip(states, scores, before, strict=True):
            each.settle()
            write_scores(state, found, elapsed_s)
        write_advantages(states)

    async def evaluate(self, states: Sequence[State]) -> list[Scores]:
        """Return the scores of the rollouts of one group, without writing them."""
        scores = [Scores(answered=state.is_answered) for state in states]
        # All calls of the group are collected first, so that asynchronous ones run concurrently
        # across its rollouts.
        calls: list[FunctionCall] = []
        # The function of each call, and the index of its rollout (-1: the whole group).
        targets: list[tuple[RewardFunction, int]] = []
        kinds: dict[Kind, list[RewardFunction]] = {"rollout": [], "step": [], "group": []}
        for function in self.functions:
            kinds[function.kind].append(function)
        for index, state in enumerate(states):
            known = rollout_arguments(state, self.class_objects)
            for function in kinds["rollout"]:
                calls.append((function, known, state))
                targets.append((function, index))
            for position, step in enumerate(state.trajectory if kinds["step"] else ()):
                here = {**known, "step": step, "step_index": position}
                for function in kinds["step"]:
                    calls.append((function, here, state))
                    targets.append((function, index))
        for function in kinds["group"]:
            # Lists of its own, since a function may empty them.
            calls.append((function, group_arguments(states, self.class_objects), {}))
            targets.append((function, -1))
        _distribute(scores, targets, await call_all(calls), kinds["step"])
        return scores


def _distribute(
    scores: list[Scores],
    targets: Sequence[tuple[RewardFunction, int]],
    outcomes: Sequence[RawScore],
    step_functions: Sequence[RewardFunction],
) -> None:
    by_step: dict[tuple[int, str], list[RawScore]] = {
        (index, function.name): [] for index in range(len(scores)) for function in step_functions
    }
    for (function, index), outcome in zip(targets, outcomes, strict=True):
        if function.kind == "step":
            by_step[index, function.name].append(outcome)
        elif function.kind == "group":
            for found, value in zip(scores, _spread(function, outcome, len(scores)), strict=True):
                found.add(function, value)
        else:
            scores[index].add(function, outcome)
    for index, found in enumerate(scores):
        for function in step_functions:
            found.add_steps(function, by_step[index, function.name])
        found.finish()


def _spread(function: RewardFunction, outcome: RawScore, num: int) -> list[RawScore]:
    if isinstance(outcome, ErrorRecord):
        return [outcome] * num
    # Iterated, these would give keys, an arbitrary order, or letters.
    if isinstance(outcome, Mapping | AbstractSet | str) or not isinstance(outcome, Iterable):
        problem = f"a {type(outcome).__name__}"
    else:
        try:
            values = list(outcome)
        except Exception as error:  # noqa: BLE001  a generator runs the author's code
            return [scoring_error(function.func, function.name, error)] * num
        if len(values) == num:
            return values
        problem = f"{len(values)} scores"
    # What it returns may follow from an answer, so it counts as a function that raises.
    wrong = ValueError(
        f"group function {function.name!r} returned {problem} for {num} rollouts, so the "
        "scores cannot be matched to rollouts. Return one number per rollout, in order."
    )
    return [scoring_error(function.func, function.name, wrong)] * num


def write_scores(state: State, scores: Scores, elapsed_s: float) -> None:
    """Write scores into a state and its steps.

    With step functions each step has its own reward, and the last step's includes the reward of the
    rollout as a whole, so that the steps add up to the reward. Without them, every step that has no
    reward yet gets the rollout's. `state["has_step_rewards"]` tells the two apart.
    """
    steps = state.trajectory
    # Steps may have rewards of a world, which stay if there are no step functions.
    own = state.has_step_rewards
    if own is None:
        own = any(step["reward"] is not None for step in steps)
    if scores.scored:
        state.reward = scores.reward
    state.metrics = {**(state.metrics or {}), **scores.metrics}
    if scores.errors:
        state["scoring_errors"] = scores.errors
    if scores.failed is not None and state.error is None:
        state.error = scores.failed
    state.has_step_rewards = own or scores.step_rewards is not None
    if scores.step_rewards is not None and scores.reward is not None and steps:
        rewards = list(scores.step_rewards)
        # The reward of the rollout as a whole is known only at its end, so the last step gets it,
        # and the steps add up to the reward.
        rewards[-1] += scores.reward - sum(scores.step_rewards)
        for step, reward in zip(steps, rewards, strict=True):
            step["reward"] = reward
    elif scores.step_rewards is None:
        for step in steps:
            if step["reward"] is None or not own:
                step["reward"] = state.reward
    timing = state.timing
    if timing is not None:
        # A group is scored at once, so each member gets the time of the whole group.
        timing["scoring_ms"] = elapsed_s * 1000.0
        timing["total_ms"] = timing["generation_ms"] + timing["scoring_ms"]


def failed_scores(states: Sequence[State], rubric: object, error: BaseException) -> list[Scores]:
    """Return the scores of rollouts whose rubric raised: as of one function that raises for all."""
    found = [Scores(scored=True, answered=state.is_answered) for state in states]
    record = record_error(error, "scoring")
    for scores in found:
        scores.fail(type(rubric).__name__, record)
    return found


def write_failure(states: Sequence[State], rubric: object, error: BaseException) -> None:
    """Write `failed_scores` into the rollouts."""
    for state, scores in zip(states, failed_scores(states, rubric, error), strict=True):
        write_scores(state, scores, 0.0)


def settle_rewards(state: State, rubric: Rubric) -> None:
    """Replace rewards that an override wrote and that are not numbers by 0, as scoring errors."""
    steps: Any = dict.get(state, "trajectory")
    for scored in (state, *(steps if isinstance(steps, list) else ())):
        value = dict.get(scored, "reward") if isinstance(scored, dict) else None
        if value is None or (type(value) is float and abs(value) <= MAX_REWARD):
            continue
        try:
            scored["reward"] = as_number(value, source="it wrote the reward")
        except Exception as error:  # noqa: BLE001  a `__float__` may raise anything
            name, scored["reward"] = type(rubric).__name__, 0.0
            known = state.get("scoring_errors") or {}
            state["scoring_errors"] = {name: record_error(error, "scoring").as_dict(), **known}


def reset_scores(state: State) -> None:
    """Restore a scored state as it was before scoring, so that it can be scored again.

    Everything that scoring added is removed, even the keys that reward functions wrote. An error
    stays unless it is one of scoring. In a state without a snapshot (`State.unscored`), a world's
    rewards and metrics stay, and are overwritten if they are scored.
    """
    before = state.unscored or _assumed_snapshot(state)
    # Reward functions may write keys, too (`judge_response`), which they must not find again.
    for key in [key for key in dict.keys(state) if key not in before.keys]:
        dict.__delitem__(state, key)
    for key, value in (("reward", before.reward), ("metrics", before.metrics), ("advantage", None)):
        if key in before.keys:
            state[key] = dict(value) if isinstance(value, Mapping) else value
    if before.has_step_rewards is not None:
        state.has_step_rewards = before.has_step_rewards
    error = state.error
    # Other rewards cannot repair a rollout that failed while it was played.
    if isinstance(error, ErrorRecord) and error.phase == "scoring":
        state.error = None
    for step, reward in zip(state.trajectory, before.step_rewards, strict=True):
        step["reward"], step["advantage"] = reward, None
    timing = state.timing
    if timing is not None:
        timing["scoring_ms"], timing["total_ms"] = 0.0, timing["generation_ms"]


_ADDED = frozenset(("has_step_rewards", "scoring_errors", "judge_response"))


def _assumed_snapshot(state: State) -> UnscoredSnapshot:
    """Return the likely snapshot of a state that was stored without one."""
    # A `RolloutSource` that is not an environment takes no snapshots, but its rollouts can be
    # scored again, too.
    now = UnscoredSnapshot.of(state)
    # These step rewards come from a world.
    if now.has_step_rewards and "environment_steps" in state:
        return replace(now, keys=now.keys - (_ADDED - {"has_step_rewards"}))
    nothing = (None,) * len(now.step_rewards)
    return UnscoredSnapshot(now.keys - _ADDED, None, None, nothing, None)


def are_equal(rewards: Sequence[float] | NDArray[np.float64]) -> bool:
    """Return whether rewards differ by rounding at most.

    Sums in another order differ in their last bits, which says nothing about the rollouts.

    >>> are_equal([0.1 + 0.2, 0.3]), are_equal([0.3, 0.3001])
    (True, False)
    """
    values = np.asarray(rewards, np.float64)
    return not len(values) or bool(values.max() - values.min() <= reward_rounding(values))


def reward_rounding(values: NDArray[np.float64]) -> float:
    """Return the difference up to which rewards of this size count as equal."""
    return 1e-9 * max(1.0, float(np.abs(values).max()))


def centred_rewards(
    rewards: Sequence[float] | NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return each reward minus the group's mean, float64 `[num_rollouts]`.

    `weights` add up to 1; without them all rewards count equally. Rewards that equal the mean, but
    for rounding, give exactly 0.
    """
    values = np.asarray(rewards, np.float64)
    if not len(values):
        return np.zeros_like(values)
    shares = np.float64(1.0 / len(values)) if weights is None else weights
    centred = values - (shares * values).sum()
    # In floats, the mean of equal numbers may differ from them in the last bit, which normalisation
    # would turn into a signal.
    return np.where(np.abs(centred) <= reward_rounding(values), 0.0, centred)


def write_advantages(states: Sequence[State]) -> None:
    """Fill the advantages of one group: the reward minus the mean.

    Rollouts without a reward get none and do not count. Training does not use these advantages.
    """
    known = [(state, state.reward) for state in states if state.reward is not None]
    advantages = centred_rewards([reward for _, reward in known]).tolist()
    for (state, _), advantage in zip(known, advantages, strict=True):
        state.advantage = advantage
        for step in state.trajectory:
            # An environment may have set the step's advantage itself.
            if step["advantage"] is None:
                step["advantage"] = advantage


def as_rubric(rubric: Any, kind: type[Rubric] = Rubric) -> Any:
    """Return a rubric as it is, or make one of a reward function or several.

    Raises:
        ConfigError: `rubric` is neither a rubric nor reward functions.
    """
    if hasattr(rubric, "score_group") and not isinstance(rubric, type):
        return rubric
    if rubric is None:
        return kind()
    functions = list(rubric) if isinstance(rubric, list | tuple) else [rubric]
    if functions and all(callable(f) and not isinstance(f, type) for f in functions):
        return kind(functions)
    given = rubric.__name__ if isinstance(rubric, type) else type(rubric).__name__
    raise ConfigError(
        f"rubric is {given!r}, which cannot score a rollout. Pass a rubric, such as "
        "Rubric([function]), or a reward function."
    )
