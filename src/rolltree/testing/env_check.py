"""`check_environment`: whether an environment keeps its contract.

It plays an environment with probes (an empty answer, constants, a list of everything, the prompt
repeated, the reference, a model that fails, one that is cancelled) and reports what a run would
only show as a strange curve. It knows environments from outside. It leaves out whether the task is
worth learning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolltree.environments import Environment
from rolltree.errors import ConfigError, did_you_mean
from rolltree.testing.env_lifecycle import lifecycle_findings
from rolltree.testing.env_rows import leak_rate, row_findings
from rolltree.testing.findings import CHECKS, Finding
from rolltree.testing.probes import EndlessRollout, Probe, Style, styles_of
from rolltree.types import State

EMPTY_LIMIT = 0.25
"""An empty answer may earn this share of the reward range: some environments pay for politeness."""
GUESS_LIMIT = 0.5
"""A guess may earn this share: a constant answer to a fair yes-or-no question is right half the
time."""
_CONSTANTS = ("yes", "no", "0", "1", "A", "I do not know.", "ok")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was found. `notes` say what could not be checked, or looks odd and may be meant so."""

    env_id: str
    num_examples: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    mean_rewards: dict[str, float] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


async def check_environment(
    make: Callable[[], Environment],
    *,
    num_examples: int = 16,
    reward_range: tuple[float, float] = (0.0, 1.0),
    allow: Sequence[str] = (),
) -> CheckReport:
    """Check an environment and return what was found.

    Args:
        make: returns a new environment; it is called twice, and must make the same one.
        num_examples: evaluation rows to play.
        reward_range: what rewards are meant to lie in.
        allow: names of checks (`findings.CHECKS`) whose findings are meant so.

    Raises:
        ConfigError: `allow` has an unknown name. What the environment raises when it is made is
            raised too.
    """
    unknown = [name for name in allow if name not in CHECKS]
    if unknown:
        raise ConfigError(f"there is no check {unknown[0]!r}.{did_you_mean(unknown[0], CHECKS)}")
    first, second = make(), make()
    try:
        check = _Check(first, num_examples, reward_range)
        findings = row_findings(first, second, num_examples)
        findings += await check.score_findings()
        findings += check.leak_findings()
        findings += await _repeat_findings(first, second, num_examples, check.best_style)
        findings += await lifecycle_findings(first)
    finally:
        await first.aclose()
        await second.aclose()
    kept = {(f.check, f.message): f for f in findings if f.check not in allow}
    return CheckReport(
        env_id=first.env_id,
        num_examples=len(check.rows),
        findings=tuple(kept.values()),
        notes=tuple(check.notes),
        mean_rewards=check.means,
    )


