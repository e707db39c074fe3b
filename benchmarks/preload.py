"""Rollouts per second of programs that import openai: started each, and forked (`preload`).

    python benchmarks/preload.py            24 rollouts per run, two runs of each in turn
    python benchmarks/preload.py --check    exit 1 when the bar is missed
    python benchmarks/preload.py --json     one JSON object instead of the table
    python benchmarks/preload.py --num 48   more rollouts

Each program imports openai and makes one call, which a scripted model answers at once. The time of
a run includes the start of the process that is forked.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from verdict import Bar, conclude, make_parser

import rolltree as rt
from rolltree.testing import ScriptedClient

PROGRAM = """
import sys, openai
messages = [dict(role="user", content=sys.argv[1])]
print(openai.OpenAI().chat.completions.create(model="any", messages=messages).id)
"""


def one(state: Any) -> float:
    """A reward that everything gets."""
    return 1.0


def measure(num: int, concurrency: int, **settings: Any) -> float:
    """Return the rollouts per second of a run."""
    env = rt.ProgramEnv(
        [sys.executable, "-c", PROGRAM, "{question}"],
        dataset=[{"question": f"question {number}"} for number in range(num)],
        rubric=rt.Rubric([one]),
        **settings,
    )
    began = time.perf_counter()
    results = env.evaluate_sync(ScriptedClient(lambda messages: "4"), max_concurrent=concurrency)
    took_s = time.perf_counter() - began
    assert [state["program"]["exit_status"] for state in results.state] == [0] * num
    return num / took_s


def main() -> int:
    """Measure, and print the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--num", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=4)
    options = parser.parse_args()
    ways: dict[str, dict[str, Any]] = {
        "started": {},
        "forked": {"preload": ["openai", "openai.resources.chat"]},
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(2):  # in turns, since the speed of a machine changes
        for name, settings in ways.items():
            rates[name].append(measure(options.num, options.concurrency, **settings))
    gain = sum(rates["forked"]) / sum(rates["started"])

    def table() -> None:
        for name, values in rates.items():
            print(f"{name:8} {', '.join(f'{value:.2f}' for value in values)} rollouts per second")

    bar = Bar.at_least("times the rollouts per second", gain, 2)
    return conclude(options, [bar], {"rates": rates, "gain": gain}, table)


if __name__ == "__main__":
    sys.exit(main())
