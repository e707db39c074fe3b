"""Runs an agent as a process of its own in front of a session, and checks what was recorded."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from rolltree.samples import build_samples

PROGRAMS = Path(__file__).parent / "programs"
TIME_LIMIT_S = 120  # importing one framework takes seconds on a busy machine


async def play(
    python: Path, session: Any, folder: Path, program: str, *arguments: str
) -> dict[str, Any]:
    """Run `programs/PROGRAM.py` in `folder` and return what its last line says, as JSON."""
    environment = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.root_url,
        "ANTHROPIC_API_KEY": session.api_key,
        # The price list of litellm, from its package rather than the network.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_SILENT_STARTUP": "1",
    }
    process = await asyncio.create_subprocess_exec(
        str(python),
        str(PROGRAMS / f"{program}.py"),
        *arguments,
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            said, complained = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, complained.decode()[-4000:]
    line = said.decode().splitlines()[-1]
    try:
        return json.loads(line)
    except ValueError:
        raise AssertionError(f"the program's last line is {line!r}") from None


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
