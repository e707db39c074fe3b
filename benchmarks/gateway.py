"""What the gateway costs beside calling the client directly: CPU per call, latency, memory.

    python benchmarks/gateway.py                      the table, figures on the last line
    python benchmarks/gateway.py --check              exit 1 when a bar is missed
    python benchmarks/gateway.py --litellm PYTHON     also litellm's proxy, of another Python

A fake server in a process of its own answers every call after 20 ms, with ids that continue the
earlier ones byte for byte. The same conversations (32 sessions of 50 turns, 256 of 20, 1,000 of 5;
each turn adds 200 characters and gets 200 back) go to it from an `OpenAIClient`, through a gateway,
and through litellm's proxy, each in its own process, whose CPU time and memory are read. The
gateway has a secret per session, records the token trees, and keeps every call on disk. The time
to the first token is that of the embedded engine, called directly and streamed through a gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from verdict import Bar, conclude, make_parser

SETTINGS = {"32 x 50": (32, 50), "256 x 20": (256, 20), "1000 x 5": (1000, 5)}
DELAY_S = 0.02
SAID = "answer " * 28 + "end."
ASKED = "question" * 25


# -- the processes ---------------------------------------------------------------------------------


def serve_upstream(port: int) -> None:
    """Answer chats with ids: the bytes of the conversation."""
    import uvicorn

    answer = list(SAID.encode())
    token = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    logprobs = {"content": [token] * (len(answer) + 1)}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        content, more = b"", True
        while more:
            message = await receive()
            content += message.get("body", b"")
            more = message.get("more_body", False)
        body: dict[str, Any] = {}
        if content:
            messages = msgspec.json.decode(content)["messages"]
            text = "".join(
                f"{each['content']}\x03"
                if each["role"] == "assistant"
                else f"\x01{each['content']}\x02"
                for each in messages
            )
            prompt = list(text.encode())
            message = {"role": "assistant", "content": SAID}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            choice |= {"token_ids": [*answer, 3], "logprobs": logprobs}
            counted = {"prompt_tokens": len(prompt), "completion_tokens": len(answer) + 1}
            counted["total_tokens"] = sum(counted.values())
            body = {"id": "x", "object": "chat.completion", "created": 1, "model": "fake"}
            body |= {"choices": [choice], "usage": counted, "prompt_token_ids": prompt}
            await asyncio.sleep(DELAY_S)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": msgspec.json.encode(body)})

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical", lifespan="off")


def serve_gateway(port: int, upstream: str, folder: str) -> None:
    import rolltree as rt

    async def run() -> None:
        client = rt.OpenAIClient(upstream, "fake", max_connections=2000)
        async with rt.gateway(client, directory=folder, port=port, admin_key="admin"):
            await asyncio.Event().wait()

    asyncio.run(run())


def call_directly(upstream: str, num_sessions: int, num_turns: int) -> None:
    """Make the calls from this process, and print its CPU seconds and what they took."""
    import rolltree as rt
    from rolltree.values.types import ChatMessage

    async def converse(client: Any) -> None:
        session, messages = client.session(), list[ChatMessage]()
        for turn in range(num_turns):
            messages.append({"role": "user", "content": f"{turn} {ASKED}"})
            response = await session.chat(messages)
            messages.append(response.message)

    async def run() -> None:
        client = rt.OpenAIClient(upstream, "fake", max_connections=2000)
        await converse(client)
        before, began_s = time.process_time(), time.perf_counter()
        await asyncio.gather(*(converse(client) for _ in range(num_sessions)))
        spent_s, took_s = time.process_time() - before, time.perf_counter() - began_s
        print(json.dumps([spent_s, took_s]), flush=True)
        await client.aclose()

    asyncio.run(run())


def start(*words: str, python: str = sys.executable, **more: Any) -> subprocess.Popen[str]:
    words = words if python != sys.executable else (str(Path(__file__).resolve()), *words)
    return subprocess.Popen([python, *words], text=True, stdout=subprocess.PIPE, **more)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of those that it started."""
    found = 0.0
    tick = os.sysconf("SC_CLK_TCK")
    for each in [pid, *children(pid)]:
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        found += (int(fields[11]) + int(fields[12])) / tick
    return found


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    direct = [int(word) for word in text.split()]
    return [*direct, *(each for child in direct for each in children(child))]


def memory_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


# -- the load --------------------------------------------------------------------------------------


