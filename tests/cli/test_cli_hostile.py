"""A hostile environment and a hostile model in the real program: what reaches the terminal, raw."""

import os
import pty
import re
import select
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rolltree.cli
from rolltree._helpers.untrusted import visible
from rolltree.testing import ScriptedServer

PAYLOAD = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31;5m[bold red]hi[/]\u202eback\U000e0041\u2066\x9b2J\x7f:bomb:"
)
ENVIRONMENT = f"PAYLOAD = {PAYLOAD!r}\n" + textwrap.dedent(
    """
    import logging
    import warnings
    import rolltree as rt

    Evil = type("Evil" + PAYLOAD, (Exception,), {})

    class Hostile(rt.ToolEnv):
        async def setup_state(self, state):
            if state["answer"] == "2":
                raise Evil(PAYLOAD)
            return state

        @rt.cleanup
        async def leave(self, state):
            raise Evil("leaving " + PAYLOAD)

    def load_environment(fails=""):
        if fails == "plain":
            raise RuntimeError("loading " + PAYLOAD)
        if fails == "known":
            raise rt.ConfigError("loading " + PAYLOAD)
        logging.getLogger("rolltree.environments").error("logged %s", PAYLOAD)
        logging.getLogger("other").error("logged too %s", PAYLOAD)
        warnings.warn("warned " + PAYLOAD)
        rows = [
            {"question": f"{PAYLOAD} {i}", "answer": str(i), "task": f"{PAYLOAD}{i}"}
            for i in range(3)
        ]

        def right(completion, answer):
            return float(completion[-1]["content"] == answer)

        right.__name__ = "right" + PAYLOAD
        return Hostile(eval_dataset=rows, rubric=rt.Rubric([right]), env_id=PAYLOAD, max_turns=1)
    """
)
OWN = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|2K|1?A|[0-9]+D)")
"""What rich itself sends to a terminal for colours, the cursor and progress."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / "hostile.py").write_text(ENVIRONMENT)
    return tmp_path


def words(*arguments):
    return [sys.executable, "-m", "rolltree", *map(str, arguments)]


def in_terminal(*arguments, cwd):
    """Return every character that a terminal got from the program."""
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"}
    process = subprocess.Popen(
        words(*arguments), stdin=inner, stdout=inner, stderr=inner, cwd=cwd, env=environment
    )
    os.close(inner)
    data = b""
    while True:
        try:
            ready = select.select([outer], [], [], 120.0)[0]
            piece = os.read(outer, 65536) if ready else b""
        except OSError:  # the program has ended
            break
        if not piece:
            break
        data += piece
    os.close(outer)
    process.wait(60)
    return data.decode(errors="surrogateescape")


def in_pipe(*arguments, cwd):
    done = subprocess.run(words(*arguments), cwd=cwd, capture_output=True, timeout=120)
    return (done.stdout + done.stderr).decode(errors="surrogateescape")


def is_harmless(out):
    assert "\x1b[31;5m" not in out
    rest = OWN.sub("", out).replace("\r", "")
    assert visible(rest) == rest, ascii(rest[:3000])
    return rest


@pytest.mark.parametrize("run", [in_terminal, in_pipe])
def test_nothing_that_a_model_or_an_environment_says_reaches_the_terminal(folder, run):
    def said(messages):
        return PAYLOAD

    with ScriptedServer(said) as server:
        out = is_harmless(
            run(
                *("eval", "./hostile", "-m", "scripted", "-b", server.base_url, "-n", 3, "-r", 1),
                *("--run", "run", "--transcripts", 3),
                cwd=folder,
            )
        )
    for text in ("logged ", "logged too ", "warned ", "leaving "):
        assert text in out
    assert out.count("[bold red]hi[/]") > 6
    assert ":bomb:" in out  # no emoji either
    assert "Evil" in out
    is_harmless(run("show", "run", "--transcripts", 9, "--phase", "eval", cwd=folder))
    is_harmless(run("runs", ".", cwd=folder))


def test_errors_of_every_kind_are_harmless(folder):
    for fails in ("plain", "known"):
        out = in_terminal("eval", "./hostile", "-a", f'{{"fails": "{fails}"}}', cwd=folder)
        assert "[bold red]hi[/]" in is_harmless(out)
    out = is_harmless(in_terminal("env", "check", "./hostile", cwd=folder))
    assert "[bold red]hi[/]" in out


def test_the_command_line_prints_in_one_place():
    """`echo` and `SafeConsole` clean what they print; a bare print would not."""
    package = Path(rolltree.cli.__file__).parents[1]
    files = [*package.glob("**/cli/*.py"), *package.glob("*/cli.py")]
    bare = [
        f"{file.name}: {line.strip()}"
        for file in sorted(files, key=lambda file: file.name)
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"(?<![\w.])print\(|\bConsole\(|click\.echo", line)
    ]
    assert bare == [
        "arguments.py: print(text, file=file, flush=True)",
        'gateway.py: print(f"admin key: {gateway.admin_key}", flush=True)',
        'serve.py: print(f"token: {used_token}", flush=True)',
        'serve.py: print(f"admin token: {used_admin_token}", flush=True)',
        "view.py: print(link, flush=True)",
    ]
