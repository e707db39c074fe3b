"""`EnvGroup`: several environments as one, told apart by the task of a row.

The rows are in the order of the environments; shuffle them with a seed to mix them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

from rolltree.environments.dataset import Data, Row, Rows
from rolltree.environments.environment import Environment
from rolltree.environments.lifecycle import teardown
from rolltree.environments.rubrics import Rubric, Scores
from rolltree.environments.rubrics.groups import CompositeRubric
from rolltree.rollouts.requests import Split, current_episode
from rolltree.store.weights import ScoredPart, environments_of, task_environment
from rolltree.values.errors import ConfigError, UnknownName, did_you_mean
from rolltree.values.types import RolloutInput, SamplingArgs, State, ToolSchema


class EnvGroup(Environment):
    """Train on, or evaluate, several environments at once.

    A row's `task` is the name of its environment, followed by `/` and the row's own task if it
    has one (so groups can hold groups); its `example_id` is its index in the group. Environments
    and their rubrics see the row's own task, as they do outside of a group.

    The training rows come from the environments that have some, the evaluation rows from all. A
    part of the rows, such as `num_examples` of an evaluation, has equally many of each environment
    (of a group, of each environment in it), or all of those that have fewer: their first rows.

    Args:
        envs: the environments.
        env_names: their names; by default their `env_id`s, made distinct.
        sampling_args: OpenAI's sampling fields for all environments. If left out, all environments
            must have the same.
        env_id: the group's name.

    Raises:
        ConfigError: there is no environment, names are not distinct, or sampling arguments differ.
    """

    def __init__(
        self,
        envs: Sequence[Environment],
        env_names: Sequence[str] | None = None,
        sampling_args: SamplingArgs | None = None,
        env_id: str | None = None,
    ) -> None:
        self.envs = list(envs)
        self.env_names = _names(self.envs, env_names)
        self.env_map = dict(zip(self.env_names, self.envs, strict=True))
        # An environment with evaluation rows only may be in the group.
        trained = {n: e.dataset for n, e in self.env_map.items() if e.dataset is not None}
        tested = {n: e.get_eval_dataset() for n, e in self.env_map.items()}
        super().__init__(
            dataset=self._join(trained) if trained else None,
            eval_dataset=self._join(tested),
            rubric=_GroupRubric(self),
            sampling_args=_common(self.envs) if sampling_args is None else sampling_args,
            env_id=env_id,
        )

    def get_env_for_task(self, task: str) -> Environment:
        """Return the environment that plays rows of this task.

        Raises:
            UnknownName: no environment of the group does.
        """
        return self.env_map[self._name_of(task)]

    def rows(self, data: Data) -> Rows:
        """Return `data` as rows, each formatted by its task's environment."""
        return Rows.of(data, self._format)

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """Return `n` training rows (-1: all), equally many of each environment."""
        rows = super().get_dataset(-1, seed)
        return rows.select(self._first_of_each(rows, n))

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """Return `n` evaluation rows (-1: all), equally many of each environment."""
        rows = super().get_eval_dataset(-1, seed)
        return rows.select(self._first_of_each(rows, n))

    def first_examples(self, split: Split, num: int) -> Sequence[int]:
        """Return the indices of `num` rows, equally many of each environment."""
        return self._first_of_each(self._split(split), num)

    async def rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str = "",
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Let the row's environment play it, and return the first of its states."""
        return (await self.rollouts(input, client, model, sampling_args))[0]

    async def rollouts(
        self,
        input: RolloutInput,
        client: Any,
        model: str = "",
        sampling_args: SamplingArgs | None = None,
    ) -> list[State]:
        """Let the row's environment play it."""
        task = input["task"]
        env = self.get_env_for_task(task)
        own = cast(RolloutInput, {**input, "task": self.own_task(task)})
        episode = current_episode()
        # The environment adds its states to the engine's episode, with its own task in them.
        made = episode.states if episode is not None else []
        before = len(made)
        try:
            states = await env.rollouts(own, client, model, sampling_args)
            for state in states:
                state.task = task
        finally:
            # Including the state of a rollout that was cancelled.
            for begun in made[before:]:
                begun.task = task
        return states

    async def _cleanup(self, state: State) -> None:
        # The hooks may read `state["task"]`, which must be the same as outside of a group.
        with self.as_own(state) as env:
            await env._cleanup(state)

    @teardown
    async def close_environments(self) -> None:
        """Run the teardowns of all environments."""
        for env in self.envs:
            await env.aclose()

    def own_task(self, task: str) -> str:
        """Return the task that the row has in its own environment."""
        name = self._name_of(task)
        return self.env_map[name].env_id if task == name else task.removeprefix(f"{name}/")

    def tools_for(self, row: Mapping[str, object]) -> list[ToolSchema]:
        """Return the tools that the row's environment offers for this row."""
        task = str(row["task"])
        return self.get_env_for_task(task).tools_for({**row, "task": self.own_task(task)})

    @contextmanager
    def as_own(self, state: State) -> Iterator[Environment]:
        """Set the environment's own task in the state while the block runs."""
        task = state.task
        state.task = self.own_task(task)
        try:
            yield self.get_env_for_task(task)
        finally:
            state.task = task

    def _name_of(self, task: str) -> str:
        name = task_environment(task, self.env_names)
        if name is None:
            raise UnknownName(
                f"no environment of the group has the task {task!r}."
                f"{did_you_mean(task, self.env_names)}"
            )
        return name

    def _first_of_each(self, rows: Rows, num: int) -> Sequence[int]:
        """Return the positions of `num` rows (-1: all), with the first rows of each environment."""
        if not 0 <= num < len(rows):
            return range(len(rows))
        names, met, turns = environments_of(self), Counter[Hashable](), []
        for position in range(len(rows)):
            environment: Hashable = _environment(rows, position)
            if not environment:
                # Rows that were put in later have only a task, and reading them takes longer.
                environment = task_environment(rows[position]["task"], names)
            turns.append(met[environment])
            met[environment] += 1
        # Every environment has one row in each turn until it has no more.
        return sorted(sorted(range(len(rows)), key=turns.__getitem__)[:num])

    def _join(self, parts: Mapping[str, Rows]) -> Rows:
        return Rows(_Joined(parts, self.env_map), lambda row, index: dict(row))

    def _format(self, row: Mapping[str, Any], index: int) -> Row:
        if "task" not in row:
            raise ConfigError(
                f"row {index} has no task, so the group cannot tell which environment it belongs "
                f"to. Set `task` to one of {', '.join(self.env_names)}."
            )
        env = self.get_env_for_task(row["task"])
        return {**env.row_format(row, index), "task": row["task"]}


