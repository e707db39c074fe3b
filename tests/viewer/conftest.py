"""A real server process over a folder of runs, and a client that has its token."""

import contextlib
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest

import golden_kit
from browser_kit import NoChromiumError, serving, started_chromium


@dataclass
class Page:
    process: subprocess.Popen
    link: str

    @property
    def base(self):
        return self.link.partition("/#")[0]

    @property
    def token(self):
        return self.link.partition("#token=")[2]

    def get(self, path, *, token=None, **headers):
        """GET with the token of the link, or another one; "" sends none."""
        token = self.token if token is None else token
        given = {"Authorization": f"Bearer {token}"} if token else {}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.get(self.base + path, headers=given | named, timeout=60)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Return a folder with the three runs of the newest schema, one of them deeper down."""
    root = tmp_path_factory.mktemp("view") / "runs"
    newest = golden_kit.SCHEMAS[-1]
    golden_kit.unpack(f"{newest}/train", root / "train")
    golden_kit.unpack(f"{newest}/agents", root / "deep" / "agents")
    golden_kit.unpack("4/tools", root / "tools")
    return root


@pytest.fixture(scope="session")
def start():
    """Return a function that starts `rolltree view` on a folder; all are stopped at the end."""
    with ExitStack() as stack:
        yield lambda *words: Page(*stack.enter_context(serving(*words)))


@pytest.fixture(scope="session")
def page(start, runs):
    return start(runs)


@pytest.fixture
def opening(tmp_path):
    """Return a function that starts `rolltree view` with a browser that notes its arguments."""
    program, note = tmp_path / "browser", tmp_path / "given"
    program.write_text(
        f"#!{sys.executable}\nimport os, pathlib, sys\n"
        f"pathlib.Path({str(note)!r} + '~').write_text(' '.join(sys.argv[1:]))\n"
        f"os.rename({str(note)!r} + '~', {str(note)!r})\n"
    )
    program.chmod(0o755)
    (tmp_path / "runs").mkdir()

    @contextlib.contextmanager
    def start(**variables):
        command = [sys.executable, "-m", "rolltree", "view", str(tmp_path / "runs")]
        environment = {**os.environ, "BROWSER": f"{program} %s", **variables}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        ) as process:
            try:
                link = process.stdout.readline().strip()
                deadline = time.monotonic() + 60
                while not note.is_file():
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                yield process, link, note.read_text()
            finally:
                process.terminate()

    return start


@pytest.fixture(scope="module")
def browser():
    """Return a real Chromium; its loop ends with the module, so that others can run theirs."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(started_chromium())
        except NoChromiumError as error:
            pytest.skip(str(error))
        yield made