class _Check:
    """Plays the rows of one environment with one probe after the other."""

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
        """Return what the rewards of the probes show."""
        await self._find_style()
        empty = max(await self._mean("empty", ""), await self._mean("bare", self.best_style("")))
        if empty > self._share(EMPTY_LIMIT):
            self._found("empty-scores", f"an empty answer earns {empty:.2f} on average")
        common = [answer for answer, _ in Counter(filter(None, self.answers)).most_common(2)]
        for constant in dict.fromkeys([*_CONSTANTS, *common]):
            for text in dict.fromkeys([constant, self.best_style(constant)]):
                earned = await self._mean(f"always {text!r}", text)
                if earned > self._share(GUESS_LIMIT):
                    self._found(
                        "constant-scores", f"always saying {text!r} earns {earned:.2f} on average"
                    )
        await self._guesses()
        if len(self._rewards) == 1 and any(self.answers):
            self._found(
                "constant-reward",
                f"every probe earns {self._rewards.pop():.2f}, the reference answer too",
            )
        return self.findings

    async def _find_style(self) -> None:
        if not any(self.answers):
            self.notes.append("the rows have no answers, so the reference answer was not tried")
            return
        best, name = float("-inf"), ""
        for style_name, style in styles_of(self.env.parser).items():
            earned = await self._mean(
                "reference", [style(answer) for answer in self.answers], keep=False
            )
            if earned > best:
                best, name, self.best_style = earned, style_name, style
            if best >= self.high:
                break
        self.means["reference"] = best
        if best <= self._share(GUESS_LIMIT):
            self.notes.append(
                f"the reference answer earns {best:.2f} at best (written {name}); fine where more "
                "than an answer is asked for"
            )

    async def _guesses(self) -> None:
        known = list(dict.fromkeys(filter(None, self.answers)))
        everything = " ".join([*known, *map(str, range(101))])
        replies: dict[str, Any] = {
            "repeating the prompt": _echo,
            "repeating the prompt in the format": lambda said: self.best_style(_echo(said)),
        }
        if len(known) > 1:
            replies["listing every answer"] = everything
            replies["listing every answer in the format"] = self.best_style(everything)
        for name, reply in replies.items():
            earned = await self._mean(name, reply)
            if earned > self._share(GUESS_LIMIT):
                self._found("guessing-scores", f"{name} earns {earned:.2f} on average")

    def leak_findings(self) -> list[Finding]:
        """Return whether the prompts that were sent hold their own answers."""
        shown = [(self._prompts.get(i, ""), a) for i, a in enumerate(self.answers) if a]
        own, other = leak_rate(shown)
        if own >= 0.5 and own - other >= 0.4:
            return [
                Finding(
                    "leak",
                    f"{own:.0%} of the prompts contain their own answer, {other:.0%} others'",
                )
            ]
        return []

    async def _mean(self, name: str, reply: Any, *, keep: bool = True) -> float:
        """Play all rows with a reply (or one per row), and note what the states show."""
        earned: list[float] = []
        for index in range(len(self.rows)):
            probe = Probe(reply[index] if isinstance(reply, list) else reply)
            state = await play(self.env, self.rows, index, probe)
            if probe.prompts:
                self._prompts.setdefault(index, _all_text(probe.prompts[0]))
            self._note(name, state)
            if state["reward"] is not None:
                earned.append(state["reward"])
        mean = sum(earned) / len(earned) if earned else float("-inf")
        if keep and earned:
            self.means[name] = mean
        return mean

    def _note(self, name: str, state: State) -> None:
        error, reward = state.get("error"), state["reward"]
        if error is not None and error.type == EndlessRollout.__name__:
            self._found("never-ends", f"{error.message}; set max_turns or a @stop condition")
        elif error is not None and error.phase == "scoring":
            self._found("scoring-fails", f"({name}) {error.type}: {error.message}")
        elif error is not None:
            self._found("rollout-fails", f"({name}) {error.type}: {error.message}")
        elif reward is None:
            self._found("scoring-fails", f"({name}) the rollout has no reward and no error")
        else:
            self._rewards.add(reward)
            if not self.low <= reward <= self.high:
                self._found(
                    "reward-range",
                    f"a reward is {reward:g}, outside of {self.low:g} to {self.high:g}",
                )

    def _found(self, check: str, message: str) -> None:
        if sum(found.check == check for found in self.findings) < 3:
            self.findings.append(Finding(check, message))

    def _share(self, share: float) -> float:
        return self.low + share * (self.high - self.low)


async def play(env: Environment, rows: Any, index: int, probe: Probe) -> State:
    """Play one row as every run does, and return its state."""
    results = await env.generate(rows.select([index]), probe, seed=1)
    return results.state[0]


async def _repeat_findings(
    first: Environment, second: Environment, num_examples: int, style: Style
) -> list[Finding]:
    """Play the same rows with the same seed and words again, in the same and another instance."""
    rows, again = first.get_eval_dataset(num_examples), second.get_eval_dataset(num_examples)
    for index in range(min(4, len(rows), len(again))):
        reply = style(str(rows[index].get("answer") or "1"))
        told = [
            _told(await play(env, data, index, Probe(reply)))
            for env, data in ((first, rows), (first, rows), (second, again))
        ]
        if told[0] != told[1] or told[0] != told[2]:
            which = next(key for key in told[0] if len({str(t[key]) for t in told}) > 1)
            return [
                Finding(
                    "nondeterministic",
                    f"two rollouts of one row, seed and reply differ in {which}: "
                    + " / ".join(dict.fromkeys(str(t[which])[:80] for t in told)),
                )
            ]
    return []


def _told(state: State) -> dict[str, Any]:
    return {key: state.get(key) for key in ("prompt", "completion", "metrics", "reward")}


def _echo(messages: Any) -> str:
    return messages if isinstance(messages, str) else str(messages[-1].get("content") or "")


def _all_text(prompt: tuple[Any, Any]) -> str:
    messages, tools = prompt
    if isinstance(messages, str):
        return messages
    return "\n".join([*(str(m.get("content") or "") for m in messages), str(list(tools) or "")])
