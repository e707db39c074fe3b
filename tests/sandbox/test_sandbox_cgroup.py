"""A cgroup for each run: found, used and left behind empty. The kernel's own where there is one."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from attacks import ATTACKS

from rolltree.sandbox import LocalBackend, supervisor
from rolltree.sandbox.machine import Cgroup, candidates, find_cgroup, this_machine
from rolltree.values.errors import SandboxError

LIMITS = {"memory_bytes": 1000, "disk_bytes": 500, "wall_s": 10}
BOUNDS = ("memory.max", "memory.swap.max", "memory.oom.group")


@pytest.fixture
def tree(tmp_path):
    """A machine whose service manager gave this process a group beside its own."""
    for folder, controllers in {"": "", "up": "memory pids", "up/own": ""}.items():
        (tmp_path / "fs" / folder).mkdir(parents=True)
        (tmp_path / "fs" / folder / "cgroup.subtree_control").write_text(controllers)
    mounts = f"proc /proc proc rw 0 0\ncgroup2 {tmp_path}/fs cgroup2 rw 0 0\n"
    (tmp_path / "mounts").write_text(mounts)
    (tmp_path / "cgroup").write_text("4:memory:/other\n0::/up/own\n")
    return tmp_path


def test_the_group_above_bounds_memory(tree):
    assert find_cgroup(tree) == Cgroup(f"{tree}/fs/up", bounds_memory=True)


def test_the_own_group_counts_where_the_one_above_has_no_controllers(tree):
    (tree / "fs" / "up" / "cgroup.subtree_control").write_text("cpu")
    assert find_cgroup(tree) == Cgroup(f"{tree}/fs/up/own", bounds_memory=False)
    (tree / "cgroup").write_text("0::/\n")
    assert find_cgroup(tree) == Cgroup(f"{tree}/fs", bounds_memory=False)


def test_no_group(tree):
    (tree / "cgroup").write_text("0::/gone/away\n")
    assert find_cgroup(tree) is None
    (tree / "cgroup").write_text("4:memory:/\n")
    assert find_cgroup(tree) is None
    (tree / "mounts").write_text("")
    assert find_cgroup(tree) is None


def test_what_a_group_does_is_said():
    for group, memory, cpu in (
        (None, "not counted", "what is seen"),
        (Cgroup("/x", bounds_memory=False), "not counted", "a cgroup"),
        (Cgroup("/x", bounds_memory=True), "a cgroup", "a cgroup"),
    ):
        for found in candidates(replace(this_machine(), cgroup=group), "rlimits"):
            assert memory in found.level.protections["memory"]
            assert cpu in found.level.protections["cpu"]


def test_a_group_gets_its_bounds_before_its_process(tmp_path, monkeypatch):
    plain = os.mkdir

    def by_the_kernel(path, *arguments):
        plain(path, *arguments)
        for name in BOUNDS:
            Path(path, name).touch()

    monkeypatch.setattr(os, "mkdir", by_the_kernel)
    supervisor.join_cgroup(str(tmp_path / "run"), LIMITS)
    assert [(tmp_path / "run" / name).read_text() for name in BOUNDS] == ["1500", "0", "1"]
    assert (tmp_path / "run" / "cgroup.procs").read_text() == "0"
    supervisor.join_cgroup(str(tmp_path / "run"), LIMITS)  # one that a dead supervisor left


def test_a_kill_by_the_groups_bound_is_the_memory_limit(tmp_path):
    control = os.open("/dev/null", os.O_RDONLY)
    spec = {"folder": "/", "folder_fd": None, "control_fd": control, "trusted_processes": 0}
    spec |= {"limits": LIMITS, "windowed": False, "cgroup": str(tmp_path)}
    spec |= {"is_limited": True, "has_network": False}
    watch = supervisor.Watch(spec, 0)
    watch.main_status = 9
    assert watch.ended() == "signal"
    (tmp_path / "memory.events").write_text("oom 1\noom_kill 0\n")
    assert watch.ended() == "signal"
    (tmp_path / "memory.events").write_text("oom 1\noom_kill 2\n")
    assert watch.ended() == "memory"
    watch.main_status = 0
    assert watch.ended() == "exit"
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert watch.cpu_s([]) == 2.5
    os.close(control)


@pytest.fixture
def group():
    """A group for this test alone; it can be deleted because nothing is left in it."""
    found = this_machine().cgroup
    if found is None:
        pytest.skip("this process may not make a cgroup (version 2) on this machine")
    made = Path(found.path, f"rolltree-test-{os.getpid()}")
    made.mkdir()
    yield Cgroup(str(made), bounds_memory=False)
    made.rmdir()


@pytest.mark.parametrize("level", ["bubblewrap", "landlock", "rlimits"])
async def test_the_kernels_own_group_counts_exactly_and_is_gone(level, group):
    """Of brief children that nobody waits for, looking alone sees a part."""
    if level == "bubblewrap" and this_machine().bwrap is None:
        pytest.skip("bubblewrap is not installed")
    attack = ATTACKS["brief children that nobody waits for"]
    backend = LocalBackend(level, allow_weaker=True)
    backend.machine = replace(backend.machine, cgroup=group)
    sandbox = await backend.create(limits=attack.limits)
    result = await sandbox.run_python(attack.program)
    await sandbox.close()
    assert attack.verdict(result, sandbox.level.missing) == "stopped"
    if result.ended == "cpu":
        assert 1.0 <= result.cpu_s < 2.0


async def test_a_group_that_cannot_be_made_is_a_failure_of_the_sandbox(tmp_path):
    backend = LocalBackend(allow_weaker=True)
    sandbox = await backend.create()
    backend.machine = replace(backend.machine, cgroup=Cgroup(f"{tmp_path}/gone", True))
    with pytest.raises(SandboxError, match="gone"):
        await sandbox.run(["true"])
    await sandbox.close()
