"""Written runs: `write(folder, FAULTS["gaming"].course)`, `write(folder, HEALTHY["sparse"])`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import rolltree as rt
from rolltree.rollouts.record import encode_result
from rolltree.store import Run, StoredRollout
from rolltree.store.weights import META

DRIFT = "train/sampling/sampling_logp_difference/mean"


class Spot(NamedTuple):
    """One rollout's place in a run: `t` goes from 0 to 1 over the run."""

    step: int
    t: float
    group: int
    index: int
    draw: random.Random


Number = Callable[[int, float, random.Random], float]
OfRollout = Callable[[Spot], Any]


def ramp(before: float, after: float, noise: float = 0.1) -> Number:
    """Return a number that goes evenly from one value to another, and varies by `noise` of it."""
    return lambda step, t, draw: (before + (after - before) * t) * math.exp(draw.gauss(0, noise))


def jumps(before: float, after: float, at: int, noise: float = 0.1) -> Number:
    """Return a number that changes at a step."""
    return lambda step, t, draw: (after if step >= at else before) * math.exp(draw.gauss(0, noise))


def coin(before: float, after: float) -> OfRollout:
    """Return a reward of 0 or 1: right with a chance that rises, other for every question."""

    def reward(spot: Spot) -> float:
        chance = before + (after - before) * spot.t
        ease = (spot.group % 4 - 1.5) / 10
        return float(spot.draw.random() < min(0.98, max(0.0, chance + ease)))

    return reward


HEALTHY_SERIES: Mapping[str, Number] = {
    "train/entropy": ramp(0.9, 0.35),
    "train/kl": ramp(0.01, 0.08, 0.3),
    "train/grad_norm": ramp(0.8, 0.6, 0.4),
    "train/loss": lambda step, t, draw: draw.gauss(0, 0.02),
    DRIFT: ramp(0.003, 0.003, 0.3),
    "ratio/ess": lambda step, t, draw: 0.97 - 0.02 * draw.random(),
    "train/completions/mean_length": ramp(40, 48),
    "rollout/total_sampled_tokens": ramp(1500, 1700),
    "time/step": ramp(20, 22),
    "time/wait_for_batch": ramp(14, 15),
    "time/train_s": ramp(5, 6),
}


@dataclass(frozen=True)
class Course:
    """What a written run is made of; everything left out is healthy."""

    reward: OfRollout = field(default_factory=lambda: coin(0.25, 0.8))
    metrics: Mapping[str, OfRollout] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    series: Mapping[str, Number] = field(default_factory=dict)
    columns: OfRollout = lambda spot: {}
    # What was said, as (messages, steps, more of the state); None: only columns are stored.
    talk: Callable[[Spot, float | None], Any] | None = None
    # Held-out means by step, with the half width of their interval.
    held_out: Mapping[int, float] = field(default_factory=dict)
    notices: Sequence[str] = ()
    # The first step after the run was continued with other settings, and what was changed.
    changed: tuple[int, str] = (0, "")
    last_notice: str = ""
    error: str = ""
    max_tokens: int = 256
    steps: int = 16
    groups: int = 6
    size: int = 6
    # Steps beyond the last one that a feed has played and nothing trained.
    num_ahead: int = 0
    is_finished: bool = True
    phase: str = "train"


def write(folder: Path, course: Course, seed: int = 0) -> Path:
    """Write a run of a course."""
    draw = random.Random(seed)
    config = {"model": {"name": "none"}, "sampling": {"max_tokens": course.max_tokens}}
    with Run.create(folder, kind="train", config=config) as run:
        if course.weights:
            functions = [list(pair) for pair in course.weights.items()]
            part = {"task": "", "agent": "", "functions": functions}
            run.set_meta(META, [{"env_id": "sums", "since": 0.0, "parts": [part]}])
        for notice in course.notices:
            run.add_event("notice", {"message": notice})
        # All rollouts at once: a transaction for each step is what takes the time.
        steps = range(1, course.steps + 1 + course.num_ahead)
        played = {step: list(_rollouts(course, step, draw)) for step in steps}
        run.add_rollouts(row for pairs in played.values() for row, _ in pairs)
        for step in range(course.steps + 1):
            if step in course.held_out:
                mean = course.held_out[step]
                found = {"reward": {"mean": mean, "low": mean - 0.08, "high": mean + 0.08}}
                phase = {"phase": f"eval/{step}", "metrics": found}
                run.add_event("evaluation", phase, step=step)
            if step and step == course.changed[0]:
                run.add_event("resumed", {"changed": [course.changed[1]]})
            if step:
                _write_step(run, course, step, played[step], draw)
        if course.last_notice:
            run.add_event("notice", {"message": course.last_notice})
        if course.error:
            kind, _, message = course.error.partition(": ")
            run.add_event("ended", {"state": "failed", "error": kind, "message": message})
        elif course.is_finished:
            run.add_event("finished", step=course.steps)
    return folder


