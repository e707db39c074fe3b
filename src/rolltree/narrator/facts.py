"""The facts that the narrator uses: columns of all rollouts, and a few rollouts read whole.

It is cheap on 100,000 rollouts: columns have no blobs, and at most `MAX_LOOKED` rollouts, with
`MAX_TOKENS` tokens together, are read whole, spread over the run. With `quick`, for commands that
must be fast, `MAX_SAMPLED` rollouts of a long run are read, and none of their tokens.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from rolltree.rollouts.conversation import conversation_of
from rolltree.rollouts.decode import decode_rollout
from rolltree.store import Run, StoredEvaluation, StoredRollout, raised_by_rewards, summarize
from rolltree.store.metric_names import finite_numbers, is_number
from rolltree.store.weights import phase_parts
from rolltree.values.errors import StoreError
from rolltree.values.estimate import Estimate, estimate, mean
from rolltree.values.state import tool_errors
from rolltree.values.types import State

MAX_LOOKED = 96
MAX_SAMPLED, LONG_RUN = 1024, 4096
"""How many rollouts `quick` reads of a run with more than `LONG_RUN`."""
MAX_TOKENS = 1_000_000
MAX_ANSWER = 400
MAX_TASKS = 24
"""With more tasks, each has too few rollouts to be reported on its own."""
_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
Breaks: TypeAlias = Callable[[State], list[dict[str, Any]]]
"""Returns where the prompts of a rollout do not extend the call before, as `break_rows` does."""


NAMES = (
    *("request_id", "trajectory_index", "group_id", "train_step", "parent_rollout", "reward"),
    *("status", "error_type", "error_phase", "truncated", "truncation_reason", "finish_reason"),
    *("num_calls", "num_completion_tokens", "num_unique_tokens", "task", "scoring_ms"),
    *("env_id", "example_id"),
)
"""The columns of a rollout that the narrator reads."""


@dataclass(frozen=True, slots=True)
class Looked:
    """A rollout that was read whole."""

    rollout: StoredRollout
    # Reward function and what it raised.
    scoring_errors: tuple[tuple[str, str], ...] = ()
    # Whether its last answer is empty and calls no tool.
    is_empty: bool = False
    # The last answer, and the answer of the dataset row.
    answer: str = ""
    expected: str = ""
    # The share of its four-word sequences that are repetitions.
    repeated: float = 0.0
    # Tool and type of error.
    tool_errors: tuple[tuple[str, str], ...] = ()
    # The number of tool messages.
    num_tools: int = 0
    # How its program failed; empty if it did not, or if there is none.
    program_failure: str = ""
    # Call, position and cause.
    breaks: tuple[tuple[int, int, str], ...] = ()
    # The number of calls after the first.
    num_later_calls: int = 0


@dataclass(frozen=True)  # without slots, so that `cached_property` works
class Facts:
    """The facts of a run that sentences are made of."""

    # `train`, or else the phase that began last.
    phase: str
    # Each optimizer step's metrics.
    steps: Mapping[int, Mapping[str, float]]
    # The rollouts of `phase`.
    rollouts: Sequence[StoredRollout]
    looked: Sequence[Looked] = ()
    evaluations: Sequence[StoredEvaluation] = ()
    max_tokens: int | None = None
    # What the run ended with, if it failed.
    error: str | None = None
    # The number of rollouts that these were sampled from; None if they are all.
    num_sampled_of: int | None = None
    # Reward function to weight, as noted last; empty if none was noted.
    weights: Mapping[str, float] = field(default_factory=dict)
    # Metric to the first step at which it was NaN or infinite.
    not_finite: Mapping[str, int] = field(default_factory=dict)
    # The run's notices.
    notices: Sequence[str] = ()
    # Its notices about waiting, after its last step.
    waits: Sequence[str] = ()
    # The first step after the run was continued with other settings, and what was changed.
    changes: Sequence[tuple[int, str]] = ()
    # The machine has a GPU, and the model was on the CPU.
    idle_gpu: bool = False

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return the steps at which a metric has a value, with the value."""
        return [(step, found[name]) for step, found in self.steps.items() if name in found]

    def names(self, prefix: str) -> list[str]:
        """Return the step metrics whose names begin with `prefix`, in the order they came."""
        found = dict.fromkeys(name for step in self.steps.values() for name in step)
        return [name for name in found if name.startswith(prefix)]

    def average(self, name: str) -> float:
        """Return the mean of a metric over all steps; a step without it counts as 0."""
        return sum(value for _, value in self.series(name)) / max(1, len(self.steps))

    @property
    def is_broken(self) -> bool:
        """Whether code of the environment or of a reward function raised in most rollouts."""
        return 2 * sum(bool(each.scoring_errors) for each in self.looked) > len(self.looked)

    @cached_property
    def rewards(self) -> list[float]:
        """All rewards except those of delegated rollouts, in ascending order."""
        own = (each.reward for each in self.rollouts if not each.parent_rollout)
        return sorted(each for each in own if each is not None)

    @cached_property
    def played_reward(self) -> Estimate | None:
        """The mean reward of a phase without steps, over its examples; None if there is none."""
        if self.phase == "train":
            return None
        by_example: dict[Hashable, list[float]] = defaultdict(list)
        for each in self.rollouts:
            if each.reward is not None and each.status == "ok" and not each.parent_rollout:
                by_example[each.env_id, each.task, each.example_id].append(each.reward)
        return estimate(by_example)

    def reward_means(self, steps: Sequence[int]) -> list[float]:
        """Return the mean reward of each step that has one, among these."""
        by_step = self.group_rewards
        found = [list(by_step[step].values()) for step in steps if step in by_step]
        return [sum(map(mean, groups)) / len(groups) for groups in found]

    @cached_property
    def group_rewards(self) -> dict[int, dict[str, list[float]]]:
        """The rewards of training by step and group, without those of delegated rollouts.

        Intervals count groups, not rollouts: the members of a group share their question.
        """
        return self._by_step(self.rollouts)

    @cached_property
    def task_rewards(self) -> dict[tuple[str, str], dict[int, dict[str, list[float]]]]:
        """`group_rewards` by task or, with a single task or very many, by environment."""
        for column in ("task", "env_id"):
            parts: dict[str, list[StoredRollout]] = defaultdict(list)
            for each in self.rollouts:
                parts[getattr(each, column)].append(each)
            if 1 < len(parts) <= MAX_TASKS:
                return {(column, name): self._by_step(part) for name, part in parts.items()}
        return {}

    def _by_step(self, rollouts: Iterable[StoredRollout]) -> dict[int, dict[str, list[float]]]:
        found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for each in rollouts:
            step = each.train_step
            # A step in progress has only the rollouts that ended first, which are the easy ones.
            is_whole = step is not None and (not self.steps or step in self.steps)
            if is_whole and each.reward is not None and not each.parent_rollout:
                found[step or 0][each.group_id].append(each.reward)
        return found


