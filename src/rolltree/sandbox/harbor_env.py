"""`HarborEnv`: Harbor tasks (terminal-bench's format) as an environment; the model has a shell.

    env = rt.HarborEnv("tasks/")
    print(env.oracle_sync())

`HarborProgramEnv` plays them with a program in place of the model's shell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rolltree._helpers.tasks import run_sync
from rolltree.environments.lifecycle import cleanup, stop, teardown
from rolltree.environments.rubrics import Rubric, run_inline
from rolltree.sandbox import Limits, LocalBackend
from rolltree.sandbox.harbor_docker import docker_reason, docker_world
from rolltree.sandbox.harbor_tasks import HarborTask, filled_env, read_tasks
from rolltree.sandbox.harbor_worlds import (
    HARBOR_LIMITS,
    HarborWorld,
    sandbox_world,
    solved,
    verdict_on,
)
from rolltree.sandbox.sandbox_env import SandboxToolEnv
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.types import Messages, SamplingArgs, State, TruncationReason

WorldKind: TypeAlias = Literal["auto", "sandbox", "docker"]
SYSTEM = (
    "Do the task with the tool bash; its commands begin in the task's folder. When the task is "
    "done, say so without calling a tool."
)


@dataclass(frozen=True, slots=True)
class OracleResult:
    """What a task's own solution earned, or why it earned nothing."""

    task: str
    reward: float | None
    problem: str | None = None


class HarborTasks:
    """The tasks of an environment, and their worlds; shared by the environments that play them.

    Args:
        tasks: the tasks to play, by name.
        world: "sandbox", "docker", or "auto": Docker if an engine answers, else the sandbox.
        limits: resource limits of a world, unless the task sets its own.
        reward_key: the key of a reward.json that holds the reward.
    """

    def __init__(
        self,
        tasks: Sequence[HarborTask],
        world: WorldKind,
        limits: Limits | None,
        reward_key: str,
    ) -> None:
        if world not in ("auto", "sandbox", "docker"):
            raise ConfigError(
                f"world is {world!r}; Harbor tasks are played in 'sandbox' or 'docker', or 'auto'."
                f"{did_you_mean(world, ('auto', 'sandbox', 'docker'))}"
            )
        self.by_name = {task.name: task for task in tasks}
        self.world: WorldKind = world
        self.limits = limits or HARBOR_LIMITS
        self.reward_key = reward_key
        # Only bubblewrap can provide the absolute paths that tasks name.
        self.backend = LocalBackend("bubblewrap")
        self._has_docker: bool | None = None
        # Raised now and not in the middle of a run.
        if world == "sandbox":
            self.refuse_docker_tasks("world='sandbox'")

    def refuse_docker_tasks(self, why: str) -> None:
        """Raise an error that names the tasks that need Docker, and why they need it."""
        needing = [task for task in self.by_name.values() if task.world is None]
        if needing:
            shown = "\n".join(
                f"  {task.name}: {'; '.join(task.needs_docker)}" for task in needing[:20]
            )
            raise ConfigError(
                f"{len(needing)} of {len(self.by_name)} Harbor tasks need Docker, but there is "
                f"none ({why}):\n{shown}\nStart a Docker engine, or leave these tasks out."
            )

    async def settle(self) -> bool:
        """Return whether worlds are Docker containers; this is determined once.

        Raises:
            ConfigError: there is no Docker, and a task needs it.
        """
        if self._has_docker is None:
            reason = "" if self.world == "sandbox" else await docker_reason()
            if self.world == "docker" and reason:
                raise ConfigError(
                    f"world is 'docker', but no container can be started here: {reason}. Start the "
                    "engine, or use world='auto'."
                )
            self._has_docker = self.world != "sandbox" and not reason
            if not self._has_docker and self.world == "auto":
                self.refuse_docker_tasks(reason)
        return self._has_docker

    def of(self, state: State) -> HarborTask:
        """Return a rollout's task."""
        return self.by_name[state["info"]["harbor_task"]]

    async def make(self, task: HarborTask) -> HarborWorld:
        """Return a new world of a task."""
        if await self.settle():
            return await docker_world(task, self.limits)
        return await sandbox_world(task, self.backend, self.limits)

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return a row for each of the tasks."""
        return [
            {"question": self.by_name[name].instruction, "info": {"harbor_task": name}}
            for name in names
        ]

    async def judge(self, world: HarborWorld, task: HarborTask) -> dict[str, Any]:
        """Run a task's tests in a world, and return their verdict as a state keeps it."""
        verdict = asdict(await verdict_on(world, task))
        try:
            return {**verdict, "reward": self.reward_in(verdict["rewards"])}
        except ConfigError as error:  # the agent's code, too, may write a file with other values
            return {**verdict, "reward": 0.0, "problem": verdict["problem"] or str(error)}

    def reward_in(self, rewards: Mapping[str, float]) -> float:
        """Return the reward among the values that tests wrote; 0 if they wrote none.

        Raises:
            ConfigError: the tests wrote several values, and none is the reward.
        """
        if not rewards or self.reward_key in rewards:
            return rewards.get(self.reward_key, 0.0)
        if len(rewards) == 1:
            return next(iter(rewards.values()))
        raise ConfigError(
            f"the task's reward.json has {', '.join(rewards)} but no {self.reward_key!r}, so the "
            "reward to train on is not clear. Pass reward_key with one of these names."
        )

    async def oracle(self, task: HarborTask) -> OracleResult:
        """Play a task's own solution and return what it earned."""
        if task.solution is None:
            return OracleResult(task.name, None, "it has no solution/solve.sh")
        world = await self.make(task)
        try:
            ran = await solved(world, task)
            verdict = await self.judge(world, task)
        finally:
            await world.close()
        reward, problem = verdict["reward"], verdict["problem"]
        if problem is None and reward <= 0:
            problem = f"solve.sh: {ran.text()[-300:]!r}; tests: {verdict['output'][-300:]!r}"
        return OracleResult(task.name, reward, problem)


