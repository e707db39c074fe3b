"""The checks of one stored rollout: its columns, tokens, sampler, versions and rewards.

They read the record's data and the token tree as they lie in the store, so that a hundred thousand
rollouts take no longer than decoding them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rolltree.errors import RolltreeError
from rolltree.records.auditing.facts import CallFacts, RolloutFacts, credit_state
from rolltree.records.auditing.report import Finding, Ledger
from rolltree.records.auditing.text import TextCheck
from rolltree.rollouts.decode import UNREADABLE
from rolltree.rollouts.message_table import MessageReader
from rolltree.samples.build import by_prefix, find_breaks
from rolltree.samples.resolve import ResolvedRollout, ResolvedStep
from rolltree.samples.truncation import TruncationEffect
from rolltree.seeds import derive_seed
from rolltree.store import StoredRollout
from rolltree.store.codec import unpack
from rolltree.tokens import TokenTree
from rolltree.training.sampled import not_the_models_own

_SIZES = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs")
_REQUEST_COLUMNS = ("request_id", "group_id", "index_in_group", "phase", "train_step", "env_id")
_STATE_COLUMNS = (
    *("reward", "parent_rollout", "depth", "terminated", "truncated", "truncation_reason"),
    *("stop_condition", "is_completed"),
)
_parse = msgspec.json.Decoder().decode
_EFFECT = TruncationEffect("keep", False, None, None)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run says about its rollouts: `versions` by phase, the seed, and what is trained.

    `run_seed` is None if seeds are not known to be derived; `is_training` says whether rollouts
    of the phase `train` are trained by their own step.
    """

    versions: Mapping[str, int] = field(default_factory=dict)
    run_seed: int | None = None
    is_training: bool = False
    is_async: bool = False
    end_ids: frozenset[int] = frozenset()


class RolloutAudit:
    """Checks the rows of one run, one after the other; what it finds goes to `ledger`."""

    def __init__(self, expected: Expected, ledger: Ledger, text: TextCheck | None) -> None:
        self.expected, self.ledger, self.text = expected, ledger, text

    def check(self, row: StoredRollout) -> RolloutFacts:
        """Check one row and return what the checks of the whole run need."""
        facts = RolloutFacts(
            request_id=row.request_id,
            trajectory_index=row.trajectory_index,
            num_trajectories=row.num_trajectories,
            group_id=row.group_id,
            index_in_group=row.index_in_group,
            phase=row.phase,
            train_step=row.train_step,
            failed=row.status == "error",
            reward=row.reward,
            error_type=row.error_type,
        )
        one = _One(self, row, facts)
        try:
            one.check()
        except RolltreeError as error:
            one.find("tokens", "unreadable", str(error))
        except UNREADABLE as error:
            what = f"its record or its tokens cannot be read ({type(error).__name__}: {error})"
            one.find("tokens", "unreadable", what)
        return facts


