"""`state["trajectory"]`: a list of `TrajectoryStep`s whose tokens are in one token tree.

The token lists of steps that are appended by hand are moved into the tree, too, so every step costs
O(new tokens).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, SupportsIndex, cast

from rolltree.tokens.buffers import UnusableLogprobs
from rolltree.tokens.routing import recorded_routing, routing_streams
from rolltree.tokens.step import RecordedStep, StepTokens, peek
from rolltree.tokens.tree import TokenTree
from rolltree.values.errors import ConfigError, TokenError
from rolltree.values.types import Messages, ModelResponse, TrajectoryStep, concat_messages


class Trajectory(list[TrajectoryStep]):
    """The steps of one rollout, and `tree`, the tokens of all of them.

    It is a list in every respect. A slice or a shallow copy is a Trajectory over the same tree,
    which only grows; a deep copy has its own tree.
    """

    def __init__(
        self, steps: Iterable[TrajectoryStep] = (), *, tree: TokenTree | None = None
    ) -> None:
        super().__init__()
        self._tree = tree  # None until it is needed, since the first response's may be taken over
        self._handles: dict[int, int] = {}
        self._latest: tuple[RecordedStep, Messages] | None = None  # the last step's conversation
        self.extend(steps)

    @classmethod
    def of(cls, steps: Iterable[TrajectoryStep] | None) -> Trajectory:
        """Return `steps` as a trajectory: itself, or a new one over the tree of its last step.

        It is for lists that an author put into `state["trajectory"]`.
        """
        if isinstance(steps, cls):
            return steps
        listed = list(steps or ())
        views = (peek(step, "tokens") for step in reversed(listed))
        tree = next((view.tree for view in views if isinstance(view, StepTokens)), None)
        return cls(listed, tree=tree)

    @property
    def tree(self) -> TokenTree:
        """The tokens of all steps."""
        if self._tree is None:
            self._tree = TokenTree()
        return self._tree

    def append_call(
        self,
        *,
        prompt: Messages,
        completion: Messages,
        response: ModelResponse,
        agent: str = "",
        turn: int | None = None,
        extras: dict[str, Any] | None = None,
        streams: Mapping[str, Any] | None = None,
    ) -> TrajectoryStep:
        """Record one model call as a step and return the step.

        A response that its session already stored in this tree (an empty trajectory takes over the
        session's tree) stays there. Otherwise its ids are inserted: O(new tokens) if
        `response.extends` names a call recorded here, else a scan of the prompt. Without ids
        `step["tokens"]` is None. `extras` overrides derived values: `agent`, `turn`, `call_id`,
        `finish_reason`, `temperature`, `num_prompt_tokens`, `num_completion_tokens` and, with ids,
        `policy_version_min` and `policy_version_max`.
        Placeholders in place of logprobs are dropped, and `info["unusable_logprobs"]` says why.

        Raises:
            TokenError: the response's arrays contradict each other.
        """
        # Without ids a call can be evaluated but not trained.
        has_ids = response.prompt_ids is not None and response.completion_ids is not None
        try:
            call = self._place(response, agent, turn, streams) if has_ids else None
        except UnusableLogprobs as error:
            response = response.without_logprobs(str(error))
            call = self._place(response, agent, turn, streams)
        chat = isinstance(prompt, list) and isinstance(completion, list)
        text = isinstance(prompt, str) and isinstance(completion, str)
        # A view needs every value in the tree or the record; other steps are plain dicts.
        if call is not None and response.versions is not None and (chat or text):
            step: dict[str, Any] = self._record(call, prompt, completion, response)
            if extras:
                step["extras"] |= extras
        else:
            step = _plain_step(prompt, completion, response, agent, turn, extras)
            if call is not None:
                step["tokens"] = StepTokens(self.tree, call)
        super().append(cast(TrajectoryStep, step))
        return cast(TrajectoryStep, step)

    def _record(
        self, call: int, prompt: Messages, completion: Messages, response: ModelResponse
    ) -> RecordedStep:
        """Return the step of a call; if it continues the last step, they share messages."""
        head, messages = self._last_conversation()
        added = prompt
        # Usually these are the same message objects, which Python compares by identity, so this
        # costs only a comparison of pointers.
        if (
            head is not None
            and type(messages) is type(prompt)
            and prompt[: len(messages)] == messages
        ):
            added = prompt[len(messages) :]
        else:
            head = None
        step = RecordedStep(self.tree, call, response, head, added, completion)
        # In place, so that T turns do not copy T histories; the list is not shared.
        if head is not None and isinstance(messages, list):
            messages += added  # type: ignore[arg-type]
            messages += completion  # type: ignore[arg-type]
        else:
            messages = prompt + completion  # type: ignore[operator]
        self._latest = step, messages
        return step

    def _last_conversation(self) -> tuple[RecordedStep | None, Messages]:
        """Return the last step and its conversation, or None if it is not a recorded step."""
        last = self[-1] if self else None
        if not isinstance(last, RecordedStep):
            return None, ""
        # Steps may have been inserted or removed meanwhile.
        if self._latest is None or self._latest[0] is not last:
            self._latest = last, last.recorded_conversation()
        return self._latest

    def conversation(self) -> Messages:
        """Return the last step's prompt and completion together; a list is a new object.

        Raises:
            IndexError: there are no steps.
        """
        last = self[-1]
        if isinstance(last, RecordedStep) and not last.is_changed():
            messages = self._last_conversation()[1]
            return messages if isinstance(messages, str) else list(messages)
        return concat_messages([last["prompt"], last["completion"]])

    def trim(self) -> None:
        """Free memory that is reserved for further calls; calls can still be recorded."""
        # The conversation can be built again from the steps.
        self._latest = None
        self.tree.trim()

    def _place(
        self,
        response: ModelResponse,
        agent: str,
        turn: int | None,
        streams: Mapping[str, Any] | None,
    ) -> int:
        """Return the call's handle: the one that it already has in this tree, or a new one."""
        # Only at a session's first call: later, its tree has calls that are not in this trajectory.
        # If `tree` was read before the first call, an empty one was made.
        if response.call == 0 and (self._tree is None or not self._tree.num_calls):
            self._tree = response.tree
        # A response that is recorded again is a new call with the same tokens.
        if response.tree is not self.tree or response.call_id in self._handles:
            return self._insert(response, agent, turn, streams)
        call = cast(int, response.call)
        self.tree.label(call, agent=agent, turn=turn, streams=streams)
        self._handles[response.call_id] = call
        return call

    def _insert(
        self,
        response: ModelResponse,
        agent: str,
        turn: int | None,
        streams: Mapping[str, Any] | None,
    ) -> int:
        parent = None
        if response.extends is not None:
            parent = self._handles.get(response.extends)
        prompt, completion = cast(Any, response.prompt_ids), cast(Any, response.completion_ids)
        routing = response.routed_experts
        # A stored response has its experts in its tree.
        if routing is None and response.call is not None:
            routing = recorded_routing(response.tree, response.call)
        size = len(prompt) + len(completion)
        versions = 0 if response.versions is None else response.versions
        call = self.tree.insert(
            prompt,
            completion,
            logprobs=response.logprobs,
            temperature=response.temperature,
            versions=versions,
            agent=agent,
            turn=turn,
            parent=parent,
            streams={
                **routing_streams(routing, size, self.tree, parent, versions),
                **(streams or {}),
            },
        )
        self._handles[response.call_id] = call
        return call

    def call_of(self, step_index: int) -> int | None:
        """Return the handle in `tree` of a step's call, or None if the step has no tokens there."""
        step = list.__getitem__(self, step_index)
        if isinstance(step, RecordedStep) and step.has_own_tokens:
            return step.call if step.tree is self.tree else None
        tokens = peek(step, "tokens")
        if isinstance(tokens, StepTokens) and tokens.tree is self.tree:
            return tokens.call
        return None

    def _adopt(self, step: TrajectoryStep) -> TrajectoryStep:
        if isinstance(step, RecordedStep) and step.has_own_tokens:
            return cast(TrajectoryStep, step)
        tokens = step.get("tokens")
        if isinstance(tokens, Mapping) and not isinstance(tokens, StepTokens):
            call = insert_step(self.tree, step)
            view = StepTokens(self.tree, call)
            view.hold(tokens)
            step["tokens"] = cast(Any, view)
        return step

    def append(self, step: TrajectoryStep) -> None:
        """Append a step; plain token lists move into the tree."""
        super().append(self._adopt(step))

    def extend(self, steps: Iterable[TrajectoryStep]) -> None:
        """Append steps; plain token lists move into the tree."""
        super().extend([self._adopt(step) for step in steps])

    def insert(self, index: SupportsIndex, step: TrajectoryStep) -> None:
        """Insert a step; plain token lists move into the tree."""
        super().insert(index, self._adopt(step))

    def __iadd__(self, steps: Iterable[TrajectoryStep]) -> Trajectory:  # type: ignore[override,misc]
        self.extend(steps)
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            super().__setitem__(index, [self._adopt(step) for step in value])
        else:
            super().__setitem__(index, self._adopt(value))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Trajectory(super().__getitem__(index), tree=self.tree)
        return super().__getitem__(index)

    def copy(self) -> Trajectory:
        """Return a shallow copy over the same tree."""
        return self[:]  # type: ignore[no-any-return]

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Trajectory:
        tree = deepcopy(self.tree, memo)
        steps = [deepcopy(step, memo) for step in self._to_parts()]
        memo[id(self)] = made = _rebuild(tree, steps, dict(self._handles))
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.tree, self._to_parts(), self._handles)

    def _to_parts(self) -> list[Any]:
        """Return the steps in a form that shares messages and tokens: parts, or a plain dict."""
        # Indices by identity: a step refers to its head by its index in the list.
        places: dict[int, int] = {}
        taken: list[Any] = []
        for index, step in enumerate(self):
            call = self.call_of(index)
            if isinstance(step, RecordedStep) and step.tree is self.tree:
                taken.append(step.to_parts(places))
            elif call is not None:
                tokens = peek(step, "tokens")
                assigned = {key: tokens[key] for key in tokens.assigned}
                taken.append({**step, "tokens": (call, assigned)})
            else:
                taken.append(step)
            places[id(step)] = index
        return taken


