"""`ProgramEnv`: an environment whose rollout is a program that talks to an OpenAI or Anthropic URL.

    env = rt.ProgramEnv(["python", "agent.py", "{question}"], dataset=rows, rubric=rubric)

The program is a command or an asynchronous function. Its model calls go through a gateway in this
process and become the rollout's trajectory. Outcomes that a model can cause (a program that fails,
hangs, prints without end or uses up a limit) are scored by the rubric; any other failure is a
failed rollout (docs/gateway.md). The module is long because starting, watching and ending a program
are one subject.
"""

from __future__ import annotations

import asyncio
import fnmatch
import inspect
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rolltree._helpers.redact import redact_text
from rolltree._helpers.tasks import being_cancelled, contained, run_shielded
from rolltree.environments.environment import Environment
from rolltree.environments.lifecycle import discover, in_phase, teardown
from rolltree.gateway.fields import checked_names
from rolltree.gateway.program import (
    NAMES,
    PASSED,
    ProgramOutcome,
    Template,
    environment_of_program,
    program_path,
    template_values,
    variables_of,
)
from rolltree.gateway.server import Gateway
from rolltree.gateway.session import GatewaySession, SessionLimits
from rolltree.gateway.trained_calls import TrainCalls, checked_rule
from rolltree.inference.call import ModelCall
from rolltree.inference.client import ModelClient, as_client
from rolltree.inference.client_base import DelegatingClient
from rolltree.inference.deadline import Clock, RolloutClient, seeded
from rolltree.rollouts import merge_args
from rolltree.rollouts.requests import current_episode
from rolltree.sandbox import Limits, LocalBackend, backend_of
from rolltree.sandbox.folder import FolderSandbox, PrivateFolder
from rolltree.sandbox.local import REACHED_AT
from rolltree.sandbox.process import OutputTail
from rolltree.sandbox.unconfined import UnconfinedBackend
from rolltree.sandbox.warm import Zygote, check_platform, split_command
from rolltree.store import to_plain
from rolltree.values.errors import (
    ConfigError,
    ProgramError,
    PromptTooLong,
    SandboxFileError,
    TokenError,
    error_kind,
    record_error,
)
from rolltree.values.seeds import CallSeeds, asked_seed
from rolltree.values.types import (
    ModelResponse,
    RolloutInput,
    RolloutRequest,
    SamplingArgs,
    State,
    ToolSchema,
    TruncationReason,
)

AgentFunction: TypeAlias = Callable[[GatewaySession, State], Awaitable[Any]]
PROGRAM_LIMITS = Limits(
    wall_s=86_400.0,
    cpu_s=3_600.0,
    memory_bytes=2 * 2**30,
    max_processes=256,
    max_open_files=1024,
    max_files=65_536,
    disk_bytes=512 * 2**20,
)
"""The default limits of a program in a sandbox; `time_limit_s` is separate."""
_MOST_FILES = 100
_FUNCTION_GRACE_S = 5.0


