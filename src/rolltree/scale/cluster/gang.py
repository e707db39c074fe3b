"""The trainer role: `python -m rolltree.scale.cluster.gang N` runs N ranks on this machine.

It does what torchrun does for one machine, without torchrun's stores: those listen on every address
without a token, and torchrun unpickles a key of theirs. The ranks find each other through a file
that only this user can open, and their own sockets are on loopback.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rolltree.scale.cluster.roles import GLOO_ON_LOOPBACK
from rolltree.training.launch import RENDEZVOUS

_POLL_S = 0.1
_GRACE_S = 30.0
_TRAINER = (sys.executable, "-m", "rolltree.scale.cluster.trainer")


def run_gang(num_ranks: int, command: Sequence[str] = _TRAINER) -> int:
    """Run the ranks until all have ended; return 0, or the exit status of the first that failed.

    When one fails, the others get SIGTERM, and SIGKILL after 30 s. SIGTERM and SIGINT are passed on
    to all. Only in the main thread.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def pass_on(number: int, _: object = None) -> None:
        received.append(number)
        for process in ranks:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    with tempfile.TemporaryDirectory(prefix="rolltree-ranks-") as folder:
        for rank in range(num_ranks):
            environment = _environment(rank, num_ranks, Path(folder))
            # A signal for the group of this process must reach them only once.
            ranks.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
                )
            )
        if received:  # while they were started
            pass_on(received[0])
        status, end = 0, float("inf")
        while (statuses := [process.poll() for process in ranks]).count(None):
            if not status and (failed := [s for s in statuses if s]):
                status, end = failed[0], time.monotonic() + _GRACE_S
                rank = statuses.index(status)
                print(f"rank {rank} ended with status {status}; the others end with it", flush=True)
                pass_on(signal.SIGTERM)
            if time.monotonic() > end:
                for process in ranks:
                    process.kill()
            time.sleep(_POLL_S)
    status = status or next((s for s in statuses if s), 0)
    # A negative one is that of a signal, which cannot be an exit status.
    return status if status >= 0 else 128 - status


def _environment(rank: int, num_ranks: int, folder: Path) -> dict[str, str]:
    """Return the variables of one rank, with the names that torchrun gives them."""
    size = str(num_ranks)
    own = {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
        **{"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
        RENDEZVOUS: f"file://{folder / 'store'}",
    }
    # As torchrun does: every rank would start a thread per core.
    threads = {"OMP_NUM_THREADS": "1"} if num_ranks > 1 else {}
    return {**threads, **os.environ, **GLOO_ON_LOOPBACK, **own}


if __name__ == "__main__":
    sys.exit(run_gang(int(sys.argv[1])))