def _write_step(
    run: Run,
    course: Course,
    step: int,
    pairs: list[tuple[StoredRollout, dict[str, Any]]],
    draw: random.Random,
) -> None:
    t = (step - 1) / max(1, course.steps - 1)
    groups: dict[str, list[float]] = {}
    for row, _ in pairs:
        if row.reward is not None:
            groups.setdefault(row.group_id, []).append(row.reward)
    numbers = [each for group in groups.values() for each in group]
    metrics = {name: of(step, t, draw) for name, of in {**HEALTHY_SERIES, **course.series}.items()}
    if numbers:
        metrics["reward/mean"] = sum(numbers) / len(numbers)
        flat = [len(set(group)) == 1 for group in groups.values()]
        metrics["train/frac_reward_zero_std"] = sum(flat) / len(flat)
        if all(flat) and "train/grad_norm" not in course.series:
            metrics["train/grad_norm"] = 0.0
    for name in course.metrics:
        known = [found[name] for _, found in pairs if found[name] is not None]
        if known:
            metrics[f"metrics/{name}"] = sum(known) / len(known)
    run.add_step(step, metrics)


def _rollouts(course: Course, step: int, draw: random.Random) -> Any:
    t = (step - 1) / max(1, course.steps - 1)
    for group in range(course.groups):
        for index in range(course.size):
            spot = Spot(step, t, group, index, draw)
            metrics = {name: of(spot) for name, of in course.metrics.items()}
            reward = course.reward(spot)
            if course.weights and reward is None:
                values = [w * metrics[name] for name, w in course.weights.items()]
                reward = sum(values)
            yield _row(course, spot, reward, metrics), metrics


def _row(course: Course, spot: Spot, reward: float | None, metrics: Mapping[str, Any]) -> Any:
    name = f"train/{spot.step:06}/g{spot.group:02}"
    columns = {
        "task": "adding",
        "num_calls": 1,
        "num_completion_tokens": 40,
        "finish_reason": "stop",
        **course.columns(spot),
    }
    if columns.get("status") == "error":
        reward = None
    known: dict[str, Any] = {
        "reward": reward,
        "metrics": dict(metrics),
        "group_id": name,
        "index_in_group": spot.index,
        "phase": course.phase,
        "train_step": spot.step,
        "env_id": "sums",
        "example_id": spot.group,
    }
    if course.talk is None:
        return StoredRollout(request_id=f"{name}/{spot.index}", **known | columns)
    messages, steps, more = course.talk(spot, reward)
    request = rt.RolloutRequest(
        request_id=f"{name}/{spot.index}",
        env_id="sums",
        input={"prompt": [_user("What is 2 + 3?")], "example_id": spot.group, "task": "adding"},
        seed=0,
        sampling_seed=spot.index,
        group_id=name,
        index_in_group=spot.index,
        sampling=rt.SamplingParams(),
        phase=course.phase,
        train_step=spot.step,
    )
    state = rt.State(
        input=request.input,
        trajectory=rt.Trajectory(steps),
        reward=reward,
        metrics=dict(metrics),
        completion=messages,
        is_completed=True,
        **more,
    )
    (row,) = encode_result(rt.RolloutResult(request, (state,), None, 1))
    if steps:
        del columns["num_calls"]
    return replace(row, **known | columns)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _call(
    prompt: list[int], sampled: list[int], messages: list[Any], said: Any, turn: int = 0
) -> dict[str, Any]:
    tokens = {
        "prompt_ids": prompt,
        "prompt_mask": [0] * len(prompt),
        "completion_ids": sampled,
        "completion_mask": [1] * len(sampled),
        "completion_logprobs": [-0.5] * len(sampled),
    }
    return {
        "prompt": messages,
        "completion": [said],
        "response": None,
        "tokens": tokens,
        "reward": None,
        "advantage": None,
        "extras": {"policy_version": 0, "finish_reason": "stop", "turn": turn},
    }


def says(text: Callable[[Spot, float | None], str]) -> Any:
    """Return a talk of one answer."""
    return lambda spot, reward: ([_said(text(spot, reward))], [], {})


def calls_tool(raises: Callable[[Spot], bool], error: str = "RuntimeError") -> Any:
    """Return a talk with a call of a tool, which raises for some rollouts."""

    def talk(spot: Spot, reward: float | None) -> Any:
        bad = raises(spot)
        function = {"name": "search", "arguments": "{}"}
        call = {"id": "1", "type": "function", "function": function}
        messages = [
            _said("", tool_calls=[call]),
            {"role": "tool", "tool_call_id": "1", "content": "failed" if bad else "found"},
            _said("5"),
        ]
        late = {"tool": "search", "type": error, "message": "m", "traceback": "t"}
        return messages, [], {"tool_errors": [late] if bad else []}

    return talk


