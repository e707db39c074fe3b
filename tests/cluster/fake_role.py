"""A role that registers and beats, and does nothing else; orders are files in the run.

`NAME.do` holds the exit status to end with, or `stuck`, which stops the main loop, not the beats,
or `saves`: on SIGTERM it takes a while, and then notes in `NAME.saved` which roles still run.
Standard library only, so that it starts quickly.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

URL, TOKEN = os.environ["ROLLTREE_CLUSTER_URL"], os.environ["ROLLTREE_CLUSTER_TOKEN"]
NAME, RUN = os.environ["ROLLTREE_ROLE"], Path(os.environ["ROLLTREE_RUN"])
KIND = NAME.partition("-")[0]
BEAT_S = float(os.environ.get("FAKE_BEAT_S", "0.2"))
ORPHAN_S = float(os.environ.get("FAKE_ORPHAN_S", "60"))


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return json.loads(answer.read())


class Loop:
    advanced = time.monotonic()
    progress = 0


def beat():
    waits = {"worker": "trainer", "trainer": "engine"}.get(KIND)
    heard = time.monotonic()
    while True:
        body = {
            "name": NAME,
            "state": f"{KIND} at work",
            "waits_for": waits,
            "busy_since_s": time.monotonic() - Loop.advanced,
            "metrics": {"progress": Loop.progress, "active": 0},
            "pid": os.getpid(),
            "host": "here",
        }
        try:
            answer = ask("/beat", body)
            heard = time.monotonic()
            part = RUN / f".{NAME}.answer"
            part.write_text(json.dumps(answer))
            part.rename(RUN / f"{NAME}.answer")
            if answer["stop"]:
                os._exit(75)
            if answer["drain"] and KIND == "worker":
                os._exit(0)
        except OSError:
            if time.monotonic() - heard > ORPHAN_S:
                os._exit(75)
        time.sleep(BEAT_S)


def runs(lives):
    """Whether the newest process of a role runs."""
    try:
        os.kill(int(lives.read_text().split()[-1]), 0)
    except ProcessLookupError:
        return False
    return True


def main():
    order = RUN / f"{NAME}.do"

    def end(*_):
        if order.exists() and order.read_text() == "saves":
            time.sleep(1.5)
            running = [path.stem for path in sorted(RUN.glob("*.lives")) if runs(path)]
            (RUN / f"{NAME}.saved").write_text(" ".join(running))
        sys.exit(75)

    signal.signal(signal.SIGTERM, end)
    if order.exists() and order.read_text().startswith("early "):
        print("this role never works", flush=True)
        sys.exit(int(order.read_text().split()[1]))
    url = None if KIND == "worker" else f"http://127.0.0.1:1/{NAME}"
    ask("/register", {"name": NAME, "kind": KIND, "url": url, "pid": os.getpid(), "host": "here"})
    with open(RUN / f"{NAME}.lives", "a") as lives:
        lives.write(f"{os.getpid()}\n")
    if os.environ.get("FAKE_CHILD"):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (RUN / f"{NAME}.child").write_text(str(child.pid))
    threading.Thread(target=beat, daemon=True).start()
    while True:
        time.sleep(0.05)
        said = order.read_text() if order.exists() else ""
        if said == "stuck":
            continue
        Loop.advanced = time.monotonic()
        Loop.progress += 1
        if said.isdigit():
            sys.exit(int(said))


if __name__ == "__main__":
    main()
