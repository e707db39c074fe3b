"""Cost of a model call over a real socket: CPU time and event-loop lag, 1 to 4,000 connections.

    python benchmarks/http.py            1, 64, 256, 1,000 and 4,000 connections, figures last
    python benchmarks/http.py --check    exit 1 when a bar is missed
    python benchmarks/http.py --json     one JSON object instead of the table
    python benchmarks/http.py --connections 64 --scale 0.1      a smaller run

Rollouts of four turns run against a server in a process of its own that does next to nothing: it
finds the end of the request, counts the assistant's messages and sends an answer that was made
before, in vLLM's shape with its token ids and the logprobs of all sampled ids. A prompt has 100
ids and grows by 40 a turn (20 sampled, 20 of the environment). Every side runs in a process of its
own whose CPU time, all threads together, is divided by the turns.

- `rolltree`: an environment on `OpenAIClient`, as it comes.
- `AsyncOpenAI`: the same environment of rolltree on openai's client, as it comes.
- `verifiers`: the same environment of verifiers on the `AsyncOpenAI` that verifiers itself makes.
- `aiohttp`: no library, only the same requests; the answers are read and not looked at.
- `burst`: `rolltree` again, where the server holds answers back until all connections wait for one,
  and then sends them at once. It has no bar: asyncio reads all that has come in one round of the
  loop, before anything else has a turn.

As many rollouts are in flight as there are connections. Lag is what a task that sleeps for 10 ms
oversleeps, as far as the process used the CPU meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, TypeAlias

from probe import Probe
from talk import NUM_VARIANTS, make_answers, make_environment, make_rows, words
from verdict import Bar, conclude, make_parser

if __name__ == "http":  # a neighbour wants the standard library's, and this folder comes first
    _here = Path(__file__).resolve().parent
    _spec = PathFinder.find_spec("http", [at for at in sys.path if Path(at).resolve() != _here])
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["http"] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["http"])

CONNECTIONS = (1, 64, 256, 1000, 4000)
NUM_TURNS = 4
FIRST_IDS, NEW_IDS, SAMPLED_IDS = 100, 20, 20
NUM_ROLLOUTS = {
    "rolltree": {1: 500, 64: 2000, 256: 2000, 1000: 4000, 4000: 8000},
    "burst": {64: 2000, 256: 2000, 1000: 4000},
    "aiohttp": {1: 1000, 64: 4000, 256: 4000, 1000: 8000, 4000: 12000},
    "AsyncOpenAI": {1: 200, 64: 500, 256: 768, 1000: 2000, 4000: 4000},
    "verifiers": {1: 100, 64: 256, 256: 512, 1000: 1000},
}
"""Rollouts per side and connections; what is missing here is not measured.

