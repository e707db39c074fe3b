"""The JSON endpoints, which map paths and parameters to functions of `records`.

A run's name is its path relative to the root, percent-encoded as one segment. A parameter that an
endpoint does not have is an error.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_origin
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from rolltree._helpers.untrusted import shorten
from rolltree.insight.comparison import RunPhase, held_out_gain
from rolltree.insight.page.cache import cache_file, cache_folder
from rolltree.insight.page.curves import run_curves
from rolltree.insight.page.evaluation_view import evaluation_view
from rolltree.insight.page.glances import Glances
from rolltree.insight.page.group_tree import group_tree, tree_picture
from rolltree.insight.page.pages import MAX_ROWS, group_page, rollout_page, row_previews
from rolltree.insight.page.rollout_view import rollout_view
from rolltree.insight.page.token_lens import token_lens
from rolltree.insight.page.watching import change_mark, is_running
from rolltree.insight.search import SearchIndex
from rolltree.records import compare
from rolltree.records.overview import run_overview, run_summary
from rolltree.records.story import run_story
from rolltree.records.values import json_bytes
from rolltree.store import Run, run_folders
from rolltree.values.errors import ConfigError, RolltreeError, StoreError, UnknownName, did_you_mean

logger = logging.getLogger("rolltree.insight.page")

_MAX_OPEN = 16
_MAX_ERROR_CHARACTERS = 500
_PATIENCE_S, _LEAST_PATIENCE_S = 3.0, 0.1
"""How long a list waits for all slow runs together, and then still for each of them."""
_STILL_READ = "it is still being read: it is large, or another program has locked it."


def api_response(value: object, status: int = 200) -> Response:
    """Return `value` as JSON; a number that is not finite is null."""
    return Response(json_bytes(value), status, media_type="application/json")


@dataclass(frozen=True, slots=True)
class _Opened:
    """A run that stays open; `file` shows whether it has been replaced."""

    run: Run
    file: tuple[int, int]


class _Look(threading.Thread):
    """Reads one run's row of the list in its own thread, so that no list waits for it."""

    def __init__(self, folder: Path, name: str, mark: str) -> None:
        super().__init__(name=f"look at {name}", daemon=True)
        self.folder, self.run_name, self.mark = folder, name, mark
        self.row: dict[str, Any] | None = None
        self.error = ""

    def run(self) -> None:
        """Read the row; an unreadable run must not hide the others."""
        try:
            with Run.open(self.folder, mode="r", check="rows") as run:
                self.row = {"id": self.run_name, **run_overview(run)}
        except StoreError as error:
            self.error = shorten(str(error), _MAX_ERROR_CHARACTERS)
        except Exception as error:  # noqa: BLE001  a run that rolltree did not write
            self.error = _unexpected(error)


