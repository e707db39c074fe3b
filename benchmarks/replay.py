"""Replays of recorded rollouts of every ready-made environment: how many end equal, and how fast.

    python benchmarks/replay.py --check                    100 rollouts of each
    python benchmarks/replay.py --only wordle --num 10

Each environment is played by a player that answers rightly, wrongly and without any form in turn,
and calls tools if there are any. The run is then replayed with the environment loaded again.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verdict import Bar, conclude, make_parser

import rolltree as rt
from rolltree.environments.check_probes import HOSTILE_ANSWERS
from rolltree.records import ReplayReport
from rolltree.reports import replay_lines

ROOT = Path(__file__).resolve().parents[1]
MADE = {"train": "generated", "test": "generated", "num_generated": 100}
SETTINGS: dict[str, dict[str, Any]] = {"gsm8k": MADE, "math": MADE}
Say = Callable[[rt.Messages], Any]


def load(name: str) -> rt.Environment:
    """Return a ready-made environment, or one of those that are made here."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    folder = ROOT / "examples/delegation/code_book.py" if name == "code_book" else None
    return rt.load_environment(folder or ROOT / "environments" / name, **SETTINGS.get(name, {}))


def gym() -> rt.Environment:
    sides = {"to_text": "{}".format, "action_names": ("stick", "hit")}
    return rt.GymEnv("Blackjack-v1", num_train=0, num_eval=50, **sides)


def textarena() -> rt.Environment:
    return rt.TextArenaEnv("GuessTheNumber-v0", num_train=0, num_eval=50, max_turns=8)


BUILT_IN: dict[str, Callable[[], rt.Environment]] = {"gym": gym, "textarena": textarena}
READY_MADE = sorted(path.name for path in (ROOT / "environments").iterdir() if path.is_dir())
NAMES = [*READY_MADE, "code_book", *BUILT_IN]


def player(name: str, env: rt.Environment, seed: int = 0) -> Say:
    """Return what a model says: often the reference, in the form that is asked for."""
    rng = random.Random(seed)
    known = {_asked(row["prompt"]): str(row["answer"]) for row in env.get_eval_dataset()
             if row.get("answer") is not None and row["prompt"]}  # fmt: skip
    words = sorted({answer for answer in known.values() if answer.strip()}) or ["1"]
    numbers = [str(number) for number in range(1, 10)]
    forms = ["{}", "\\boxed{{{}}}", "<answer>{}</answer>", "<guess>{}</guess>", "[{}]",
             "<reversed_text>\n{}\n</reversed_text>"]  # fmt: skip
    tools = TOOLS.get(name)

    def say(messages: rt.Messages) -> Any:
        kind = rng.random()
        if tools is not None and kind < 0.6:
            return tools(rng)
        if kind < 0.1:
            return rng.choice([*HOSTILE_ANSWERS.values(), "", "I do not know."])
        if name in ("tic_tac_toe", "gym"):
            return rng.choice([*numbers, "stick", "hit", "hit"])
        if name == "code_book":
            return rng.choice([*"ABCXYZ", *numbers])
        right = known.get(_asked(messages), rng.choice(words))
        said = right if rng.random() < 0.5 else rng.choice([*words, *numbers])
        return rng.choice(forms).format(said)

    return say


def _asked(messages: rt.Messages) -> str:
    first = [m for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    return str(first[-1]["content"]) if first else ""


def _call(name: str, arguments: Any) -> rt.ChatMessage:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": written}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def shop(rng: random.Random) -> rt.ChatMessage:
    item = rng.choice(["bolt", "brush", "clock", "cup", "unknown", 3])
    a, b = rng.randrange(100), rng.randrange(100)
    calls = [("price", {"item": item}), ("multiply", {"a": a, "b": b}), ("multiply", {"a": "x"})]
    return _call(*rng.choice([*calls, ("nothing", {})]))


def python(rng: random.Random) -> rt.ChatMessage:
    codes = ["n = {0}", "print(n * {0})", "1 / 0", "print('x' * {0})", "sum(range({0}))", "while"]
    return _call("python", {"code": rng.choice(codes).format(rng.randrange(1000))})


TOOLS = {"tool_calls": shop, "python_tools": python}


def record_and_replay(name: str, num: int, folder: Path) -> tuple[list[ReplayReport], float]:
    """Play `num` rollouts, replay them in a separate environment; return the seconds of that."""
    env = load(name)
    client = rt.ScriptedClient(player(name, env))
    examples = min(num, env.num_examples("eval"))

    async def record(run: rt.Run) -> None:
        async with env:
            await rt.evaluate_async(
                env,
                client,
                num_examples=examples,
                rollouts_per_example=-(-num // examples),
                run=run,
                max_concurrent=16,
            )

    with rt.Run.create(folder, kind="eval") as run:
        asyncio.run(record(run))
    again, began_s = load(name), time.perf_counter()
    reports = rt.replay_many(folder, again, num=num)
    return reports, time.perf_counter() - began_s


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num", type=int, default=100, help="rollouts of each environment")
    parser.add_argument("--only", choices=NAMES, help="one environment")
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="rolltree-replay-") as scratch:
        for name in [options.only] if options.only else NAMES:
            reports, took_s = record_and_replay(name, options.num, Path(scratch, name))
            for report in reports:
                if not report.is_equal:
                    print("\n".join(replay_lines(report)), file=sys.stderr)
            states = [state for report in reports for state in report.live.states]
            rows[name] = {
                "rollouts": len(reports),
                "equal": sum(report.is_equal for report in reports),
                "calls": sum(report.num_replayed for report in reports),
                "agents": len({state.get("agent") for state in states}),
                "rewards": len({state["reward"] for state in states}),
                "seconds": took_s,
            }
    share = min(row["equal"] / row["rollouts"] for row in rows.values())

    def show() -> None:
        print(f"{'environment':14} {'rollouts':>8} {'equal':>6} {'calls':>6} {'replay':>8}")
        for name, row in rows.items():
            print(
                f"{name:14} {row['rollouts']:8} {row['equal']:6} {row['calls']:6} "
                f"{row['seconds']:6.1f} s"
            )

    bar = Bar.at_least("% of the rollouts replay equal, worst environment", 100 * share, 100)
    return conclude(options, [bar], rows, show)


if __name__ == "__main__":
    sys.exit(main())