verifiers at 4,000 connections takes most of an hour.
"""


class Serving(asyncio.Protocol):
    """One connection of the server."""

    answers: list[list[bytes]] = []
    num_answers = 0
    held: list[tuple[Serving, bytes]] = []
    releasing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.waiting = b""

    def data_received(self, data: bytes) -> None:
        data = self.waiting + data
        end = data.find(b"\r\n\r\n")
        at = data.lower().find(b"content-length:", 0, end) + 15 if end >= 0 else 0
        if end < 0 or len(data) < end + 4 + int(data[at : data.index(b"\r\n", at)]):
            self.waiting = data
            return
        self.waiting = b""
        marker = data.index(b"task-", end) + 5
        tail = self.answers[int(data[marker : marker + 1])][data.count(b'"assistant"', end)]
        Serving.num_answers += 1
        body = b'{"id":"chatcmpl-%d",' % Serving.num_answers + tail
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        answer = head % len(body) + body
        if data.startswith(b"POST /burst-"):
            self.hold(answer, int(data[12 : data.index(b"/", 12)]))
        else:
            self.transport.write(answer)

    def hold(self, answer: bytes, num: int) -> None:
        """Keep an answer until `num` are there, or no further one came for a while."""
        Serving.held.append((self, answer))
        if Serving.releasing is not None:
            Serving.releasing.cancel()
        if len(Serving.held) >= num:
            self.release()
        else:
            Serving.releasing = asyncio.get_running_loop().call_later(0.5, self.release)

    @staticmethod
    def release() -> None:
        held, Serving.held = Serving.held, []
        for connection, answer in held:
            connection.transport.write(answer)


async def serve() -> None:
    """Serve until standard input ends; the port is the first line of the output."""
    Serving.answers = [
        make_answers(
            *(number, NUM_TURNS),
            first_ids=FIRST_IDS,
            new_ids=NEW_IDS,
            sampled_ids=SAMPLED_IDS,
            token_bytes=lambda token: [32],
        )
        for number in range(NUM_VARIANTS)
    ]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Serving, "127.0.0.1", 0, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


Row: TypeAlias = dict[str, Any]
SAID = words(random.Random(99), NEW_IDS)


SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_tokens": SAMPLED_IDS}


async def run_rolltree(url: str, rows: list[Row], connections: int) -> Any:
    import rolltree

    client = rolltree.OpenAIClient(url, "scripted", max_connections=connections)
    env = make_environment(rolltree, NUM_TURNS, SAID)
    found = await env.generate(rows, client, "scripted", SAMPLING, max_concurrent=connections)
    await client.aclose()
    return found["state"]


async def run_sdk(url: str, rows: list[Row], connections: int) -> Any:
    from openai import AsyncOpenAI

    import rolltree

    client = AsyncOpenAI(base_url=url, api_key="none")
    env = make_environment(rolltree, NUM_TURNS, SAID)
    found = await env.generate(rows, client, "scripted", SAMPLING, max_concurrent=connections)
    await client.close()
    return found["state"]


async def run_verifiers(url: str, rows: list[Row], connections: int) -> Any:
    import verifiers
    from verifiers.types import ClientConfig
    from verifiers.utils.client_utils import setup_client

    client = setup_client(ClientConfig(api_base_url=url))
    env = make_environment(verifiers, NUM_TURNS, SAID)
    sampling = {
        **SAMPLING,
        "logprobs": True,
        "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True},
    }
    found = await env.generate(
        rows, client, "scripted", sampling, max_concurrent=connections, use_tqdm=False
    )
    await client.close()
    return found["state"]


async def run_aiohttp(url: str, rows: list[Row], connections: int) -> None:
    import aiohttp

    inputs = iter(rows)
    more = [message(turn) for turn in range(NUM_TURNS - 1)]

    async def worker(session: aiohttp.ClientSession) -> None:
        for row in inputs:
            messages = list(row["prompt"])
            for turn in range(NUM_TURNS):
                body = {"model": "scripted", "messages": messages, "logprobs": True, **SAMPLING}
                async with session.post(f"{url}/chat/completions", json=body) as answer:
                    if answer.status != 200 or len(await answer.read()) < 1000:
                        raise SystemExit(f"the server answered {answer.status}")
                if turn < NUM_TURNS - 1:
                    messages += more[turn]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(worker(session) for _ in range(connections)))


def message(turn: int) -> list[dict[str, str]]:
    """Return what a turn adds to a conversation."""
    answer = words(random.Random(turn), SAMPLED_IDS)
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": SAID}]


def check_results(states: Any, num: int) -> None:
    """Refuse figures of a run that did not do the work."""
    if len(states) != num:
        raise SystemExit(f"{len(states)} rollouts of {num} came back")
    grown = FIRST_IDS + (NUM_TURNS - 1) * (NEW_IDS + SAMPLED_IDS)
    for state in states:
        steps = state["trajectory"]
        if len(steps) != NUM_TURNS or state["reward"] is None:
            raise SystemExit(f"a rollout has {len(steps)} turns: {state.get('error')}")
        tokens = steps[-1]["tokens"]
        sizes = len(tokens["prompt_ids"]), len(tokens["completion_logprobs"])
        if sizes != (grown, SAMPLED_IDS):
            raise SystemExit(f"a rollout has {sizes} ids and logprobs")


RUN = {
    "rolltree": run_rolltree,
    "burst": run_rolltree,
    "aiohttp": run_aiohttp,
    "AsyncOpenAI": run_sdk,
    "verifiers": run_verifiers,
}


async def measure_side(name: str, url: str, num: int, connections: int) -> dict[str, float]:
    """Run one side in this process, after a small run that imports and fills caches."""
    await RUN[name](url, make_rows(8, FIRST_IDS), 4)
    if name == "burst":
        url = url.replace("/v1", f"/burst-{connections}/v1")
    rows, probe = make_rows(num, FIRST_IDS), Probe()
    gc.collect()
    watching = asyncio.create_task(probe.run())
    await asyncio.sleep(0.02)
    cpu_s, began = time.process_time(), time.perf_counter()
    states = await RUN[name](url, rows, connections)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began
    await asyncio.sleep(0.02)
    watching.cancel()
    if states is not None:
        check_results(states, num)
    num_turns = num * NUM_TURNS
    return {
        "cpu_ms": 1000 * cpu_s / num_turns,
        "turns_per_cpu_s": num_turns / cpu_s,
        "turns_per_s": num_turns / wall_s,
        **probe.figures(),
    }


def raise_open_files() -> None:
    """Allow this process and its children as many open files as the system lets them have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def measure(connections: list[int], sides: list[str], scale: float) -> dict[str, Any]:
    """Return figures by side and number of connections."""
    from rollouts import peer_python

    raise_open_files()
    python = dict.fromkeys(RUN, sys.executable)
    if "verifiers" in sides:
        python["verifiers"] = peer_python()
    figures: dict[str, Any] = {name: {} for name in sides}
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
        for number in connections:
            for name in sides:
                num = NUM_ROLLOUTS[name].get(number)
                if num is not None:
                    num = max(round(num * scale), number)
                    words = ["--side", name, "--url", url, "--num", str(num)]
                    words += ["--connections", str(number)]
                    done = subprocess.run(
                        [python[name], __file__, *words], capture_output=True, text=True
                    )
                    if done.returncode:
                        raise SystemExit(f"the run of {name} failed:\n{done.stderr[-3000:]}")
                    figures[name][str(number)] = json.loads(done.stdout.splitlines()[-1])
                    if os.environ.get("HTTP_BENCH_VERBOSE"):
                        print(name, number, done.stdout.splitlines()[-1], file=sys.stderr)
        server.stdin.close()
    return figures