class ProgramEnv(Environment):
    """Runs a program for each row, and records its model calls.

    Args:
        program: a command as a list of arguments, or `async def agent(session, state)`, which is
            called with its `GatewaySession` and the rollout's state. In arguments, `{question}` is
            a column of the row and `{info.repo}` a field of a column; `{prompt}`, `{row}` (as JSON,
            without the answer), `{seed}`, `{folder}`, `{base_url}`, `{root_url}`, `{api_key}` and
            `{model}` are known too.
        files: the files in the program's folder at the start, by name: a text in which the same
            names are filled in, or a `Path` to copy.
        stdin: the command's standard input, a text with the same names.
        env: additional environment variables of the command, texts with the same names.
        pass_env: names of more variables of this process that the command gets. Without a sandbox
            it always gets PATH and LANG.
        preload: names of modules that a command in Python imports. One process imports them once,
            and is forked for each rollout (docs/gateway.md, Warm processes).
        time_limit_s: seconds after which the program is ended, not counting waits for the server.
        max_calls, max_tokens: the model calls, or sampled tokens, after which calls are refused.
        drop_fields: names of fields that are taken out of the program's requests, and noted.
        train_calls: which calls are trained: `task` (not those beside the task), `all`, conditions
            as a dict, or a function of a `FinishedCall` (docs/gateway.md, What is trained).
        sandbox: "local" or a `LocalBackend`: the command can reach the gateway and nothing else.
            None runs it as the user of this process.
        sandbox_limits: the command's limits. Without a sandbox none holds but these, which are
            watched: memory, CPU time, processes and files of the folder.
        collect: names or patterns of files whose texts `state["program"]["files"]` has at the end,
            at most 100 of them; `num_files_left_out` counts the rest.
        max_file_bytes: the largest file that is collected.
        tail_bytes: how many bytes of the end of standard output, and of standard error, are kept.
        max_output_bytes: a program that prints more is ended.
        settings: passed to `Environment`.

    Raises:
        ConfigError: a setting would have no effect, or a template names a column that rows lack.
        SandboxUnavailable: in a rollout: this machine cannot isolate the program.
    """

    def __init__(
        self,
        program: Sequence[str] | AgentFunction,
        *,
        files: Mapping[str, str | Path] | None = None,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        pass_env: Sequence[str] = (),
        preload: Sequence[str] = (),
        time_limit_s: float | None = 600.0,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        drop_fields: Sequence[str] = (),
        train_calls: TrainCalls = "task",
        sandbox: str | LocalBackend | None = None,
        sandbox_limits: Limits | None = None,
        collect: Sequence[str] = (),
        max_file_bytes: int = 2**16,
        tail_bytes: int = 2**14,
        max_output_bytes: int = 64 * 2**20,
        **settings: Any,
    ) -> None:
        self._refuse_ignored(settings)
        self.function: AgentFunction | None = None
        self.command: tuple[Template, ...] = ()
        if callable(program):
            if not inspect.iscoroutinefunction(program):
                raise ConfigError(
                    "the agent is a synchronous function; it would block the event loop that has "
                    "to answer its model calls. Write async def agent(session, state), or run it "
                    "as a command."
                )
            ours: dict[str, Any] = {
                "files": files,
                "stdin": stdin,
                "env": env,
                "pass_env": pass_env,
                "preload": preload,
            }
            ours |= {"sandbox": sandbox, "sandbox_limits": sandbox_limits, "collect": collect}
            ignored = [name for name, value in ours.items() if value]
            if ignored:
                raise ConfigError(
                    f"{ignored[0]} is for commands; a function runs in this process, so it would "
                    "have no effect."
                )
            self.function = program
        elif isinstance(program, str) or not program:
            raise ConfigError(
                f"the command is {program!r}, but has to be a list of arguments, such as "
                '["python", "agent.py", "{question}"]. For a shell: ["sh", "-c", "..."].'
            )
        else:
            self.command = tuple(Template(str(part)) for part in program)
        self.files: dict[str, Template | Path] = {
            name: content if isinstance(content, Path) else Template(content)
            for name, content in (files or {}).items()
        }
        for path in self.files.values():
            if isinstance(path, Path) and not path.is_file():
                raise ConfigError(f"there is no file {path}, so the program would not get it.")
        self.stdin = Template(stdin)
        self.env = {name: Template(value) for name, value in (env or {}).items()}
        self.pass_env = tuple(pass_env)
        self.time_limit_s = time_limit_s
        if time_limit_s is not None and not time_limit_s > 0:
            raise ConfigError(f"time_limit_s is {time_limit_s}; no program could even start.")
        self.session_limits = SessionLimits(max_calls=max_calls, max_tokens=max_tokens)
        self.drop_fields = checked_names(drop_fields)
        self.train_calls = checked_rule(train_calls)
        self.backend = _local_backend(sandbox)
        # Of a command without a sandbox, limits are watched only if they were asked for.
        self._unconfined = UnconfinedBackend(is_limited=sandbox_limits is not None)
        self.sandbox_limits = sandbox_limits or PROGRAM_LIMITS
        self._zygote = self._zygote_of(preload)
        self.collect = tuple(collect)
        self.max_file_bytes, self.tail_bytes = max_file_bytes, tail_bytes
        self.max_output_bytes = max_output_bytes
        # By the id that is in the state, since a state is stored and a folder cannot be.
        self._folders: dict[str, FolderSandbox] = {}
        self._scored_later: set[str] = set()
        self._gateways: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, asyncio.Task[_OpenGateway]
        ] = weakref.WeakKeyDictionary()
        super().__init__(**settings)
        self._check_names()

    def _zygote_of(self, preload: Sequence[str]) -> Zygote | None:
        if not preload:
            return None
        if self.backend is not None:
            raise ConfigError(
                "preload has no effect in a sandbox, where each rollout has namespaces of its own "
                "and a process outside cannot be forked into them. Leave out one of the two."
            )
        if not isinstance(preload, list | tuple) or not all(
            isinstance(name, str) and name for name in preload
        ):
            raise ConfigError(f"preload is {preload!r}, but has to be a list of modules.")
        check_platform()
        python, _ = split_command([part.text for part in self.command])
        fixed = [part for part in self.command[: len(python)] if not part.names]
        if len(fixed) < len(python):
            raise ConfigError("preload needs the same interpreter for every row; leave it out.")
        return Zygote([part.fill({}) for part in fixed], preload)

    def _refuse_ignored(self, settings: Mapping[str, Any]) -> None:
        ignored = [
            name for name in ("oai_tools", "system_prompt", "few_shot") if settings.get(name)
        ]
        ignored += [name for name, _ in discover(type(self))["stop"]]
        if settings.get("message_type", "chat") != "chat":
            ignored.append("message_type")
        if ignored:
            raise ConfigError(
                f"{ignored[0]!r} has no effect in a {type(self).__name__}: the program decides "
                "on its prompts, its tools and its end. Pass it to the program instead."
            )

    def _check_names(self) -> None:
        texts = [*self.command, self.stdin, *self.env.values()]
        texts += [each for each in self.files.values() if isinstance(each, Template)]
        names = {name for text in texts for name in text.names}
        rows = self.dataset if self.dataset is not None else self.eval_dataset
        if rows is not None and "program" in rows[0]:
            raise ConfigError(
                "rows have a column 'program', but state['program'] holds the outcome of the "
                "program that ran, so reward functions could not see the column. Rename it."
            )
        if names and rows is not None:
            values = dict.fromkeys(NAMES, "") | dict(rows[0])
            for name in sorted(names):
                Template(f"{{{name}}}").fill(values)

    # One rollout

    async def rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str = "",
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Run the program once and return the rollout's state.

        A failure is in `state["error"]`; the program's outcome is in `state["program"]`.
        """
        state = await self.init_state(
            input, client=client, model=model, sampling_args=sampling_args
        )
        watch = _Watch(self._clock(self.time_limit_of(state)), self.max_seq_len)
        outcome = ProgramOutcome()
        try:
            # The time limit covers the program, not its setup.
            with in_phase("setup"), watch.clock.excluded(), contained():
                state = await self._set_up(state)
                session = await self._open_session(state, client, model, sampling_args, watch)
            try:
                with contained():
                    await self._run(session, state, watch, outcome)
                self._settle(state, session, watch, outcome)
            finally:
                if state.trajectory:
                    # The model continued the program's first prompt, not the row's: the session
                    # puts it there.
                    state.prompt = []
                await run_shielded(session.aclose())
        except Exception as error:  # noqa: BLE001  a failed rollout is data
            self.record_failure(state, error)
        finally:
            state["program"] = to_plain(outcome.as_dict())
            # The tools that the agent offered its model, if they were always the same.
            state.oai_tools = watch.tools
            if state.error is not None:
                state.is_completed, state.terminated = False, False
            await self._cleanup(state)
            if state.completion is None:
                await self._render_timing(state)
                await self._render_completion(state)
        return state

    def time_limit_of(self, state: State) -> float | None:
        """Return the time limit of a rollout's program in seconds; None if it has none."""
        return self.time_limit_s

    def _clock(self, limit_s: float | None) -> Clock:
        """Return the program's clock, which ends no later than the episode's."""
        limits = [limit_s]
        episode = current_episode()
        if episode is not None and episode.clock.limit_s is not None:
            limits.append(max(episode.clock.limit_s - episode.clock.spent_s, 0.0))
        return Clock(min((each for each in limits if each is not None), default=None))

    async def _open_session(
        self,
        state: State,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None,
        watch: _Watch,
    ) -> GatewaySession:
        args = merge_args(self.sampling_args, sampling_args)
        seed = args.pop("seed", None)
        asked = as_client(client, model or None)
        if seed is not None:
            asked = seeded(asked, CallSeeds(seed))
        gateway = (await self._opened(asked)).gateway
        return gateway.session(
            client=_ProgramClient(RolloutClient(asked, watch.clock), watch, seed),
            state=state,
            sampling=args,
            limits=self.session_limits,
            drop_fields=self.drop_fields,
            train_calls=self.train_calls,
        )

    async def _run(
        self, session: GatewaySession, state: State, watch: _Watch, outcome: ProgramOutcome
    ) -> None:
        """Run the program to its end, and write into `outcome` how it ended."""
        if self.function is None:
            await self._run_command(session, state, watch, outcome)
            return
        began = time.monotonic()
        task = asyncio.ensure_future(_ending(self.function(session, state)))
        is_done = await watch.wait_for(task, _FUNCTION_GRACE_S)
        outcome.wall_s = time.monotonic() - began
        if not is_done:
            outcome.ended = "time"
            return
        error: BaseException | None = asyncio.CancelledError("it cancelled itself")
        if not task.cancelled():
            outcome.returned, error = task.result()
        outcome.ended, outcome.exit_status = "exit", int(error is not None)
        if error is not None:
            outcome.error = record_error(error, "environment")

    async def _run_command(
        self, session: GatewaySession, state: State, watch: _Watch, outcome: ProgramOutcome
    ) -> None:
        api_key = session.api_key or ""
        root_url = session.root_url
        if self.backend is not None:
            host, port = REACHED_AT
            root_url = f"http://{host}:{port}/s/{session.id}"
        values = template_values(state) | {
            "base_url": f"{root_url}/v1",
            "root_url": root_url,
            "api_key": api_key,
            "model": session.model_name,
        }
        with in_phase("setup"), watch.clock.excluded():
            folder = await self._make_folder(values, state, root_url, api_key)
        state["sandbox_id"], state["sandbox_level"] = folder.id, folder.level.as_dict()
        self._folders[folder.id] = folder
        tail = OutputTail(self.tail_bytes, self.max_output_bytes)
        stdin = self.stdin.fill(values)
        command = self.command_line(values, state)
        if self.backend is None:
            located = program_path(command[0], folder.env.get("PATH", ""))
            if located is None:
                raise ProgramError(
                    f"there is no program {command[0]!r} in the PATH that it would get, so it "
                    "cannot be started. Install it, or name its file."
                )
            command[0] = located
        if self._zygote is not None:
            with in_phase("setup"), watch.clock.excluded():
                await self._zygote.start(variables_of((*PASSED, *self.pass_env)))
        run = asyncio.ensure_future(folder.run(command, stdin=stdin, tail=tail))
        outcome.folder = str(folder.path)
        try:
            if await watch.wait_for(run, None):
                result = run.result()
                outcome.ended, outcome.exit_status = result.ended, result.exit_code
                outcome.signal, outcome.wall_s = result.signal, result.wall_s
                outcome.cpu_s = result.cpu_s
                outcome.peak_memory_bytes = result.peak_memory_bytes
            else:
                outcome.ended, outcome.wall_s = "time", watch.clock.spent_s
        finally:
            # Even if this rollout is cancelled.
            clean = partial(redact_text, secrets=(api_key,))
            outcome.stdout, outcome.stderr = tail.text(1, clean), tail.text(2, clean)
        await self._collect(folder, api_key, outcome)

    def command_line(self, values: Mapping[str, Any], state: State) -> list[str]:
        """Return the command of a rollout."""
        return [part.fill(values) for part in self.command]

    async def new_folder(self, reach: Path | None, state: State) -> FolderSandbox:
        """Return a folder for a command; in a sandbox, `reach` is the gateway's socket."""
        if self.backend is None:
            folder = await self._unconfined.create(limits=self.sandbox_limits)
            folder.zygote = self._zygote
            return folder
        assert reach is not None
        return await self.backend.reaching(reach).create(limits=self.sandbox_limits)

    async def _make_folder(
        self, values: dict[str, Any], state: State, root_url: str, api_key: str
    ) -> FolderSandbox:
        passed = (*PASSED, *self.pass_env) if self.backend is None else self.pass_env
        socket = None if self.backend is None else (await self._opened(None)).socket
        folder = await self.new_folder(socket, state)
        try:
            values["folder"] = folder.inside
            own = {name: text.fill(values) for name, text in self.env.items()}
            folder.env |= environment_of_program(passed, own, root_url=root_url, api_key=api_key)
            for name, content in self.files.items():
                if isinstance(content, Path):
                    await folder.write_file(name, await asyncio.to_thread(content.read_bytes))
                else:
                    await folder.write_file(name, content.fill(values))
        except BaseException:  # a cancellation, too
            await run_shielded(folder.close())
            raise
        return folder

    async def _collect(self, folder: FolderSandbox, secret: str, outcome: ProgramOutcome) -> None:
        """Write the texts of the files that `collect` names into `outcome`."""
        names = [name for name in self.collect if not _is_pattern(name)]
        patterns = [name for name in self.collect if _is_pattern(name)]
        if patterns:
            there = await folder.list_files()
            names += [name for name in there if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
        names, found = list(dict.fromkeys(names)), outcome.files
        outcome.num_files_left_out = len(names[_MOST_FILES:])
        for name in names[:_MOST_FILES]:
            try:
                data = await folder.read_file(name, max_bytes=self.max_file_bytes)
            except SandboxFileError:
                # The program may have made it a link, a folder or larger than `max_file_bytes`.
                found[name] = None
            else:
                found[name] = redact_text(data.decode(errors="replace"), (secret,))

    def _settle(
        self, state: State, session: GatewaySession, watch: _Watch, outcome: ProgramOutcome
    ) -> None:
        """Write how the rollout ended into its state.

        Raises:
            Exception: the model's server failed (`ModelError`), and no later call was answered.
            ProgramError: the program ended without calling its model.
        """
        failure = watch.failure
        if watch.num_asked == 0 and not watch.refused:
            raise ProgramError(_never_asked(outcome))
        if failure is not None and _says_nothing(failure, has_steps=bool(state.trajectory)):
            with in_phase("model"):
                raise failure
        if isinstance(failure, PromptTooLong) and session.ended is None:
            state.prompt_too_long = True
            self._cut(state, TruncationReason.MAX_SEQ_LEN)
        elif outcome.ended == "time":
            self._cut(state, TruncationReason.TIME_LIMIT)
        elif outcome.ended not in ("exit", "signal"):
            self._cut(state, TruncationReason.ENV)
        state.stop_condition = state.truncation_reason or f"program_{outcome.ended}"

    def _cut(self, state: State, reason: TruncationReason) -> None:
        # If a limit of the session was reached first, how the program ended followed from it.
        if not state.truncated:
            state.truncated, state.truncation_reason = True, reason.value

    # Folders and gateways

    async def run_request(self, request: RolloutRequest, client: ModelClient) -> Sequence[State]:
        """Play and score one episode; then the program's folder is deleted."""
        self._scored_later.add(request.request_id)
        states: Sequence[State] | None = None
        try:
            states = await super().run_request(request, client)
        finally:
            self._scored_later.discard(request.request_id)
            if states is None or not self.has_group_rewards:
                episode = current_episode()
                await self._release(episode.states if episode and states is None else states or ())
        return states

    async def play_request(self, request: RolloutRequest, client: ModelClient) -> list[State]:
        """Play one episode without scoring it."""
        states = await super().play_request(request, client)
        if request.request_id not in self._scored_later:
            await self._release(states)
        return states

    async def score_group(self, states: Sequence[State]) -> None:
        """Score the finished rollouts of one group; then the programs' folders are deleted."""
        try:
            await super().score_group(states)
        finally:
            await self._release(states)

    async def _release(self, states: Iterable[State]) -> None:
        for state in states:
            folder = self._folders.pop(str(state.get("sandbox_id")), None)
            if folder is not None:
                state["program"]["folder"] = None
                await run_shielded(folder.close())

    async def _opened(self, client: ModelClient | None) -> _OpenGateway:
        """Return the gateway of this event loop; the first rollout starts it."""
        loop = asyncio.get_running_loop()
        starting = self._gateways.get(loop)
        if starting is None or (starting.done() and not _is_open(starting)):
            assert client is not None
            starting = loop.create_task(_open_gateway(client, with_socket=self.backend is not None))
            self._gateways[loop] = starting
        # A cancelled rollout must not cancel the start, for which others may wait.
        return await asyncio.shield(starting)

    @teardown
    async def close_gateways(self) -> None:
        """Close the gateways, and delete the folders of rollouts that were never scored."""
        here = asyncio.get_running_loop()
        for loop, starting in list(self._gateways.items()):
            # A loop that has ended has left nothing to close.
            if loop is here and not starting.cancelled():
                await (await starting).aclose()
            elif loop.is_running() and starting.done() and _is_open(starting):
                asyncio.run_coroutine_threadsafe(starting.result().aclose(), loop)
        self._gateways.clear()
        if self._zygote is not None:
            self._zygote.close()
        left, self._folders = list(self._folders.values()), {}
        await asyncio.gather(*(folder.close() for folder in left), return_exceptions=True)


@dataclass(slots=True)
class _OpenGateway:
    """A gateway, and the socket through which programs in a sandbox reach it."""

    gateway: Gateway
    folder: PrivateFolder | None = None
    socket: Path | None = None

    async def aclose(self) -> None:
        await self.gateway.aclose()
        if self.folder is not None:
            self.folder.remove()


async def _open_gateway(client: ModelClient, *, with_socket: bool) -> _OpenGateway:
    folder = PrivateFolder() if with_socket else None
    socket = None if folder is None else folder.path / "gateway.sock"
    gateway = Gateway(client, unix_socket=socket)
    await gateway.start()
    if socket is not None:
        # The programs may run as a different user; the private folder keeps all others out.
        socket.chmod(0o666)
    return _OpenGateway(gateway, folder, socket)


def _is_open(starting: asyncio.Task[_OpenGateway]) -> bool:
    if starting.cancelled() or starting.exception() is not None:
        return False
    return starting.result().gateway.is_serving


@dataclass(slots=True, eq=False)
class _Watch:
    """The state of a running program: its time, its last failed call, its tools."""

    clock: Clock
    max_seq_len: int | None
    num_asked: int = 0
    # Whether a call was refused because `max_seq_len` was reached, without calling the model.
    refused: bool = False
    # The error of the last call that ended; None if it was answered.
    failure: Exception | None = None
    # Ends the rollout from within a call, when a replay is over.
    ending: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _tools: list[ToolSchema] | None = None
    _has_one_set: bool = True
    _num_tokens: int = 0
    _scope: asyncio.Timeout | None = None

    @property
    def tools(self) -> list[ToolSchema] | None:
        """The tools that the calls offered; None if they were not always the same."""
        return (self._tools or []) if self._has_one_set else None

    def begins(self, call: ModelCall) -> None:
        """Note a call.

        Raises:
            PromptTooLong: an earlier call reached `max_seq_len`.
        """
        if self.max_seq_len is not None and self._num_tokens >= self.max_seq_len:
            self.refused = True
            self.failure = PromptTooLong(
                f"an earlier call had max_seq_len = {self.max_seq_len} tokens or more, so no "
                "further call is made."
            )
            raise self.failure
        self.num_asked += 1
        tools = list(call.tools or ())
        if self._tools is None:
            self._tools = tools
        elif self._tools != tools:
            self._has_one_set = False

    def answered(self, response: ModelResponse) -> None:
        """Note an answer."""
        self.failure = None
        self._num_tokens = max(
            self._num_tokens, response.num_prompt_tokens + response.num_completion_tokens
        )

    def call_ended(self) -> None:
        """End the program if its time is over, even while other calls of it are in flight."""
        if self._scope is not None and self.clock.expired and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def wait_for(self, work: asyncio.Future[Any], grace_s: float | None) -> bool:
        """Wait for the program's end, or end it when its time is over; return if it ended in time.

        `grace_s` is how many seconds it may take to end when it is cancelled; None: no limit.

        Raises:
            asyncio.CancelledError: a replay is over, or this task was cancelled.
        """
        try:
            async with self.clock.guard() as self._scope:
                await asyncio.wait((work, self.ending), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            self.clock.stop()
            self._scope = None
            if not work.done():
                work.cancel()
                await run_shielded(_ended(work, grace_s))
                is_late = True
            else:
                is_late = False
        if self.ending.done():
            self.ending.result()
        return not is_late


async def _ending(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Return what an agent's function returns, and what it raises."""
    try:
        # A task that raises SystemExit ends the event loop, and with it all other rollouts.
        with contained():
            return await work, None
    except Exception as error:  # noqa: BLE001  how a program ends is data
        return None, error


async def _ended(work: asyncio.Future[Any], grace_s: float | None) -> None:
    await asyncio.wait((work,), timeout=grace_s)
    if work.done() and not work.cancelled():
        work.exception()  # too late to count, but asyncio logs errors that are not retrieved


class _ProgramClient(DelegatingClient):
    """The client of a program's session, which records its calls in a `_Watch`.

    A seed that the program asks for is mixed with the rollout's `seed`, if there is one.
    """

    def __init__(self, inner: ModelClient, watch: _Watch, seed: int | None) -> None:
        super().__init__(inner)
        self._watch, self._seed = watch, seed

    async def call(self, call: ModelCall) -> ModelResponse:
        """Pass the call on."""
        watch, asked = self._watch, call.sampling
        if self._seed is not None and asked.seed is not None:
            mixed = asked_seed(self._seed, asked.seed)
            call = replace(call, sampling=asked.with_seed(mixed))
        watch.begins(call)
        try:
            response = await call.to(self._inner)
        except Exception as error:  # `_settle` judges it if no later call is answered
            # What the program asks for after its server failed may follow from that.
            if watch.failure is None or error_kind(watch.failure) == "episode":
                watch.failure = error
            raise
        except asyncio.CancelledError as error:
            # The program did not hang up and no limit was reached: the client itself has ended.
            if not being_cancelled() and not watch.ending.done():
                watch.ending.set_exception(error)
            raise
        finally:
            watch.call_ended()
        watch.answered(response)
        return response


def _local_backend(sandbox: str | LocalBackend | None) -> LocalBackend | None:
    if sandbox is None:
        return None
    backend = backend_of(sandbox)
    if not isinstance(backend, LocalBackend):
        raise ConfigError(
            f"a program cannot run in {type(backend).__name__}, which cannot limit it to the "
            "gateway. Use sandbox='local', which needs bubblewrap."
        )
    return backend


def _is_pattern(name: str) -> bool:
    return any(char in name for char in "*?[")


def _says_nothing(failure: Exception, *, has_steps: bool) -> bool:
    """Whether the server or the harness is to blame for a failed call, and not the program.

    A prompt that is too long can be the model's fault, and so can any request that is refused after
    others were answered: it may quote what the model wrote, or be made only because of it.
    """
    if isinstance(failure, PromptTooLong):
        return False
    # Tokens that contradict themselves are the server's, whatever the model wrote.
    is_servers = isinstance(failure, TokenError) or error_kind(failure) != "episode"
    return is_servers or not has_steps


def _never_asked(outcome: ProgramOutcome) -> str:
    how = {
        "exit": f"ended with exit status {outcome.exit_status}",
        "signal": f"was ended by signal {outcome.signal}",
        "time": "ran out of time",
    }.get(outcome.ended, f"was ended ({outcome.ended})")
    said = outcome.stderr.strip()[-2000:] or outcome.stdout.strip()[-2000:]
    if outcome.error is not None:
        said = f"{outcome.error.type}: {outcome.error.message}"
    return (
        f"the program {how} without asking its model once, so nothing can be learned from it. "
        "Does it use OPENAI_BASE_URL or ANTHROPIC_BASE_URL, and did the gateway refuse its "
        f"request? It said: {said or '(nothing)'}"
    )
