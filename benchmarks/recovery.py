"""Recovery: each role of a run on several processes is killed, and the run goes on.

    python benchmarks/recovery.py                   seconds per role, figures on the last line
    python benchmarks/recovery.py --kills 20        kills of each role, in turn
    python benchmarks/recovery.py --random 100      further kills, of one to three roles at once
    python benchmarks/recovery.py --stop            stops each role (SIGSTOP) too, until it is named
    python benchmarks/recovery.py --launcher ray    on a Ray cluster of this machine
    python benchmarks/recovery.py --nodes 4         on Ray with nodes, which are lost too, in turn
    python benchmarks/recovery.py --minutes 50      no further kill after that time
    python benchmarks/recovery.py --check --json    as every benchmark

`rolltree train` with two rollout workers, an engine and two trainer ranks trains the tiny model;
one run takes all kills. A role has recovered when another process of its name has registered and
the run has stored a rollout since. The driver is started again at once, by the same command. A node
is lost as a machine is: Ray's daemon and all that ran there are killed, and another node joins.
What the run holds at the end is compared with what its settings ask for, and audited. Every rollout
names the version of the weights that sampled it, so a request that an engine answered before it had
the weights of its step would be seen.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verdict import Bar, conclude, make_parser

from rolltree.scale.cluster.launchers import marked_processes
from rolltree.scale.cluster.report import ask_driver
from rolltree.scale.cluster.state import read_state
from rolltree.store import Run
from rolltree.values.errors import ClusterError

ROLES = ("worker-0", "engine-0", "trainer", "trainer-1", "driver")
NODE_CPUS = 2
GROUPS, GROUP_SIZE = 4, 4
LIMIT_S = 900.0
CONFIG = f"""
[run]
dir = "DIR"
[model]
name = "tiny"
[env]
id = "reverse_text"
[sampling]
temperature = 1.0
max_tokens = 8
[algorithm]
groups_per_step = {GROUPS}
group_size = {GROUP_SIZE}
[train]
num_steps = 100000
num_threads = 1
[eval]
before = false
after = false
[checkpoint]
every = 5
export = false
[cluster]
rollout_workers = 2
launcher = "LAUNCHER"
address = "ADDRESS"
trainer = {{ ranks = 2 }}
"""


class Trained:
    """A run that `rolltree train` drives, in a process of its own."""

    def __init__(self, folder: Path, launcher: str, num_nodes: int) -> None:
        self.dir = folder / "run"
        self._config = folder / "recovery.toml"
        self._nodes = Nodes(num_nodes) if num_nodes else None
        text = CONFIG.replace("DIR", str(self.dir)).replace("LAUNCHER", launcher)
        text = text.replace("ADDRESS", self._nodes.address if self._nodes else "")
        self._config.write_text(text)
        self._said = folder / "said.txt"
        self.driver = self.start()

    def start(self, *overrides: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "rolltree", "train", str(self._config), *overrides]
        with open(self._said, "ab") as said:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.driver = subprocess.Popen(words, stdout=said, stderr=said, env=env)
        return self.driver

    def status(self) -> dict[str, Any]:
        """Return what the driver says; nothing while there is none."""
        if self.driver.poll() is not None:
            raise SystemExit(f"the driver ended:\n{self._said.read_text()[-3000:]}")
        try:
            return ask_driver(self.dir, "/status")
        except (ClusterError, OSError, ValueError):
            return {"roles": [], "notices": [], "progress": 0}

    def pids(self, status: dict[str, Any]) -> dict[str, int]:
        found = {
            role["name"]: role["pid"] for role in status["roles"] if role["heard_s"] is not None
        }
        return {**found, "driver": self.driver.pid} if found else {}

    def num_rollouts(self) -> int:
        with contextlib.suppress(Exception), Run.open(self.dir, "r", check="rows") as run:
            return run.num_rollouts(phase="train")
        return 0

    def until(self, old: dict[str, int], rollouts: int) -> float:
        """Return when these roles run as other processes, and the run has more than `rollouts`."""
        end, is_back, at = time.monotonic() + LIMIT_S, False, 0
        while time.monotonic() < end:
            if not is_back:
                pids = self.pids(self.status())
                is_back = {*ROLES, *old} <= {*pids} and not old.items() & pids.items()
                at = self.num_rollouts() if is_back else 0
            elif self.num_rollouts() > max(at, rollouts):
                return time.monotonic()
            time.sleep(0.05)
        raise SystemExit(
            f"{[*old]} did not recover in {LIMIT_S:g} s:\n{self._said.read_text()[-3000:]}"
        )

    def kill(self, roles: Sequence[str]) -> float:
        """Kill roles at once, and return the seconds until the run goes on with others."""
        pids = self.pids(self.status())
        rollouts, began = self.num_rollouts(), time.monotonic()
        for role in roles:
            os.kill(pids[role], signal.SIGKILL)
        if "driver" in roles:
            self.driver.wait()
            self.start()
        return self.until({role: pids[role] for role in roles}, rollouts) - began

    def lose_node(self, role: str) -> float:
        """Lose the node on which a role is, and return the seconds until the run goes on."""
        assert self._nodes is not None
        found = {each["name"]: each for each in self.status()["roles"]}
        node, pids = found[role]["node_id"], self.pids(self.status())
        lost = [name for name, each in found.items() if each["node_id"] == node]
        state = read_state(self.dir)
        assert state is not None
        rollouts, began = self.num_rollouts(), time.monotonic()
        self._nodes.lose(node, [(state.launch_id, name) for name in lost])
        return self.until({name: pids[name] for name in lost}, rollouts) - began

    def end(self) -> None:
        if self.driver.poll() is None:
            self.driver.terminate()
            self.driver.wait()
        if self._nodes is not None:
            self._nodes.close()

    def stop(self, role: str) -> float:
        """Stop a role until a notice names it, let it go on, and return the seconds until then."""
        pid, began = self.pids(self.status())[role], time.monotonic()
        before = len(self.status()["notices"])
        os.kill(pid, signal.SIGSTOP)
        try:
            while not any(role in said for said in self.status()["notices"][before:]):
                if time.monotonic() - began > LIMIT_S:
                    raise SystemExit(f"{role} was stopped, and no notice names it")
                time.sleep(0.05)
            named_s = time.monotonic() - began
        finally:
            os.kill(pid, signal.SIGCONT)
        self.until({}, self.num_rollouts())
        if self.pids(self.status()).get(role) != pid:
            raise SystemExit(f"{role} was stopped and did not survive it")
        return named_s

    def finish(self) -> int:
        """Let the run end two steps from here; return the number of its last step."""
        self.driver.send_signal(signal.SIGTERM)
        self.driver.wait(LIMIT_S)
        with Run.open(self.dir, "r", check="rows") as run:
            last = run.last_step()[0] + 2
        if self.start(f"train.num_steps={last}").wait(LIMIT_S):
            raise SystemExit(f"the run did not end:\n{self._said.read_text()[-3000:]}")
        return last


class Nodes:
    """A Ray cluster on this machine: a node without room for roles, and others with."""

    def __init__(self, number: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self._nodes = [self._cluster.add_node(num_cpus=NODE_CPUS) for _ in range(number)]
        self.address = self._cluster.address

    def lose(self, node_id: str, roles: Sequence[tuple[str, str]]) -> None:
        """Kill a node with these roles of a launcher, and add another one."""
        (node,) = (each for each in self._nodes if each.node_id == node_id)
        pids = [pid for role in roles for pid in marked_processes(*role)]
        self._cluster.remove_node(node, allow_graceful=False)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._nodes.remove(node)
        self._nodes.append(self._cluster.add_node(num_cpus=NODE_CPUS))

    def close(self) -> None:
        self._cluster.shutdown()


def faults(folder: Path, num_steps: int) -> dict[str, int]:
    """Return what the run lacks or has too much of."""
    with Run.open(folder, "r") as run:
        steps = [row.step for row in run.steps()]
        names = ["request_id", "train_step", "status", "min_version", "max_version"]
        rows = list(run.columns(names, phase="train"))
        trained = [(row.request_id, row.step) for row in run.trained()]
    per_step = Counter(row[1] for row in rows)
    audit = subprocess.run(
        [sys.executable, "-m", "rolltree", "audit", str(folder)], capture_output=True, check=False
    )
    if audit.returncode:
        print(audit.stdout.decode()[-3000:], file=sys.stderr)
    expected = GROUPS * GROUP_SIZE
    return {
        "steps missing": len({*range(1, num_steps + 1)} - {*steps}),
        "rollouts lost": sum(max(0, expected - per_step[s]) for s in range(1, num_steps + 1)),
        "rollouts too many": sum(max(0, n - expected) for n in per_step.values()),
        "rollouts twice": len(rows) - len({row[0] for row in rows}),
        "rollouts failed": sum(row[2] != "ok" for row in rows),
        # Version n is that after n steps.
        "rollouts of other weights": sum({*row[3:]} != {row[1] - 1} for row in rows),
        "rollouts not trained": len({row[:2] for row in rows} - {*trained}),
        "rollouts trained twice": len(trained) - len({name for name, _ in trained}),
        "audits failed": int(audit.returncode != 0),
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=2, help="kills of each role, in turn")
    parser.add_argument("--random", type=int, default=0, help="further kills, of any roles")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time for kills")
    parser.add_argument("--stop", action="store_true", help="stop each role once, too")
    parser.add_argument("--launcher", default="local", choices=("local", "ray"))
    parser.add_argument("--nodes", type=int, default=0, help="nodes of a Ray cluster made for it")
    options = parser.parse_args()
    launcher = "ray" if options.nodes else options.launcher
    # Whatever else fills the memory of this machine is not what is measured.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112  Ray's own name
    draw = random.Random(0)
    turn = [(role,) for role in (*ROLES, *["node"] * bool(options.nodes))]
    order: list[tuple[str, ...]] = turn * options.kills
    while sum(map(len, order)) < options.kills * len(turn) + options.random:
        order.append(tuple(draw.sample((*ROLES, "worker-1"), draw.choice((1, 1, 2, 3)))))
    took: dict[str, list[float]] = defaultdict(list)
    named: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        trained = Trained(Path(folder), launcher, options.nodes)
        began = time.monotonic()
        num_kills = 0
        try:
            first_s = trained.until({}, 0) - began
            for roles in order:
                if time.monotonic() - began > 60 * options.minutes:
                    break
                # Anywhere in a step.
                time.sleep(draw.uniform(0, 2))
                if roles == ("node",):
                    seconds = trained.lose_node(draw.choice(ROLES[:3]))
                else:
                    seconds = trained.kill(roles)
                num_kills += len(roles)
                name = roles[0] if len(roles) == 1 else "several"
                took[name].append(seconds)
                said = f"{num_kills}: {' and '.join(roles)} killed, {seconds:.1f} s"
                print(said, file=sys.stderr, flush=True)
            for role in ROLES[:-1] if options.stop else ():
                named[role] = trained.stop(role)
                print(
                    f"{role} stopped, named after {named[role]:.1f} s", file=sys.stderr, flush=True
                )
            num_steps = trained.finish()
        finally:
            trained.end()
        found = faults(trained.dir, num_steps)

    def show() -> None:
        print(f"started after {first_s:.1f} s; {num_steps} steps, {num_kills} kills")
        print("role          kills   recovered after s: median     max")
        for role, seconds in took.items():
            print(
                f"{role:12s} {len(seconds):6d} {statistics.median(seconds):27.1f} "
                f"{max(seconds):7.1f}"
            )
        for role, seconds_to_name in named.items():
            print(f"{role:12s} stopped, named after {seconds_to_name:.1f} s, and went on")
        print(", ".join(f"{what}: {number}" for what, number in found.items()))

    bars = [
        Bar.at_most(f"{what} after kills of every role", number, 0)
        for what, number in found.items()
    ]
    bars += (
        [Bar.at_most("s until a stopped role is named", max(named.values()), 30)] if named else []
    )
    results = {
        "took": dict(took),
        "kills": num_kills,
        "named": named,
        "faults": found,
        "started": first_s,
    }
    return conclude(options, bars, results, show)


if __name__ == "__main__":
    sys.exit(main())
