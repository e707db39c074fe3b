"""The input of the rollout engine: sources of examples, and the requests made from them.

One request is one episode; a `RequestStrategy` turns one request into several.
All randomness is derived from one `run_seed` by `rolltree.values.seeds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, overload, runtime_checkable

from rolltree.inference.client import ModelClient, check_tools, sampling_from_args
from rolltree.inference.deadline import Clock
from rolltree.values.errors import ConfigError, refuse_unknown
from rolltree.values.seeds import CallSeeds, derive_seed
from rolltree.values.types import RolloutInput, RolloutRequest, SamplingArgs, SamplingParams, State

__all__ = ["Clock", "Episode", "current_episode", "playing"]


@dataclass(slots=True)
class Episode:
    """The data of one episode that the engine and the source share."""

    request: RolloutRequest
    clock: Clock = field(default_factory=Clock)
    # States are registered when they are made, so that a cancelled episode keeps its steps.
    states: list[State] = field(default_factory=list)


_CURRENT: ContextVar[Episode | None] = ContextVar("rolltree_episode", default=None)


def current_episode() -> Episode | None:
    """Return the episode that the calling task plays, or None outside an episode."""
    return _CURRENT.get()


class playing:  # noqa: N801  (a context manager that reads as a verb)
    """`with playing(episode):` makes `episode` the current episode of this task."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    def __enter__(self) -> Episode:
        self._token = _CURRENT.set(self._episode)
        return self._episode

    def __exit__(self, *exc: object) -> None:
        _CURRENT.reset(self._token)


Split: TypeAlias = Literal["train", "eval"]


@runtime_checkable
class RolloutSource(Protocol):
    """Holds examples, and plays one episode of an example at a time.

    Optional: an attribute `sampling_args` (OpenAI fields) with the source's defaults;
    `rolltree.rollouts.resolve_sampling` merges the caller's fields over them. A method
    `first_examples(split, num)` returns the indices of `num` examples to play if not all are;
    without it, they are the first ones.
    """

    env_id: str

    def num_examples(self, split: Split) -> int:
        """Return how many examples the split holds."""
        ...

    def example(self, split: Split, index: int) -> RolloutInput:
        """Return example `index`, a fresh dict that the caller may change."""
        ...

    async def run_request(self, request: RolloutRequest, client: ModelClient) -> Sequence[State]:
        """Play one episode, score it, and return its states: one per trajectory.

        A failed rollout is data: `state["error"]` is an `ErrorRecord` and `state["reward"]` None.
        Only cancellation is raised.
        """
        ...


@runtime_checkable
class GroupScorer(Protocol):
    """A source whose rewards compare the members of a group."""

    @property
    def has_group_rewards(self) -> bool:
        """Whether `score_group` must run before a member's reward is known."""
        ...

    async def score_group(self, states: Sequence[State]) -> None:
        """Finish the scores of a group's rollouts in place; `states` has no failed ones."""
        ...


class RequestStrategy(Protocol):
    """A one-to-many transform of requests."""

    def expand(self, requests: Iterable[RolloutRequest]) -> list[RolloutRequest]:
        """Return the requests to run, in order."""
        ...


@dataclass(frozen=True, slots=True)
class GroupStrategy:
    """Turns every request into a group: one world, `group_size` sampling seeds (GRPO).

    The members share the world's seed, the group id and the input; the sampling seeds differ.
    """

    group_size: int

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(
                f"group_size is {self.group_size}; a group without members would run nothing. "
                "Use 1 for ungrouped rollouts, or at least 2 to compare rollouts with each other."
            )

    def expand(self, requests: Iterable[RolloutRequest]) -> list[RolloutRequest]:
        """Return `group_size` requests for each request, group after group."""
        return [
            group_member(request, index) for request in requests for index in range(self.group_size)
        ]


def example_request(
    env_id: str,
    input: RolloutInput,
    *,
    group_id: str,
    seed: int,
    sampling: SamplingParams,
    phase: str,
    train_step: int | None = None,
) -> RolloutRequest:
    """Return the request of one example; `group_member` and strategies turn it into rollouts.

    `seed` is the world's seed; the sampling seed is derived from it.
    """
    return RolloutRequest(
        request_id=group_id,
        env_id=env_id,
        input=input,
        seed=seed,
        # Not the world's seed itself: with the same seed, the world and the sampler would draw the
        # same numbers.
        sampling_seed=derive_seed(seed, "sampling"),
        group_id=group_id,
        index_in_group=0,
        sampling=sampling,
        phase=phase,
        train_step=train_step,
    )


