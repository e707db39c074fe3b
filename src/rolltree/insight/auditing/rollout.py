"""The checks of one stored rollout: its columns, tokens, sampler, versions and rewards.

The store's own decoder reads the rollout, so an audit sees what replay, training and the page see.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from zlib import crc32

import msgspec
import numpy as np

from rolltree._helpers.redact import REDACTED
from rolltree.insight.auditing.report import Ledger, Place
from rolltree.insight.auditing.rules import ROLLOUT_RULES, PlannedSettings
from rolltree.insight.auditing.text import TextCheck
from rolltree.insight.credit_states import credit_state
from rolltree.rollouts.decode import UNREADABLE, decode_rollout
from rolltree.rollouts.programs import why_left_out
from rolltree.rollouts.record import encode_result
from rolltree.samples.build import trajectory_breaks
from rolltree.samples.resolve import (
    changed_sampling,
    not_the_models_own,
    resolve_tokens,
)
from rolltree.store import Opaque, StoredRollout, dumps, projection
from rolltree.store.codec import is_equal
from rolltree.store.rows import COLUMNS
from rolltree.store.weights import ScoredPart, noted_part
from rolltree.tokens import RecordedStep, StepTokens, peek
from rolltree.training.plan import PHASE
from rolltree.values.errors import RolltreeError
from rolltree.values.types import RolloutRequest, State

# The columns that follow from the record. Secrets are cut out of both, but a label may have a cut
# that its record lacks, so labels with a cut are not compared.
_LABELS = ("agent", "task", "finish_reason", "error_type", "error_phase", "input")
_COMPARED = (
    *("request_id", "group_id", "index_in_group", "phase", "train_step", "env_id"),
    *("reward", "metrics", "parent_rollout", "depth", "status", "terminated", "truncated"),
    *("truncation_reason", "stop_condition", "is_completed"),
    *("num_calls", "num_prompt_tokens", "num_completion_tokens", "num_unique_tokens"),
    *("min_version", "max_version", "example_id", "started_at"),
    *("generation_ms", "scoring_ms", "total_ms"),
    *_LABELS,
)
_NUMBERS = ("reward", "started_at", "generation_ms", "scoring_ms", "total_ms")
_compared_of = attrgetter(*_COMPARED)
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Expected:
    """The values of a run that its rollouts are checked against."""

    versions: Mapping[str, int] = field(default_factory=dict)  # by phase
    run_seed: int | None = None  # None: the seeds need not be derived from one
    is_training: bool = False  # whether rollouts of the phase `train` are trained by their own step
    is_async: bool = False
    end_ids: frozenset[int] = frozenset()
    settings: PlannedSettings = field(default_factory=PlannedSettings)


@dataclass(frozen=True, slots=True)
class Call:
    """A model call with tokens: its step's index in the trajectory, and a view of the tree."""

    index: int
    handle: int
    tokens: StepTokens
    step: Any
    extras: Mapping[str, Any]
    # Whether what an environment assigned to its tokens can be read; if not, it is not trained.
    is_valid: bool = True

    @property
    def num_sampled(self) -> int:
        """How many tokens the call sampled."""
        return self.tokens.tree.num_sampled(self.handle)

    @property
    def changed_sampling(self) -> str | None:
        """The settings for which it was not sampled from the model's own distribution, if any."""
        temperature, _ = self.value_range("temperature") or (1.0, 1.0)
        return changed_sampling(self.step) or not_the_models_own(float(temperature), {})

    @property
    def left_out(self) -> str | None:
        """Why it is not to be trained, if so."""
        return why_left_out(self.step)

    @property
    def logprobs(self) -> Any:
        """The engine's logprob of each sampled token, or what replaced it; None if unknown."""
        if not self.is_valid:
            return None
        if "completion_logprobs" not in self.tokens.assigned:
            return self.tokens.tree.logprobs(self.handle)
        given = self.tokens["completion_logprobs"]
        return None if given is None or not len(given) else given

    @property
    def versions(self) -> Any:
        """The policy version of each sampled token, int32."""
        return self.tokens.tree.versions(self.handle)

    @property
    def answer(self) -> Mapping[str, Any]:
        """What is stored of the answer: when it was sent, its times, what the server says."""
        record, names = self.response_record, ("sent_s", "time_s", "wait_s", "info")
        if isinstance(record, Mapping):
            return record
        return {name: getattr(record, name, None) for name in names}

    @property
    def response_record(self) -> Any:
        """The response; if it was recorded, without the arrays, which the tree holds."""
        if isinstance(self.step, RecordedStep):
            return self.step.response_record
        return peek(self.step, "response")

    def value_range(self, name: str) -> tuple[Any, Any] | None:
        """Return the smallest and the largest value of a field of its tokens, None without any."""
        return self.tokens.tree.value_range(name, self.handle)