class _One:
    """The checks of one row."""

    def __init__(self, audit: RolloutAudit, row: StoredRollout, facts: RolloutFacts) -> None:
        self.ledger, self.expected, self.text = audit.ledger, audit.expected, audit.text
        self.row, self.facts = row, facts

    def find(self, check: str, cause: str, message: str) -> None:
        row = self.row
        where = row.request_id, row.trajectory_index, row.train_step
        self.ledger.find(Finding(check, cause, message, *where))

    def check(self) -> None:
        row, ledger = self.row, self.ledger
        record = _parse(row.record)  # what is tagged in it is unpacked where it is read
        state, request = record["state"], record["request"]
        request["sampling"] = unpack(request["sampling"])
        for name in ("columns", "rewards"):
            ledger.count(name)
        self._request(request)
        if state is None:
            self._failure(record["error"], {})
            return
        fields, steps = unpack(state["fields"]), state["steps"]
        state["fields"] = fields
        self._columns(fields)
        self._failure(record["error"], fields)
        self._step_rewards(fields, steps)
        tree = TokenTree.from_bytes(row.tokens)
        handles = self._handles(tree, steps)
        for step, handle in zip(steps, handles, strict=True):
            self._step(tree, step, handle, request["sampling"])
        self._totals(tree, steps, handles)
        self._versions(tree, handles)
        if len(handles) > 1:
            self._breaks(tree, steps, handles)
        if self.text is not None:
            self.text.check(self, tree, steps, handles, MessageReader(record["table"]), request)
        self._keep(record, fields, steps, tree, handles)

    # -- columns and rewards ---------------------------------------------------------------------

    def _request(self, request: Mapping[str, Any]) -> None:
        row = self.row
        for name in _REQUEST_COLUMNS:
            if getattr(row, name) != request[name]:
                self._differs(name, getattr(row, name), request[name])
        seed = self.expected.run_seed
        if seed is None or row.phase != "train":
            return
        self.ledger.count("sampler")
        group, number = row.group_id.rpartition("/")[2], row.group_id.rpartition("/")[2][1:]
        if not number.isdigit() or group[0] not in "gx" or row.train_step is None:
            return
        parts: tuple[str | int, ...] = ("replacement",) if group[0] == "x" else ()
        world = derive_seed(seed, "train", row.train_step, *parts, int(number))
        own = derive_seed(derive_seed(world, "sampling"), "member", row.index_in_group)
        if (request["seed"], request["sampling_seed"]) != (world, own):
            self.find(
                *("sampler", "seed"),
                f"it was played with the seeds {request['seed']} and {request['sampling_seed']}; "
                f"the run's seed gives {world} and {own} for this place, so it is not the rollout "
                "that was planned",
            )

    def _differs(self, name: str, column: object, stored: object) -> None:
        self.find(
            *("columns", "column_differs"),
            f"the column {name} is {column!r} and the rollout's own record says {stored!r}",
        )

    def _columns(self, fields: Mapping[str, Any]) -> None:
        row = self.row
        for name in _STATE_COLUMNS:
            if name not in fields:
                continue
            column, stored = getattr(row, name), fields[name]
            if isinstance(column, bool):
                stored = bool(stored)
            elif name == "depth":
                stored = int(stored or 0)
            if column != stored and not (name == "reward" and _same(column, stored)):
                self._differs(name, column, stored)
        metrics = fields.get("metrics")
        if isinstance(metrics, dict) and row.metrics != metrics:
            names = [name for name, value in metrics.items() if row.metrics.get(name) != value]
            if names:
                self._differs(
                    f"metrics[{names[0]!r}]", row.metrics.get(names[0]), metrics[names[0]]
                )

    def _failure(self, error: Any, fields: Mapping[str, Any]) -> None:
        row = self.row
        if (error is not None) != (row.status == "error") and row.status != "error":
            self._differs("status", row.status, "an error")
        if row.status == "error" and row.parent_rollout is None and row.reward is not None:
            self.find(
                *("rewards", "reward_of_failure"),
                f"it failed with {row.error_type} and has the reward {row.reward:g}; a failure "
                "has none, or it would count in the means",
            )
        if row.reward is not None and not math.isfinite(row.reward):
            self.find("rewards", "not_finite", f"its reward is {row.reward}")

    def _step_rewards(self, fields: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> None:
        reward = self.row.reward
        rewards = [step["reward"] for step in steps if step["reward"] is not None]
        if reward is None or not rewards or len(rewards) < len(steps):
            return
        own = fields.get("has_step_rewards")
        if own and not _same(sum(rewards), reward):
            self.find(
                *("rewards", "step_rewards"),
                f"its steps earned {sum(rewards):g} together and its reward is {reward:g}",
            )
        if own is False and not all(_same(value, reward) for value in rewards):
            self.find(
                *("rewards", "step_rewards"),
                f"its reward is {reward:g} and a step says {rewards[0]:g}",
            )

    # -- tokens ----------------------------------------------------------------------------------

    def _handles(self, tree: TokenTree, steps: Sequence[Mapping[str, Any]]) -> list[int | None]:
        handles = [step["call"] for step in steps]
        known = [handle for handle in handles if handle is not None]
        self.ledger.count("tokens", len(known))
        self.ledger.count("spans", len(known))
        twice = [handle for handle, count in Counter(known).items() if count > 1]
        if twice:
            at = [index for index, handle in enumerate(handles) if handle == twice[0]]
            self.find(
                *("spans", "call_twice"),
                f"steps {at} are one model call, so its tokens would be trained {len(at)} times",
            )
        outside = [handle for handle in known if not 0 <= handle < tree.num_calls]
        if outside:
            raise ValueError(f"a step names call {outside[0]} of {tree.num_calls}")
        ids = [(step["extras"] or {}).get("call_id") for step in steps]
        again = [
            name for name, count in Counter(i for i in ids if i is not None).items() if count > 1
        ]
        if again and not twice:
            at = [index for index, name in enumerate(ids) if name == again[0]]
            self.find(
                *("spans", "duplicated_span"),
                f"steps {at} are the same answer of the engine (call_id {again[0]}), recorded "
                f"{len(at)} times",
            )
        return handles

    def _step(
        self,
        tree: TokenTree,
        step: Mapping[str, Any],
        handle: int | None,
        sampling: Mapping[str, Any],
    ) -> None:
        index = handle if handle is not None else "without ids"
        if "loose_tokens" in step:
            self.find("alignment", "contradiction", "a step's token lists contradict themselves")
        if handle is None:
            return
        extras = step["extras"] or {}
        prompt, sampled = tree.prompt_len(handle), tree.num_sampled(handle)
        self.ledger.count("alignment")
        self.ledger.count("sampler")
        self.ledger.num_sampled_tokens += sampled
        for name, size in (("num_prompt_tokens", prompt), ("num_completion_tokens", sampled)):
            if extras.get(name, size) != size:
                self.find(
                    *("alignment", "count_differs"),
                    f"call {index} says {name} = {extras[name]} and has {size}",
                )
        if step.get("assigned"):
            self._assigned(tree, handle, unpack(step["assigned"]))
        if tree.prompt_mask(handle).any():
            self.find(
                *("alignment", "prompt_marked"),
                f"call {index} marks {int((tree.prompt_mask(handle) != 0).sum())} tokens of its "
                "prompt as sampled; nobody sampled them",
            )
        trains = self.expected.is_training and self.row.phase == "train"
        if trains and sampled and tree.logprobs(handle) is None and tree.mask(handle).any():
            self.find(
                *("alignment", "no_logprobs"),
                f"call {index} sampled {sampled} tokens and has no logprobs, so it cannot be "
                "trained",
            )
        self._sampler(tree, handle, extras, sampling)

    def _assigned(self, tree: TokenTree, handle: int, assigned: Mapping[str, Any]) -> None:
        """Check what was put over a recorded call: a mask may change, what was sampled may not."""
        given = {name: value for name, value in assigned.items() if value is not None}
        lengths = {name: len(given[name]) for name in _SIZES if name in given}
        recorded = {
            "prompt_ids": tree.prompt_ids,
            "completion_ids": tree.completion_ids,
            "completion_logprobs": tree.logprobs,
        }
        for name, read in recorded.items():
            if name not in given:
                continue
            values: Any = read(handle)
            same = np.empty(0) if values is None else values
            if not np.array_equal(np.asarray(given[name], same.dtype), same):
                self.find(
                    *("spans", "changed_after_sampling"),
                    f"{name} of call {handle} were replaced after the engine had answered; what is "
                    "trained would not be what was sampled",
                )
        prompt = lengths.get("prompt_ids", tree.prompt_len(handle))
        sampled = lengths.get("completion_ids", tree.num_sampled(handle))
        wanted = {
            "prompt_mask": prompt,
            "completion_mask": sampled,
            "completion_logprobs": sampled,
        }
        for name, size in wanted.items():
            if lengths.get(name, size) not in (size, 0):
                self.find(
                    *("alignment", "length_differs"),
                    f"{name} of call {handle} has {lengths[name]} values for {size} tokens",
                )

    def _sampler(
        self, tree: TokenTree, handle: int, extras: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> None:
        sampled = tree.num_sampled(handle)
        if not sampled:
            return
        said, temperature = extras.get("temperature"), tree.temperature(handle)
        if said is not None and (temperature != np.float32(said)).any():
            self.find(
                *("sampler", "temperature"),
                f"call {handle} says temperature {said:g} and its tokens {temperature[0]:g}",
            )
        changes = not_the_models_own(float(temperature.min()), extras.get("sampling") or {})
        if changes and self.expected.is_training and self.row.phase == "train":
            self.find(
                *("sampler", "not_the_models_own"),
                f"call {handle} was sampled with {changes}; ratios of such tokens would be wrong",
            )
        limit = sampling.get("max_tokens")
        if limit is not None and sampled > limit and not extras.get("agent"):
            self.find(
                *("sampler", "too_long"),
                f"call {handle} has {sampled} sampled tokens and was to have {limit} at most",
            )
        ends = self.expected.end_ids
        if ends:
            ids = tree.completion_ids(handle)
            ended = [at for at, token in enumerate(ids.tolist()) if token in ends]
            if ended and ended[0] < sampled - 1:
                self.find(
                    *("spans", "after_the_end"),
                    f"call {handle} goes on for {sampled - 1 - ended[0]} tokens after its end "
                    f"token, at {ended[0]}: an engine stops there, so they were not sampled",
                )
            elif ended and extras.get("finish_reason") == "length":
                self.find(
                    *("sampler", "finish_reason"),
                    f"call {handle} ends with its end token and says that it was cut by length",
                )

    def _totals(
        self, tree: TokenTree, steps: Sequence[Mapping[str, Any]], handles: Sequence[int | None]
    ) -> None:
        row = self.row
        extras = [step["extras"] or {} for step in steps]
        pairs = list(zip(handles, extras, strict=True))
        prompt = sum(
            int(e.get("num_prompt_tokens") or 0) if h is None else tree.prompt_len(h)
            for h, e in pairs
        )
        sampled = sum(
            int(e.get("num_completion_tokens") or 0) if h is None else tree.num_sampled(h)
            for h, e in pairs
        )
        for name, stored in (
            ("num_calls", len(steps)),
            ("num_prompt_tokens", prompt),
            ("num_completion_tokens", sampled),
            ("num_unique_tokens", tree.num_tokens),
        ):
            if getattr(row, name) != stored:
                self._differs(name, getattr(row, name), stored)

    # -- versions and breaks -----------------------------------------------------------------------

    def _versions(self, tree: TokenTree, handles: Sequence[int | None]) -> None:
        row, facts = self.row, self.facts
        found = [tree.versions(h) for h in handles if h is not None and tree.num_sampled(h)]
        if not found:
            return
        low, high = min(int(v.min()) for v in found), max(int(v.max()) for v in found)
        facts.min_version, facts.max_version = low, high
        self.ledger.count("versions")
        if (row.min_version, row.max_version) != (low, high):
            columns = f"{row.min_version} to {row.max_version}"
            self._differs("min_version and max_version", columns, f"{low} to {high}")
        if any((np.diff(v) < 0).any() for v in found):
            self.find(
                *("versions", "went_back"),
                "the policy version falls inside a call, and versions only rise",
            )
        wanted = self.expected.versions.get(row.phase)
        if row.phase == "train" and self.expected.is_training and not self.expected.is_async:
            wanted = None if row.train_step is None else row.train_step - 1
        if wanted is not None and (low, high) != (wanted, wanted):
            span = f"{low}" if low == high else f"{low} to {high}"
            what = f"step {row.train_step}" if row.phase == "train" else f"phase {row.phase}"
            self.find(
                *("versions", "wrong_version"),
                f"its tokens say that version {span} sampled them; rollouts of {what} are sampled "
                f"by version {wanted}",
            )

    def _breaks(
        self, tree: TokenTree, steps: Sequence[Mapping[str, Any]], handles: Sequence[int | None]
    ) -> None:
        calls = [
            ResolvedStep(index, handle, extras.get("agent") or tree.agent(handle), None, None, None)
            for index, (step, handle) in enumerate(zip(steps, handles, strict=True))
            if handle is not None
            for extras in (step["extras"] or {},)
        ]
        groups = by_prefix(tree, calls)
        self.ledger.count("tokens", 0)
        if len(groups) < 2:
            return
        whole = ResolvedRollout(
            *(0, "", tree, tuple(calls), tuple(calls), None, False, False, None, False, _EFFECT)
        )
        for found in find_breaks(
            whole, groups, None if self.text is None else self.text.tokenizer.decode
        ):
            self.ledger.breaks[str(found.cause)] += 1

    # -- for the checks of the whole run -----------------------------------------------

    def _keep(
        self,
        record: Mapping[str, Any],
        fields: Mapping[str, Any],
        steps: Sequence[Mapping[str, Any]],
        tree: TokenTree,
        handles: Sequence[int | None],
    ) -> None:
        row, facts = self.row, self.facts
        facts.rollout_id, facts.parent_rollout = fields.get("rollout_id"), row.parent_rollout
        facts.advantage = None if fields.get("credit") else fields.get("advantage")
        facts.num_sampled = row.num_completion_tokens
        if row.started_at is not None and facts.num_sampled:
            facts.fingerprint = (row.started_at, row.generation_ms, row.example_id, row.agent)
        if row.phase != "train" or not self.expected.is_training:
            return
        facts.state = credit_state(record, steps, tree, handles)
        facts.calls = tuple(
            None
            if handle is None
            else CallFacts(handle, tree.versions(handle), tree.logprobs(handle), tree.mask(handle))
            for handle in handles
        )


def _same(one: Any, other: Any) -> bool:
    """Whether two numbers are equal but for rounding."""
    if one is None or other is None or isinstance(other, str) or isinstance(one, str):
        return one is other
    return math.isclose(float(one), float(other), rel_tol=1e-6, abs_tol=1e-9)
