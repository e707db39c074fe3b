"""Cost of a rollout compared with verifiers 0.1.8: CPU time, kept memory, import time.

    python benchmarks/rollouts.py            2,000 four-turn rollouts per run, figures last
    python benchmarks/rollouts.py --check    exit 1 when a bar is missed
    python benchmarks/rollouts.py --json     one JSON object instead of the table
    python benchmarks/rollouts.py --num 200  fewer rollouts

Both libraries run the same environment class against the same scripted server in their own
process. The server takes the place of sockets: every request goes through the library's own client
(`OpenAIClient`, `AsyncOpenAI`) down to what carries bytes, and every answer is fresh JSON with
vLLM's token ids and the logprobs of 100 sampled ids. `http.py` measures the same with sockets.
Prompts have 500 ids in the first turn and 500 more in every turn after it (400 of the environment,
100 sampled). What the server takes to answer is measured and taken out. The environment says the
same 400 tokens of text every turn, so that its text, which both libraries keep as it is, hardly
counts as memory; `own text` shows 32 turns with new text in each.

verifiers runs in its own virtual environment, made if it is missing, in
`~/.cache/rolltree/benchmarks` (or $ROLLTREE_HOME/benchmarks). The runs of the two alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

from talk import NUM_VARIANTS, make_answers, make_environment, make_rows, words
from verdict import Bar, conclude, make_parser

PEER = "verifiers==0.1.8.post2"
SIDES = ("rolltree", "verifiers")
FIRST_IDS, NEW_IDS, SAMPLED_IDS = 500, 400, 100
CONCURRENCY = 64
SAID = words(random.Random(99), NEW_IDS)


class ScriptedTransport:
    """Answers of a chat model with vLLM's token fields, made before the clock starts.

    A conversation names its variant ("task-3") in its first message; its turn is the number of
    assistant messages. Each answer differs from every other by its id.
    """

    def __init__(self, num_turns: int) -> None:
        self.busy_s = 0.0
        self.num_answers = 0
        self.answers = [
            make_answers(
                *(number, num_turns),
                first_ids=FIRST_IDS,
                new_ids=NEW_IDS,
                sampled_ids=SAMPLED_IDS,
                token_bytes=lambda token: list(token.encode()),
            )
            for number in range(NUM_VARIANTS)
        ]

    def answer(self, sent: bytes) -> bytes:
        """Answer one request."""
        started = time.thread_time()
        marker = sent.index(b"task-") + 5
        turn = sent.count(b'"assistant"')
        self.num_answers += 1
        tail = self.answers[int(sent[marker : marker + 1])][turn]
        body = b'{"id":"chatcmpl-%d",' % self.num_answers + tail
        self.busy_s += time.thread_time() - started
        return body

    async def send(self, url: str, headers: Any, content: bytes | None) -> Any:
        """Answer rolltree's client."""
        from rolltree.inference.transport import HttpAnswer

        return HttpAnswer(200, self.answer(content or b""))

    async def aclose(self) -> None:
        """Return: nothing is open."""


async def run_rolltree(
    num: int, turns: int, transport: ScriptedTransport, own_text: bool = False
) -> Any:
    import rolltree

    env = make_environment(rolltree, turns, SAID, own_text)
    client = rolltree.OpenAIClient("http://scripted/v1", "scripted", transport=transport)
    sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": SAMPLED_IDS}
    return await env.generate(
        make_rows(num, FIRST_IDS), client, "scripted", sampling, max_concurrent=CONCURRENCY
    )


async def run_verifiers(
    num: int, turns: int, transport: ScriptedTransport, own_text: bool = False
) -> Any:
    import httpx
    import verifiers
    from openai import AsyncOpenAI

    async def answer(request: httpx.Request) -> httpx.Response:
        body = transport.answer(request.content)
        return httpx.Response(200, headers={"content-type": "application/json"}, content=body)

    env = make_environment(verifiers, turns, SAID, own_text)
    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    client = AsyncOpenAI(base_url="http://scripted/v1", api_key="none", http_client=http)
    sampling = {
        "temperature": 1.0,
        "max_tokens": SAMPLED_IDS,
        "logprobs": True,
        "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True},
    }
    return await env.generate(
        make_rows(num, FIRST_IDS),
        client,
        "scripted",
        sampling,
        max_concurrent=CONCURRENCY,
        use_tqdm=False,
    )


RUN = {"rolltree": run_rolltree, "verifiers": run_verifiers}


def check_results(results: Any, num: int, turns: int) -> None:
    """Refuse figures of a run that did not do the work."""
    states = results["state"]
    for state in (states[0], states[-1]):
        steps = state["trajectory"]
        tokens = steps[-1]["tokens"]
        sizes = (len(tokens["prompt_ids"]), len(tokens["completion_logprobs"]))
        wanted = (FIRST_IDS + (turns - 1) * (NEW_IDS + SAMPLED_IDS), SAMPLED_IDS)
        if len(steps) != turns or sizes != wanted or state["reward"] is None:
            raise SystemExit(f"a rollout is not what it should be: {len(steps)} steps, {sizes}")
    if len(states) != num:
        raise SystemExit(f"{len(states)} rollouts of {num} came back")