@run_inline
def tests_reward(state: State) -> float:
    """The reward that the task's tests wrote."""
    return float(state["harbor"]["reward"])


@run_inline
def judged(state: State) -> float:
    """1 if the tests wrote a reward, else 0 (the reward is 0 then, too)."""
    return float(state["harbor"]["problem"] is None)


def harbor_rubric() -> Rubric:
    """Return the rubric of Harbor tasks: the tests' reward, and whether there was one."""
    rubric = Rubric([tests_reward])
    rubric.add_metric(judged)
    return rubric


def tasks_of(
    tasks: str | Path | Sequence[str | Path],
    eval_tasks: str | Path | Sequence[str | Path] | None,
    world: WorldKind,
    limits: Limits | None,
    reward_key: str,
) -> tuple[HarborTasks, dict[str, Any]]:
    """Return the tasks of an environment, and its settings for data and rubric."""
    train = read_tasks(tasks)
    held_out = [] if eval_tasks is None else read_tasks(eval_tasks)
    known = {task.name for task in train}
    for task in held_out:
        if task.name in known:
            raise ConfigError(
                f"the Harbor task {task.name} is in tasks and in eval_tasks, so evaluation would "
                "test what was trained on. Leave it out of one."
            )
    found = HarborTasks([*train, *held_out], world, limits, reward_key)
    settings: dict[str, Any] = {"dataset": found.rows([task.name for task in train])}
    if held_out:
        settings["eval_dataset"] = found.rows([task.name for task in held_out])
    return found, settings


class HarborWorlds:
    """The part that both environments of Harbor tasks share: open worlds, and the oracle."""

    harbor: HarborTasks
    _worlds: dict[str, HarborWorld]

    @teardown
    async def close_worlds(self) -> None:
        """Delete the worlds of rollouts that never reached their cleanup."""
        left, self._worlds = list(self._worlds.values()), {}
        await asyncio.gather(*(world.close() for world in left), return_exceptions=True)

    async def oracle(self, names: Sequence[str] | None = None) -> list[OracleResult]:
        """Play the tasks' own solutions and return what each earned; all should earn a reward."""
        known = self.harbor.by_name
        chosen = list(known) if names is None else list(names)
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise ConfigError(
                f"there is no Harbor task {unknown[0]!r}.{did_you_mean(unknown[0], known)}"
            )
        return [await self.harbor.oracle(known[name]) for name in chosen]

    def oracle_sync(self, names: Sequence[str] | None = None) -> list[OracleResult]:
        """`oracle`, which also works if an event loop runs already."""
        return run_sync(self.oracle(names))

    async def check_findings(self) -> list[tuple[str, str]]:
        """Return a finding for each oracle solution that fails."""
        return [
            ("oracle-fails", f"the solution of {each.task} earns {each.reward}: {each.problem}")
            for each in await self.oracle()
            if not each.reward or each.problem
        ]