def record_call(steps: Any, **call: Any) -> TrajectoryStep:
    """Append a call to a trajectory, or to the plain list that an author put in its place.

    `call` has the arguments of `Trajectory.append_call`.

    Raises:
        ConfigError: `steps` is not a list of dicts.
    """
    check_steps(steps)
    trajectory = Trajectory.of(steps)
    step = trajectory.append_call(**call)
    if trajectory is not steps:
        steps.append(step)
    return step


def check_steps(steps: object) -> None:
    """Check that model calls can be recorded in the value of `state["trajectory"]`.

    Raises:
        ConfigError: it is not a list of dicts.
    """
    if isinstance(steps, Trajectory):  # first, since nearly all are
        return
    try:
        is_list = isinstance(steps, list) and all(isinstance(step, dict) for step in steps)
    except Exception:  # noqa: BLE001  a class of an environment's author may raise when it is read
        is_list = False
    if not is_list:
        raise ConfigError(
            f"state['trajectory'] is a {type(steps).__name__}, or holds other things than steps, so no "
            "model call can be recorded in it. Put a list of steps there: "
            "[step for step in state['trajectory'] if ...]."
        )


def _plain_step(
    prompt: Messages,
    completion: Messages,
    response: ModelResponse,
    agent: str,
    turn: int | None,
    extras: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the step of a call whose values are not all in the tree."""
    derived: dict[str, Any] = {
        "agent": agent,
        "turn": turn,
        "call_id": response.call_id,
        "finish_reason": response.finish_reason.value,
        "temperature": response.temperature,
        "num_prompt_tokens": response.num_prompt_tokens,
        "num_completion_tokens": response.num_completion_tokens,
    }
    if response.prompt_ids is not None and response.completion_ids is not None:
        derived["num_prompt_tokens"] = len(response.prompt_ids)
        derived["num_completion_tokens"] = len(response.completion_ids)
    if "sampling" in response.info:
        derived["sampling"] = response.info["sampling"]
    return {
        "prompt": list(prompt) if isinstance(prompt, list) else prompt,
        "completion": completion,
        "response": response if response.raw is None else response.raw,
        "tokens": None,
        "reward": None,
        "advantage": None,
        "extras": derived | (extras or {}),
    }


def _rebuild(tree: TokenTree, parts: list[Any], handles: dict[int, int]) -> Trajectory:
    """Return the trajectory that `_to_parts` took apart."""
    steps: list[Any] = []
    for part in parts:
        if isinstance(part, tuple):
            steps.append(RecordedStep.from_parts(tree, part, steps))
            continue
        if isinstance(part.get("tokens"), tuple):
            call, assigned = part["tokens"]
            part["tokens"] = StepTokens(tree, call)
            part["tokens"].update(assigned)
        steps.append(part)
    made = Trajectory(tree=tree)
    # Without `_adopt`, since the tokens of these steps are already in the tree.
    list.extend(made, steps)
    made._handles = handles
    return made


def check_ids(tokens: Mapping[str, Any]) -> None:
    """Raise `TokenError` if the ids of a step's tokens are missing."""
    if not isinstance(tokens, Mapping):
        raise TokenError(
            f"step['tokens'] is a {type(tokens).__name__} and not a dict of token lists, so the "
            "step cannot be trained. Set it to None when the server gave no ids."
        )
    missing = [key for key in ("prompt_ids", "completion_ids") if tokens.get(key) is None]
    if missing:
        raise TokenError(
            f"step['tokens'] has no {' and no '.join(missing)}; without ids the step cannot be "
            "trained. Set step['tokens'] to None when the server gave no ids."
        )


def insert_step(tree: TokenTree, step: Mapping[str, Any]) -> int:
    """Insert a step with plain token lists into a tree; return the call's handle.

    `extras` may hold `agent`, `turn`, `temperature`, `policy_version` and `token_streams`. Empty
    logprobs of a completion that is not empty mean that the engine returned none.

    Raises:
        TokenError: a key is missing, or lengths differ.
    """
    tokens = step["tokens"]
    check_ids(tokens)
    extras = step.get("extras") or {}
    lists = map(tokens.get, ("completion_logprobs", "completion_mask", "prompt_mask"))
    try:
        logprobs, mask, prompt_mask = (
            value if value is not None and len(value) else None for value in lists
        )
    except TypeError as error:
        raise TokenError(
            f"step['tokens'] has a value that is not a list ({error}), so the step cannot be "
            "trained. Give one number per token."
        ) from error
    return tree.insert(
        tokens["prompt_ids"],
        tokens["completion_ids"],
        logprobs=logprobs,
        temperature=extras.get("temperature", 1.0),
        versions=extras.get("policy_version", 0),
        mask=mask,
        prompt_mask=prompt_mask,
        agent=extras.get("agent", ""),
        turn=extras.get("turn"),
        streams=extras.get("token_streams"),
    )
