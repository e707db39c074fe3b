"""Make the golden runs of today's schema: `cd tests; python -m golden.make_runs`, once per schema.

They are what every later version must read and continue:

    train    three turns, GRPO on a tiny model, failures, evaluations before, within and after
    agents   a parent that delegates to a child, with answers that cannot be parsed
    tools    `rolltree eval` over HTTP: tool calls, wrong ones too, and a server that fails

Do not make them again for a schema that was released: that would test nothing.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import rolltree as rt
from golden.pack import ROOT, pack
from rolltree.cli import app
from rolltree.inference.models import TinyConfig, make_tiny
from rolltree.store import Run
from rolltree.testing import HttpFault, ScriptedServer

HERE = Path(__file__).parent
TINY = TinyConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, max_context=512)
TRAIN: dict[str, Any] = {
    "run": {"dir": "runs/train", "seed": 3},
    "model": {"name": "./model"},
    "engine": {"max_batch": 8, "max_context": 512},
    "sampling": {"max_tokens": 6, "temperature": 1.5},
    "algorithm": {"group_size": 4, "groups_per_step": 2},
    "optim": {"lr": 5e-3},
    "train": {"num_steps": 4, "num_threads": 1, "max_failed_share": 1.0},
    "eval": {"every": 2, "num_examples": 6},
    "checkpoint": {"every": 2, "keep": 1, "export": False},
}


class Letters(rt.MultiTurnEnv):
    """Write letters in three turns; the world breaks on one example in five."""

    async def env_response(self, messages: rt.Messages, state: rt.State) -> rt.Messages:
        if state["example_id"] % 5 == 3:
            raise ConnectionError("the letter box is stuck: läuft nicht \x1b[31m")
        return [{"role": "user", "content": f"more {state['answer']}, please ✓"}]


@rt.run_inline
def letters(completion: rt.Messages, answer: str) -> float:
    """The share of what was said that are letters."""
    said = "".join(str(m["content"]) for m in completion if m["role"] == "assistant")
    return sum(c.isalpha() for c in said) / (len(said) + 1)


@rt.run_inline
def length(completion: rt.Messages) -> float:
    """How many messages there were."""
    return float(len(completion))


def letters_environment() -> rt.Environment:
    """Return the environment of the run `train`."""
    rows = [{"question": f"write {c}", "answer": c} for c in "abcdefghijklmno"]
    rubric = rt.Rubric([letters])
    rubric.add_metric(length)
    return Letters(
        dataset=rows, eval_dataset=rows, system_prompt="You write.", rubric=rubric, max_turns=3,
        env_id="letters",
    )  # fmt: skip


def code_book() -> Any:
    """Return the module of the example with delegation."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        "code_book", ROOT / "examples" / "delegation" / "code_book.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def agents_client() -> rt.ScriptedClient:
    """Return the model of the run `agents`."""
    say = code_book().expert({"ask": 0.3, "book": 0.4, "tell": 0.2}, seed=1)
    return rt.ScriptedClient(lambda messages: "?!" if "F" in str(messages) else say(messages))


async def evaluate_agents(run: Run) -> rt.EvalReport:
    """Play the run `agents`, or what it lacks."""
    environment = code_book().load_environment(num_train=4, num_eval=8)
    return await rt.evaluate_async(
        environment, agents_client(), num_examples=8, rollouts_per_example=3, run=run, seed=5
    )


def shopper(messages: list[dict[str, Any]]) -> Any:
    """Return what the model of the run `tools` says: look up, multiply wrongly, answer."""
    turns = sum(message["role"] == "assistant" for message in messages)
    if turns == 0:
        call = '<tool_call>\n{"name": "price", "arguments": {"item": "clock"}}\n</tool_call>'
        return f"<think>a clock?</think>{call}"
    if turns == 1:
        return '<tool_call>\n{"name": "multiply", "arguments": {"a": "x"}}\n</tool_call>'
    return "<answer>\n100\n</answer>"


FAULTS = [None] * 5 + [HttpFault(status=400)] + [None] * 6 + [HttpFault(status=400)]


def tools_command(url: str, run: str) -> list[str]:
    """Return the words of the command that makes, or continues, the run `tools`."""
    return [
        *("eval", "environments/tool_calls", "-m", "scripted", "-b", url, "-n", "4", "-r", "2"),
        *("-c", "1", "--seed", "7", "-T", "0.7", "--run", run),
    ]


def main() -> None:
    """Make the three runs and pack them."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("environments").symlink_to(ROOT / "environments")
        Path("model").mkdir()
        make_tiny(Path("model"), TINY)
        rt.train(TRAIN, environment=letters_environment(), reporter=rt.Silent())
        with Run.create("runs/agents", config={"model": "scripted"}, kind="eval") as run:
            asyncio.run(evaluate_agents(run))
            run.add_event("notice", {"message": "made by hand"})
        with ScriptedServer(shopper, model="scripted", faults=FAULTS) as server:
            done = CliRunner().invoke(app, tools_command(server.base_url, "runs/tools"))
        assert done.exit_code == 0, done.output
        version = sqlite3.connect("runs/train/run.db").execute("PRAGMA user_version").fetchone()[0]
        for name in ("train", "agents", "tools"):
            target = HERE / str(version) / f"{name}.tar.xz"
            pack(Path("runs") / name, target, expected=True)


if __name__ == "__main__":
    main()