def two_calls(second: Callable[[Spot], tuple[list[int], list[Any]]]) -> Any:
    """Return a talk of two calls, the second with the ids and messages that are given."""

    def talk(spot: Spot, reward: float | None) -> Any:
        question, first, more = (
            _user("What is 2 + 3?"),
            _said("<think>Add.</think> 6"),
            _user("No."),
        )
        ids, messages = second(spot)
        steps = [
            _call([1, 2, 3, 4], THOUGHT + SPOKEN, [question], first),
            _call(ids, [50, 33], messages, _said("5"), turn=1),
        ]
        return [first, more, _said("5")], steps, {}

    return talk


def runs_program(status: Callable[[Spot], int]) -> Any:
    """Return a talk of a program that ends with a status."""

    def talk(spot: Spot, reward: float | None) -> Any:
        program = {"ended": "exit", "exit_status": status(spot), "signal": None, "stderr": "..."}
        return [_said("5")], [], {"program": program}

    return talk


THOUGHT, SPOKEN = [20, 21, 22, 23], [30, 31, 32, 40, 33]
_HISTORY = [_user("What is 2 + 3?"), _said("<think>Add.</think> 6"), _user("No.")]
STRIPPED = ([1, 2, 3, 4, *SPOKEN, 8, 9], _HISTORY)
KEPT = ([1, 2, 3, 4, *THOUGHT, *SPOKEN, 8, 9], _HISTORY)
SLID = ([1, 2, *THOUGHT, *SPOKEN, 8, 9], _HISTORY[1:])


def fails(
    at: int, share: float, kind: str = "SandboxError", phase: str = "environment"
) -> OfRollout:
    """Return columns of rollouts that fail from a step on."""
    return lambda spot: (
        {"status": "error", "error_type": kind, "error_phase": phase}
        if spot.step >= at and spot.draw.random() < share
        else {}
    )


