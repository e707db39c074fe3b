"""`BatchRunner`: the data of an environment, and how one request or many are played.

Confidence intervals are in `rolltree.evaluation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rolltree._helpers.tasks import contained, run_sync
from rolltree.environments.dataset import Data, RowFormat, Rows
from rolltree.environments.lifecycle import end_raised, failure_of, is_scored
from rolltree.environments.openai_view import OpenAIView
from rolltree.environments.rubrics import Rubric
from rolltree.environments.scoring import check_scored, score_episode
from rolltree.inference.client import ModelClient, sampling_to_args
from rolltree.inference.deadline import seeded
from rolltree.rollouts import Split, current_episode
from rolltree.rollouts.requests import Episode, call_seeds, playing
from rolltree.rollouts.settle import settle_state, settle_states
from rolltree.tokens import Trajectory
from rolltree.values.errors import ConfigError
from rolltree.values.state import UnscoredSnapshot
from rolltree.values.types import RolloutInput, RolloutRequest, SamplingArgs, State, as_input

if TYPE_CHECKING:
    from rolltree.environments.generate import GenerateResults
    from rolltree.rollouts import RolloutProgress

AT_THE_BEGINNING: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("is_completed", "terminated", "truncated"), False),
        **dict.fromkeys(("stop_condition", "truncation_reason", "error")),
        **dict.fromkeys(("completion", "reward", "advantage", "metrics")),
    }
)
"""Values of a state before its rollout is over: hooks can read them without a default."""


class BatchRunner(ABC):
    """The data of an environment, and the ways to run it. A `RolloutSource` and a `GroupScorer`."""

    env_id: str
    rubric: Rubric
    sampling_args: SamplingArgs
    row_format: RowFormat
    dataset: Rows | None
    eval_dataset: Rows | None
    _settles = False  # whether nothing can change a state after `rollout` has settled it

    @abstractmethod
    async def rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Play one rollout and return its state, which also records a failure."""

    @abstractmethod
    async def _cleanup(self, state: State) -> None:
        """Run the cleanups of this state unless they have run."""

    # Data

    def rows(self, data: Data) -> Rows:
        """Return `data` as rows with this environment's prompts; `Rows` pass through."""
        return Rows.of(data, lambda row, index: self.row_format(row, index))

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """Return `n` training rows (-1: all), shuffled by `seed` when there is one.

        Raises:
            ConfigError: the environment has evaluation data only.
        """
        if self.dataset is None:
            raise ConfigError(
                f"environment {self.env_id!r} has evaluation data only, so it cannot be trained "
                "on. Pass dataset=..., or use the eval split."
            )
        return self.dataset.take(n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """Return `n` evaluation rows (-1: all); the training rows if there are no others."""
        if self.eval_dataset is None:
            return self.get_dataset(n, seed)
        return self.eval_dataset.take(n, seed)

    def own_rows(self, split: Split) -> Rows | None:
        """Return a split's own rows; None if it has none."""
        return self.dataset if split == "train" else self.eval_dataset

    def num_examples(self, split: Split) -> int:
        """Return how many rows the split has; without evaluation rows, how many training rows."""
        return len(self._split(split))

    def example(self, split: Split, index: int) -> RolloutInput:
        """Return the input of row `index` of the split."""
        return self.input_of(self._split(split)[index])

    def group_of(self, row: Mapping[str, Any]) -> str:
        """Return the name of the group in which `generate` compares a row's rollouts."""
        return f"{row['task']}/{row['example_id']}"

    def input_of(self, row: Mapping[str, Any]) -> RolloutInput:
        """Return a rollout's input: all columns of a row, in a new dict."""
        return as_input(row)

    def _split(self, split: Split) -> Rows:
        return self.get_dataset() if split == "train" else self.get_eval_dataset()

    # One request

    async def run_request(self, request: RolloutRequest, client: ModelClient) -> Sequence[State]:
        """Play and score one episode. A failure does not raise, only a cancellation does.

        With group reward functions, `score_group` sets the reward later. The engine's time limit
        covers playing, not scoring.
        """
        states = await self.play_request(request, client)
        await score_episode(self.rubric, states)
        return states

    async def play_request(self, request: RolloutRequest, client: ModelClient) -> list[State]:
        """Play one episode without scoring it."""
        # The engine has made the episode, with its clock; other callers of `play_request` get an
        # episode without a time limit.
        episode = current_episode()
        if episode is not None and episode.request is request:
            return await self._play(episode, client)
        with playing(Episode(request)) as own:
            return await self._play(own, client)

    async def rollouts(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> list[State]:
        """Play one episode and return the states of its rollouts; here there is only one."""
        return [await self.rollout(input, client, model, sampling_args)]

    async def _play(self, episode: Episode, client: ModelClient) -> list[State]:
        request = episode.request
        seeds = call_seeds(request)
        client = seeded(client, seeds)
        # Overrides of `rollout` expect sampling arguments as OpenAI's fields.
        args = {**sampling_to_args(request.sampling), "seed": seeds.seed}
        states: list[State] | None = None
        try:
            with contained():
                states = await self.rollouts(request.input, OpenAIView(client), client.model, args)
            for state in states:
                # An override, or a cleanup, may have assigned a plain list, or anything.
                if not isinstance(dict.get(state, "trajectory"), Trajectory):
                    settle_state(state, request.input)
                state.trajectory = Trajectory.of(state.trajectory)
        except Exception as error:  # noqa: BLE001  an overridden rollout() may raise: it is data
            # If the episode got as far as a state, its steps are kept.
            states = [episode.states[-1] if episode.states else empty_state(request)]
            settle_state(states[0], request.input)
            if states[0].is_answered and states[0].error is None and is_scored(error):
                end_raised(states[0], error)
            else:
                states[0].error = states[0].error or failure_of(error)
                states[0].reward = None
        finally:
            # Also when cancelled: nothing was returned then, but the episode has the states so far.
            for made in states if states is not None else episode.states:
                await self._cleanup(made)
        settle_states(states, request.input, are_settled=self._settles)
        for state in states:
            # Before scoring, so that a stored rollout can be scored again as if for the first time.
            state.unscored = UnscoredSnapshot.of(state)
        return states

    @property
    def has_group_rewards(self) -> bool:
        """Whether the rubric compares the members of a group."""
        return self.rubric.has_group_rewards

    async def score_group(self, states: Sequence[State]) -> None:
        """Score the finished rollouts of one group, in place."""
        await self.rubric.score_group(states)
        check_scored(states, self.rubric, "score_group")

    # Many requests

    async def generate(
        self,
        inputs: Data,
        client: Any,
        model: str | None = None,
        sampling_args: SamplingArgs | None = None,
        *,
        rollouts_per_example: int = 1,
        score_rollouts: bool = True,
        max_concurrent: int = 64,
        time_limit_s: float | None = None,
        deadline_s: float | None = None,
        seed: int = 0,
        on_progress: Callable[[RolloutProgress], None] | None = None,
        **unknown: Any,
    ) -> GenerateResults:
        """Run rollouts for rows and return them in the rows' order.

        Delegated rollouts are in `results.results[i].states`, after the episode's own rollouts.

        The rollouts of all rows with the same task and `example_id` are one group: they share the
        world's seed, and `advantage` is the reward minus the group's mean. All seeds are derived
        from `seed`; `max_concurrent=-1` means no limit. The caller's `sampling_args` override the
        environment's, field by field.

        Args:
            inputs: the rows.
            client, model: what is asked; a client may have a model of its own.
            sampling_args: OpenAI's fields.
            rollouts_per_example: the size of each group.
            score_rollouts: whether the rubric runs.
            max_concurrent: the most episodes at a time.
            time_limit_s, deadline_s: limits of an episode; see `RolloutEngine`.
            seed: that of all rollouts.
            on_progress: gets a `RolloutProgress` after every result.
            unknown: other arguments, which are refused with the nearest name.

        Raises:
            ConfigError: the rows, the client or a setting cannot be used. Failed rollouts do not
                raise; see `results.metadata.num_failed`.
        """
        from rolltree.environments.generate import generate

        return await generate(
            *(self, inputs, client, model, sampling_args),
            rollouts_per_example=rollouts_per_example,
            score_rollouts=score_rollouts,
            max_concurrent=max_concurrent,
            time_limit_s=time_limit_s,
            deadline_s=deadline_s,
            seed=seed,
            on_progress=on_progress,
            **unknown,
        )

    async def evaluate(
        self,
        client: Any,
        model: str | None = None,
        sampling_args: SamplingArgs | None = None,
        num_examples: int = -1,
        rollouts_per_example: int = 1,
        **settings: Any,
    ) -> GenerateResults:
        """Run the first `num_examples` evaluation rows (-1: all). `settings` are `generate`'s."""
        rows = self.get_eval_dataset(num_examples)
        return await self.generate(
            rows,
            client,
            model,
            sampling_args,
            rollouts_per_example=rollouts_per_example,
            **settings,
        )

    async def run_group(
        self,
        group_inputs: Sequence[RolloutInput],
        client: Any,
        model: str | None = None,
        sampling_args: SamplingArgs | None = None,
        **settings: Any,
    ) -> list[State]:
        """Run the given inputs of one task as one group and return the scored states.

        Raises:
            ConfigError: the inputs are of several tasks, or as `generate` says.
        """
        tasks = sorted({repr(row.get("task")) for row in group_inputs})
        if len(tasks) > 1:
            raise ConfigError(
                f"the inputs are of the tasks {', '.join(tasks)}, and rollouts of different tasks "
                "are not compared with each other. Run one group per task."
            )
        first = group_inputs[0]["example_id"] if group_inputs else 0
        # `RowFormat` gives each row an id of its own if it is not an integer.
        first = first if isinstance(first, int) else 0
        # The same example id makes them one group, whatever rows of the task they are.
        rows = [dict(row, example_id=first) for row in group_inputs]
        results = await self.generate(rows, client, model, sampling_args, **settings)
        return results.state

    def generate_sync(self, *args: Any, **kwargs: Any) -> GenerateResults:
        """Run `generate` and wait for it, even if an event loop is running, as in notebooks."""
        return run_sync(self.generate(*args, **kwargs))

    def evaluate_sync(self, *args: Any, **kwargs: Any) -> GenerateResults:
        """Run `evaluate` and wait for it, even if an event loop is running."""
        return run_sync(self.evaluate(*args, **kwargs))

    def run_group_sync(self, *args: Any, **kwargs: Any) -> list[State]:
        """Run `run_group` and wait for it, even if an event loop is running."""
        return run_sync(self.run_group(*args, **kwargs))


def empty_state(request: RolloutRequest) -> State:
    """Return a state for an episode that failed before it had one."""
    return State(
        input=dict(request.input),
        oai_tools=[],
        trajectory=Trajectory(),
        timing=None,
        seed=request.seed,
        **AT_THE_BEGINNING,
    )
