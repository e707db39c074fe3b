"""Two processes on gloo that train every architecture together, one after another."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rolltree.training.models.ranks import start_ranks
from rolltree.values.errors import RolltreeError

LIMIT_S = 200
"""Of one architecture: some 2 s alone. A rank that waits for one that gave up never answers."""


class Pair:
    """Two ranks; they start with the first call, and anew after one that broke them."""

    def __init__(self) -> None:
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what `function(ranks, *args)` returns on rank 0, once both ranks are through.

        Raises:
            RolltreeError: both refused.
            RuntimeError: a rank crashed, or they waited for each other.
        """
        if not self._ends:
            self._start()
        try:
            for end in self._ends:
                end.send((function, args))
            left, replies = list(self._ends), {}
            while left:
                ready = wait(left, LIMIT_S)
                if not ready:
                    raise RuntimeError("a rank waits for the other forever")
                for end in ready:
                    replies[self._ends.index(end)] = end.recv()
                    left.remove(end)
                if any(kind == "crashed" for kind, _ in replies.values()):
                    break
        except (EOFError, OSError) as error:
            self.close()
            raise RuntimeError("a rank was aborted") from error
        except RuntimeError:
            self.close()
            raise
        kinds = {kind for kind, _ in replies.values()}
        if kinds == {"refused"}:
            raise RolltreeError(replies[0][1])
        if kinds != {"done"}:
            self.close()
            raise RuntimeError("; ".join(text for kind, text in replies.values() if kind != "done"))
        return replies[0][1]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        place = Path(self._folder.name) / "store"
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, place, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()
        self._ends, self._processes, self._folder = [], [], None


def _serve(rank: int, place: Path, end: Connection) -> None:
    from tests_models.check import quiet

    quiet()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    with start_ranks(init_method=f"file://{place}") as ranks:
        while True:
            try:
                function, args = end.recv()
            except EOFError:  # whoever asks is gone
                os._exit(0)
            end.send(_reply(function, ranks, args))


def _reply(function: Callable[..., Any], ranks: Any, args: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "done", function(ranks, *args)
    except RolltreeError as refusal:
        return "refused", str(refusal)
    except Exception as crash:
        where = traceback.extract_tb(crash.__traceback__)[-1]
        text = f"{type(crash).__name__}: {str(crash)[:300]}"
        return "crashed", f"{text} ({Path(where.filename).name}:{where.lineno})"