class HarborEnv(HarborWorlds, SandboxToolEnv):
    """Harbor tasks, played by a model with the tool `bash`.

    Each rollout has its own world. When the model is done (it answered without a call, or its time
    or turns are over), the task's tests are added to the world and run; `state["harbor"]` has their
    verdict. If the tests write no reward, it is 0, because a model can cause that; the metric
    `judged` shows it.

    Args:
        tasks: a folder of tasks, the folder of a task, or a list of these.
        eval_tasks: the same, for evaluation.
        world: "sandbox", "docker", or "auto": Docker if an engine answers, else the sandbox.
        limits: resource limits of a world, unless the task sets its own.
        reward_key: the key of a reward.json that holds the reward.
        command_limit_s: time limit of one command of the model. The task's own `[agent]
            timeout_sec` limits the time of all of them together.
        settings: `StatefulToolEnv`'s; a different `rubric` can read `state["harbor"]`.

    Raises:
        ConfigError: a task needs something that is not available; the message names both.
    """

    def __init__(
        self,
        tasks: str | Path | Sequence[str | Path],
        eval_tasks: str | Path | Sequence[str | Path] | None = None,
        *,
        world: WorldKind = "auto",
        limits: Limits | None = None,
        reward_key: str = "reward",
        command_limit_s: float = 60.0,
        max_turns: int = 30,
        system_prompt: str | None = SYSTEM,
        rubric: Rubric | None = None,
        **settings: Any,
    ) -> None:
        self.harbor, data = tasks_of(tasks, eval_tasks, world, limits, reward_key)
        self.command_limit_s = command_limit_s
        self._worlds: dict[str, HarborWorld] = {}
        super().__init__(
            max_turns=max_turns,
            system_prompt=system_prompt,
            rubric=rubric or harbor_rubric(),
            **data,
            **settings,
        )
        self.add_tool(self.bash, args_to_skip=["state"])

    async def bash(self, command: str, state: State) -> str:
        """Run a shell command and return its output.

        Files stay between calls; variables and background processes do not.

        Args:
            command: The command line.
        """
        task = self.harbor.of(state)
        limit_s = min(self.command_limit_s, _time_left(state, task))
        world = self._worlds[state["sandbox_id"]]
        # A previous call of this message may have used up the time.
        if limit_s <= 0:
            return "[the time for this task is over]"
        env = filled_env(task.env, task)
        ran = await world.run(command, limit_s=limit_s, env=env, user=task.agent_user)
        state["agent_s"] = state.get("agent_s", 0.0) + ran.wall_s
        return ran.text() or "(no output)"

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State
    ) -> dict[str, Any]:
        """Fill in the state for `bash`."""
        return {**tool_args, "state": state} if tool_name == "bash" else tool_args

    async def setup_state(self, state: State) -> State:
        """Make the rollout's world."""
        state = await super().setup_state(state)
        world = await self.harbor.make(self.harbor.of(state))
        self._worlds[world.id] = world
        state["sandbox_id"], state["sandbox_level"] = world.id, world.level.as_dict()
        return state

    @stop(truncates=TruncationReason.TIME_LIMIT)
    async def agent_time_over(self, state: State) -> bool:
        """The commands of this rollout have used up the task's time."""
        return _time_left(state, self.harbor.of(state)) <= 0

    async def _play_turns(self, state: State, session: Any, model: str, args: SamplingArgs) -> None:
        await super()._play_turns(state, session, model, args)
        world = self._worlds[state["sandbox_id"]]
        state["harbor"] = await self.harbor.judge(world, self.harbor.of(state))

    @cleanup(priority=-100)
    async def close_world(self, state: State) -> None:
        """Delete the rollout's world."""
        world = self._worlds.pop(state.get("sandbox_id") or "", None)
        if world is not None:
            await world.close()


def _time_left(state: State, task: HarborTask) -> float:
    limit_s = task.agent_limit_s
    return float("inf") if limit_s is None else limit_s - state.get("agent_s", 0.0)
