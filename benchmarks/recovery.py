"""Recovery: each role of a run on several processes is killed, and the run goes on.

    python benchmarks/recovery.py                   seconds per role, figures on the last line
    python benchmarks/recovery.py --kills 20        kills of each role, in turn
    python benchmarks/recovery.py --stop            stops each role (SIGSTOP) too, until it is named
    python benchmarks/recovery.py --launcher ray    on a Ray cluster of this machine
    python benchmarks/recovery.py --check --json    as every benchmark

`rolltree train` with two rollout workers, an engine and two trainer ranks trains the tiny model. A
role has recovered when another process of its name has registered and the run has stored a rollout
since. The driver is started again at once, by the same command. What the run holds at the end is
compared with what its settings ask for, and audited.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from verdict import Bar, conclude, make_parser

from rolltree.cluster.report import ask_driver
from rolltree.errors import ClusterError
from rolltree.store import Run

ROLES = ("worker-0", "engine-0", "trainer", "trainer-1", "driver")
GROUPS, GROUP_SIZE = 4, 4
LIMIT_S = 300.0
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
stall_s = 10.0
trainer = {{ ranks = 2 }}
"""


class Trained:
    """A run that `rolltree train` drives, in a process of its own."""

    def __init__(self, folder: Path, launcher: str) -> None:
        self.dir = folder / "run"
        self._config = folder / "recovery.toml"
        text = CONFIG.replace("DIR", str(self.dir)).replace("LAUNCHER", launcher)
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

    def until(self, role: str, old: int | None, rollouts: int) -> float:
        """Return when the role runs as another process, and the run holds more than `rollouts`."""
        end, is_back, at = time.monotonic() + LIMIT_S, False, 0
        while time.monotonic() < end:
            if not is_back:
                pids = self.pids(self.status())
                is_back = {*ROLES} <= {*pids} and pids[role] != old
                at = self.num_rollouts() if is_back else 0
            elif self.num_rollouts() > max(at, rollouts):
                return time.monotonic()
            time.sleep(0.05)
        raise SystemExit(
            f"{role} did not recover in {LIMIT_S:g} s:\n{self._said.read_text()[-3000:]}"
        )

    def kill(self, role: str) -> float:
        """Kill a role, and return the seconds until the run goes on with another one."""
        pid, rollouts, began = self.pids(self.status())[role], self.num_rollouts(), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if role == "driver":
            self.driver.wait()
            self.start()
        return self.until(role, pid, rollouts) - began

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
        self.until("driver", None, self.num_rollouts())
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


def faults(folder: Path, num_steps: int) -> dict[str, int]:
    """Return what the run lacks or has too much of."""
    with Run.open(folder, "r") as run:
        steps = [row.step for row in run.steps()]
        rows = list(run.columns(["request_id", "train_step"], phase="train"))
    per_step = Counter(step for _, step in rows)
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
        "rollouts twice": len(rows) - len({request for request, _ in rows}),
        "audits failed": int(audit.returncode != 0),
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=2, help="kills of each role, in turn")
    parser.add_argument("--random", type=int, default=0, help="further kills, of any role")
    parser.add_argument("--stop", action="store_true", help="stop each role once, too")
    parser.add_argument("--launcher", default="local", choices=("local", "ray"))
    options = parser.parse_args()
    draw = random.Random(0)
    order = [role for _ in range(options.kills) for role in ROLES]
    order += [draw.choice(ROLES) for _ in range(options.random)]
    took: dict[str, list[float]] = defaultdict(list)
    named: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        trained = Trained(Path(folder), options.launcher)
        began = time.monotonic()
        first_s = trained.until("driver", None, 0) - began
        try:
            for role in order:
                # Anywhere in a step.
                time.sleep(draw.uniform(0, 2))
                took[role].append(trained.kill(role))
                print(f"{role} killed, {took[role][-1]:.1f} s", file=sys.stderr, flush=True)
            for role in ROLES[:-1] if options.stop else ():
                named[role] = trained.stop(role)
                print(
                    f"{role} stopped, named after {named[role]:.1f} s", file=sys.stderr, flush=True
                )
            num_steps = trained.finish()
        finally:
            if trained.driver.poll() is None:
                trained.driver.terminate()
                trained.driver.wait()
        found = faults(trained.dir, num_steps)

    def show() -> None:
        print(f"started after {first_s:.1f} s; {num_steps} steps, {len(order)} kills")
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
    results = {"took": dict(took), "named": named, "faults": found, "started": first_s}
    return conclude(options, bars, results, show)


if __name__ == "__main__":
    sys.exit(main())
