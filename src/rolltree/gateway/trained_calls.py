"""Which calls of a session are trained: by default those of the task, or what a rule says.

Agents make calls beside their task: titles, probes, classifiers. They are kept, and their steps say
why they are left out (`extras["left_out"]`, design/0027).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from inspect import iscoroutinefunction
from reprlib import repr as shown
from typing import Any, TypeAlias

from rolltree.tokens import peek
from rolltree.tokens.breaks import system_text
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.types import ChatMessage, Messages, TrajectoryStep

BESIDE = "beside the task: a call without tools, whose instructions and answer are in no other call"
_NAMES = ("task", "all")
_CONDITIONS = ("agent", "model", "root", "tools")
# A line of an answer that is found within another text, not only as a line of its own.
_LONG = 24
_ROUNDING_S = 1e-5


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """A call of a session, as a rule sees it.

    `model` is the name that the agent asked for, and `tools` are the names of the tools that it
    offered. Without a name, `agent` is empty.
    """

    index: int
    agent: str
    model: str
    tools: tuple[str, ...]
    step: TrajectoryStep = field(repr=False)

    @property
    def prompt(self) -> Messages:
        """The messages, or the text."""
        found: Messages = peek(self.step, "prompt")
        return found

    @property
    def answer(self) -> str:
        """The text of the answer."""
        answer = peek(self.step, "completion")
        return answer if isinstance(answer, str) else "".join(map(_text, answer))

    @property
    def sent_s(self) -> float:
        """When it was sent, in seconds since the session was opened."""
        return float(getattr(peek(self.step, "response"), "sent_s", 0.0))

    @property
    def ended_s(self) -> float:
        """When it was answered, in seconds since the session was opened."""
        return self.sent_s + float(getattr(peek(self.step, "response"), "time_s", 0.0))

    @property
    def root(self) -> str:
        """The text of the system message; without one, of the first message."""
        messages = _messages(self.prompt)
        return system_text(messages) or "".join(map(_text, messages[:1]))


TrainCalls: TypeAlias = str | Mapping[str, Any] | Callable[[FinishedCall], bool]
"""`task`, `all`, conditions that must all hold, or a function that says whether a call is trained.

