"""`HarborProgramEnv`: Harbor tasks, solved by a program that talks to its model's URL.

    env = rt.HarborProgramEnv(["python3", "{folder}/agent.py"], "tasks/", files={"agent.py": path})

A command runs inside the task's world and can reach its model and nothing else. A function runs in
this process and works in the world through `env.shell_of(state)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolltree._helpers.tasks import run_shielded
from rolltree.environments.lifecycle import cleanup
from rolltree.environments.rubrics import Rubric
from rolltree.gateway.program_env import PROGRAM_LIMITS, AgentFunction, ProgramEnv
from rolltree.sandbox import Limits, RunResult
from rolltree.sandbox.folder import FolderSandbox
from rolltree.sandbox.harbor_env import HarborWorlds, WorldKind, harbor_rubric, tasks_of
from rolltree.sandbox.harbor_tasks import HarborTask, filled_env
from rolltree.sandbox.harbor_worlds import HarborWorld, sandbox_world
from rolltree.values.errors import ConfigError, SandboxError
from rolltree.values.types import State


class AgentShell:
    """Runs a function's shell commands in its task's world, until the function ends."""

    def __init__(self, world: HarborWorld, task: HarborTask) -> None:
        self._world, self.task = world, task
        self._running: set[asyncio.Task[RunResult]] = set()
        self._is_over = False

    async def run(self, command: str, *, limit_s: float | None = 60.0) -> RunResult:
        """Run a shell command in the task's folder.

        Raises:
            SandboxError: the world failed, or the agent's time is over.
        """
        if self._is_over:
            raise SandboxError(
                "the agent's time is over, and the task's tests judge the world as it is. Let the "
                "function end when it is cancelled."
            )
        task = self.task
        run = self._world.run(
            command, limit_s=limit_s, env=filled_env(task.env, task), user=task.agent_user
        )
        running = asyncio.ensure_future(run)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await running

    async def end(self) -> None:
        """End its commands, and refuse more: a late function must not touch the world again."""
        self._is_over = True
        running = list(self._running)
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class HarborProgramEnv(HarborWorlds, ProgramEnv):
    """Harbor tasks that a program solves; they are judged as in `HarborEnv`.

    Args:
        program: a command, which runs in the task's sandbox and starts in the task's folder
            (`{folder}` is the folder of `files`), or `async def agent(session, state)`.
        tasks: a folder of tasks, a task, or several.
        eval_tasks: the same, for evaluation.
        world: "sandbox", or for functions also "docker" and "auto".
        limits: the limits of a world, unless the task sets its own.
        reward_key: the key of the reward in a reward.json.
        time_limit_s: a limit in addition to the tasks' own; the smaller one applies.
        settings: passed to `ProgramEnv`.

    Raises:
        ConfigError: a task, which is named, requires something that is not supported.
    """

    def __init__(
        self,
        program: Sequence[str] | AgentFunction,
        tasks: str | Path | Sequence[str | Path],
        eval_tasks: str | Path | Sequence[str | Path] | None = None,
        *,
        world: WorldKind | None = None,
        limits: Limits | None = None,
        reward_key: str = "reward",
        time_limit_s: float | None = None,
        rubric: Rubric | None = None,
        **settings: Any,
    ) -> None:
        is_command = not callable(program)
        kind = world or ("sandbox" if is_command else "auto")
        if is_command and kind != "sandbox":
            raise ConfigError(
                f"world is {kind!r}, but a command cannot reach its model from a container. Leave "
                "it out for the sandbox, or write the agent as a function."
            )
        self.harbor, data = tasks_of(tasks, eval_tasks, kind, limits or PROGRAM_LIMITS, reward_key)
        self._shells: dict[str, AgentShell] = {}
        self._worlds: dict[str, HarborWorld] = {}
        super().__init__(
            program,
            time_limit_s=time_limit_s,
            sandbox=self.harbor.backend if is_command else None,
            sandbox_limits=self.harbor.limits if is_command else None,
            rubric=rubric or harbor_rubric(),
            **data,
            **settings,
        )

    def shell_of(self, state: State) -> AgentShell:
        """Return the shell through which a function works in its rollout's world.

        Raises:
            SandboxError: the rollout has no world, or no longer has one.
        """
        shell = self._shells.get(state.get("harbor_world") or "")
        if shell is None:
            raise SandboxError("this rollout has no world: it exists while the function runs.")
        return shell

    def time_limit_of(self, state: State) -> float | None:
        """Return the smaller of the task's limit and the environment's, in seconds."""
        limits = (self.time_limit_s, self.harbor.of(state).agent_limit_s)
        return min((limit for limit in limits if limit is not None), default=None)

    async def setup_state(self, state: State) -> State:
        """Create a function's world; a command's world is its folder."""
        state = await super().setup_state(state)
        if self.function is not None:
            task = self.harbor.of(state)
            world = await self.harbor.make(task)
            self._worlds[world.id], self._shells[world.id] = world, AgentShell(world, task)
            state["harbor_world"], state["sandbox_level"] = world.id, world.level.as_dict()
        return state

    async def new_folder(self, reach: Path | None, state: State) -> FolderSandbox:
        """Return the sandbox of the task's world."""
        assert reach is not None
        task = self.harbor.of(state)
        world = await sandbox_world(task, self.harbor.backend.reaching(reach), self.harbor.limits)
        self._worlds[world.id] = world
        state["harbor_world"] = world.id
        world.sandbox.env = {**(task.world.env if task.world else {}), **filled_env(task.env, task)}
        return world.sandbox

    def command_line(self, values: Any, state: State) -> list[str]:
        """Return the command, wrapped to start in the task's folder."""
        world = self.harbor.of(state).world
        assert world is not None
        enter = 'cd "$0" && exec "$@"'
        return ["sh", "-c", enter, world.workdir, *super().command_line(values, state)]

    async def _run(self, session: Any, state: State, watch: Any, outcome: Any) -> None:
        await super()._run(session, state, watch, outcome)
        world = self._worlds[state["harbor_world"]]
        await run_shielded(self._end_agent(world.id))
        state["harbor"] = await self.harbor.judge(world, self.harbor.of(state))

    async def _end_agent(self, world_id: str) -> None:
        shell = self._shells.pop(world_id, None)
        if shell is not None:
            await shell.end()

    @cleanup(priority=-100)
    async def close_world(self, state: State) -> None:
        """Delete a function's world; a command's is deleted with its folder."""
        name = state.get("harbor_world") or ""
        world = self._worlds.pop(name, None)
        await self._end_agent(name)
        if world is not None and self.function is not None:
            await world.close()
