"""Harbor's task folders, read as `HarborTask`s, which also say what needs Docker.

A folder has `task.toml`, an instruction, `environment/` (a Dockerfile), `test.sh` in `tests` and
`solution/solve.sh`. The format is that of harbor 0.26 (schema 1.4). If a task uses features that
rolltree does not support, or keys that the format does not have, an error names them.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from rolltree._helpers.files import read_regular
from rolltree._helpers.untrusted import read_json, read_toml
from rolltree.values.errors import ConfigError, did_you_mean

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
# Images with only a shell, the usual tools and Python; the sandbox shows this machine's instead.
_PLAIN_IMAGES = ("ubuntu", "debian", "python", "bash", "buildpack-deps", "scratch")
_OURS = ("tests", "solution", "logs", "sandbox", "tmp")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of `task.toml`."""


class _Solution(_Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    env: dict[str, str] = {}


class _Agent(_Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class _Verifier(_Agent, frozen=True, forbid_unknown_fields=True, kw_only=True):
    timeout_sec: float | None = 600.0
    env: dict[str, str] = {}
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = []


class _Environment(_Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    memory: str | None = None
    storage_mb: int | None = None
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None
    allow_internet: bool | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class _File(_Section, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema_version: str | None = None
    version: str | None = None
    task: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    source: str | None = None
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    multi_step_reward_strategy: str | None = None
    steps: list[Any] | None = None
    artifacts: list[Any] = []


_REFUSED: Mapping[str, Callable[[_File], Any]] = {
    "[[steps]]": lambda f: f.steps,
    "multi_step_reward_strategy": lambda f: f.multi_step_reward_strategy,
    "artifacts": lambda f: f.artifacts,
    "[environment] os": lambda f: f.environment.os.lower() != "linux",
    "[environment] gpus": lambda f: f.environment.gpus,
    "[environment] tpu": lambda f: f.environment.tpu,
    "[environment] mcp_servers": lambda f: f.environment.mcp_servers,
    "[environment] skills_dir": lambda f: f.environment.skills_dir,
    "[environment] healthcheck": lambda f: f.environment.healthcheck,
    "[environment] allowed_hosts": lambda f: f.environment.allowed_hosts,
    "[agent] network_mode": lambda f: f.agent.network_mode,
    "[agent] allowed_hosts": lambda f: f.agent.allowed_hosts,
    "[verifier] network_mode": lambda f: f.verifier.network_mode,
    "[verifier] allowed_hosts": lambda f: f.verifier.allowed_hosts,
    "[verifier] environment_mode": lambda f: f.verifier.environment_mode not in (None, "shared"),
    "[verifier.environment]": lambda f: f.verifier.environment,
    "[[verifier.collect]]": lambda f: f.verifier.collect,
}
"""Settings that are supported neither in the sandbox nor in Docker; whether a task uses them."""
_REFUSED_FILES = (
    *("trajectory.json", ".harborignore", "environment/docker-compose.yaml"),
    *("environment/docker-compose.yml", "environment/singularity-compose.yaml"),
)


@dataclass(frozen=True, slots=True)
class WorldFiles:
    """The result of a Dockerfile without `RUN`: a folder, files copied into it, variables."""

    workdir: str
    env: Mapping[str, str]
    # Where each file of the task goes: an absolute path inside, and the file.
    files: tuple[tuple[str, Path], ...]

    @property
    def top_folders(self) -> tuple[str, ...]:
        """The folders of `/` that it uses, without the slash."""
        paths = [self.workdir, *(path for path, _ in self.files)]
        return tuple(dict.fromkeys(PurePosixPath(path).parts[1] for path in paths))


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task. Times are in seconds; None: without a limit."""

    folder: Path
    name: str
    instruction: str
    agent_limit_s: float | None
    verifier_limit_s: float | None
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]
    agent_user: str | None
    verifier_user: str | None
    cpus: float | None
    memory_bytes: int | None
    disk_bytes: int | None
    network: bool | None
    docker_image: str | None
    build_limit_s: float
    workdir: str | None
    # None if the sandbox cannot make it; then `needs_docker` says why.
    world: WorldFiles | None
    needs_docker: tuple[str, ...]

    @property
    def solution(self) -> Path | None:
        """The folder of its oracle solution."""
        folder = self.folder / "solution"
        return folder if (folder / "solve.sh").is_file() else None


def read_tasks(places: str | Path | Sequence[str | Path]) -> list[HarborTask]:
    """Return the tasks of one or several folders (of a task or of tasks), sorted by name.

    Raises:
        ConfigError: there is no task, two have the same name, or one needs something that rolltree
            does not support.
    """
    given = [places] if isinstance(places, str | Path) else list(places)
    folders = []
    for place in map(Path, given):
        here = [place] if (place / "task.toml").is_file() else []
        here = here or sorted(each.parent for each in place.glob("*/task.toml"))
        if not here:
            raise ConfigError(
                f"{place} has no Harbor task: neither it nor a folder in it has a task.toml. Give "
                "the folder of a task, or the folder that holds the tasks."
            )
        folders += here
    tasks = sorted(map(read_task, folders), key=lambda task: task.name)
    for one, other in itertools.pairwise(tasks):
        if one.name == other.name:
            raise ConfigError(
                f"the tasks {one.folder} and {other.folder} are both named {one.name!r}, so their "
                "results could not be told apart. Rename one in its task.toml."
            )
    return tasks


def read_task(folder: str | Path) -> HarborTask:
    """Return the task of a folder.

    Raises:
        ConfigError: a part is missing or wrong, or the task needs something that rolltree does not
            support.
    """
    folder = Path(folder).resolve()
    file = _read_toml(folder / "task.toml")
    _refuse(folder, file)
    for part in ("instruction.md", "tests/test.sh"):
        if not (folder / part).is_file():
            raise ConfigError(
                f"the Harbor task {folder} has no {part}, so it cannot be "
                f"{'asked' if part == 'instruction.md' else 'scored'}. Add the file."
            )
    asked = file.environment
    needs = list(_docker_needs(folder, file))
    world = None
    if not needs:
        try:
            world = _world_files(folder, asked)
        except _NeedsDocker as why:
            needs.append(str(why))
    return HarborTask(
        folder=folder,
        name=str((file.task or {}).get("name") or folder.name),
        instruction=_without_canary(_text_of(folder / "instruction.md")),
        agent_limit_s=file.agent.timeout_sec,
        verifier_limit_s=file.verifier.timeout_sec,
        env=asked.env,
        verifier_env=file.verifier.env,
        solution_env=file.solution.env,
        agent_user=None if file.agent.user is None else str(file.agent.user),
        verifier_user=None if file.verifier.user is None else str(file.verifier.user),
        cpus=asked.cpus,
        memory_bytes=_bytes_of(folder, "memory", asked.memory_mb, asked.memory),
        disk_bytes=_bytes_of(folder, "storage", asked.storage_mb, asked.storage),
        network=_network(folder, asked),
        docker_image=asked.docker_image,
        build_limit_s=asked.build_timeout_sec,
        workdir=asked.workdir,
        world=world,
        needs_docker=tuple(needs),
    )


def filled_env(env: Mapping[str, str], task: HarborTask) -> dict[str, str]:
    """Return `env` with `${NAME}` and `${NAME:-default}` replaced by this process's variables.

    Raises:
        ConfigError: a variable is not set and has no default.
    """

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ConfigError(
                f"the Harbor task {task.name} needs the environment variable {match[1]}, which is "
                f"not set here. Set it: export {match[1]}=..."
            )
        return found

    return {name: _VARIABLE.sub(value, text) for name, text in env.items()}


def _read_toml(path: Path) -> _File:
    try:
        data = read_toml(read_regular(path, follow=True).decode())
        return msgspec.convert(data, _File, strict=False)
    except (OSError, ValueError) as error:  # not UTF-8, not TOML, not such a table
        hint = ""
        unknown = re.search(r"unknown field `(\w+)`(?: - at `\$\.(\w+))?", str(error))
        if unknown:
            section = {"agent": _Agent, "verifier": _Verifier, "environment": _Environment}.get(
                unknown[2] or "", _File
            )
            hint = did_you_mean(unknown[1], section.__struct_fields__)
        raise ConfigError(
            f"{path} cannot be read as a Harbor task ({error}).{hint} rolltree knows the format of "
            "harbor 0.26."
        ) from error


def _text_of(path: Path) -> str:
    try:
        return read_regular(path, follow=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}). Harbor's tasks are text in UTF-8: correct the file."
        ) from error


def _refuse(folder: Path, file: _File) -> None:
    asked = [name for name, is_asked in _REFUSED.items() if is_asked(file)]
    asked += [name for name in _REFUSED_FILES if (folder / name).exists()]
    if asked:
        raise ConfigError(
            f"the Harbor task {folder} uses what rolltree does not support: {', '.join(asked)}. "
            "Without that it would be a different task, so it is not played. Leave it out, or play "
            "it with harbor itself."
        )


def _docker_needs(folder: Path, file: _File) -> Iterator[str]:
    asked = file.environment
    if asked.docker_image:
        yield f"the image {asked.docker_image} ([environment] docker_image)"
    elif not (folder / "environment" / "Dockerfile").is_file():
        raise ConfigError(
            f"the Harbor task {folder} has neither environment/Dockerfile nor [environment] "
            "docker_image, so nothing says what its world is. Add one."
        )
    if _network(folder, asked):
        yield "a network ([environment] network_mode or allow_internet)"
    if file.agent.user is not None or file.verifier.user is not None:
        yield "a user of its own ([agent] or [verifier] user)"


def _network(folder: Path, asked: _Environment) -> bool | None:
    """Return whether the world has a network; None if the task does not say."""
    if asked.network_mode is None:
        return asked.allow_internet
    modes = {"public": True, "no-network": False}
    if asked.network_mode not in modes:
        raise ConfigError(
            f"the Harbor task {folder} has [environment] network_mode = {asked.network_mode!r}; "
            "rolltree gives a task the whole network (in Docker) or none: 'public' or 'no-network'."
        )
    return modes[asked.network_mode]


def _bytes_of(folder: Path, name: str, megabytes: int | None, text: str | None) -> int | None:
    if megabytes is not None:
        return megabytes * 2**20
    if text is None:
        return None
    units = {"G": 2**30, "M": 2**20, "K": 2**10}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMKgmk])\s*", text)
    if match is None:
        raise ConfigError(
            f"the Harbor task {folder} has [environment] {name} = {text!r}, which is not a size. "
            f"Write {name}_mb = 512."
        )
    return int(float(match[1]) * units[match[2].upper()])


def _without_canary(text: str) -> str:
    """Return an instruction without the canary lines at its beginning."""
    lines = text.split("\n")
    marked = 0
    while marked < len(lines) and _CANARY.fullmatch(lines[marked].strip()):
        marked += 1
    return "\n".join(lines[marked:]).lstrip("\n") if marked else text


# Dockerfiles


class _NeedsDocker(Exception):
    """A line of a Dockerfile that only Docker can carry out."""


class _Dockerfile:
    """Carries out the lines of a Dockerfile that only copy files and set variables."""

    def __init__(self, folder: Path) -> None:
        self.context = folder
        self.workdir = ""
        self.env: dict[str, str] = {}
        self.files: dict[str, Path] = {}

    def take(self, number: int, line: str) -> None:
        word, _, rest = line.strip().partition(" ")
        known: dict[str, Callable[[str], None]] = {
            "FROM": self._from,
            "WORKDIR": self._workdir,
            "COPY": self._copy,
            "ENV": self._env,
            "LABEL": _nothing,
            # Only commands of the agent and the tests run in the world.
            "CMD": _nothing,
        }
        try:
            if word.upper() not in known:
                raise _NeedsDocker(word.upper())
            known[word.upper()](rest.strip())
        except _NeedsDocker as why:
            raise _NeedsDocker(f"environment/Dockerfile, line {number}: {why}") from None

    def _from(self, rest: str) -> None:
        image = rest.split()[0] if rest else ""
        if image.split("/")[-1].partition(":")[0] not in _PLAIN_IMAGES or len(rest.split()) > 1:
            raise _NeedsDocker(f"FROM {rest}")

    def _workdir(self, rest: str) -> None:
        self.workdir = self._inside(rest)

    def _env(self, rest: str) -> None:
        if "$" in rest:
            raise _NeedsDocker(f"ENV with a variable in it: {rest}")
        words = _words(rest)
        if len(words) > 1 and "=" not in words[0]:
            words = [f"{words[0]}={' '.join(words[1:])}"]
        if not words or any("=" not in word for word in words):
            raise _NeedsDocker(f"ENV without a value: {rest}")
        self.env |= dict(word.split("=", 1) for word in words)

    def _copy(self, rest: str) -> None:
        words = _words(rest)
        if len(words) < 2 or any(word.startswith("--") or "$" in word for word in words):
            raise _NeedsDocker(f"COPY {rest}")
        *sources, target = words
        into_folder = target.endswith("/") or len(sources) > 1 or target == "."
        for source in sources:
            matched = sorted(self._matching(source.strip("/")))
            if not matched:
                raise ConfigError(
                    f"{self.context}/Dockerfile copies {source!r}, and no file there has that name."
                )
            for found in matched:
                if found.is_dir():
                    for file in sorted(found.rglob("*")):
                        if file.is_file():
                            self._put(f"{target}/{file.relative_to(found).as_posix()}", file)
                else:
                    folder_given = into_folder or len(matched) > 1
                    self._put(f"{target}/{found.name}" if folder_given else target, found)

    def _matching(self, source: str) -> Iterator[Path]:
        if source in ("", "."):
            yield self.context
            return
        for path in self.context.rglob("*"):
            if fnmatch.fnmatchcase(path.relative_to(self.context).as_posix(), source):
                yield path

    def _put(self, target: str, file: Path) -> None:
        if file.is_symlink():
            raise _NeedsDocker(f"COPY of the link {file.name}")
        self.files[self._inside(target)] = file

    def _inside(self, path: str) -> str:
        if "$" in path:
            raise _NeedsDocker(f"a variable in the path {path}")
        whole = os.path.normpath(f"{self.workdir or ''}/{path}" if path[:1] != "/" else path)
        parts = PurePosixPath(whole.replace("//", "/")).parts
        if len(parts) < 2:
            raise _NeedsDocker("files in / itself")
        if parts[1] in _OURS:
            raise _NeedsDocker(f"files in /{parts[1]}")
        return "/" + "/".join(parts[1:])


def _words(rest: str) -> list[str]:
    try:
        words = read_json(rest) if rest.startswith("[") else shlex.split(rest)
        return msgspec.convert(words, list[str])
    except ValueError as error:
        raise _NeedsDocker(f"words that rolltree cannot read: {rest} ({error})") from error


def _nothing(rest: str) -> None:
    """Do nothing, for lines that do not change the world."""


def _world_files(folder: Path, asked: _Environment) -> WorldFiles:
    """Return the files and variables that the task's Dockerfile makes.

    Raises:
        _NeedsDocker: a line of it needs Docker.
    """
    path = folder / "environment" / "Dockerfile"
    made = _Dockerfile(path.parent)
    number, pending = 0, ""
    for number, text in enumerate(_text_of(path).splitlines(), start=1):
        if text.lstrip().startswith("#"):
            continue
        pending += text.rstrip()
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        if pending.strip():
            made.take(number, pending)
        pending = ""
    if asked.workdir is not None:
        made.workdir = made._inside(asked.workdir)
    if not made.workdir:
        raise _NeedsDocker("a world without WORKDIR: commands would begin in / itself")
    return WorldFiles(made.workdir, made.env, tuple(made.files.items()))
