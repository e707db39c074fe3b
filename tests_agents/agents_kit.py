"""Runs an agent as a process of its own in front of a session, and checks what was recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rolltree.samples import build_samples
from rolltree.values.types import Messages

PROGRAMS = Path(__file__).parent / "programs"
TASK = "add() subtracts. Fix it."
WRONG, RIGHT = (f"def add(a, b):\n    return a {sign} b\n" for sign in "-+")
"""A file, and what an agent makes of it."""
TIME_LIMIT_S = 240  # importing one framework takes seconds on a busy machine


async def play(
    python: Path, session: Any, folder: Path, program: str, *arguments: str, **environment: str
) -> dict[str, Any]:
    """Run `programs/PROGRAM.py` in `folder` and return what its last line says, as JSON."""
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(python), str(PROGRAMS / f"{program}.py"), *arguments]
    said = await run(command, session, folder, folder, PATH=path, **environment)
    line = said.splitlines()[-1]
    try:
        return json.loads(line)
    except ValueError:
        raise AssertionError(f"the program's last line is {line!r}") from None


async def run(
    command: Sequence[str | Path], session: Any, home: Path, work: Path, **environment: str
) -> str:
    """Run an agent in the folder `work`, with nothing of this machine's home; return its output.

    It fails if the agent does, or if it asks the proxy of its environment for another host.
    """
    async with refusing_proxy() as (proxy, asked):
        given = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(home),
            "LANG": "C.UTF-8",
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANTHROPIC_BASE_URL": session.root_url,
            "ANTHROPIC_API_KEY": session.api_key,
            # The price list of litellm, from its package rather than the network.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_SILENT_STARTUP": "1",
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
            **environment,
        }
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=work,
            env=given,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # A limit has to reach what a launcher started, too.
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                said, complained = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode == 0, (said + complained).decode()[-4000:]
    assert not asked, f"it asked for other hosts: {asked}"
    return said.decode()


@contextlib.asynccontextmanager
async def refusing_proxy() -> AsyncIterator[tuple[str, list[str]]]:
    """Serve a proxy that refuses every request; yield its URL, and the requests' first lines."""
    asked: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode(errors="replace").strip())
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1")
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}", asked


def num_answers(messages: Messages) -> int:
    """Return how often the model has answered in this conversation."""
    return sum(message["role"] == "assistant" for message in messages)


def calling(*calls: tuple[str, dict[str, Any]], content: str = "") -> dict[str, Any]:
    """Return what a scripted model says to call tools, each a name and its arguments."""
    made = [{"function": {"name": name, "arguments": json.dumps(its)}} for name, its in calls]
    return {"content": content, "tool_calls": made}


def check_recorded(session: Any) -> None:
    """Check that every call is in the tree whole, and that every sampled token is trained once."""
    tree = session.trajectory.tree
    assert tree.num_calls == len(session.trajectory)
    num_sampled = 0
    for call, step in enumerate(session.trajectory):
        tokens = step["tokens"]
        path = [*tokens["prompt_ids"], *tokens["completion_ids"]]
        assert tree.path_view(call).tolist() == path
        num_sampled += len(tokens["completion_ids"])
    assert num_sampled == session.num_sampled_tokens > 0
    batch = build_samples([session.state], "tree")
    assert batch.skipped == ()
    assert sum(len(sample.records.target) for sample in batch.samples) == num_sampled


def continues(session: Any) -> list[int | None]:
    """Return, for each call, the latest one whose tokens its prompt begins with, all of them."""
    tree = session.trajectory.tree
    paths = [tree.path_view(call).tolist() for call in range(tree.num_calls)]
    prompts = [step["tokens"]["prompt_ids"] for step in session.trajectory]
    return [
        next(
            (i for i in reversed(range(at)) if prompt[: len(paths[i])] == paths[i]),
            None,
        )
        for at, prompt in enumerate(prompts)
    ]


def causes(session: Any) -> list[str]:
    """Return why prompts did not continue what came before."""
    return [each.cause.value for each in session.breaks]