async def converse(
    http: aiohttp.ClientSession, url: str, key: str, num_turns: int, waits: list[float]
) -> None:
    messages: list[dict[str, str]] = []
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"{turn} {ASKED}"})
        body = msgspec.json.encode({"model": "fake", "messages": messages})
        began_s = time.perf_counter()
        async with http.post(f"{url}/chat/completions", data=body, headers=headers) as response:
            content = await response.read()
            if response.status != 200:
                raise SystemExit(f"{url} answered {response.status}: {content[:300]!r}")
        waits.append(time.perf_counter() - began_s)
        said = msgspec.json.decode(content)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said})


async def wait_for(http: aiohttp.ClientSession, url: str, limit_s: float) -> None:
    end_s = time.perf_counter() + limit_s
    while time.perf_counter() < end_s:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(url):
                return
        await asyncio.sleep(0.1)
    raise SystemExit(f"nothing answers at {url}")


async def measure(
    process: subprocess.Popen[str], where: list[tuple[str, str]], num_turns: int
) -> dict[str, float]:
    """Run one conversation per address and key; return what it cost the process."""
    # uvicorn closes idle connections after 5 s, and a busy machine is late to notice.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(connector=connector) as http:
        await converse(http, *where[0], 1, [])
        before, began_s = cpu_s(process.pid), time.perf_counter()
        waits: list[float] = []
        await asyncio.gather(*(converse(http, *each, num_turns, waits) for each in where[1:]))
        took_s, spent_s = time.perf_counter() - began_s, cpu_s(process.pid) - before
    waits.sort()
    return {
        "cpu_ms": 1000 * spent_s / len(waits),
        "calls_per_s": len(waits) / took_s,
        "p50_ms": 1000 * waits[len(waits) // 2],
        "p99_ms": 1000 * waits[int(0.99 * len(waits))],
        "memory_mib": memory_mib(process.pid),
    }


@contextlib.contextmanager
def running(*words: str, python: str = sys.executable) -> Iterator[subprocess.Popen[str]]:
    process = start(*words, python=python)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def through_gateway(upstream: str, num_sessions: int, num_turns: int) -> dict[str, float]:
    """Measure a fresh gateway; also its memory per session, and how that grows with turns."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        running("--role", "gateway", str(port), upstream, folder) as process,
    ):
        root, admin = f"http://127.0.0.1:{port}", {"Authorization": "Bearer admin"}
        async with aiohttp.ClientSession(headers=admin) as http:
            await wait_for(http, f"{root}/health", 60.0)
            where = []
            for _ in range(num_sessions + 1):
                async with http.post(f"{root}/sessions", json={}) as response:
                    made = await response.json()
                where.append((made["base_url"], made["api_key"]))
            begun = memory_mib(process.pid)
            found = await measure(process, where, num_turns)
            name = where[1][0].split("/")[-2]
            async with http.get(f"{root}/sessions/{name}") as response:
                shown = await response.json()
            assert (shown["num_calls"], shown["breaks"]) == (num_turns, [])
    found["session_kib"] = 1024 * (found["memory_mib"] - begun) / num_sessions
    found["bytes_per_token"] = 1024 * found["session_kib"] / shown["num_unique_tokens"]
    return found


def directly(upstream: str, num_sessions: int, num_turns: int) -> dict[str, float]:
    process = start("--role", "direct", upstream, str(num_sessions), str(num_turns))
    said, _ = process.communicate()
    spent_s, took_s = json.loads(said)
    num_calls = num_sessions * num_turns
    return {"cpu_ms": 1000 * spent_s / num_calls, "calls_per_s": num_calls / took_s}


async def through_litellm(
    python: str, upstream: str, num_sessions: int, num_turns: int
) -> dict[str, float]:
    port = free_port()
    model = {"model": "openai/fake", "api_base": upstream, "api_key": "x"}
    key = "sk-" + "benchmark" * 4
    config = {
        "model_list": [{"model_name": "fake", "litellm_params": model}],
        "general_settings": {"master_key": key},  # without one it does not start
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config, file)  # JSON is YAML
        file.flush()
        words = ["-c", "from litellm import run_server; run_server()", "--config", file.name]
        with running(*words, "--port", str(port), python=python) as process:
            async with aiohttp.ClientSession() as http:
                await wait_for(http, f"http://127.0.0.1:{port}/health/liveliness", 120.0)
            url = f"http://127.0.0.1:{port}/v1"
            return await measure(process, [(url, key)] * (num_sessions + 1), num_turns)


async def first_tokens(num_calls: int = 60) -> dict[str, dict[str, float]]:
    """Return the ms to the first token of the embedded engine: called directly, and streamed.

    The two are asked in turn, so that what else the machine does meets both.
    """
    import rolltree as rt
    from rolltree.inference.call import ModelCall
    from rolltree.values.types import SamplingParams

    client = rt.local_client(*rt.load_model("tiny"))
    waits: dict[str, list[float]] = {"direct": [], "gateway": []}

    async def ask_directly(question: str) -> None:
        began_s, first = time.perf_counter(), list[float]()
        call = ModelCall(
            [{"role": "user", "content": question}],
            SamplingParams(max_tokens=4),
            on_delta=lambda _: first.append(time.perf_counter()),
        )
        await call.to(client)
        waits["direct"].append(1000 * (first[0] - began_s))

    async with rt.gateway(client) as g, g.session() as s, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {s.api_key}"}
        for at in range(2 * num_calls):
            # Numbers first: what begins alike would be read from the engine's cache.
            question = f"{at} {ASKED}"
            if at % 2:
                await ask_directly(question)
                continue
            body = {"messages": [{"role": "user", "content": question}], "model": "tiny"}
            body |= {"max_tokens": 4, "stream": True}
            began_s = time.perf_counter()
            async with http.post(f"{s.base_url}/chat/completions", json=body, headers=headers) as r:
                await r.content.readline()
                waits["gateway"].append(1000 * (time.perf_counter() - began_s))
                await r.read()
    await client.aclose()
    return {
        name: {"first_token_ms": sorted(each[5:])[(len(each) - 5) // 2]}
        for name, each in waits.items()
    }


async def compare(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    port, rows = free_port(), dict[str, dict[str, dict[str, float]]]()
    upstream = f"http://127.0.0.1:{port}/v1"
    with running("--role", "upstream", str(port)):
        async with aiohttp.ClientSession() as http:
            await wait_for(http, f"{upstream}/models", 60.0)
        for name, (num_sessions, num_turns) in SETTINGS.items():
            row = rows[name] = {
                "direct": await asyncio.to_thread(directly, upstream, num_sessions, num_turns),
                "gateway": await through_gateway(upstream, num_sessions, num_turns),
            }
            if options.litellm:
                row["litellm"] = await through_litellm(
                    options.litellm, upstream, num_sessions, num_turns
                )
        half = await through_gateway(upstream, 32, 25)
    rows["32 x 25"] = {"gateway": half}
    rows["first token"] = await first_tokens()
    return rows


def show(rows: dict[str, dict[str, dict[str, float]]]) -> None:
    names = ("cpu_ms", "calls_per_s", "p50_ms", "p99_ms", "memory_mib", "session_kib")
    names = (*names, "bytes_per_token", "first_token_ms")
    print(f"{'sessions x turns':18}{'':9}" + "".join(f"{name:>16}" for name in names))
    for setting, row in rows.items():
        for who, found in row.items():
            cells = "".join(f"{found[n]:16,.2f}" if n in found else f"{'':16}" for n in names)
            print(f"{setting:18}{who:9}{cells}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--litellm", metavar="PYTHON", help="a Python that has litellm[proxy]")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.role:
        case ["upstream", port]:
            serve_upstream(int(port))
            return 0
        case ["gateway", port, upstream, folder]:
            serve_gateway(int(port), upstream, folder)
            return 0
        case ["direct", upstream, num_sessions, num_turns]:
            call_directly(upstream, int(num_sessions), int(num_turns))
            return 0
    rows = asyncio.run(compare(options))
    at_256, whole, half = rows["256 x 20"], rows["32 x 50"]["gateway"], rows["32 x 25"]["gateway"]
    added = at_256["gateway"]["cpu_ms"] - at_256["direct"]["cpu_ms"]
    growth = whole["session_kib"] / half["session_kib"]
    first = {who: found["first_token_ms"] for who, found in rows["first token"].items()}
    return conclude(
        options,
        [
            Bar.below("ms of CPU that the gateway adds to a call at 256 sessions", added, 1.0),
            # Twice the turns are twice the tokens; keeping every prompt would make it four times.
            Bar.at_most(
                "ms that the gateway adds to the first token of the embedded engine",
                first["gateway"] - first["direct"],
                5.0,
            ),
            Bar.at_most("times the memory of a session for twice the turns", growth, 2.6),
        ],
        rows,
        lambda: show(rows),
    )


if __name__ == "__main__":
    sys.exit(main())