def call_seeds(request: RolloutRequest) -> CallSeeds:
    """Return the seeds of the request's model calls, from its sampling seed.

    A caller's seed, in `request.sampling`, is the same for many rollouts.
    """
    own, wanted = request.sampling_seed, request.sampling.seed
    # The caller's seed is mixed with the rollout's own; otherwise all members of a group would
    # sample the same text.
    return CallSeeds(own if wanted is None else derive_seed(wanted, own), own, wanted)


def group_member(request: RolloutRequest, index: int) -> RolloutRequest:
    """Return member `index` of the request's group: same world, different sampling seed."""
    return replace(
        request,
        request_id=f"{request.request_id}/{index}",
        sampling_seed=derive_seed(request.sampling_seed, "member", index),
        index_in_group=index,
    )


def repeat(request: RolloutRequest, num: int) -> list[RolloutRequest]:
    """Return `num` independent requests made from one: each has its own world and sampling seeds.

    They keep the group id, so that evaluation can aggregate per example.
    """
    return [
        replace(
            request,
            request_id=f"{request.request_id}/{index}",
            # Unlike the members of a group, repeats face different worlds.
            seed=derive_seed(request.seed, "repeat", index),
            sampling_seed=derive_seed(request.sampling_seed, "repeat", index),
            index_in_group=index,
        )
        for index in range(num)
    ]


def resolve_sampling(
    source: object, sampling: SamplingArgs | SamplingParams | None = None
) -> SamplingParams:
    """Return the sampling parameters: the caller's fields over the source's `sampling_args`.

    `SamplingParams` decide every field, so the source's are not used; a dict decides only the
    fields that it names. `extra_body` is merged key by key. Neither mapping is changed.
    """
    # Its fields have defaults, so a field that the caller set looks like one left alone.
    if isinstance(sampling, SamplingParams):
        return sampling
    if not isinstance(sampling, Mapping | None):
        raise ConfigError(
            f"sampling is {sampling!r}, which names no fields. Pass a dict, such as "
            '{"max_tokens": 256}, or SamplingParams.'
        )
    return sampling_from_args(merge_args(getattr(source, "sampling_args", None), sampling))