class Runs:
    """The runs at and below a folder, opened for reading on demand."""

    def __init__(self, root: Path) -> None:
        root = root.resolve()
        is_run = (root / "run.db").is_file()
        self.root = root.parent if is_run else root
        self._only = root if is_run else None
        self._open: OrderedDict[str, _Opened] = OrderedDict()
        self._looks: dict[Path, _Look] = {}
        self._lock = threading.Lock()

    def folders(self) -> list[Path]:
        """Return the folders that may be runs."""
        return list(run_folders(self.root)) if self._only is None else [self._only]

    def overviews(self) -> dict[str, list[dict[str, Any]]]:
        """Return a row per run, the newest first, and the unreadable runs with their errors.

        A run that has not changed since the last request is not opened again. While a slow run is
        still being read, the others are shown.
        """
        rows, unreadable = [], []
        looks: dict[Path, _Look] = {}
        # Shared by all slow runs: a disk that hangs must not hide the other runs.
        patience = _PATIENCE_S
        for folder in self.folders():
            # Taken before the run is read, so that writes meanwhile change the next mark.
            mark = change_mark([folder])
            look = self._looks.get(folder)
            if look is None or not (look.is_alive() or (look.row and look.mark == mark)):
                look = _Look(folder, self.name(folder), mark)
                look.start()
                began = time.monotonic()
                look.join(max(_LEAST_PATIENCE_S, patience))
                if look.is_alive():
                    patience -= time.monotonic() - began
            looks[folder] = look
            if (row := look.row) is not None:
                rows.append({**row, "age_s": max(0.0, time.time() - row["last_written"])})
            else:
                unreadable.append({"id": look.run_name, "error": look.error or _STILL_READ})
        self._looks = looks
        rows.sort(key=lambda row: row["last_written"], reverse=True)
        return {"runs": rows, "unreadable": unreadable}

    def mark(self) -> str:
        """Return a text that changes when the list changes."""
        num_read_on = sum(look.is_alive() for look in self._looks.values())
        return f"{change_mark(self.folders())}-{num_read_on}"

    def name(self, folder: Path) -> str:
        """Return the name of a run: its path below the root."""
        return folder.relative_to(self.root).as_posix()

    def folder(self, name: str) -> Path:
        """Return the directory of a run.

        Raises:
            UnknownName: there is no run of this name.
        """
        # The name comes from a URL, and must name a folder below the root however it is spelled.
        parts = name.split("/")
        folder = self.root.joinpath(*parts)
        is_below = all(part not in ("", ".", "..") and "\0" not in part for part in parts)
        is_shown = self._only is None or folder == self._only
        is_named = is_below and is_shown and len(parts) <= 4
        if not (is_named and os.path.isfile(folder / "run.db")):  # False for impossible names, too
            raise UnknownName(f"there is no run {shorten(name, 200)!r} below {self.root}.")
        return folder

    def get(self, name: str) -> Run:
        """Return a run, open for reading, which closes when it is no longer used.

        Raises:
            UnknownName: there is no run of this name.
            StoreError: it cannot be read.
        """
        folder = self.folder(name)
        try:
            status = (folder / "run.db").stat()
        except OSError as error:
            raise UnknownName(f"the run {shorten(name, 200)!r} is gone.") from error
        # The inode: a run that was deleted and made again at the same path is a different one.
        file = (status.st_dev, status.st_ino)
        with self._lock:
            found = self._open.get(name)
        if found is None or found.file != file:
            # Outside the lock, since another program's lock on the file may make this wait.
            run = Run.open(folder, mode="r", check="rows")
            # A request may still read a run that left the list, so it closes with its last user.
            weakref.finalize(run, run._database.close)
            found = _Opened(run, file)
        with self._lock:
            self._open[name] = found
            self._open.move_to_end(name)
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        return found.run


# -- endpoints -------------------------------------------------------------------------------------


def _previews(run: Run, index: SearchIndex, of: list[str]) -> Any:
    """Return previews of rollouts; each is named `INDEX:REQUEST`."""
    names = []
    for each in of[:MAX_ROWS]:
        place, colon, request_id = each.partition(":")
        if not (colon and place.isdecimal() and len(place) < 10):
            raise ConfigError(
                f"a preview is named by INDEX:REQUEST, not by {shorten(each, 100)!r}."
            )
        names.append((request_id, int(place)))
    return row_previews(run, names, index)


def _index(run: Run, index: SearchIndex, build: bool = False) -> Any:
    """Return the progress of the text index; with `build`, begin to build it."""
    found = index.state()
    worker = _INDEXING.get(run)
    is_busy = worker is not None and worker.is_alive()
    error = None if is_busy or worker is None else worker.error
    if build and not is_busy and not found["is_whole"] and error is None:
        _INDEXING[run] = worker = _Indexing(index)
        worker.start()
        is_busy = True
    elif error is not None:
        del _INDEXING[run]
        raise error
    return {**found, "is_building": is_busy}


class _Indexing(threading.Thread):
    """Builds a text index in its own thread, which pauses between batches."""

    def __init__(self, index: SearchIndex) -> None:
        super().__init__(name="index of texts", daemon=True)
        self._index = index
        self.error: RolltreeError | None = None

    def run(self) -> None:
        """Build the index; the next request reports an error."""
        try:
            # The pauses let this process answer other requests.
            self._index.build(pause=lambda: time.sleep(0.005))
        except RolltreeError as error:
            self.error = error