class _Joined(Sequence[Row]):
    """The rows of all parts one after the other, read on access."""

    def __init__(self, parts: Mapping[str, Rows], envs: Mapping[str, Environment]) -> None:
        self._parts = [(name, rows, envs[name]) for name, rows in parts.items()]

    def __len__(self) -> int:
        return sum(len(rows) for _, rows, _ in self._parts)

    def __getitem__(self, index: Any) -> Any:
        number, position = self.find(index)
        name, rows, env = self._parts[number]
        row = rows[position]
        own = row["task"]
        task = name if own == env.env_id else f"{name}/{own}"
        return {**row, "task": task, "example_id": index}

    def find(self, index: int) -> tuple[int, int]:
        """Return the number of the part that has a row, and the row's position there."""
        position = index
        for number, (_, rows, _) in enumerate(self._parts):
            if position < len(rows):
                return number, position
            position -= len(rows)
        raise IndexError(f"the group has {len(self)} rows, so there is no row {index}")

    def environment(self, index: int) -> tuple[int, ...]:
        """Return the number of the row's environment in the group, then in a group in it, ..."""
        number, position = self.find(index)
        return number, *_environment(self._parts[number][1], position)


def _environment(rows: Rows, position: int) -> tuple[int, ...]:
    """Return which environment of a group a row is from; empty if the rows are not a group's."""
    source, index = rows.place(position)
    return source.environment(index) if isinstance(source, _Joined) else ()


class _GroupRubric(CompositeRubric):
    """Scores each state with the rubric of its environment."""

    def __init__(self, group: EnvGroup) -> None:
        super().__init__()
        self._group = group

    def parts(self) -> Sequence[Rubric]:
        """Return the environments' rubrics."""
        return [env.rubric for env in self._group.envs]

    def scored_parts(self) -> list[ScoredPart]:
        """Return the functions of each environment."""
        return [
            replace(part, task=f"{name}/{part.task}" if part.task else name)
            for name, env in self._group.env_map.items()
            for part in env.rubric.scored_parts()
        ]

    def add_reward_func(self, func: Any, weight: float = 1.0, *, run_inline: bool = False) -> None:
        """Refuse: it is not known which environment the function is for."""
        raise ConfigError(
            "a group's rollouts are scored by their own environments' rubrics. Add the function to "
            "one of these: group.env_map[name].rubric.add_reward_func(...)."
        )

    add_step_reward_func = add_reward_func

    async def score_rollout(self, state: State, score_sem: object = None) -> None:
        """Score one rollout by its environment's rubric."""
        with self._group.as_own(state) as env:
            await env.rubric.score_rollout(state)

    async def score_group(self, states: Sequence[State], score_sem: object = None) -> None:
        """Score the rollouts of one group of requests, each by its environment's rubric."""
        with ExitStack() as swapped:
            for env, places in self._by_env(states, swapped):
                await env.rubric.score_group([states[place] for place in places])

    async def evaluate(self, states: Sequence[State]) -> list[Scores]:
        """Return the scores, each computed by its environment's rubric."""
        found: dict[int, Scores] = {}
        with ExitStack() as swapped:
            for env, places in self._by_env(states, swapped):
                scores = await env.rubric.evaluate([states[place] for place in places])
                found.update(zip(places, scores, strict=True))
        return [found[place] for place in range(len(states))]

    def _by_env(
        self, states: Sequence[State], swapped: ExitStack
    ) -> list[tuple[Environment, list[int]]]:
        members: dict[int, tuple[Environment, list[int]]] = {}
        for place, state in enumerate(states):
            env = swapped.enter_context(self._group.as_own(state))
            members.setdefault(id(env), (env, []))[1].append(place)
        return list(members.values())


def _names(envs: Sequence[Environment], given: Sequence[str] | None) -> list[str]:
    if not envs:
        raise ConfigError("an EnvGroup got no environments, so it has nothing to run.")
    if given is None:
        ids = [env.env_id for env in envs]
        return [
            name if ids.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(ids)
        ]
    names = list(given)
    if len(names) != len(envs) or len(set(names)) != len(names):
        raise ConfigError(
            f"an EnvGroup got {len(envs)} environments and the names {names}, so a row's task "
            "would not identify its environment. Pass one distinct name per environment."
        )
    return names


def _common(envs: Sequence[Environment]) -> SamplingArgs:
    first = envs[0].sampling_args
    # The engine resolves sampling arguments once per batch, before it reads a row's task.
    if any(env.sampling_args != first for env in envs):
        raise ConfigError(
            "the environments of a group have different sampling_args, but a batch is sampled with "
            "the same ones throughout. Pass EnvGroup(sampling_args=...)."
        )
    return cast(SamplingArgs, dict(first))