def tasks(chances: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Return the reward and columns of several tasks, each with its own course."""
    names = list(chances)

    def reward(spot: Spot) -> float:
        return coin(*chances[names[spot.group % len(names)]])(spot._replace(group=1))

    return {"reward": reward, "columns": lambda spot: {"task": names[spot.group % len(names)]}}


def share_metric(before: float, after: float) -> OfRollout:
    """Return a metric of 0 or 1, on average from one value to another."""
    return lambda spot: float(spot.draw.random() < before + (after - before) * spot.t)


def length_cut(at: int, share: float) -> OfRollout:
    """Return columns of rollouts that run into their limit of tokens from a step on."""
    return lambda spot: {
        "finish_reason": "length" if spot.step >= at and spot.draw.random() < share else "stop"
    }


class Fault(NamedTuple):
    """A course with a fault, and the kinds of sentences of which one must alarm."""

    kinds: tuple[str, ...]
    course: Course


def _paid(spot: Spot) -> None:
    return None  # the sum of what the functions are worth


FLAT = coin(0.45, 0.45)
PRAISE = "What a good question! The answer is surely right."

FAULTS: Mapping[str, Fault] = {
    "gaming": Fault(
        ("gaming",),
        Course(
            reward=_paid,
            weights={"polite": 1.0},
            metrics={"polite": share_metric(0.2, 0.95), "correct": share_metric(0.77, 0.0)},
        ),
    ),
    "gaming_main": Fault(
        ("gaming",),
        Course(
            reward=_paid,
            weights={"correct": 1.0, "long": 1.0},
            metrics={
                "correct": share_metric(0.6, 0.2),
                "long": lambda s: 3 * s.t + s.draw.random(),
            },
        ),
    ),
    "format_only": Fault(
        ("form",),
        Course(
            reward=_paid,
            weights={"correct": 1.0, "format": 0.5},
            metrics={"correct": share_metric(0.08, 0.08), "format": share_metric(0.1, 0.98)},
        ),
    ),
    "format_unpaid": Fault(
        ("form",),
        Course(
            reward=_paid,
            weights={"format": 1.0},
            metrics={"correct": share_metric(0.1, 0.1), "format": share_metric(0.1, 0.98)},
        ),
    ),
    "flat_groups": Fault(
        ("flat_groups",),
        Course(reward=lambda s: float(s.draw.random() < 0.04), groups=8, size=5),
    ),
    "flat_questions": Fault(
        ("flat_groups",),
        Course(
            reward=lambda s: float(s.group < 3 if s.group != 5 else s.draw.random() < 0.5),
        ),
    ),
    "constant_reward": Fault(("zero_variance",), Course(reward=lambda s: 0.5)),
    "all_zero": Fault(("zero_variance",), Course(reward=lambda s: 0.0)),
    "dead_judge": Fault(
        ("waits",),
        Course(columns=lambda s: {"scoring_ms": 430_000.0 if s.step == 5 else 900.0}),
    ),
    "stuck": Fault(
        ("waits",),
        Course(
            is_finished=False,
            last_notice="step 17 has waited 372 s for a group with reward variance: no group of "
            "rollouts has ended. Check the engine and the environment.",
        ),
    ),
    "collapse": Fault(
        ("collapse",),
        Course(reward=lambda s: float(s.draw.random() < (0.19 if s.step < 5 else 0.0))),
    ),
    "reward_falls": Fault(("reward",), Course(reward=coin(0.7, 0.3))),
    "never_learns": Fault(("reward",), Course(reward=FLAT, steps=40, groups=8)),
    "length": Fault(
        ("length",),
        Course(
            reward=FLAT, series={"train/completions/mean_length": ramp(40, 800)}, max_tokens=4096
        ),
    ),
    "gradient": Fault(("gradient",), Course(series={"train/grad_norm": jumps(0.8, 1e5, 10, 0.4)})),
    "gradient_spike": Fault(
        ("gradient",),
        Course(
            series={"train/grad_norm": lambda s, t, d: 1e5 if s == 9 else math.exp(d.gauss(0, 0.4))}
        ),
    ),
    "nan_loss": Fault(
        ("not_finite",), Course(series={"train/loss": lambda s, t, d: math.nan if s > 11 else 0.1})
    ),
    "ess": Fault(("ess",), Course(series={"ratio/ess": ramp(0.9, 0.03)})),
    "ess_always": Fault(("ess",), Course(series={"ratio/ess": ramp(0.03, 0.03)})),
    "one_task_lost": Fault(
        ("task",),
        Course(**tasks({"adding": (0.3, 0.9), "sorting": (0.4, 0.9), "naming": (0.6, 0.0)})),
    ),
    "tool_raises": Fault(
        ("tools",),
        Course(
            groups=3,
            size=4,
            talk=calls_tool(lambda s: s.step > 10),
            columns=lambda s: {"num_calls": 2},
        ),
    ),
    "program_fails": Fault(
        ("programs",), Course(groups=3, size=4, talk=runs_program(lambda s: int(s.step > 10)))
    ),
    "tool_late": Fault(
        ("timeouts",),
        Course(groups=3, size=4, talk=calls_tool(lambda s: s.index % 2 == 0, "ToolTimeLimit")),
    ),
    "timeouts": Fault(("timeouts",), Course(columns=fails(6, 0.3, "RolloutTimeout", "timeout"))),
    "unscored": Fault(
        ("unscored",),
        Course(reward=lambda s: None if s.draw.random() < 0.3 else float(s.index % 2)),
    ),
    "scoring": Fault(
        ("scoring",),
        Course(
            talk=says(lambda s, r: "5"),
            columns=lambda s: {
                "errors": ({"function": "correct", "type": "KeyError", "message": "'x'"},)
                if s.index == 0
                else ()
            },
        ),
    ),
    "slow": Fault(("slow",), Course(series={"time/step": jumps(20, 400, 9)})),
    "entropy": Fault(
        ("entropy",), Course(reward=FLAT, series={"train/entropy": jumps(0.8, 0.004, 8)})
    ),
    "kl": Fault(
        ("kl",),
        Course(
            reward=lambda s: float(s.draw.random() < (0.7 if s.t < 0.5 else 0.25)),
            series={"train/kl": ramp(0.01, 2.0)},
        ),
    ),
    "breaks": Fault(
        ("breaks",),
        Course(
            groups=3,
            size=4,
            talk=two_calls(lambda s: STRIPPED),
            series={
                "samples/break_rate": ramp(1, 1, 0),
                "samples/breaks/reasoning_stripped": ramp(1, 1, 0),
            },
        ),
    ),
    "max_tokens": Fault(("max_tokens",), Course(columns=length_cut(9, 0.5))),
    "max_tokens_always": Fault(
        ("max_tokens",),
        Course(
            reward=lambda s: 0.0 if s.index < 3 else float(s.draw.random() < 0.6),
            columns=lambda s: {"finish_reason": "length" if s.index < 3 else "stop"},
        ),
    ),
    "truncated": Fault(
        ("truncated",),
        Course(
            columns=lambda s: (
                {"truncated": True, "truncation_reason": "max_turns"}
                if s.step > 8 and s.index < 4
                else {}
            )
        ),
    ),
    "drift": Fault(("drift",), Course(series={DRIFT: jumps(0.003, 0.3, 8)})),
    "drift_in_a_step": Fault(
        ("drift",), Course(series={DRIFT: lambda s, t, d: 0.4 if s == 12 else 0.003})
    ),
    "stale": Fault(
        ("staleness",),
        Course(series={"train/lag_mean": ramp(3, 3), "async/stale_share": ramp(0.4, 0.4)}),
    ),
    "failures": Fault(("failures",), Course(columns=fails(9, 0.4))),
    "failures_creep": Fault(
        ("failures",),
        Course(
            columns=lambda s: fails(0, 0.3 * s.t)(s),
        ),
    ),
    "shared_questions": Fault(
        ("shared_questions",),
        Course(
            held_out={0: 0.2, 16: 0.8},
            notices=[
                "12 of 12 evaluation questions are also training questions, so the held-out reward "
                "includes memorization; the first: 'x'."
            ],
        ),
    ),
    "overfit": Fault(("held_out",), Course(held_out={0: 0.6, 8: 0.4, 16: 0.3})),
    "empty_answers": Fault(
        ("empty_answers",),
        Course(
            reward=lambda s: 1.0 if s.index == 0 else float(s.draw.random() < 0.5),
            talk=says(lambda s, r: "" if s.index == 0 else "5"),
        ),
    ),
    "ended": Fault(("ended",), Course(error="TrainingError: the loss is nan", steps=5)),
    # Written after the rules, without looking at their numbers (design 30).
    "accuracy_erodes": Fault(
        ("gaming",),
        Course(
            reward=lambda s: 0.2 + 0.6 * s.t + s.draw.gauss(0, 0.1),
            metrics={"accuracy": share_metric(0.9, 0.5)},
            steps=40,
        ),
    ),
    "tool_mostly_raises": Fault(
        ("tools",),
        Course(
            groups=3,
            size=4,
            talk=calls_tool(lambda s: s.step >= 3 and s.draw.random() < 0.7, "KeyError"),
            steps=12,
        ),
    ),
    "falls_to_crumbs": Fault(
        ("collapse", "reward"),
        Course(reward=lambda s: 0.1 if s.step > 20 else float(s.draw.random() < 0.45), steps=30),
    ),
    "drift_creeps": Fault(("drift",), Course(series={DRIFT: ramp(0.002, 0.2)}, steps=30)),
    "slower_and_slower": Fault(("slow",), Course(series={"time/step": ramp(10, 250)}, steps=20)),
    "gradient_creeps": Fault(
        ("gradient",),
        Course(
            series={"train/grad_norm": lambda s, t, d: 3000**t * math.exp(d.gauss(0, 0.3))},
            steps=24,
        ),
    ),
    "one_of_five_tasks": Fault(
        ("task",),
        Course(
            reward=lambda s: float(
                s.draw.random()
                < (
                    0.1
                    if s.group % 5 == 2 and s.step > 9
                    else 0.5 + 0.4 * s.t
                    if s.group % 5 != 2
                    else 0.8
                )
            ),
            columns=lambda s: {"task": f"t{s.group % 5}"},
            steps=20,
            groups=10,
        ),
    ),
    "answers_grow": Fault(
        ("length",),
        Course(series={"train/completions/mean_length": ramp(60, 1500)}, max_tokens=8192, steps=20),
    ),
    "nan_entropy": Fault(
        ("not_finite",),
        Course(series={"train/entropy": lambda s, t, d: math.nan if s > 5 else 0.5}),
    ),
    "ess_drops": Fault(
        ("ess",), Course(series={"ratio/ess": jumps(0.95, 0.2, 12, 0.05)}, steps=20)
    ),
    "falls_below_zero": Fault(
        ("reward",), Course(reward=lambda s: -0.5 - s.t + s.draw.gauss(0, 0.4), steps=20)
    ),
    "judge_slows": Fault(
        ("waits",),
        Course(
            columns=lambda s: {
                "scoring_ms": 90_000.0 * (1 + s.draw.random()) if s.step >= 10 else 1500.0
            }
        ),
    ),
    "more_are_cut": Fault(
        ("max_tokens",),
        Course(
            columns=lambda s: {
                "finish_reason": "length" if s.draw.random() < 0.15 + 0.45 * s.t else "stop"
            },
            steps=20,
        ),
    ),
    "style_only": Fault(
        ("form",),
        Course(
            reward=_paid,
            weights={"solves": 2.0, "style": 1.0},
            metrics={"solves": share_metric(0.3, 0.3), "style": share_metric(0.3, 0.95)},
            steps=24,
        ),
    ),
    "entropy_fades": Fault(
        ("entropy",),
        Course(reward=coin(0.3, 0.3), series={"train/entropy": ramp(0.9, 0.01)}, steps=24),
    ),
    "memorizes": Fault(("held_out",), Course(held_out={0: 0.7, 5: 0.68, 10: 0.6, 16: 0.45})),
    # Missed by the rules that found all of the above (design 30).
    "rate_of_zero": Fault(
        ("idle",), Course(reward=FLAT, series={"train/learning_rate": ramp(0, 0)})
    ),
    "no_advantage": Fault(
        ("idle",),
        Course(series={"train/grad_norm": lambda s, t, d: 0.5 + d.random() if s < 9 else 0.0}),
    ),
    "other_rate": Fault(
        ("settings",),
        Course(
            reward=lambda s: coin(0.5, 0.7)(s) if s.step < 17 else coin(0.9, 0.1)(s),
            changed=(17, "optim.lr was 1e-05 and is now 0.001"),
            steps=32,
        ),
    ),
    "other_scale": Fault(
        ("scale",), Course(reward=lambda s: coin(0.4, 0.6)(s) * (10 if s.step > 8 else 1))
    ),
    "one_sentence": Fault(
        ("same_answer",),
        Course(
            groups=8,
            size=4,
            talk=says(lambda s, r: PRAISE if s.draw.random() < 2 * s.t - 0.5 else f"{s.group} {r}"),
            columns=lambda s: {"example_id": s.step * 8 + s.group},
        ),
    ),
    "loops": Fault(
        ("repeats",),
        Course(
            groups=4,
            size=4,
            talk=says(lambda s, r: "I must check it again. " * 30 if s.step > 9 else f"It is {r}."),
        ),
    ),
    "one_question": Fault(
        ("same_questions",),
        Course(columns=lambda s: {"example_id": 7 if s.group else s.step}),
    ),
    "dead_function": Fault(
        ("dead_function",),
        Course(
            reward=_paid,
            weights={"tests": 1.0, "style": 0.5},
            metrics={
                "tests": lambda s: 0.0 if s.step > 10 else float(s.draw.random() < 0.4),
                "style": share_metric(0.3, 0.7),
            },
        ),
    ),
    "clipped": Fault(
        ("lost_tokens",), Course(series={"train/clip_ratio/region_mean": ramp(0.01, 0.9)})
    ),
    "in_no_sample": Fault(
        ("lost_tokens",), Course(series={"samples/skipped_tokens": ramp(900, 900)})
    ),
    "becomes_random": Fault(
        ("randomness",),
        Course(
            reward=lambda s: coin(0.5, 0.5)(s) if s.t < 0.4 else coin(0.9, 0.0)(s),
            series={"train/entropy": ramp(0.5, 6.0)},
            steps=24,
        ),
    ),
    "never_earned": Fault(
        ("task",),
        Course(**tasks({"adding": (0.3, 0.9), "sorting": (-1, -1), "naming": (0.6, 0.9)})),
    ),
    "refuses": Fault(("gaming",), Course(metrics={"refusal": share_metric(0.02, 0.8)})),
    "too_hard": Fault(
        ("collapse",),
        Course(
            reward=lambda s: coin(0.4, 0.9)(s) if s.step < 13 else 0.0,
            metrics={"level": lambda s: 1.0 if s.step < 13 else 8.0},
            steps=24,
        ),
    ),
    "all_right": Fault(("zero_variance",), Course(reward=lambda s: 1.0)),
    "accepts_all": Fault(
        ("zero_variance",),
        Course(reward=lambda s: 1.0 if s.step > 10 else coin(0.4, 0.5)(s)),
    ),
    "schedule_over": Fault(
        ("idle",),
        Course(series={"train/learning_rate": lambda s, t, d: max(0.0, 1e-5 * (1 - 3 * t))}),
    ),
    "fades_in_an_environment": Fault(
        ("task",),
        Course(
            reward=lambda s: coin(0.8, 0.1)(s) if s.group % 3 else coin(0.3, 0.9)(s),
            columns=lambda s: {"env_id": "sql" if s.group % 3 else "bash"},
            steps=40,
        ),
    ),
    "only_training": Fault(("held_out",), Course(held_out={0: 0.3, 8: 0.32, 16: 0.3})),
    "shrinks": Fault(
        ("length",), Course(reward=FLAT, series={"train/completions/mean_length": ramp(200, 20)})
    ),
}
"""Name to a fault in a written run."""

HEALTHY: Mapping[str, Course] = {
    "plain": Course(),
    "stopped_early": Course(is_finished=False, steps=7),
    "loss_near_zero": Course(series={"train/loss": lambda s, t, d: d.gauss(0, 1e-9)}),
    "cost_falls": Course(
        reward=_paid,
        weights={"correct": 1.0},
        metrics={
            "correct": share_metric(0.2, 0.8),
            "num_turns": lambda s: 6 - 4 * s.t,
            "parse_errors": share_metric(0.6, 0.05),
            "format": share_metric(0.9, 0.95),
        },
    ),
    "format_first": Course(
        reward=_paid,
        weights={"correct": 1.0, "format": 0.5},
        metrics={
            "correct": lambda s: float(s.draw.random() < max(0.05, s.t - 0.3)),
            "format": lambda s: float(s.draw.random() < min(1.0, 0.1 + 3 * s.t)),
        },
    ),
    "brevity_is_traded": Course(
        reward=_paid,
        weights={"correct": 1.0, "brief": 0.1},
        metrics={"correct": share_metric(0.2, 0.8), "brief": share_metric(0.9, 0.3)},
    ),
    "reward_dips": Course(reward=lambda s: coin(0.3, 0.8)(s) if s.step != 9 else coin(0.1, 0.1)(s)),
    "solved_below_zero": Course(
        reward=lambda s: 0.0 if s.step > 10 else -float(s.draw.random() < 0.6 * (1 - s.t))
    ),
    "negative": Course(reward=lambda s: -2 + s.t + s.draw.gauss(0, 0.3)),
    "sparse": Course(
        reward=lambda s: float(s.draw.random() < 0.02 + 0.12 * s.t), steps=30, groups=12
    ),
    "sparse_late": Course(
        reward=lambda s: float(s.draw.random() < (0.01 if s.t < 0.5 else 0.6 * s.t)), steps=24
    ),
    "several_tasks": Course(
        **tasks({"adding": (0.3, 0.9), "sorting": (0.5, 0.5), "naming": (0.6, 0.5)})
    ),
    "bfloat16": Course(series={DRIFT: ramp(0.012, 0.02, 0.3)}),
    "gradient_noise": Course(series={"train/grad_norm": lambda s, t, d: math.exp(d.gauss(0, 1.0))}),
    "asynchronous": Course(
        series={
            "train/lag_mean": ramp(1.4, 1.6),
            "async/lag_max": ramp(3, 3, 0),
            "ratio/ess": ramp(0.85, 0.8, 0.02),
            "async/stale_share": ramp(0.005, 0.005),
        },
        num_ahead=5,
        steps=40,
    ),
    "kl_is_spent": Course(series={"train/kl": ramp(0.01, 1.3)}),
    "confident": Course(reward=coin(0.3, 1.2), series={"train/entropy": jumps(0.8, 0.01, 12)}),
    "empty_answers_lose": Course(
        reward=lambda s: 0.0 if s.index == 0 else float(s.draw.random() < 0.5 + 0.4 * s.t),
        talk=says(lambda s, r: "" if s.index == 0 else "5"),
    ),
    "delegation": Course(
        reward=lambda s: None if s.index > 3 else coin(0.3, 0.8)(s),
        columns=lambda s: (
            {"parent_rollout": f"train/{s.step}/p", "depth": 1} if s.index > 3 else {}
        ),
    ),
    "slow_judge": Course(columns=lambda s: {"scoring_ms": 6000.0 + 2000 * s.draw.random()}),
    "rare_failure": Course(
        columns=lambda s: (
            fails(1, 1.0, "RolloutTimeout", "timeout")(s)
            if (s.step, s.group, s.index) == (7, 2, 3)
            else {}
        ),
    ),
    "tool_is_learned": Course(
        groups=3,
        size=4,
        talk=calls_tool(lambda s: s.draw.random() < 0.9 * (1 - s.t) ** 2, "ToolArgumentError"),
    ),
    "program_is_learned": Course(
        groups=3,
        size=4,
        talk=runs_program(lambda s: int(s.draw.random() < 0.9 * (1 - s.t) ** 2)),
    ),
    "sliding_window": Course(
        groups=3,
        size=4,
        talk=two_calls(lambda s: SLID),
        series={
            "samples/break_rate": ramp(1, 1, 0),
            "samples/breaks/system_or_tools_changed": ramp(1, 1, 0),
        },
    ),
    "two_turns": Course(groups=3, size=4, talk=two_calls(lambda s: KEPT)),
    "one_token": Course(
        max_tokens=1,
        columns=lambda s: {"finish_reason": "length", "num_completion_tokens": 1},
        series={"train/completions/mean_length": ramp(1, 1, 0)},
    ),
    "multiple_choice": Course(
        max_tokens=1,
        reward=coin(0.27, 0.6),
        columns=lambda s: {"finish_reason": "length", "num_completion_tokens": 1},
        series={"train/completions/mean_length": ramp(1, 1, 0), "train/entropy": ramp(1.3, 0.7)},
    ),
    "learns_to_think": Course(
        series={
            "train/completions/mean_length": ramp(100, 550),
            "time/step": ramp(20, 60),
            "rollout/total_sampled_tokens": ramp(3600, 20_000),
        },
        max_tokens=4096,
    ),
    "fixed_turns": Course(
        columns=lambda s: {"truncated": True, "truncation_reason": "max_turns", "num_calls": 8}
    ),
    "held_out": Course(held_out={step: 0.2 + 0.04 * step for step in range(0, 17, 2)}),
    "curriculum": Course(reward=coin(0.7, 0.45), metrics={"level": lambda s: 1 + s.step // 5}),
    "curriculum_of_tasks": Course(
        reward=lambda s: coin(0.85, 0.85)(s) if s.step < 8 else coin(0.4, 0.5)(s),
        columns=lambda s: {"task": "easy" if s.step < 8 else "hard"},
    ),
    "best_is_0.8": Course(reward=lambda s: 0.8 * coin(0.5, 1.2)(s), steps=30),
    "some_impossible": Course(
        reward=lambda s: 0.0 if s.group == 5 else float(s.draw.random() < 0.94), steps=24
    ),
    "partial_credit": Course(
        reward=lambda s: min(1.0, max(0.0, s.draw.gauss(0.3 + 0.4 * s.t, 0.2)))
    ),
    "compiles_first": Course(
        series={"time/step": lambda s, t, d: 90.0 if s == 1 else 8 + d.random()}
    ),
    # Written after the rules, without looking at their numbers (design 30).
    "nearly_solved": Course(reward=coin(0.95, 0.97), steps=30),
    "self_play": Course(reward=lambda s: 1.0 if s.index % 2 == 0 else -1.0, steps=20),
    "large_rewards": Course(reward=lambda s: 100 + 400 * s.t + s.draw.gauss(0, 80)),
    "explores": Course(series={"train/entropy": ramp(0.4, 0.9), "train/kl": ramp(0, 0, 0)}),
    "three_steps": Course(steps=3),
    "busy_machine": Course(
        series={"time/step": lambda s, t, d: 20 * math.exp(d.gauss(0, 0.8))}, steps=30
    ),
    "tool_sometimes": Course(groups=3, size=4, talk=calls_tool(lambda s: s.draw.random() < 0.15)),
    "hints_fall": Course(metrics={"used_hint": share_metric(0.8, 0.1)}),
    "few_large_groups": Course(steps=8, groups=3, size=16),
    "too_early": Course(reward=coin(0.5, 0.5), steps=8, groups=3),
    "three_functions": Course(
        reward=_paid,
        weights={"a": 1.0, "b": 0.5, "c": 0.2},
        metrics={
            "a": share_metric(0.2, 0.7),
            "b": share_metric(0.3, 0.6),
            "c": share_metric(0.5, 0.8),
            "tool_calls": lambda s: 5 - 3 * s.t,
            "words": lambda s: 80 - 60 * s.t,
        },
    ),
    "some_are_cut": Course(
        columns=lambda s: {"finish_reason": "length" if s.draw.random() < 0.1 else "stop"}
    ),
    "one_large_gradient": Course(
        series={"train/grad_norm": lambda s, t, d: 20.0 if s == 7 else math.exp(d.gauss(0, 0.3))}
    ),
    "stages": Course(
        reward=lambda s: float(s.draw.random() < 0.45 + 0.4 * ((s.step - 1) % 8) / 8),
        metrics={"stage": lambda s: (s.step - 1) // 8},
        steps=32,
    ),
    "summaries": Course(
        groups=3,
        size=4,
        talk=two_calls(lambda s: ([7, 8, 9], [_user("Summary: 6 was wrong."), _user("No.")])),
        series={"samples/break_rate": ramp(1, 1, 0)},
    ),
    "few_failures": Course(columns=fails(1, 0.004, "ServerError", "model")),
    # Neighbours of what was missed.
    "rate_decays": Course(
        series={
            "train/learning_rate": lambda s, t, d: 1e-5 * (1 - t),
            "train/grad_norm": ramp(1, 0),
        }
    ),
    "more_steps": Course(changed=(9, "train.num_steps was 8 and is now 16")),
    "yes_or_no": Course(
        groups=8,
        size=4,
        talk=says(lambda s, r: "yes" if (s.group % 2 == 0) == bool(r) else "no"),
        columns=lambda s: {"example_id": s.step * 8 + s.group},
    ),
    "counts": Course(
        groups=4,
        size=4,
        talk=says(lambda s, r: " ".join(f"{n + s.step * s.group} and then" for n in range(60))),
    ),
    "few_questions": Course(columns=lambda s: {"example_id": (s.step * 6 + s.group) % 8}),
    "format_is_learned": Course(
        reward=_paid,
        weights={"correct": 1.0, "format": 0.2},
        metrics={
            "correct": share_metric(0.2, 0.8),
            "format": lambda s: float(s.step > 4 or s.draw.random() < 0.6),
        },
    ),
    "some_clipped": Course(series={"train/clip_ratio/region_mean": ramp(0.1, 0.25)}),
    "win_or_lose": Course(reward=lambda s: s.draw.choice((1.0, -1.0)), steps=60, groups=16, size=2),
    "tasks_are_added": Course(
        reward=lambda s: coin(0.6, 0.6)(s),
        columns=lambda s: {"task": f"level {int(s.draw.random() * (1 + 4 * s.t))}"},
        steps=40,
        groups=8,
    ),
    "dip_and_recovery": Course(
        reward=lambda s: coin(0.6, 0.6)(s) if not 0.4 < s.t < 0.75 else coin(0.3, 0.3)(s),
        steps=40,
        groups=10,
    ),
    "two_environments": Course(
        reward=lambda s: 5 * coin(0.3, 0.8)(s) if s.group % 2 else 0.2 * coin(0.3, 0.8)(s),
        columns=lambda s: {"env_id": "chess" if s.group % 2 else "sums"},
    ),
}
"""Name to a healthy run of some shape."""