_INDEXING: weakref.WeakKeyDictionary[Run, _Indexing] = weakref.WeakKeyDictionary()


def index_of(run: Run) -> SearchIndex:
    """Return the index of the texts of a run's rollouts, kept in the user's cache folder."""
    try:
        return SearchIndex(run, cache_file(run.path, ".texts.db"))
    except OSError as error:
        raise ConfigError(
            f"{cache_folder()} cannot be created ({error.strerror}), so texts cannot be indexed. "
            "Set ROLLTREE_CACHE to a writable folder."
        ) from error


_STORIES: weakref.WeakKeyDictionary[Run, tuple[int, float, Any]] = weakref.WeakKeyDictionary()
"""For each run: the number of commits, when the story may be computed again, and the story."""
_PAUSE = 20
"""The story of a running run is recomputed after this many times as long as it took."""
_STORY_LOCKS: weakref.WeakKeyDictionary[Run, threading.Lock] = weakref.WeakKeyDictionary()
"""A lock per run, so that no run waits for the story of another."""


def _story(run: Run) -> Any:
    """Return the story of a run; it reads all rows, so it is recomputed only after a pause.

    `again_s`: seconds until a request computes it again; None if nothing new is stored.
    """
    # One thread computes a story, and the others wait for it.
    with _STORY_LOCKS.setdefault(run, threading.Lock()):
        commits, began = run.num_commits, time.monotonic()
        stored, due, story = _STORIES.get(run, (-1, 0.0, None))
        if story is None or (stored != commits and began >= due):
            story, stored = run_story(run), commits
            due = time.monotonic() + _PAUSE * (time.monotonic() - began)
            _STORIES[run] = stored, due, story
    return {**story, "again_s": None if stored == commits else max(0.1, due - began)}


_GAINS: weakref.WeakKeyDictionary[Run, tuple[int, Any]] = weakref.WeakKeyDictionary()
"""For each run, the number of evaluations and their gain; a live page requests it repeatedly."""


def _gain(run: Run) -> Any:
    num = len(run.evaluations())
    if _GAINS.get(run, (-1, None))[0] != num:
        _GAINS[run] = num, held_out_gain(run)
    return _GAINS[run][1]


def _changed(run: Run, since: int = -1) -> Any:
    commits = run.num_commits
    return {"commits": commits, "is_running": is_running(run.path), "changed": commits != since}


_OF_RUN: dict[str, Callable[..., Any]] = {
    "": run_summary,
    "changed": _changed,
    "curves": run_curves,
    "evaluation": evaluation_view,
    "gain": _gain,
    "rollouts": rollout_page,
    "previews": _previews,
    "index": _index,
    "groups": group_page,
    "group": group_tree,
    "rollout": rollout_view,
    "tokens": token_lens,
    "tree": tree_picture,
    "story": _story,
}
"""The functions for `/api/runs/R/NAME`, called with the run and the query's parameters."""
_INDEXED = ("rollouts", "previews", "index")
"""Those that are called with the run's index of texts, too."""