def side(name: str, num: int, turns: int, memory: bool, own_text: bool = False) -> dict[str, float]:
    """Run one side in this process: CPU seconds per rollout, or bytes kept per rollout."""
    transport = ScriptedTransport(turns)
    asyncio.run(RUN[name](4, turns, ScriptedTransport(turns)))  # imports and caches
    gc.collect()
    if memory:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
    started = time.process_time()
    results = asyncio.run(RUN[name](num, turns, transport, own_text))
    cpu_s = time.process_time() - started - transport.busy_s
    kept = 0.0
    if memory:
        gc.collect()
        kept = (tracemalloc.get_traced_memory()[0] - before) / num
        tracemalloc.stop()
    check_results(results, num, turns)
    return {"cpu_s": cpu_s / num, "kept_bytes": kept}


def peer_python() -> str:
    """Return the Python of verifiers' virtual environment, which is made when it is missing."""
    home = os.environ.get("ROLLTREE_HOME")
    cache = Path(home) if home else Path.home() / ".cache" / "rolltree"
    folder = cache / "benchmarks" / PEER.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {PEER} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", PEER], check=True)
        (folder / "complete").touch()
    return str(python)


def run_side(python: str, name: str, num: int, turns: int, *flags: str) -> dict[str, Any]:
    command = [python, __file__, "--side", name, "--num", str(num), "--turns", str(turns), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the run of {name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def import_seconds(python: str, name: str, repeats: int) -> float:
    code = f"import time; t = time.perf_counter(); import {name}; print(time.perf_counter() - t)"
    return min(
        float(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(repeats)
    )


def measure(num: int, rounds: int) -> dict[str, float]:
    """Return all figures. CPU time is each side's best of `rounds` runs, which alternate."""
    python = {"rolltree": sys.executable, "verifiers": peer_python()}
    cpu: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name in SIDES:
            found = run_side(python[name], name, num, 4)
            cpu[name].append(found["cpu_s"])
    figures: dict[str, float] = {}
    for name in SIDES:
        figures[f"{name}_ms"] = 1000.0 * min(cpu[name])
        figures[f"{name}_per_cpu_s"] = 1.0 / min(cpu[name])
    figures["cpu_ratio"] = min(cpu["verifiers"]) / min(cpu["rolltree"])
    for label, turns, few, *flags in (("4", 4, 40), ("32", 32, 6), ("32_own", 32, 6, "--own-text")):
        for name in SIDES:
            found = run_side(python[name], name, few, turns, "--memory", *flags)
            figures[f"{name}_kept_kib_{label}"] = found["kept_bytes"] / 1024
        kept = [figures[f"{name}_kept_kib_{label}"] for name in SIDES]
        figures[f"memory_ratio_{label}"] = kept[1] / kept[0]
    figures["import_s"] = import_seconds(python["rolltree"], "rolltree", 5)
    figures["verifiers_import_s"] = import_seconds(python["verifiers"], "verifiers", 2)
    return figures


def bars(figures: dict[str, float]) -> list[Bar]:
    return [
        Bar.at_least("times the rollouts per CPU second", figures["cpu_ratio"], 8),
        Bar.at_least("times less memory kept, 4 turns", figures["memory_ratio_4"], 15),
        Bar.at_least("times less memory kept, 32 turns", figures["memory_ratio_32"], 100),
        Bar.at_most("s to import", figures["import_s"], 0.3),
    ]


def report(figures: dict[str, float]) -> None:
    print(f"{'':34}{'rolltree':>12}{'verifiers':>12}{'ratio':>8}")
    table = [
        ("CPU ms per four-turn rollout", "ms", "cpu_ratio"),
        ("rollouts per CPU second", "per_cpu_s", "cpu_ratio"),
        ("kept KiB per rollout, 4 turns", "kept_kib_4", "memory_ratio_4"),
        ("kept KiB per rollout, 32 turns", "kept_kib_32", "memory_ratio_32"),
        ("the same, own text", "kept_kib_32_own", "memory_ratio_32_own"),
    ]
    for label, key, ratio in table:
        ours, theirs = figures[f"rolltree_{key}"], figures[f"verifiers_{key}"]
        print(f"{label:34}{ours:12.2f}{theirs:12.2f}{figures[ratio]:8.1f}")
    ours, theirs = figures["import_s"], figures["verifiers_import_s"]
    print(f"{'import, s':34}{ours:12.3f}{theirs:12.3f}{theirs / ours:8.1f}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num", type=int, default=2000, help="rollouts per run")
    parser.add_argument("--rounds", type=int, default=2, help="alternating runs per side")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=4, help=argparse.SUPPRESS)
    parser.add_argument("--own-text", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(side(args.side, args.num, args.turns, args.memory, args.own_text)))
        return 0
    figures = measure(args.num, args.rounds)
    return conclude(args, bars(figures), figures, lambda: report(figures))


if __name__ == "__main__":
    sys.exit(main())
