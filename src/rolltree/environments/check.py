"""`check_environment`: play an environment with scripted answers and report what is wrong with it.

The answers are empty, constant, a list of all answers, the repeated prompt, and the reference; one
model call fails and one is cancelled. Whether the task is worth learning is not checked.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rolltree._helpers.tasks import run_sync
from rolltree.environments.check_probes import (
    HOSTILE_ANSWERS,
    EndlessRollout,
    Probe,
    Style,
    styles_of,
)
from rolltree.environments.dataset import Rows
from rolltree.environments.environment import Environment
from rolltree.environments.leakage import MAX_ROWS, shared_questions
from rolltree.values.errors import ConfigError, ServerError, did_you_mean
from rolltree.values.types import State

CHECKS: dict[str, str] = {
    "rows-differ": "two instances made with the same arguments have the same rows",
    "duplicate-ids": "no two rows of a split have one example_id",
    "overlap": "no question is in the training and in the evaluation rows",
    "leak": "prompts do not contain their own answers",
    "reward-range": "rewards are finite and within the intended range",
    "scoring-fails": "every answer can be scored, even an empty or a nonsensical one",
    "rollout-fails": "no answer makes the environment fail",
    "empty-scores": "an empty answer earns at most a quarter of the reward range",
    "constant-scores": "a constant answer earns at most half of the reward range",
    "guessing-scores": "listing all answers, or repeating the prompt, earns at most half",
    "constant-reward": "rewards differ between answers",
    "nondeterministic": "the same row, seed and reply give the same conversation and reward",
    "never-ends": "every rollout ends, whatever the model answers",
    "cleanup-count": "each @cleanup runs once per rollout: after success, failure, cancellation",
    "cleanup-raises": "no @cleanup raises",
    "failure-hidden": "a failed model call is an error of the rollout, and no reward",
    "oracle-fails": "a task's own solution earns its reward (Harbor tasks)",
}

EMPTY_LIMIT = 0.25
"""An empty answer may earn this share of the reward range: some rubrics also reward style."""
GUESS_LIMIT = 0.5
"""A guess may earn this share: a constant answer to a fair yes-or-no question is right half the
time."""
_CONSTANTS = ("yes", "no", "0", "1", "A", "I do not know.", "ok")
_CANCEL_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class ContractFinding:
    """A failed check: its name in `CHECKS`, and a description of the problem."""

    check: str
    message: str


Finding = tuple[str, str]
"""The two fields of a finding."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings. `notes` lists what could not be checked, or looks odd but may be intended."""

    env_id: str
    num_examples: int
    findings: tuple[ContractFinding, ...]
    notes: tuple[str, ...] = ()
    mean_rewards: dict[str, float] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether there are no findings."""
        return not self.findings


def check_environment(make: Callable[[], Environment], **settings: Any) -> CheckReport:
    """Check an environment and return a report.

    It also works if an event loop runs already. `settings` are those of `check_environment_async`,
    for use in async functions.
    """
    return run_sync(check_environment_async(make, **settings))


async def check_environment_async(
    make: Callable[[], Environment],
    *,
    num_examples: int = 16,
    reward_range: tuple[float, float] = (0.0, 1.0),
    allow: Sequence[str] = (),
) -> CheckReport:
    """Check an environment and return a report.

    Args:
        make: returns a new environment; it is called twice, and both must be alike.
        num_examples: evaluation rows to play.
        reward_range: lowest and highest intended reward.
        allow: names of checks (`CHECKS`) to leave out of the report.

    Raises:
        ConfigError: `allow` has an unknown name. Errors of `make` are passed on.
    """
    unknown = [name for name in allow if name not in CHECKS]
    if unknown:
        raise ConfigError(f"there is no check {unknown[0]!r}.{did_you_mean(unknown[0], CHECKS)}")
    # Two, because rows that are drawn without a seed look fine in a single instance.
    first, second = make(), make()
    try:
        check = _Check(first, num_examples, reward_range)
        findings = row_findings(first, second, num_examples)
        findings += await check.score_findings()
        findings += check.leak_findings()
        findings += await _repeat_findings(first, second, num_examples, check.best_style)
        findings += await lifecycle_findings(first)
        findings += await first.check_findings()
    finally:
        await first.aclose()
        await second.aclose()
    kept = dict.fromkeys(found for found in findings if found[0] not in allow)
    return CheckReport(
        env_id=first.env_id,
        num_examples=len(check.rows),
        findings=tuple(ContractFinding(*each) for each in kept),
        notes=tuple(check.notes),
        mean_rewards=check.means,
    )


def row_findings(first: Environment, second: Environment, num_examples: int) -> list[Finding]:
    """Return the findings about the rows of two instances of one environment."""
    findings = list[Finding]()
    splits = [("training", first.own_rows("train"), second.own_rows("train"))]
    splits.append(("evaluation", first.own_rows("eval"), second.own_rows("eval")))
    for name, rows, again in splits:
        if rows is None or again is None:
            continue
        if len(rows) != len(again) or _texts(rows, num_examples) != _texts(again, num_examples):
            what = f"the {name} rows of two instances differ; seed whatever draws or orders them"
            findings.append(("rows-differ", what))
        ids = Counter((r["task"], r["example_id"]) for r in rows[:MAX_ROWS])
        (task, example_id), times = ids.most_common(1)[0]
        if times > 1:
            what = (
                f"{times} {name} rows have the example_id {example_id} (task {task!r}); their "
                "rollouts would be compared as one group"
            )
            findings.append(("duplicate-ids", what))
    shared, num_tested = shared_questions(first)
    if shared:
        what = (
            f"{len(shared)} of {num_tested} evaluation questions are also training questions, "
            f"such as {shared[0][-80:]!r}"
        )
        findings.append(("overlap", what))
    return findings


def leak_rate(shown: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """Return how often a prompt contains its own answer, and how often that of another row.

    `shown` holds (prompt, answer) pairs. The second share distinguishes a leak from answers that
    all prompts list.
    """
    if not shown:
        return 0.0, 0.0
    # Only the difference counts: "A, B, C or D?" contains every answer, including its own.
    own = sum(_contains(prompt, answer) for prompt, answer in shown) / len(shown)
    pairs = [
        _contains(prompt, other)
        for i, (prompt, answer) in enumerate(shown)
        for j, (_, other) in enumerate(shown)
        if i != j and other != answer
    ]
    return own, sum(pairs) / len(pairs) if pairs else 0.0


def _contains(prompt: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", prompt, re.IGNORECASE) is not None


def _texts(rows: Rows, num: int) -> list[str]:
    return [json.dumps(row, sort_keys=True, default=str) for row in rows[:num]]


class _Check:
    """Plays the rows of one environment with one probe after another."""

    def __init__(
        self, env: Environment, num_examples: int, reward_range: tuple[float, float]
    ) -> None:
        self.env = env
        self.rows = env.get_eval_dataset(min(num_examples, env.num_examples("eval")))
        self.low, self.high = reward_range
        self.answers = [str(row.get("answer") or "").strip() for row in self.rows]
        self.best_style: Style = str
        self.means: dict[str, float] = {}
        self.notes: list[str] = []
        self.findings: list[Finding] = []
        self._rewards: set[float] = set()
        self._prompts: dict[int, str] = {}

    async def score_findings(self) -> list[Finding]:
        """Return the findings about the rewards of the probes."""
        await self._find_style()
        empty = max(await self._mean("empty", ""), await self._mean("bare", self.best_style("")))
        if empty > self._share(EMPTY_LIMIT):
            self._add("empty-scores", f"an empty answer earns {empty:.2f} on average")
        common = [answer for answer, _ in Counter(filter(None, self.answers)).most_common(2)]
        for constant in dict.fromkeys([*_CONSTANTS, *common]):
            for text in dict.fromkeys([constant, self.best_style(constant)]):
                earned = await self._mean(f"always {text!r}", text)
                if earned > self._share(GUESS_LIMIT):
                    self._add(
                        "constant-scores", f"always saying {text!r} earns {earned:.2f} on average"
                    )
        await self._guesses()
        for name, hostile in HOSTILE_ANSWERS.items():
            in_tags = styles_of(self.env.parser).get("tags", str)
            for text in dict.fromkeys([hostile, self.best_style(hostile), in_tags(hostile)]):
                await self._mean(name, text, keep=False)
        if len(self._rewards) == 1 and any(self.answers):
            self._add(
                "constant-reward",
                f"every probe earns {self._rewards.pop():.2f}, the reference answer too",
            )
        return self.findings

    async def _find_style(self) -> None:
        if not any(self.answers):
            self.notes.append("the rows have no answers, so the reference answer was not tried")
            return
        best, name = float("-inf"), ""
        # Environments do not declare their answer format, so the reference answer is tried in each
        # style, and probes use the style that earned most.
        for style_name, style in styles_of(self.env.parser).items():
            earned = await self._mean(
                "reference", [style(answer) for answer in self.answers], keep=False
            )
            if earned > best:
                best, name, self.best_style = earned, style_name, style
            # Nothing can earn more, so the other styles need not be tried.
            if best >= self.high:
                break
        self.means["reference"] = best
        if best <= self._share(GUESS_LIMIT):
            self.notes.append(
                f"the reference answer earns {best:.2f} at best (written {name}); fine if more "
                "than an answer is asked for"
            )

    async def _guesses(self) -> None:
        known = list(dict.fromkeys(filter(None, self.answers)))
        everything = " ".join([*known, *map(str, range(101))])
        replies: dict[str, Any] = {
            "repeating the prompt": _echo,
            "repeating the prompt in the format": lambda messages: self.best_style(_echo(messages)),
        }
        if len(known) > 1:
            replies["listing every answer"] = everything
            replies["listing every answer in the format"] = self.best_style(everything)
        for name, reply in replies.items():
            earned = await self._mean(name, reply)
            if earned > self._share(GUESS_LIMIT):
                self._add("guessing-scores", f"{name} earns {earned:.2f} on average")

    def leak_findings(self) -> list[Finding]:
        """Return a finding if the prompts that were sent contain their own answers."""
        shown = [(self._prompts.get(i, ""), a) for i, a in enumerate(self.answers) if a]
        own, other = leak_rate(shown)
        if own < 0.5 or own - other < 0.4:
            return []
        return [("leak", f"{own:.0%} of the prompts contain their own answer, {other:.0%} others'")]

    async def _mean(self, name: str, reply: Any, *, keep: bool = True) -> float:
        """Play all rows with one reply (or one per row) and return their mean reward."""
        earned: list[float] = []
        for index in range(len(self.rows)):
            probe = Probe(reply[index] if isinstance(reply, list) else reply)
            state = await play(self.env, self.rows, index, probe)
            if probe.prompts:
                self._prompts.setdefault(index, _all_text(probe.prompts[0]))
            self._note(name, state)
            if state.reward is not None:
                earned.append(state.reward)
        mean = sum(earned) / len(earned) if earned else float("-inf")
        if keep and earned:
            self.means[name] = mean
        return mean

    def _note(self, name: str, state: State) -> None:
        error, reward = state.error, state.reward
        if error is not None and error.type == EndlessRollout.__name__:
            self._add("never-ends", f"{error.message}; set max_turns or a @stop condition")
        elif error is not None and error.phase == "scoring":
            self._add("scoring-fails", f"({name}) {error.type}: {error.message}")
        elif error is not None:
            self._add("rollout-fails", f"({name}) {error.type}: {error.message}")
        elif reward is None:
            self._add("scoring-fails", f"({name}) the rollout has no reward and no error")
        else:
            self._note_raised(name, state)
            self._rewards.add(reward)
            if not self.low <= reward <= self.high:
                self._add(
                    "reward-range",
                    f"a reward is {reward:g}, outside of {self.low:g} to {self.high:g}: a rubric "
                    "adds up its functions, and weights=[0.7, 0.3] bounds the sum",
                )

    def _note_raised(self, name: str, state: State) -> None:
        """Report errors that were scored, since the answer may have caused them."""
        for check, key in (
            ("rollout-fails", "environment_errors"),
            ("scoring-fails", "scoring_errors"),
        ):
            for error in (state.get(key) or {}).values():
                self._add(check, f"({name}) {error['type']}: {error['message']}")

    def _add(self, check: str, message: str) -> None:
        same = [found for found in self.findings if found[0] == check]
        # Every probe may fail the same check; three examples are enough.
        if len(same) < 3 and (check, message) not in same:
            self.findings.append((check, message))

    def _share(self, share: float) -> float:
        return self.low + share * (self.high - self.low)


async def play(env: Environment, rows: Any, index: int, probe: Probe) -> State:
    """Play one row as every run does, and return its state."""
    # Not the method of an environment for verifiers, which raises the rollout's error. A fixed
    # seed: a finding must be reproducible.
    results = await Environment.generate(env, [rows[index]], probe, seed=1)
    return results.state[0]


async def _repeat_findings(
    first: Environment, second: Environment, num_examples: int, style: Style
) -> list[Finding]:
    """Play rows repeatedly with the same seed and reply, in the same and in another instance."""
    rows, again = first.get_eval_dataset(num_examples), second.get_eval_dataset(num_examples)
    for index in range(min(4, len(rows), len(again))):
        reply = style(str(rows[index].get("answer") or "1"))
        outcomes = [
            _outcome_of(await play(env, data, index, Probe(reply)))
            for env, data in ((first, rows), (first, rows), (second, again))
        ]
        if outcomes[0] != outcomes[1] or outcomes[0] != outcomes[2]:
            which = next(key for key in outcomes[0] if len({str(o[key]) for o in outcomes}) > 1)
            shown = " / ".join(dict.fromkeys(str(o[which])[:80] for o in outcomes))
            what = f"two rollouts of one row, seed and reply differ in {which}: {shown}"
            return [("nondeterministic", what)]
    return []


def _outcome_of(state: State) -> dict[str, Any]:
    return {key: state.get(key) for key in ("prompt", "completion", "metrics", "reward")}


def _echo(messages: Any) -> str:
    return messages if isinstance(messages, str) else str(messages[-1].get("content") or "")


def _all_text(prompt: tuple[Any, Any]) -> str:
    messages, tools = prompt
    if isinstance(messages, str):
        return messages
    return "\n".join([*(str(m.get("content") or "") for m in messages), str(list(tools) or "")])


async def lifecycle_findings(env: Environment) -> list[Finding]:
    """Play one row to its end, with a failing model call, and with a cancellation."""
    rows = env.get_eval_dataset(1)
    findings: list[Finding] = []
    failure = ServerError("the model server is down (a probe)", status=500, retryable=False)
    for name, probe in {"a rollout": Probe("1"), "a failed rollout": Probe(error=failure)}.items():
        with counted(env) as counts:
            state = await play(env, rows, 0, probe)
        findings += _count_findings(env, counts, name)
        for error in state.get("cleanup_errors") or ():
            findings.append(("cleanup-raises", f"{error['type']}: {error['message']}"))
        is_hidden = state.error is None or state.reward is not None
        if name == "a failed rollout" and probe.prompts and is_hidden:
            what = (
                f"a model call failed, but the rollout has the reward {state['reward']} and the "
                f"error {state.get('error')}; the model would be trained on it"
            )
            findings.append(("failure-hidden", what))
    with counted(env) as counts:
        if await _cancelled(env):
            findings += _count_findings(env, counts, "a cancelled rollout")
    return findings


@contextmanager
def counted(env: Environment) -> Iterator[Counter[str]]:
    """Count the calls of the environment's cleanups, by name, however they are called."""
    counts: Counter[str] = Counter()
    handlers = list(env._cleanup_handlers)

    def counting(handler: Any) -> Any:
        def call(state: State) -> Any:
            counts[handler.__name__] += 1
            return handler(state)

        call.__name__ = handler.__name__
        return call

    try:
        env._cleanup_handlers = [counting(handler) for handler in handlers]
        # An override of `rollout` may call a handler by name instead of through the list.
        for handler in env._cleanup_handlers:
            setattr(env, handler.__name__, handler)
        yield counts
    finally:
        env._cleanup_handlers = handlers
        for handler in handlers:
            delattr(env, handler.__name__)


async def _cancelled(env: Environment) -> bool:
    """Cancel a rollout during a model call; return whether it made one."""
    probe = Probe(hang=True)
    # Without the engine, which would run the cleanup itself if the rollout did not.
    task = asyncio.ensure_future(env.rollout(env.example("eval", 0), probe, probe.model))
    asked = asyncio.ensure_future(probe.is_asked.wait())
    await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED, timeout=_CANCEL_LIMIT_S)
    for waiting in (task, asked):
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    return probe.is_asked.is_set()


def _count_findings(env: Environment, counts: Counter[str], name: str) -> list[Finding]:
    return [
        ("cleanup-count", f"{handler.__name__} ran {counts[handler.__name__]} times in {name}")
        for handler in env._cleanup_handlers
        if counts[handler.__name__] != 1
    ]