class Api:
    """Answers `/api/...` for the runs at and below one folder."""

    def __init__(self, root: Path) -> None:
        self.runs = Runs(root)
        self._num_asked = 0
        self._glances = Glances(lambda: self._num_asked > 0)

    async def answer(self, request: Request) -> Response:
        """Answer one request; an error is `{"error": message}`."""
        # The raw path, since a run's name may have an encoded "/", which does not separate parts.
        raw = request.scope.get("raw_path") or request.scope["path"].encode()
        path = [unquote(part) for part in raw.decode("latin-1").split("/")[2:]]
        query = request.scope["query_string"].decode("latin-1")
        self._num_asked += 1  # needs no lock, since all of this function runs on the event loop
        try:
            return await run_in_threadpool(lambda: api_response(self._answer(path, query)))
        except RolltreeError as error:
            return api_response({"error": str(error)}, _status(error))
        except asyncio.CancelledError:  # the server is stopping
            return api_response({"error": "the server was stopped."}, 503)
        # A bug in rolltree, or a run that rolltree did not write; the page shows the error.
        except Exception as error:
            logger.error("GET %s failed", request.url.path, exc_info=error)
            return api_response({"error": _unexpected(error)}, 500)
        finally:
            self._num_asked -= 1

    def _answer(self, path: list[str], query: str) -> Any:
        if path == ["runs"]:
            return _call(self._runs, query)
        if path == ["changed"]:
            return _call(lambda: {"mark": self.runs.mark()}, query)
        if path == ["health"]:
            return _call(self._health, query)
        if path == ["compare"]:
            return _call(self._compare, query)
        if path[:1] == ["runs"] and len(path) in (2, 3):
            name = path[2] if len(path) == 3 else ""
            if name in _OF_RUN:
                run = self.runs.get(path[1])
                index = (index_of(run),) if name in _INDEXED else ()
                return _call(_OF_RUN[name], query, run, *index)
        raise UnknownName(f"there is nothing at /api/{shorten('/'.join(path), 200)}.")

    def _runs(self) -> Any:
        # Taken before they are read, so that the next request sees later writes.
        mark = self.runs.mark()
        return {"root": str(self.runs.root), "mark": mark, **self.runs.overviews()}

    def _health(self) -> Any:
        """Return the worst sentence of each run and its reward curve, as far as they are known."""
        return self._glances.answer((self.runs.name(each), each) for each in self.runs.folders())

    def _compare(self, arm: list[str]) -> Any:
        found = compare(*map(self._arm, arm))
        comparison = found.as_dict()
        for one, arm_data in zip(found.arms, comparison["arms"], strict=True):
            (run,) = one.runs
            arm_data["id"] = run.path.relative_to(self.runs.root).as_posix()
            arm_data["phase"] = run.phase
            arm_data["phases"] = self.runs.get(arm_data["id"]).phases()
        return comparison

    def _arm(self, text: str) -> RunPhase:
        """Return an arm of a comparison: a run's id, or `ID:PHASE`."""
        try:
            return RunPhase(self.runs.folder(text), "")
        except UnknownName:
            name, colon, phase = text.rpartition(":")
            if not colon:
                raise
            return RunPhase(self.runs.folder(name), phase)


def _unexpected(error: Exception) -> str:
    said = shorten(f"{type(error).__name__}: {error}", _MAX_ERROR_CHARACTERS)
    return (
        f"this cannot be shown ({said}). The run has data that rolltree does not write, or the "
        "viewer has a bug: `rolltree audit` checks the run."
    )


def _status(error: RolltreeError) -> int:
    if isinstance(error, UnknownName):
        return 404
    return 400 if isinstance(error, ConfigError) else 500


def _call(function: Callable[..., Any], query: str, *given: Any) -> Any:
    """Call an endpoint with what is given and the parameters of a query, converted to its types.

    Only a parameter that is a list may be repeated.

    Raises:
        ConfigError: a parameter is unknown, missing, repeated, or of the wrong type.
    """
    model = _parameters(function, len(given))
    named: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in model.__struct_fields__:
            near = did_you_mean(name, model.__struct_fields__)
            raise ConfigError(f"the query has an unknown parameter: {name!r}.{near}")
        kind: Any = model.__annotations__[name]
        if get_origin(kind) is list:
            named.setdefault(name, []).append(value)
        elif name in named:
            raise ConfigError(f"the query has the parameter {name!r} twice. Give it once.")
        else:
            named[name] = value
    try:
        found = msgspec.convert(named, model, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the query cannot be read: {error}.") from error
    return function(*given, **{name: getattr(found, name) for name in model.__struct_fields__})


@cache
def _parameters(function: Callable[..., Any], num_given: int) -> type[msgspec.Struct]:
    """Return the parameters of an endpoint after the given ones as a type."""
    found = list(inspect.signature(function, eval_str=True).parameters.values())[num_given:]
    fields: list[Any] = [
        (each.name, each.annotation, *(() if each.default is each.empty else (each.default,)))
        for each in found
    ]
    return msgspec.defstruct("Parameters", fields, kw_only=True)