@dataclass(slots=True)
class TrainedFacts:
    """What the table `trained` holds about one rollout in one step."""

    step: int
    advantages: list[float | None]  # one per call, None for a call without sampled tokens
    mismatch: float | None = None  # mean distance of the engine's logprobs from the trainer's
    # For each call with sampled tokens: how many of them are in the loss, and the bounds of their
    # coefficient in the aggregation. `loss_weights` fills them in.
    used: list[int] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    is_weighted: bool = False  # whether those three are known
    num_tokens: int = 0
    num_computed: int = 0  # tokens that were in a forward pass
    num_counted: int = 0  # tokens that count in the normalizers
    num_fresh: int = 0  # tokens that `mismatch` is the mean of
    # What `token_metrics` needs of its tokens: sums and largest values.
    sums: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)

    @property
    def sampling_calls(self) -> list[int]:
        """The calls that `used`, `least` and `most` are about, by their index among all calls."""
        return [index for index, value in enumerate(self.advantages) if value is not None]


_OF_ROW = (
    *("request_id", "trajectory_index", "num_trajectories", "group_id", "index_in_group"),
    *("task", "phase", "train_step", "parent_rollout", "reward", "error_type", "env_id"),
    *("status", "started_at", "created_at", "depth", "num_calls", "max_version"),
)
if TYPE_CHECKING:
    _Row: TypeAlias = StoredRollout
else:
    _Row = projection(_OF_ROW)
_columns_of = attrgetter(*_OF_ROW)


@dataclass(slots=True)
class RolloutFacts:
    """What is kept of a rollout after its own checks: enough for credit and for counting."""

    row: _Row  # some of its columns
    rollout_id: str | None = None
    num_sampled: int = 0
    # Digests of the dataset row's question and answer, and of the first prompt's ids.
    asked: int | None = None
    first_prompt: int | None = None
    # Whether the completion has the answers of all calls; None if that is not known.
    has_answers: bool | None = None
    is_as_asked: bool = False  # whether the first prompt ends with the row's question
    parent_step: int | None = None
    advantage: float | None = None  # the rubric's; None if credit replaced it
    fingerprint: tuple[Any, ...] | None = None  # equal for two rows only if one is a copy
    state: dict[str, Any] | None = None  # what credit and metrics read; None if it is not trained
    trained: list[TrainedFacts] = field(default_factory=list)

    @property
    def place(self) -> Place:
        """The rollout's name."""
        return self.row.request_id, self.row.trajectory_index


