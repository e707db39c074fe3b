"""A driver with fake roles: in this process (`driving`), or as a process of its own (`main`)."""

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import aiohttp

from rolltree.scale.cluster.driver import Driver
from rolltree.scale.cluster.launchers import LocalLauncher
from rolltree.training import Silent
from rolltree.training.sections import ClusterSection
from wait_kit import until

FAKE = [sys.executable, str(Path(__file__).with_name("fake_role.py"))]
ARGV = dict.fromkeys(("engine", "worker", "trainer"), FAKE)


class Heard(Silent):
    """Keeps what was said."""

    def __init__(self):
        self.notices, self.steps = [], []

    def on_notice(self, message):
        self.notices.append(message)
        print(message, file=sys.stderr, flush=True)

    def on_step(self, step, metrics):
        self.steps.append((step, metrics))


class Driving:
    """A driver that runs, and what a test asks of it."""

    def __init__(self, run_dir, settings, launcher=None):
        self.run_dir, self.heard = run_dir, Heard()
        self.launcher = launcher or LocalLauncher()
        config = {"run": {"dir": str(run_dir)}}
        self.driver = Driver(run_dir, settings, config, self.launcher, ARGV, self.heard)
        self.roster = self.driver.roster

    def role(self, name):
        return self.roster.roles.get(name)

    def beats(self, *names):
        return all(self.role(name) and self.role(name).beat for name in names)

    async def until_all(self):
        await until(lambda: self.beats("trainer", "engine-0", "worker-0", "worker-1"), "the roles")

    def pid(self, name):
        return self.role(name).registration.pid

    def lives(self, name):
        path = self.run_dir / f"{name}.lives"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    async def answer(self, name):
        """Return the answer to a beat of now."""
        path = self.run_dir / f"{name}.answer"
        path.unlink(missing_ok=True)
        await until(path.exists)
        return json.loads(path.read_text())

    def do(self, name, order):
        (self.run_dir / f"{name}.do").write_text(order)

    def signal(self, name, number):
        os.kill(self.pid(name), number)

    async def said(self, *words, limit_s=60.0):
        await until(
            lambda: any(all(w in n for w in words) for n in self.heard.notices),
            f"a notice with {words}",
            limit_s,
        )
        return next(n for n in self.heard.notices if all(w in n for w in words))

    async def request(self, path, body=None, token=None):
        headers = {"Authorization": f"Bearer {token or self.driver.token}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(
                "GET" if body is None else "POST", self.driver.control.url + path, json=body
            ) as answer,
        ):
            return answer.status, await answer.json()


@contextlib.asynccontextmanager
async def driving(run_dir, launcher=None, stall_s=1.0):
    """Yield a driver that runs; its roles have ended afterwards."""
    made = Driving(run_dir, ClusterSection(), launcher)
    made.roster.stall_s = stall_s
    made.task = asyncio.ensure_future(made.driver.run())
    try:
        yield made
    finally:
        made.task.cancel()
        with contextlib.suppress(BaseException):
            await made.task


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main():
    """Drive a run directory until the trainer ends, as a process that can be killed."""
    run_dir = Path(sys.argv[1])

    async def work():
        async with driving(run_dir, stall_s=5.0) as made:
            await made.task

    asyncio.run(work())


if __name__ == "__main__":
    main()