def merge_args(
    base: Mapping[str, Any] | None, override: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a new dict: `base` updated with `override`; `extra_body` is merged key by key."""
    merged = {**(base or {}), **(override or {})}
    # vLLM's fields are in `extra_body`: a caller who sets one of them must not lose the
    # environment's other fields.
    bodies = [args["extra_body"] for args in (base, override) if args and args.get("extra_body")]
    if len(bodies) == 2:
        merged["extra_body"] = {**bodies[0], **bodies[1]}
    return merged


RequestOfExample: TypeAlias = Callable[[str, int], RolloutRequest]
"""Takes the beginning of a group's id and an example's index; returns the group's request."""


class DistinctRequests(Iterator[RolloutRequest]):
    """Requests whose ids are known to differ, so that the engine need not check them."""

    def __init__(self, requests: Iterator[RolloutRequest]) -> None:
        self._requests = requests

    def __next__(self) -> RolloutRequest:
        return next(self._requests)


class RequestPlan(Sequence[RolloutRequest]):
    """The requests of some examples, group after group; each request is made when it is read.

    `request_ids` lists their ids, in order.
    """

    def __init__(
        self, stem: str, indices: Sequence[int], group_size: int, request: RequestOfExample
    ) -> None:
        self._stem, self._indices, self._size = stem, indices, group_size
        self._request = request
        self.request_ids = [
            f"{stem}/{index}/{member}" for index in indices for member in range(group_size)
        ]

    def __len__(self) -> int:
        return len(self.request_ids)

    @overload
    def __getitem__(self, at: int) -> RolloutRequest: ...
    @overload
    def __getitem__(self, at: slice) -> list[RolloutRequest]: ...
    def __getitem__(self, at: int | slice) -> RolloutRequest | list[RolloutRequest]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        place = range(len(self))[at]
        request = self._request(self._stem, self._indices[place // self._size])
        return group_member(request, place % self._size)

    def __iter__(self) -> Iterator[RolloutRequest]:
        return self.without(lambda request_id: False)

    def without(self, is_done: Callable[[str], bool]) -> Iterator[RolloutRequest]:
        """Yield the requests whose ids are not done; requests of one example share its input."""
        requests = self._without(is_done)
        is_distinct = len(set(self._indices)) == len(self._indices)
        return DistinctRequests(requests) if is_distinct else requests

    def _without(self, is_done: Callable[[str], bool]) -> Iterator[RolloutRequest]:
        for group, index in enumerate(self._indices):
            # Made once per example and shared by its members, since a row may be large and slow to
            # format.
            request: RolloutRequest | None = None
            for member in range(self._size):
                if not is_done(self.request_ids[group * self._size + member]):
                    request = request or self._request(self._stem, index)
                    yield group_member(request, member)

    def groups(self) -> Iterator[list[str]]:
        """Yield the request ids of each group."""
        for start in range(0, len(self), self._size):
            yield self.request_ids[start : start + self._size]


def check_source(source: object) -> None:
    """Check that `source` is an object that plays episodes.

    Raises:
        ConfigError: it is the name of an environment, its class or its factory, for example.
    """
    if hasattr(source, "run_request") and not isinstance(source, type):
        return
    name = getattr(source, "__name__", None)
    what, do = f"a {type(source).__name__}", "Pass an environment, such as load_environment(NAME)."
    if isinstance(source, str):
        what, do = f"the name {source!r}", f"Load it: load_environment({source!r})."
    elif callable(source) and name is not None:
        kind = "class" if isinstance(source, type) else "function"
        what, do = f"the {kind} {name!r}", f"Call it: {name}(...)."
    raise ConfigError(f"the environment is {what}, which plays no episodes itself. {do}")


def check_whole(**numbers: object) -> None:
    """Check that every argument is an integer.

    Raises:
        ConfigError: a value is not a whole number.
    """
    for name, value in numbers.items():
        if not hasattr(value, "__index__"):
            raise ConfigError(f"{name} is {value!r}, which is not a whole number. Pass an int.")


def build_requests(
    source: RolloutSource,
    split: Split,
    *,
    indices: Sequence[int] | None = None,
    num_examples: int = -1,
    group_size: int = 1,
    sampling: SamplingArgs | SamplingParams | None = None,
    run_seed: int = 0,
    phase: str = "eval",
    train_step: int | None = None,
    **unknown: Any,
) -> RequestPlan:
    """Return the requests for some examples of a split, `group_size` for each example.

    The returned sequence makes each request when it is read; `list` makes all of them.

    `indices` selects the examples; without it the first `num_examples` are taken (-1: all), of a
    group of environments equally many of each. The world's seed depends on the run seed, the
    example and, in training, the step, so two evaluations of one run have the same worlds and the
    same sampling seeds.

    Raises:
        ConfigError: an index is outside the split, or there is nothing to run.
    """
    refuse_unknown("build_requests", unknown, build_requests)
    check_source(source)
    if num_examples < -1:
        raise ConfigError(f"num_examples is {num_examples}. Use -1 for all, or a number of them.")
    available = source.num_examples(split)
    if indices is None:
        first = getattr(source, "first_examples", None)
        size = available if num_examples < 0 else min(num_examples, available)
        indices = range(size) if first is None else first(split, size)
    if not available:
        raise ConfigError(
            f"there is nothing to run: {source.env_id!r} has no examples in its {split} split. "
            "Give the environment data for this split."
        )
    if not indices:
        raise ConfigError(
            f"there is nothing to run: none of the {available} examples in the {split} split of "
            f"{source.env_id!r} was asked for. Ask for at least one."
        )
    outside = [index for index in indices if not 0 <= index < available]
    if outside:
        raise ConfigError(
            f"example {outside[0]} does not exist: the {split} split of {source.env_id!r} holds "
            f"examples 0 to {available - 1}."
        )
    params = resolve_sampling(source, sampling)
    # The ids name what was run, so that a restarted run finds the results that it has.
    stem = phase if train_step is None else f"{phase}/{train_step}"
    stem += f"/{source.env_id}" if phase.startswith(split) else f"/{source.env_id}/{split}"
    # In training, an example has a new world at every step. Evaluations keep the worlds, because
    # their results could not be compared otherwise.
    when: tuple[str | int, ...] = () if train_step is None or split == "eval" else (train_step,)

    def request(stem: str, index: int) -> RolloutRequest:
        return example_request(
            source.env_id,
            source.example(split, index),
            group_id=f"{stem}/{index}",
            seed=derive_seed(run_seed, source.env_id, split, index, *when),
            sampling=params,
            phase=phase,
            train_step=train_step,
        )

    return RequestPlan(stem, indices, GroupStrategy(group_size).group_size, request)


def with_tools(
    requests: Iterable[RolloutRequest], source: object, client: ModelClient
) -> Iterator[RolloutRequest]:
    """Yield the requests, and check that the client's chat template renders their tools.

    Raises:
        ConfigError: the client's chat template leaves out the tools of a row.
    """
    tools_for = getattr(source, "tools_for", None)
    # Each set of tools is checked once: rows share a few, and rendering a template is slow.
    known: set[tuple[str, ...]] = set()
    for request in requests:
        tools = tools_for(request.input) if tools_for is not None else ()
        names = tuple(tool["function"]["name"] for tool in tools)
        if names not in known:
            check_tools(client, tools)
            known.add(names)
        yield request