class RolloutAudit:
    """The checks of one row; what they find goes to `ledger`."""

    def __init__(
        self, expected: Expected, ledger: Ledger, text: TextCheck | None, row: StoredRollout
    ) -> None:
        self.expected, self.ledger, self.text, self.row = expected, ledger, text, row
        self.facts = RolloutFacts(projection(_OF_ROW)._make(_columns_of(row)))
        self.calls: list[Call] = []
        self.is_contradictory = False
        self.part = ScoredPart(())
        self.is_trained = expected.is_training and row.phase == "train"

    def find(self, check: str, cause: str, message: str) -> None:
        """Keep a finding of this rollout."""
        self.ledger.find(check, cause, message, self.facts.place, self.row.train_step)

    def run(self) -> None:
        """Check the row; afterwards `facts` holds what the checks of the whole run need."""
        try:
            self._check()
        except RolltreeError as error:
            self.find("tokens", "unreadable", str(error))
        except UNREADABLE as error:
            # The row's checksum is right, so it was written like this: report it and go on.
            what = f"its record or its tokens cannot be read ({type(error).__name__}: {error})"
            self.find("tokens", "unreadable", what)

    def _check(self) -> None:
        row = self.row
        for name in ("columns", "groups", "rewards", "times"):
            self.ledger.count(name)
        notes = self.expected.settings.weights
        labels = {name: getattr(row, name) for name in ("env_id", "task", "agent", "created_at")}
        self.part = noted_part(notes, **labels) or self.part
        result = decode_rollout(row)
        if self.expected.run_seed is not None and row.phase == PHASE:
            self.ledger.count("sampler")
        state = result.states[0] if result.states else None
        if state is not None:
            # First: credit needs every member of a group, even one whose checks end early.
            self._keep(state)
            self._calls(state["trajectory"])
        # Encoding the decoded result gives what every column should hold, by the writer's own code,
        # so writer and audit cannot drift apart.
        self._columns(encode_result(result, blobs=False)[0])
        self._failure()
        self._asked(result.request, state)
        for rule in ROLLOUT_RULES:
            for message in rule.find(self, result.request):
                self.find(rule.check, rule.cause, message)
        if state is None:
            return
        self._step_rewards(state)
        for call in self.calls:
            self._call(call, result.request)
        self._versions()
        if len(self.calls) > 1 and not self.is_contradictory:
            decode = None if self.text is None else self.text.tokenizer.decode
            for found in trajectory_breaks(state, decode):
                self.ledger.breaks[str(found.cause)] += 1
        if self.text is not None:
            self.text.check(self, result.request.sampling.stop or ())

    # -- columns and rewards ---------------------------------------------------------------------

    def _asked(self, request: RolloutRequest, state: State | None) -> None:
        """Keep digests of the rollout's question and answer, and of its first prompt."""
        asked, facts = request.input, self.facts
        # Columns that an environment may change during the rollout are left out.
        question = [asked.get(name) for name in ("example_id", "task", "prompt", "answer")]
        facts.asked = crc32(_digestible(question))
        facts.has_answers = None if state is None else _has_answers(state)
        # A call that lost its tokens has no prompt to compare.
        if state is None or not self.calls or self.calls[0].index:
            return
        first = self.calls[0]
        facts.first_prompt = crc32(first.tokens.tree.prompt_ids(first.handle).tobytes())
        wanted, given = _last_message(asked.get("prompt")), peek(first.step, "prompt")
        facts.is_as_asked = wanted is not None and is_equal(wanted, _last_message(given))

    def _columns(self, again: StoredRollout) -> None:
        told = [[_described(each) for each in row.errors] for row in (self.row, again)]
        if told[0] != told[1] and REDACTED not in str(told):
            self.find(
                *("columns", "column_differs"),
                f"the column errors is {told[0]!r}, but the rollout's own record says {told[1]!r}",
            )
        values = _compared_of(self.row), _compared_of(again)
        if is_equal(*values):
            return
        for name, column, stored in zip(_COMPARED, *values, strict=True):
            if is_equal(column, stored) or (name in _NUMBERS and _same(column, stored)):
                continue
            # Of an object, the record has only the type, and the column perhaps more.
            if f"{Opaque.__name__}(type=" in str(stored):
                continue
            if name in _LABELS and REDACTED in f"{column}{stored}":
                continue
            encode = COLUMNS[name].encode
            if name != "metrics" and encode(column, ()) == encode(stored, ()):
                continue
            if name == "metrics":
                wrong = [each for each in stored if not _same(column.get(each), stored[each])]
                if not wrong:
                    continue
                name = f"metrics[{wrong[0]!r}]"
                column, stored = column.get(wrong[0]), stored[wrong[0]]
            self.find(
                *("columns", "column_differs"),
                f"the column {name} is {column!r}, but the rollout's own record says {stored!r}",
            )

    def _failure(self) -> None:
        row = self.row
        if row.status == "error" and row.parent_rollout is None and row.reward is not None:
            self.find(
                *("rewards", "reward_of_failure"),
                f"it failed with {row.error_type} but has the reward {row.reward:g}; a failure "
                "must have none, or it would count in the means",
            )
        if row.reward is not None and not math.isfinite(row.reward):
            self.find("rewards", "not_finite", f"its reward is {row.reward}")

    def _step_rewards(self, state: State) -> None:
        reward, steps = self.row.reward, state["trajectory"]
        rewards = [step["reward"] for step in steps if isinstance(step["reward"], int | float)]
        if reward is None or not rewards or len(rewards) < len(steps):
            return
        own, kinds = dict.get(state, "has_step_rewards"), self.part.kinds
        # Others follow from nothing: the environment wrote them, or its own scoring method.
        is_sum = "step" in kinds or "environment_steps" in state
        if own and is_sum and not _same(sum(rewards), reward):
            self.find(
                *("rewards", "step_rewards"),
                f"its steps earned {sum(rewards):g} together, but its reward is {reward:g}",
            )
        wrong = [(at, value) for at, value in enumerate(rewards) if not _same(value, reward)]
        if own is False and kinds and wrong:
            self.find(
                *("rewards", "step_rewards"),
                f"its reward is {reward:g}, but its step {wrong[0][0]} has {wrong[0][1]:g}",
            )

    # -- calls and their tokens ------------------------------------------------------------------

    def _calls(self, steps: Sequence[Any]) -> None:
        """Collect the calls that have tokens, and check that none of them occurs twice."""
        names: list[Any] = []
        for index, step in enumerate(steps):
            extras, tokens = peek(step, "extras") or {}, peek(step, "tokens")
            names.append(extras.get("call_id"))
            if isinstance(tokens, StepTokens):
                if not 0 <= tokens.call < tokens.tree.num_calls:
                    raise ValueError(f"a step names call {tokens.call} of {tokens.tree.num_calls}")
                self.calls.append(Call(index, tokens.call, tokens, step, extras))
            elif tokens is not None:  # the step's own lists, which match no token tree
                self.is_contradictory = True
                what = "a step's token lists contradict each other"
                self.find("alignment", "contradiction", what)
        for name in ("tokens", "spans"):
            self.ledger.count(name, len(self.calls))
        if any(call.tokens.assigned for call in self.calls):
            problems: dict[int, str] = {}
            resolve_tokens(0, steps, problems)
            self.calls = [replace(call, is_valid=call.index not in problems) for call in self.calls]
        handles = [call.handle for call in self.calls]
        if twice := _repeated(handles):
            at = [call.index for call in self.calls if call.handle == twice[0]]
            self.find(
                *("spans", "call_twice"),
                f"steps {at} are one model call, so its tokens would be trained {len(at)} times",
            )
        elif again := _repeated([name for name in names if isinstance(name, int | str)]):
            at = [index for index, name in enumerate(names) if name == again[0]]
            self.find(
                *("spans", "duplicated_span"),
                f"steps {at} are the same answer of the engine (call_id {again[0]}), recorded "
                f"{len(at)} times",
            )

    def _call(self, call: Call, request: RolloutRequest) -> None:
        tree, handle, extras = call.tokens.tree, call.handle, call.extras
        prompt, sampled = tree.prompt_len(handle), tree.num_sampled(handle)
        self.ledger.count("alignment")
        self.ledger.count("sampler")
        self.ledger.num_sampled_tokens += sampled
        for name, size in (("num_prompt_tokens", prompt), ("num_completion_tokens", sampled)):
            if type(extras.get(name)) is int and extras[name] != size:
                self.find(
                    *("alignment", "count_differs"),
                    f"call {handle} says {name} = {extras[name]} but has {size}",
                )
        if call.tokens.assigned:
            self._assigned(call)
        if any(tree.value_range("prompt_mask", handle) or ()):
            marked = int((tree.prompt_mask(handle) != 0).sum())
            self.find(
                *("alignment", "prompt_marked"),
                f"call {handle} marks {marked} tokens of its prompt as sampled, but prompts are "
                "not sampled",
            )
        if (
            self.is_trained
            and sampled
            and tree.logprobs(handle) is None
            and any(tree.value_range("weight", handle) or ())
        ):
            self.find(
                *("alignment", "no_logprobs"),
                f"call {handle} sampled {sampled} tokens but has no logprobs, so it cannot be "
                "trained",
            )
        if sampled:
            self._sampler(call, request.sampling.max_tokens)
            own = request.sampling
            is_free = bool(own.stop or own.stop_token_ids) or extras.get("sampling") is not None
            self._ending(call, None if is_free or tree.agent(handle) else own.max_tokens)

    def _assigned(self, call: Call) -> None:
        """Check what replaced recorded values of a call: only masks may change."""
        tree, handle = call.tokens.tree, call.handle
        given: dict[str, Any] = {name: call.tokens[name] for name in call.tokens.assigned}
        recorded = {
            "prompt_ids": tree.prompt_ids(handle),
            "completion_ids": tree.completion_ids(handle),
            "completion_logprobs": tree.logprobs(handle),
        }
        for name in recorded.keys() & {name for name, value in given.items() if value is not None}:
            values: Any = recorded[name]
            values = np.empty(0) if values is None else values
            if not _holds(given[name], values):
                self.find(
                    *("spans", "changed_after_sampling"),
                    f"{name} of call {handle} were replaced after the engine had answered; what is "
                    "trained would not be what was sampled",
                )
        # Only values per token; an environment may assign flags, too.
        lengths = {name: len(value) for name, value in given.items() if _is_list(value)}
        sampled = lengths.get("completion_ids", tree.num_sampled(handle))
        prompt = lengths.get("prompt_ids", tree.prompt_len(handle))
        sizes = {"prompt_mask": prompt, "completion_mask": sampled, "completion_logprobs": sampled}
        for name, size in sizes.items():
            if lengths.get(name, size) not in (size, 0):
                self.find(
                    *("alignment", "length_differs"),
                    f"{name} of call {handle} has {lengths[name]} values for {size} tokens",
                )

    def _sampler(self, call: Call, limit: int | None) -> None:
        handle, extras = call.handle, call.extras
        said, recorded = extras.get("temperature"), call.value_range("temperature")
        assert recorded is not None
        # Trees hold float32, in which the request's 0.7 is a slightly different number.
        is_told = type(said) in (int, float) and said == said  # not NaN
        if is_told and not _holds([said, said], np.array(recorded)):
            wrong = next(value for value in recorded if not _holds(said, np.array(value)))
            self.find(
                *("sampler", "temperature"),
                f"call {handle} says temperature {said}, but its tokens say {wrong:g}",
            )
        # An agent of a protocol may have a limit of its own, which the request does not name.
        if limit is not None and call.num_sampled > limit and not call.tokens.tree.agent(handle):
            self.find(
                *("sampler", "too_long"),
                f"call {handle} has {call.num_sampled} sampled tokens, but its limit was {limit}",
            )

    def _ending(self, call: Call, limit: int | None) -> None:
        ends, handle, sampled = self.expected.end_ids, call.handle, call.num_sampled
        if not ends:
            return
        ids = call.tokens.tree.completion_ids(handle).tolist()
        at = next((at for at, token in enumerate(ids) if token in ends), None)
        if at is not None and at < sampled - 1:
            self.find(
                *("spans", "after_the_end"),
                f"call {handle} goes on for {sampled - 1 - at} tokens after its end token, at "
                f"{at}: an engine stops there, so they were not sampled",
            )
        elif at is None and sampled == limit and call.extras.get("finish_reason") == "stop":
            self.find(
                *("sampler", "finish_reason"),
                f"call {handle} reached its token limit without an end token, but says that it "
                "stopped by itself",
            )
        elif at is not None and call.extras.get("finish_reason") == "length":
            self.find(
                *("sampler", "finish_reason"),
                f"call {handle} ends with its end token, but says that it was cut by length",
            )

    def _versions(self) -> None:
        row = self.row
        ranges = [call.value_range("version") for call in self.calls]
        found = [int(version) for each in ranges if each is not None for version in each]
        if not found:
            return
        self.ledger.count("versions")
        low, high = min(found), max(found)
        if low != high and any((np.diff(call.versions) < 0).any() for call in self.calls):
            self.find(
                *("versions", "went_back"),
                "the policy version decreases inside a call, but versions only increase",
            )
        wanted = self.expected.versions.get(row.phase)
        if self.is_trained and not self.expected.is_async:
            wanted = None if row.train_step is None else row.train_step - 1
        if wanted is not None and (low, high) != (wanted, wanted):
            span = f"{low}" if low == high else f"{low} to {high}"
            what = f"step {row.train_step}" if row.phase == "train" else f"phase {row.phase}"
            self.find(
                *("versions", "wrong_version"),
                f"its tokens say that version {span} sampled them; rollouts of {what} are sampled "
                f"by version {wanted}",
            )

    def _keep(self, state: State) -> None:
        """Keep what the checks of the whole run need."""
        row, facts = self.row, self.facts
        facts.rollout_id = _of_kind(str, dict.get(state, "rollout_id"))
        # Without functions of a group, the environment wrote it itself.
        if not state.get("credit") and "group" in self.part.kinds:
            facts.advantage = dict.get(state, "advantage")
        facts.num_sampled = row.num_completion_tokens
        if row.started_at is not None and facts.num_sampled:
            # Two rollouts may have the same answer, but do not begin in the same microsecond.
            facts.fingerprint = (row.started_at, row.generation_ms, row.example_id, row.agent)
        facts.parent_step = _of_kind(int, dict.get(state, "parent_step"))
        if self.is_trained:
            facts.state = credit_state(state)


