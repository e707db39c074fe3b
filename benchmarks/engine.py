"""Scale of the rollout engine: 10,000 in flight, 100,000 stored, 500 turns; lag, memory, reports.

    python benchmarks/engine.py                  all cases, figures on the last line
    python benchmarks/engine.py --check          exit 1 when a bar is missed
    python benchmarks/engine.py --json           one JSON object instead of the table
    python benchmarks/engine.py --in-flight 500 --stored 2000 --turns 50     a smaller run
    python benchmarks/engine.py --cases fast long                            some of the cases

Every case evaluates an environment with a run directory, in its own process, against a model
in the same process that answers after a random latency with fresh text, ids and logprobs.

- `fast`, `slow`: `--in-flight` rollouts of 4 turns and 4,000 tokens (2,000 sampled), all in flight
  at once, at latencies of 1 to 50 ms and of 5 to 15 s.
- `stored`: `--stored` one-turn rollouts of 100 tokens, ten of each example, 256 in flight. `growth`
  is the peak memory at their end over that at a tenth of them.
- `show`, `show_phase`: `rolltree show` on that run, without and with `--phase eval`. CPU time of
  the process, the interpreter's start included.
- `resume`: the same evaluation with one more example; seconds of CPU from opening the run until
  the model is asked.
- `long`: 8 rollouts at once of `--turns` turns with 400 tokens each; CPU time of a turn in the
  first and the last fifth. The model copies every prompt, as an engine that takes ids must.

Lag is what a task that sleeps for 10 ms oversleeps, from the call of `evaluate` to its report, as
far as the process used the CPU meanwhile (the clock's lag is by the clock alone, and counts what
other programs did). A loop held for a second is one sample of such a task, but a hundred waits of
10 ms met it; every sample is weighed with the waits that it stands for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from probe import PROBE_S, Probe
from talk import words
from verdict import Bar, conclude, make_parser

import rolltree
from rolltree._helpers.tasks import peak_rss_bytes, yield_fairly
from rolltree.inference.call import Answer, CallTree, ModelCall
from rolltree.inference.client_base import RootClient
from rolltree.store import Run
from rolltree.values.types import FinishReason, ModelResponse

CASES = ("fast", "slow", "stored", "show", "show_phase", "resume", "long")
GROUP_SIZE = 10  # rollouts of an example, in `stored`
MIB = 1024**2


class Memory:
    """The calls of one rollout."""

    def __init__(self) -> None:
        self.calls = CallTree()
        self.last: ModelResponse | None = None


class LatentModel(RootClient[Memory]):
    """Answers after a latency with `sampled` fresh ids, logprobs and text.

    A prompt has `told` new ids: the first one, and what every turn adds.
    """

    def __init__(self, low_s: float, high_s: float, told: int, sampled: int) -> None:
        self.low_s, self.high_s = low_s, high_s
        self.random = random.Random(0)
        self.num_answers = 0
        self.first_asked_s: float | None = None
        self.cpu_at = array("d")
        rng = np.random.default_rng(0)
        self.told = rng.integers(300, 150_000, told).astype(np.int32)
        self.sampled = rng.integers(300, 150_000, sampled).astype(np.int32)
        self.logprobs = -rng.random(sampled).astype(np.float32)
        self.versions = np.zeros(sampled, np.int32)
        self.text = words(self.random, sampled)

    @property
    def model(self) -> str:
        return "latent"

    def new_memory(self) -> Memory:
        return Memory()

    async def respond(self, call: ModelCall, memory: Memory) -> ModelResponse:
        if self.first_asked_s is None:
            self.first_asked_s = time.process_time()
        await asyncio.sleep(self.random.uniform(self.low_s, self.high_s))
        await yield_fairly()  # before its work, as the client of a server does
        self.num_answers += 1
        self.cpu_at.append(time.process_time())
        before = memory.last
        prompt = self.told.copy()
        if before is not None:
            prompt = np.concatenate((memory.calls.path(before.call_id), prompt))
        text = f"{self.num_answers} {self.text}"
        answer = Answer(
            FinishReason.STOP,
            text=text,
            message={"role": "assistant", "content": text},
            prompt_ids=prompt,
            completion_ids=self.sampled.copy(),
            logprobs=self.logprobs.copy(),
            versions=self.versions.copy(),
            num_prompt_tokens=len(prompt),
            num_completion_tokens=len(self.sampled),
            id=f"chatcmpl-{self.num_answers}",
            model="latent",
        )
        extends = None if before is None else before.call_id
        memory.last = memory.calls.record(answer, call, extends)
        return memory.last


class Talk(rolltree.MultiTurnEnv):
    """Says something new after every answer."""

    said = ""

    async def env_response(
        self, messages: rolltree.Messages, state: rolltree.State
    ) -> rolltree.Messages:
        return [{"role": "user", "content": f"{len(messages)} {self.said}"}]


def length(completion: rolltree.Messages) -> float:
    """The number of messages, between 0 and 1."""
    return len(completion) / 1000


def make_environment(num: int, turns: int, told: int) -> Talk:
    asked = words(random.Random(1), told)
    rows = [{"question": f"{index} {asked}", "answer": ""} for index in range(num)]
    env = Talk(dataset=rows, rubric=rolltree.Rubric([length]), max_turns=turns, env_id="talk")
    env.said = asked
    return env


def memory_mib() -> float:
    """Return the largest memory this process has had."""
    return peak_rss_bytes() / 2**20


async def evaluate(
    folder: Path,
    model: LatentModel,
    env: Talk,
    num: int,
    max_concurrent: int,
    on_progress: Any = None,
    group_size: int = 1,
) -> dict[str, float]:
    """Evaluate `num` examples with a run directory, the probe at the same time."""
    memory, cpu_s, began = memory_mib(), time.process_time(), time.perf_counter()
    with Run.open_or_create(folder, config={"bench": "engine"}) as run:
        probe = Probe()
        watching = asyncio.create_task(probe.run())
        await asyncio.sleep(2 * PROBE_S)
        report = await rolltree.evaluate_async(
            env,
            model,
            num_examples=num,
            rollouts_per_example=group_size,
            run=run,
            max_concurrent=max_concurrent,
            on_progress=on_progress,
        )
    await asyncio.sleep(2 * PROBE_S)
    watching.cancel()
    if report.num_rollouts != num * group_size or report.num_failed or report.reward is None:
        raise SystemExit(f"the run did not do the work: {report.as_dict()}")
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_s,
        "planning_cpu_s": (model.first_asked_s or 0.0) - cpu_s,
        "start_mib": memory,
        "peak_mib": memory_mib(),
        **probe.figures(),
    }


def in_flight(folder: Path, num: int, low_s: float, high_s: float) -> dict[str, float]:
    env = make_environment(num, turns=4, told=500)
    model = LatentModel(low_s, high_s, told=500, sampled=500)
    return asyncio.run(evaluate(folder, model, env, num, num))


def stored(folder: Path, num: int) -> dict[str, float]:
    env = make_environment(num // GROUP_SIZE, turns=1, told=60)
    model = LatentModel(0.0, 0.0, told=60, sampled=40)
    at_tenth = 0.0

    def on_progress(progress: Any) -> None:
        nonlocal at_tenth
        if not at_tenth and progress.num_done >= num // 10:
            at_tenth = memory_mib()

    found = asyncio.run(
        evaluate(folder, model, env, num // GROUP_SIZE, 256, on_progress, GROUP_SIZE)
    )
    return {**found, "tenth_mib": at_tenth, "growth": found["peak_mib"] / at_tenth}


def resume(folder: Path, num: int) -> dict[str, float]:
    num_examples = num // GROUP_SIZE + 1
    env = make_environment(num_examples, turns=1, told=60)
    model = LatentModel(0.0, 0.0, told=60, sampled=40)
    found = asyncio.run(evaluate(folder, model, env, num_examples, 256, group_size=GROUP_SIZE))
    if model.num_answers != GROUP_SIZE:
        raise SystemExit(f"{model.num_answers} rollouts were run, and {GROUP_SIZE} were missing")
    return found


def long(folder: Path, num_turns: int, num: int = 8) -> dict[str, float]:
    env = make_environment(num, turns=num_turns, told=200)
    model = LatentModel(0.001, 0.050, told=200, sampled=200)
    found = asyncio.run(evaluate(folder, model, env, num, num))
    fifth = len(model.cpu_at) // 5
    first = model.cpu_at[fifth] - model.cpu_at[0]
    last = model.cpu_at[-1] - model.cpu_at[-1 - fifth]
    return {
        **found,
        "first_turns_ms": 1000 * first / fifth,
        "last_turns_ms": 1000 * last / fifth,
    }


def show(folder: Path, *words: str) -> dict[str, float]:
    """Run `rolltree show` and return its CPU and wall time."""
    command = [sys.executable, "-m", "rolltree", "show", str(folder), *words]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode or "eval" not in done.stdout:
        raise SystemExit(f"rolltree show failed:\n{done.stdout}{done.stderr}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu_s, "wall_s": wall_s}


def run_case(name: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Run one case in this process."""
    return {
        "fast": lambda: in_flight(folder / "fast", options.in_flight, 0.001, 0.050),
        "slow": lambda: in_flight(
            folder / "slow", options.in_flight, *(0.001 * ms for ms in options.slow_ms)
        ),
        "stored": lambda: stored(folder / "stored", options.stored),
        "show": lambda: show(folder / "stored"),
        "show_phase": lambda: show(folder / "stored", "--phase", "eval"),
        "resume": lambda: resume(folder / "stored", options.stored),
        "long": lambda: long(folder / "long", options.turns),
    }[name]()


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run every case in its own process and return the figures by case."""
    results = {}
    wanted = set(options.cases)
    if wanted & {"show", "show_phase", "resume"}:
        wanted.add("stored")
    with tempfile.TemporaryDirectory(prefix="rolltree-engine-") as folder:
        for name in CASES:
            if name not in wanted:
                continue
            sizes = ["in_flight", "stored", "turns"]
            words = [f"--{size.replace('_', '-')}={getattr(options, size)}" for size in sizes]
            words += ["--slow-ms", *map(str, options.slow_ms), "--case", name, "--folder", folder]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, __file__, *words], capture_output=True, text=True, env=environment
            )
            if done.returncode:
                raise SystemExit(f"case {name} failed:\n{done.stderr[-3000:]}")
            results[name] = json.loads(done.stdout.splitlines()[-1])
            if not options.json:
                said = "  ".join(f"{key} {value:,.4g}" for key, value in results[name].items())
                print(f"{name:10} {said}", flush=True)
    return results


def bars(results: dict[str, dict[str, float]]) -> list[Bar]:
    found = []
    for name, what in (("fast", "1 to 50 ms"), ("slow", "5 to 15 s")):
        if name in results:
            figures = results[name]
            found.append(Bar.below(f"ms lag p99 at {what}", figures["lag_p99_ms"], 50))
            found.append(Bar.below(f"MiB in flight at {what}", figures["peak_mib"], 1024))
    if "stored" in results:
        found.append(Bar.at_most("times the memory of a tenth", results["stored"]["growth"], 1.1))
        found.append(Bar.below("ms lag p99 while storing", results["stored"]["lag_p99_ms"], 50))
    for name, what, bound in (("show", "show", 0.3), ("show_phase", "show --phase", 0.3)):
        if name in results:
            found.append(Bar.at_most(f"s {what}", results[name]["cpu_s"], bound))
    if "resume" in results:
        figures = results["resume"]
        found.append(Bar.at_most("s resume planning", figures["planning_cpu_s"], 3))
        found.append(Bar.below("ms lag p99 of a resume", figures["lag_p99_ms"], 50))
    if "long" in results:
        figures = results["long"]
        found.append(Bar.below("ms lag p99 of long rollouts", figures["lag_p99_ms"], 50))
        found.append(Bar.at_most("ms CPU of a late turn", figures["last_turns_ms"], 2))
    return found


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--in-flight", type=int, default=10_000, help="rollouts in flight")
    parser.add_argument("--stored", type=int, default=100_000, help="rollouts stored")
    parser.add_argument("--turns", type=int, default=500, help="turns of long rollouts")
    parser.add_argument(
        *("--slow-ms",), type=float, nargs=2, default=[5000, 15_000], help="latencies of `slow`"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="cases to run")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case, options.folder, options)))
        return 0
    results = measure(options)
    return conclude(options, bars(results), results)


if __name__ == "__main__":
    sys.exit(main())