def read_facts(run: Run, *, quick: bool = False, breaks: Breaks | None = None) -> Facts:
    """Return the facts of a run; with `quick`, those of a sample if the run is long.

    Without `breaks`, and of a sample, no tokens are read.
    """
    run.query("SELECT 1")  # checks the file once; then no row is checked again
    phases = run.phases()
    phase = "train" if "train" in phases else phases[-1] if phases else ""
    num_rollouts = run.num_rollouts(phase=phase) if phases else 0
    is_sampled = quick and num_rollouts > LONG_RUN
    rows = run.sample(NAMES, phase, MAX_SAMPLED) if is_sampled else run.columns(NAMES, phase=phase)
    rollouts: list[StoredRollout] = list(rows) if phases else []
    sampling = run.config.get("sampling")
    limit = sampling.get("max_tokens") if isinstance(sampling, Mapping) else None
    steps, events = run.steps(), run.events()
    if phase == "train" and steps:
        # An asynchronous feed plays ahead: rollouts of later steps do not count. Those of the step
        # in progress do, since they may be the reason why a run is stuck.
        is_done = any(event.kind == "finished" for event in events)
        newest = steps[-1].step + (not is_done)
        rollouts = [each for each in rollouts if (each.train_step or 0) <= newest]
    notices = [(e.created_at, str(e.data.get("message"))) for e in events if e.kind == "notice"]
    after = steps[-1].created_at if steps else 0.0
    return Facts(
        phase=phase,
        steps={step.step: finite_numbers(step.metrics) for step in steps},
        rollouts=rollouts,
        looked=list(
            _look(run, chosen(rollouts)[::4], None)
            if is_sampled
            else _look(run, chosen(rollouts), breaks)
        ),
        evaluations=run.evaluations(),
        max_tokens=limit if type(limit) is int else None,
        error=summarize(run).error,
        num_sampled_of=num_rollouts if is_sampled else None,
        weights={
            name: weight
            for part in phase_parts(run, phase) or ()
            for name, weight in part["functions"]
        },
        not_finite={
            str(name): step.step
            for step in reversed(steps)
            for name, value in step.metrics.items()
            if is_number(value) and value - value != 0.0
        },
        notices=[message for _, message in notices],
        waits=[message for at, message in notices if at > after and " has waited " in message],
        changes=[
            (1 + sum(step.created_at < event.created_at for step in steps), ", ".join(changed))
            for event in events
            if event.kind == "resumed" and (changed := event.data.get("changed"))
        ],
    )


