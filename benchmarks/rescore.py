"""Rescoring of stored rollouts: seconds and memory for 10,000, and whether it scored them right.

    python benchmarks/rescore.py --check
    python benchmarks/rescore.py --num 2000

Two-turn rollouts of `environments/arithmetic`, eight to a group, answered by a script. They are
rescored with another reward, compared with what the environment gave for it while they were played,
and with a group function. The seconds are CPU time, the report included.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from verdict import Bar, conclude, make_parser

import rolltree as rt
from rolltree._helpers.tasks import peak_rss_bytes
from rolltree.environments import load_object

ARITHMETIC = Path(__file__).resolve().parents[1] / "environments" / "arithmetic"
GROUP = 8


def record(folder: Path, num: int) -> None:
    """Store `num` rollouts: right at once, right after a hint, or wrong."""
    rng = random.Random(0)
    env = rt.load_environment(ARITHMETIC)

    def say(messages: rt.Messages) -> str:
        first, second = str(messages[-1]["content"]).split(". ")[-1].strip(" =").split(" + ")
        return str(int(first) + int(second) + rng.choice((0, 0, 1)))

    examples = env.num_examples("train")
    with rt.Run.create(folder, kind="eval") as run:
        for begin in range(0, num, examples * GROUP):
            part = min(num - begin, examples * GROUP)
            asyncio.run(
                rt.evaluate_async(
                    env,
                    rt.ScriptedClient(say),
                    num_examples=-(-part // GROUP),
                    rollouts_per_example=GROUP,
                    run=run,
                    phase=f"train{begin}",
                    split="train",
                )
            )


def longest(completions: list[rt.Messages]) -> list[float]:
    """Compare a group: 1 for the rollouts with the most messages."""
    most = max(len(completion) for completion in completions)
    return [float(len(completion) == most) for completion in completions]


def wrong(folder: Path) -> int:
    """Return how many rollouts were not given the reward that their old metric says."""
    with rt.Run.open(folder, "r") as run:
        found = dict(run.columns(("request_id", "reward")))
    with rt.Run.open(folder.with_name("run"), "r") as run:
        known = dict(run.columns(("request_id", "metrics")))
    return sum(found.get(name) != metrics["solved_first_try"] for name, metrics in known.items())


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num", type=int, default=10_000, help="rollouts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rolltree-rescore-") as scratch:
        source = Path(scratch, "run")
        record(source, options.num)
        first_try = load_object(f"{ARITHMETIC / 'arithmetic.py'}:solved_first_try")
        figures: dict[str, float] = {}
        for name, rubric in (("alone", first_try), ("group", longest)):
            target, began_s = source.with_name(name), time.process_time()
            report = rt.rescore(source, rubric=rubric, run_dir=target)
            figures[f"{name}_s"] = time.process_time() - began_s
            figures[f"{name}_changed"] = report.num_changed
        figures["rollouts"], figures["peak_mb"] = report.num_rollouts, peak_rss_bytes() / 1e6
        num_wrong = wrong(source.with_name("alone"))

    def show() -> None:
        for name, value in figures.items():
            print(f"{name:14} {value:10,.1f}")

    ms = 1000 / figures["rollouts"]
    bars = [
        Bar.at_most("ms of CPU a rollout, each alone", figures["alone_s"] * ms, 6.0),
        Bar.at_most("ms of CPU a rollout, in groups", figures["group_s"] * ms, 6.0),
        Bar.at_most("rollouts with a wrong reward", num_wrong, 0),
    ]
    return conclude(options, bars, figures, show)


if __name__ == "__main__":
    sys.exit(main())