def bars(figures: dict[str, Any]) -> list[Bar]:
    """Return the promises; what was not measured has none."""
    found = []
    for number, row in figures.get("rolltree", {}).items():
        bound = 0.8 if int(number) <= 1000 else 1.2
        found.append(Bar.at_most(f"ms of CPU a turn at {number}", row["cpu_ms"], bound))
        found.append(Bar.below(f"ms lag p99 at {number}", row["lag_p99_ms"], 50))
    for number, bound in (("64", 10), ("1000", 20)):
        ours, theirs = (figures.get(name, {}).get(number) for name in ("rolltree", "verifiers"))
        if ours and theirs:
            ratio = ours["turns_per_cpu_s"] / theirs["turns_per_cpu_s"]
            found.append(
                Bar.at_least(f"times verifiers' turns per CPU s at {number}", ratio, bound)
            )
    return found


def report(figures: dict[str, Any]) -> None:
    """Print a row per side and number of connections."""
    columns = ("cpu_ms", "turns_per_cpu_s", "turns_per_s", "lag_p50_ms", "lag_p99_ms", "lag_max_ms")
    heads = ("CPU ms/turn", "turns/CPU s", "turns/s", "lag p50", "lag p99", "lag max, ms")
    print(f"{'connections':>11} {'':12}" + "".join(f"{head:>13}" for head in heads))
    numbers = dict.fromkeys(number for rows in figures.values() for number in rows)
    for number in numbers:
        for name, rows in figures.items():
            if number in rows:
                cells = "".join(f"{rows[number][column]:13,.2f}" for column in columns)
                print(f"{number:>11} {name:12}{cells}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--connections", type=int, nargs="+", default=list(CONNECTIONS))
    parser.add_argument("--sides", nargs="+", choices=tuple(RUN), default=list(RUN))
    parser.add_argument("--scale", type=float, default=1.0, help="times the rollouts")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=tuple(RUN), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--num", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve())
        return 0
    if args.side:
        (number,) = args.connections
        print(json.dumps(asyncio.run(measure_side(args.side, args.url, args.num, number))))
        return 0
    figures = measure(args.connections, args.sides, args.scale)
    return conclude(args, bars(figures), figures, lambda: report(figures))


if __name__ == "__main__":
    sys.exit(main())