Conditions are `agent`, `model` and `root` (a shell pattern or a list of them) and `tools` (whether
it offered any).
"""


def checked_rule(rule: TrainCalls) -> TrainCalls:
    """Return the rule.

    Raises:
        ConfigError: it is not one.
    """
    if callable(rule):
        if iscoroutinefunction(rule):
            raise ConfigError(
                f"train_calls is the coroutine function {rule.__qualname__}, whose coroutines are "
                "all true; it has to be a plain one. Write `def` in place of `async def`."
            )
        return rule
    if isinstance(rule, str):
        if rule in _NAMES:
            return rule
        raise ConfigError(
            f"train_calls is {rule!r}, so it is unclear which calls to train."
            f"{did_you_mean(rule, _NAMES)} Conditions are a dict, such as {{'model': 'gpt-*'}}."
        )
    if not isinstance(rule, Mapping) or not rule:
        raise ConfigError(
            f"train_calls is {rule!r}. Give 'task', 'all', a dict of conditions "
            f"({', '.join(_CONDITIONS)}), or a function of a call."
        )
    for name, wanted in rule.items():
        if name not in _CONDITIONS:
            raise ConfigError(
                f"train_calls has the condition {name!r}, which calls do not have."
                f"{did_you_mean(str(name), _CONDITIONS)}"
            )
        is_tools = name == "tools"
        if isinstance(wanted, bool) != is_tools or not (
            is_tools
            or (_patterns(wanted) and all(isinstance(each, str) for each in _patterns(wanted)))
        ):
            wants = "true or false" if is_tools else "a pattern, or a list of them"
            raise ConfigError(f"train_calls has {name} = {wanted!r}, but it takes {wants}.")
    return rule


def calls_left_out(calls: Sequence[FinishedCall], rule: TrainCalls) -> dict[int, str]:
    """Return the calls that are not trained, by index, and why."""
    if rule == "all":
        return {}
    if rule == "task":
        return dict.fromkeys(_beside_the_task(calls), BESIDE)
    why = _refusal if callable(rule) else _mismatch
    found = ((call.index, why(call, rule)) for call in calls)
    return {index: reason for index, reason in found if reason}


def _refusal(call: FinishedCall, rule: Any) -> str:
    try:
        return "" if rule(call) else "train_calls returned false"
    except Exception as error:  # noqa: BLE001  one odd call must not end a rollout
        return f"train_calls raised {type(error).__name__}: {error}"


def _mismatch(call: FinishedCall, rule: Any) -> str:
    for name, wanted in rule.items():
        has = bool(call.tools) if name == "tools" else getattr(call, name)
        fits = (
            has == wanted
            if name == "tools"
            else any(fnmatchcase(has, each) for each in _patterns(wanted))
        )
        if not fits:
            return f"its {name} is {shown(has)}, and train_calls wants {shown(wanted)}"
    return ""


def _patterns(wanted: Any) -> list[Any]:
    return list(wanted) if isinstance(wanted, list | tuple) else [wanted]


# -- the task ------------------------------------------------------------------------------------


def _beside_the_task(calls: Sequence[FinishedCall]) -> list[int]:
    """Return the calls that are clearly beside the task; none if it is not clear what the task is.

    The task's are the calls that offer tools; if none does, those of conversations with several
    turns. Beside it is a call that offers none, has instructions of its own, begins and ends its
    conversation, and whose answer the task does not use: no later prompt has it, and it is not the
    end, made of what the task found.
    """
    main, others = _sides(calls)
    if not main or not others:
        return []
    roots, agents, models = ({getattr(c, n) for c in main} for n in ("root", "agent", "model"))
    histories = _Histories(calls)
    candidates = [
        call
        for call in others
        if call.root not in roots
        and not (call.agent and call.agent not in agents)
        and not histories.has_turns(call)
    ]
    is_clear = any(map(histories.has_turns, main)) or (
        len(candidates) <= len(main)
        and all(_system(call) or call.model not in models for call in candidates)
    )
    if not is_clear:
        return []
    left = {call.index for call in candidates}
    # What a call that is left out was told plays no part.
    kept = [call for call in calls if call.index not in left]
    for call in kept:
        histories.keep(call)
    end_s = max(call.ended_s for call in main)
    for call in reversed(candidates):
        is_end = call.sent_s >= end_s - _ROUNDING_S and histories.is_made_of(call, kept)
        if is_end or histories.is_used(call):
            left.remove(call.index)
            kept.append(call)
            histories.keep(call)
    return sorted(left)


def _sides(calls: Sequence[FinishedCall]) -> tuple[list[FinishedCall], list[FinishedCall]]:
    """Return the calls that surely belong to the task, and those that may not."""
    main = [call for call in calls if call.tools]
    if main:
        return main, [call for call in calls if not call.tools]
    # Agents that debate or judge without tools have instructions of their own, too. There, only
    # another model's name makes a call a candidate.
    if len({call.model for call in calls}) < 2:
        return [], []
    histories = _Histories(calls)
    main = [call for call in calls if histories.has_turns(call)]
    models = {call.model for call in main}
    return main, [call for call in calls if call.model not in models]


_Text: TypeAlias = tuple[str, frozenset[str]]
"""A text in one line, and its lines."""


class _Histories:
    """What the calls of a session were told, and what they answered."""

    def __init__(self, calls: Sequence[FinishedCall]) -> None:
        self._contexts = {call.index: [*map(_key, _messages(call.prompt))] for call in calls}
        self._answers: dict[str, list[int]] = {}
        # The answers in each call's history; empty for a call of a tool.
        self._heard: dict[int, set[str]] = {}
        # By message: the first call that was told it, and the last one that is kept.
        self._first: dict[_Key, int] = {}
        self._last: dict[_Key, int] = {}
        self._texts: dict[_Key, _Text] = {}
        for call in calls:
            self._answers.setdefault(call.answer.strip(), []).append(call.index)
            context = self._contexts[call.index]
            self._heard[call.index] = {
                text.strip() for role, text in context if role == "assistant"
            }
            for key in context:
                self._first.setdefault(key, call.index)
        self._repeated = set().union(*self._heard.values())

    def has_turns(self, call: FinishedCall) -> bool:
        """Whether it continues another call, or another continues it."""
        heard, answer = self._heard[call.index], call.answer.strip()
        others = [each for text in heard for each in self._answers.get(text, ())]
        is_later = "" in heard or any(each != call.index for each in others)
        return is_later or (bool(answer) and answer in self._repeated)

    def keep(self, call: FinishedCall) -> None:
        """Note a call that is not left out."""
        for key in self._contexts[call.index]:
            # That the model writes a text again does not mean that the agent uses it.
            if key[0] != "assistant" or key[1].strip() not in self._answers:
                self._last[key] = max(call.index, self._last.get(key, -1))
                self._texts.setdefault(key, _text_of([key]))

    def is_used(self, call: FinishedCall) -> bool:
        """Whether a later call that is kept was told its answer."""
        own = _text_of(self._contexts[call.index])
        # What it was told itself, others may have been told, too.
        parts = [part for part in _parts(call.answer) if not _has(own, part)]
        return any(
            last > call.index and self._first[key] > call.index and _has(self._texts[key], part)
            for key, last in self._last.items()
            for part in parts
        )

    def is_made_of(self, call: FinishedCall, kept: Iterable[FinishedCall]) -> bool:
        """Whether it was told what calls that are kept said, or what their tools did."""
        own = _text_of(self._contexts[call.index])
        found = [each.answer for each in kept]
        found += [text for role, text in self._last if role == "tool"]
        return any(_has(own, part, is_word=True) for text in found for part in _parts(text))


_Key: TypeAlias = tuple[str, str]


def _key(message: ChatMessage) -> _Key:
    text = "" if message.get("tool_calls") else _text(message)
    return str(message.get("role")), text


def _text_of(context: Iterable[_Key]) -> _Text:
    text = "\n".join(text for _, text in context)
    return _flat(text), frozenset(map(_flat, text.splitlines()))


def _parts(text: str) -> list[str]:
    """Return what tells a text: the whole of it, and its long lines."""
    lines = {flat for line in text.splitlines() if len(flat := _flat(line)) >= _LONG}
    return [each for each in {_flat(text), *lines} if each]


def _has(text: _Text, part: str, *, is_word: bool = False) -> bool:
    """Whether a text has a part: as a line, or anywhere if it is long or has to be whole words."""
    flat, lines = text
    return (
        part in lines
        or (len(part) >= _LONG and part in flat)
        or (is_word and f" {part} " in f" {flat} ")
    )


def _flat(text: str) -> str:
    # Tools pass texts on as JSON, too.
    return " ".join(text.replace("\\n", " ").replace('\\"', '"').split())


def _system(call: FinishedCall) -> str:
    return system_text(_messages(call.prompt))


def _messages(prompt: Messages) -> list[ChatMessage]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _text(message: ChatMessage) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