def _digestible(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, TypeError, OverflowError, ValueError):
        return dumps(value).encode()


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str)


def _holds(given: Any, values: Any) -> bool:
    """Whether what an environment assigned, which may be anything, are the recorded values."""
    try:
        return np.array_equal(np.asarray(given, values.dtype), values)
    except (TypeError, ValueError, OverflowError):
        return False


def _of_kind(kind: type[Kind], value: Any) -> Kind | None:
    return value if isinstance(value, kind) else None


def _has_answers(state: State) -> bool | None:
    """Whether the completion has every call's answer, in order; None if that is not known."""
    completion, steps = state.get("completion"), state["trajectory"]
    if not isinstance(completion, list) or not steps or state.get("error") is not None:
        return None
    left = iter([each.get("content") for each in completion if each.get("role") == "assistant"])
    answers = [peek(step, "completion") for step in steps]
    last = [each[-1] for each in answers if isinstance(each, list) and each]
    return all(each.get("content") in left for each in last if isinstance(each, Mapping))


def _last_message(prompt: Any) -> Any:
    if not isinstance(prompt, list) or not prompt:
        return prompt
    last = prompt[-1]
    return last.get("content") if isinstance(last, Mapping) else last


def _described(error: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(error.get(name) for name in ("function", "type", "message", "phase"))


def _repeated(values: Sequence[Any]) -> list[Any]:
    if len(set(values)) == len(values):
        return []
    return [value for value, count in Counter(values).items() if count > 1]


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal; numbers may differ by the rounding of a sum."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    return bool(one == other)
