"""Programs that are cheap to start: they speak HTTP by hand, without a client to import."""

import sys
import time
from pathlib import Path

import rolltree as rt
from rolltree.rollouts.requests import current_episode
from rolltree.testing import ScriptedClient

ASK = """
import json, os, socket, sys, time
from urllib.parse import urlsplit

def ask(text, url=None, **more):
    url = urlsplit(url or os.environ["OPENAI_BASE_URL"])
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    connection = socket.create_connection((url.hostname, url.port))
    connection.sendall(
        f"POST {url.path}/chat/completions HTTP/1.1\\r\\nHost: {url.netloc}\\r\\n"
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\n"
        f"Content-Length: {len(body)}\\r\\nConnection: close\\r\\n\\r\\n".encode() + body
    )
    data = b""
    while part := connection.recv(65536):
        data += part
    head, _, rest = data.partition(b"\\r\\n\\r\\n")
    status = int(head.split()[1])
    if status != 200:
        raise SystemExit(f"status {status}: {rest.decode()}")
    return json.loads(rest)["choices"][0]["message"]["content"]

"""
PYTHON = (sys.executable, "-I", "-S", "-c")


def script(code):
    """Return a command whose Python code can `ask` the model; braces are its own."""
    return [*PYTHON, (ASK + code).replace("{", "{{").replace("}", "}}")]


def rows(num):
    """Return rows with a question each."""
    return [{"question": f"question {i}", "answer": f"answer {i}"} for i in range(num)]


def said(messages):
    """Answer a question with its number."""
    return messages[-1]["content"].replace("question", "answer")


def one(state):
    """A reward that everything that is scored gets."""
    return 1.0


def play(program, client=None, num=1, limits=None, **settings):
    """Return the states of a ProgramEnv on `num` rows; it is closed, so its folders are gone."""
    settings.setdefault("rubric", rt.Rubric([one]))
    env = rt.ProgramEnv(program, dataset=rows(num), **settings)
    results = env.evaluate_sync(client or ScriptedClient(said), **(limits or {}))
    return results.state


class Hurrying(ScriptedClient):
    """Answers, and then leaves the program a second: no matter how long it took to start.

    `limit` is the clock's: "limit_s" or "deadline_s".
    """

    def __init__(self, limit="limit_s"):
        super().__init__(said)
        self.limit, self.clocks = limit, []

    async def respond(self, call, memory):
        response = await super().respond(call, memory)
        clock = self.clocks[-1] if self.limit == "limit_s" else current_episode().clock
        setattr(clock, self.limit, clock.at(time.monotonic()) + 1.0)
        return response


class HurriedEnv(rt.ProgramEnv):
    """A ProgramEnv that shows its clock to the client."""

    async def rollout(self, input, client, model="", sampling_args=None):
        self.clocks = hurrying(client).clocks
        return await super().rollout(input, client, model, sampling_args)

    def _clock(self, limit_s):
        self.clocks.append(super()._clock(limit_s))
        return self.clocks[-1]


def hurrying(client):
    """Return the `Hurrying` behind a client."""
    while not isinstance(client, Hurrying):
        client = client.clients[0]
    return client


def play_hurried(program, limit="limit_s", **settings):
    """Return the state of a program whose time is over a second after its first answer."""
    env = HurriedEnv(program, dataset=rows(1), rubric=rt.Rubric([one]), **settings)
    (state,) = env.evaluate_sync(Hurrying(limit), deadline_s=600.0).state
    return state


def is_alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_death(pids, limit_s=60.0):
    """Return when none of the processes runs."""
    end = time.monotonic() + limit_s
    while alive := [pid for pid in pids if is_alive(int(pid))]:
        assert time.monotonic() < end, f"{alive} still run"
        time.sleep(0.01)