def chosen(rollouts: Sequence[StoredRollout]) -> list[StoredRollout]:
    """Return the rollouts to read whole: short with much reward, of several calls, any, worst."""
    part = MAX_LOOKED // 4
    rewards = [each.reward for each in rollouts if each.reward is not None]
    middle = sum(rewards) / len(rewards) if rewards else 0.0
    lowest = min(rewards, default=None)
    paid = [each for each in rollouts if each.reward is not None and each.reward > 0]
    well = [each for each in paid if (each.reward or 0.0) >= middle]
    short = sorted(well, key=lambda each: each.num_completion_tokens / max(1, each.num_calls))
    # A quarter each: short answers with much reward (which may cheat), rollouts of several calls
    # (which may break), those that earned the least (perhaps because a function raised), and any
    # (so that shares hold for the run).
    several = [each for each in rollouts if each.num_calls > 1]
    worst = [each for each in rollouts if lowest is not None and each.reward == lowest]
    found: dict[tuple[str, int], StoredRollout] = {}
    num_tokens = 0
    wanted = (
        *(*short[:part], *_spread(several, part)),
        *(*_spread(worst, part), *_spread(rollouts, part)),
    )
    for each in rollouts if len(rollouts) <= MAX_LOOKED else wanted:
        num_tokens += each.num_unique_tokens
        if num_tokens > MAX_TOKENS and found:
            break
        found[each.request_id, each.trajectory_index] = each
    return list(found.values())


def _spread(items: Sequence[StoredRollout], count: int) -> list[StoredRollout]:
    """Return at most `count` items, spread over the sequence, including the last one."""
    if len(items) <= count:
        return list(items)
    return [items[(index + 1) * len(items) // count - 1] for index in range(count)]


def _look(run: Run, wanted: Sequence[StoredRollout], breaks: Breaks | None) -> Iterator[Looked]:
    names = {(each.request_id, each.trajectory_index): each for each in wanted}
    if not names:
        return
    for row in run.rollouts(request_id=list(dict.fromkeys(name for name, _ in names))):
        rollout = names.get((row.request_id, row.trajectory_index))
        if rollout is not None:
            yield _looked_at(rollout, row, breaks)


def _looked_at(rollout: StoredRollout, row: StoredRollout, breaks: Breaks | None) -> Looked:
    """Return what a stored row holds beyond its columns; only scoring errors if unreadable."""
    unread = Looked(rollout, scoring_errors=raised_by_rewards(row.errors))
    try:
        states = decode_rollout(row, tokens=breaks is not None).states
        if not states:
            return unread
        state = states[0]
        found = breaks(state) if breaks is not None and row.num_calls > 1 else []
    except StoreError:
        return unread
    answer = _answer(state)
    return replace(
        unread,
        is_empty=answer == "",
        answer=" ".join((answer or "").split())[:MAX_ANSWER],
        repeated=_repeated(answer or ""),
        expected="" if row.input.get("answer") is None else str(row.input["answer"]),
        tool_errors=tuple((each["tool"], each["type"]) for each in tool_errors(state)),
        breaks=tuple(
            (each["call"], each["position"], _cause(state, each))
            for each in found
            if each["previous_call"] is not None
        ),
        num_tools=sum(each.get("role") == "tool" for each in conversation_of(state)[1]),
        program_failure=_program_failure(state),
        num_later_calls=max(0, row.num_calls - 1) if breaks is not None else 0,
    )


def _program_failure(state: State) -> str:
    program = state.get("program")
    if not isinstance(program, Mapping):
        return ""
    error, status, number = (program.get(name) for name in ("error", "exit_status", "signal"))
    if isinstance(error, Mapping):
        return f"raised {error.get('type')}"
    if number:
        return f"was ended by signal {number}"
    return f"ended with status {status}" if status else ""


def _cause(state: State, broken: Mapping[str, Any]) -> str:
    """Return a break's cause; if it is before the first answer, as the messages show it.

    Ids cannot tell a system message from a user message, but the prompts' messages can.
    """
    if broken["cause"] != "system_or_tools_changed":
        return str(broken["cause"])
    calls = [list(state["trajectory"][broken[n]]["prompt"]) for n in ("previous_call", "call")]
    heads = [[each for each in call if each.get("role") == "system"] for call in calls]
    before, now = (_plain(call) for call in calls)
    if heads[0] != heads[1] or before == now[: len(before)]:
        return "system_or_tools_changed"
    return "history_rewritten" if len(now) > len(before) else "compaction"


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Any, str]]:
    return [(each.get("role"), _text(each.get("content"))) for each in messages]


def _answer(state: State) -> str | None:
    """Return the text of the last answer; None if there is none, or if it calls a tool."""
    said = [each for each in conversation_of(state)[1] if each.get("role") == "assistant"]
    if not said or said[-1].get("tool_calls"):
        return None
    return _THOUGHT.sub("", _text(said[-1].get("content"))).strip()


def _repeated(text: str) -> float:
    words = text.split()[:2000]
    runs = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    return 1 - len(set(runs)) / len(runs) if len(runs) >= 16 else 0.0


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "?")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
