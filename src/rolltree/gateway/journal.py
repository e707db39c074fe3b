"""The calls of open sessions on disk: one append-only file per session.

A frame is written and synced before the answer that it holds is sent in full, so a restarted
gateway has every call that an agent has seen. Frames have lengths and checksums; a frame that was
not written to its end is dropped when the file is read. A file's size is O(unique tokens): a frame
has only the new messages and the tokens that its call added to the tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from rolltree._helpers.files import open_regular, sync
from rolltree.gateway.calls import AnswerHead
from rolltree.rollouts.decode import UNREADABLE
from rolltree.rollouts.message_table import MessageReader, MessageTable, Reference
from rolltree.rollouts.record_steps import decode_step, step_data
from rolltree.store import dumps, loads
from rolltree.tokens import TokenTree, Trajectory
from rolltree.values.errors import StoreError
from rolltree.values.types import ToolSchema, TrajectoryStep

_HEAD = struct.Struct("<4sIII")
_MAGIC = b"gws1"
_SUFFIX = ".calls"


_NUM_THREADS = 8
_NUMBERS = itertools.count()
_NOTE_S = 0.2
"""How long a note that an answer was sent waits for the frame of another call."""
_Write: TypeAlias = "tuple[JournalFile, bytes, asyncio.Future[None]]"


@dataclass(frozen=True, slots=True)
class KeptCall:
    """The data of a call that is kept in addition to its step.

    `num_begun` counts the session's calls that had begun when it was recorded, failed ones, too.
    """

    head: AnswerHead
    agent: str = ""
    key: str | None = None
    digest: bytes = b""
    tools: tuple[ToolSchema, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    num_begun: int = 0


@dataclass(slots=True)
class KeptSession:
    """The contents of a file: the session's settings, calls, and which answers were delivered."""

    settings: Mapping[str, Any]
    calls: list[tuple[KeptCall, TrajectoryStep]] = field(default_factory=list)
    delivered: set[int] = field(default_factory=set)


class Journal:
    """The folder of a gateway's files, and the threads that write them.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise _unwritable(folder, error) from error
        # Several threads, so that the files of different sessions are synced concurrently.
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "rolltree-journal")
        self._waiting: list[_Write] = []
        self._writing: asyncio.Task[None] | None = None
        self._noting: dict[JournalFile, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def path(self, session_id: str) -> Path:
        """Return the file of a session."""
        return self.folder / f"{session_id}{_SUFFIX}"

    def create(self, session_id: str, settings: Mapping[str, Any]) -> JournalFile:
        """Begin the file of a session; an earlier one of the same name is replaced.

        Raises:
            StoreError: it cannot be written.
        """
        return JournalFile(self.path(session_id), settings, self)

    def write(self, file: JournalFile, frame: bytes) -> asyncio.Future[None]:
        """Write and sync a frame in a thread; the future is done when it is on disk.

        Frames that come during a write are written together in the next one: handing each to a
        thread would cost as much as writing it.
        """
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((file, frame, done))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_all())
        return done

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                # One session's frames stay in one part, in their order.
                parts: list[list[_Write]] = [[] for _ in range(_NUM_THREADS)]
                for each in batch:
                    parts[each[0].number % _NUM_THREADS].append(each)
                work = [
                    loop.run_in_executor(self._pool, _write_part, part) for part in parts if part
                ]
                for found in await asyncio.gather(*work):
                    for done, error in found:
                        if done.cancelled():
                            continue
                        if error is None:
                            done.set_result(None)
                        else:
                            done.set_exception(error)
        finally:
            self._writing = None

    def note(self, file: JournalFile) -> None:
        """Write the notes of a file soon, together with those of other files.

        They are not synced: they outlive the process, as all that a kill must not lose.
        """
        self._noting[file] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_NOTE_S, self._write_notes)

    def forget(self, file: JournalFile) -> None:
        """Write no notes of a file that is closed."""
        self._noting.pop(file, None)

    def _write_notes(self) -> None:
        self._timer = None
        noted = [(file, notes) for file in self._noting if (notes := file.hand_over_notes())]
        self._noting.clear()
        if noted:
            self._pool.submit(_write_notes, noted)

    def read(self) -> Iterable[tuple[str, KeptSession]]:
        """Yield the sessions of the folder by id.

        Raises:
            StoreError: a file was damaged after it was written.
        """
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            found = read_session(path)
            if found is not None:
                yield path.name.removesuffix(_SUFFIX), found

    def close(self) -> None:
        """Wait for writes in progress."""
        if self._timer is not None:
            self._timer.cancel()
        self._pool.shutdown()


class JournalFile:
    """The file of one session."""

    def __init__(self, path: Path, settings: Mapping[str, Any], journal: Journal) -> None:
        self._path, self._journal = path, journal
        self.number = next(_NUMBERS)
        self._table, self._prompts = MessageTable(), dict[int, Reference]()
        self._num_calls = 0
        self._tools: list[tuple[ToolSchema, ...]] = []
        # The number of each option value, by the object's id: a session keeps equal values once.
        self._values: dict[int, tuple[int, Any]] = {}
        self._delivered: list[int] = []
        # Those that a thread writes, or has written.
        self._noted: list[int] = []
        self._failure: StoreError | None = None
        # Held by a thread that writes: the number of a closed file may become another file's.
        self._writing = threading.Lock()
        # Written beside the old file, which it replaces when it is complete.
        self._building = path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._building.unlink(missing_ok=True)
            self._file = os.open(self._building, flags, 0o600)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            self.write(_frame({"settings": dict(settings)}), sync=False)
        except StoreError:
            self.discard()
            raise

    def publish(self) -> None:
        """Put the file in its place, with all that was written so far, and sync both.

        Raises:
            StoreError: it cannot be written; it is discarded.
        """
        try:
            os.fdatasync(self._file)
            os.replace(self._building, self._path)
            sync(self._path.parent)
        except OSError as error:
            self.discard()
            raise _unwritable(self._path, error) from error

    async def append(self, trajectory: Trajectory, index: int, kept: KeptCall) -> None:
        """Write a finished call; returns when it is on disk.

        Raises:
            StoreError: it cannot be written.
        """
        frame = self._call_frame(trajectory, index, kept)  # in the order in which calls end
        await self._journal.write(self, frame)

    def append_now(self, trajectory: Trajectory, index: int, kept: KeptCall) -> None:
        """Write a call of a restored session; `publish` syncs it.

        Raises:
            StoreError: it cannot be written.
        """
        self.write(self._call_frame(trajectory, index, kept), sync=False)

    def note_delivered(self, step: int) -> None:
        """Note that an answer was sent in full; it is written with the next call, or soon alone."""
        self._delivered.append(step)
        self._journal.note(self)

    def take_notes(self) -> list[int]:
        """Return the steps to note, and forget them."""
        noted, self._delivered = self._delivered, []
        return noted

    def hand_over_notes(self) -> list[int]:
        """Return the steps to note, for a thread; kept too, as the file may be closed first."""
        self._noted = self.take_notes()
        return self._noted

    def discard(self) -> None:
        """Close the file; delete it if it was not published."""
        self.close()
        self._building.unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete the file."""
        self.discard()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        self._journal.forget(self)
        if self._file < 0:
            return
        if notes := self._noted + self.take_notes():
            with contextlib.suppress(StoreError):
                self.write(_frame({"delivered": notes}), sync=False)
        with self._writing:
            os.close(self._file)
            self._file = -1

    def _call_frame(self, trajectory: Trajectory, index: int, kept: KeptCall) -> bytes:
        size = self._table.size
        data: dict[str, Any] = {"step": step_data(trajectory, index, self._table, self._prompts)}
        tree, tokens = trajectory.tree, b""
        call = trajectory.call_of(index)
        if call is not None and call < self._num_calls:
            # An earlier frame has this call's tokens, but was written before its agent and turn.
            data["label"] = [call, tree.agent(call), tree.turn(call)]
        if tree.num_calls > self._num_calls:
            tokens, self._num_calls = tree.to_bytes(since=self._num_calls), tree.num_calls
        if kept.tools not in self._tools:  # agents offer a few sets of tools, call after call
            self._tools.append(kept.tools)
            data["tools"] = list(kept.tools)
        head = kept.head
        options, new = dict[str, int](), list[Any]()
        for name, value in kept.options.items():
            if id(value) not in self._values:
                self._values[id(value)] = len(self._values), value
                new.append(value)
            options[name] = self._values[id(value)][0]
        data["values"] = new
        data["call"] = {
            "head": {"id": head.id, "model": head.model, "created_s": head.created_s},
            "agent": kept.agent,
            "key": kept.key,
            "digest": kept.digest.hex(),
            "tools": self._tools.index(kept.tools),
            "options": options,
            "num_begun": kept.num_begun,
        }
        data["delivered"] = self.take_notes()
        return _frame(data, tokens, f'"table":{self._table.to_json(size)},')

    def write(self, frame: bytes, sync: bool = True) -> None:
        """Write a frame; with `sync`, wait until it is on disk.

        Raises:
            StoreError: it cannot be written.
        """
        # A later frame would follow half a frame, and continue tokens that are missing.
        if self._failure is not None:
            raise self._failure
        view = memoryview(frame)
        try:
            with self._writing:
                while view:
                    view = view[os.write(self._file, view) :]
                if sync:
                    os.fdatasync(self._file)
        except OSError as error:
            self._failure = _unwritable(self._path, error)
            raise self._failure from error


def _write_notes(noted: list[tuple[JournalFile, list[int]]]) -> None:
    for file, notes in noted:
        # The next call of the session reports the failure.
        with contextlib.suppress(StoreError):
            file.write(_frame({"delivered": notes}), sync=False)


def _write_part(part: list[_Write]) -> list[tuple[asyncio.Future[None], StoreError | None]]:
    """Write frames of a few files, each synced once."""
    frames: dict[JournalFile, list[bytes]] = {}
    for file, frame, _ in part:
        frames.setdefault(file, []).append(frame)
    errors = dict.fromkeys(frames, cast("StoreError | None", None))
    for file, several in frames.items():
        try:
            file.write(b"".join(several))
        except StoreError as error:
            errors[file] = error
    return [(done, errors[file]) for file, _, done in part]


def read_session(path: Path) -> KeptSession | None:
    """Return the session of a file; None if not even its settings were written.

    Raises:
        StoreError: the file is damaged before its last frame.
    """
    try:
        with open(open_regular(path), "rb") as file:
            frames = _frames(file.read())
        if not frames:
            return None
        session = KeptSession(loads(frames[0][0])["settings"])
        parts = [(loads(text), tokens) for text, tokens in frames[1:]]
        tree_bytes = b"".join(tokens for _, tokens in parts)
        tree = TokenTree.from_bytes(tree_bytes) if tree_bytes else TokenTree()
        for data, _ in parts:
            if "label" in data:
                call, agent, turn = data["label"]
                tree.label(call, agent=agent, turn=turn)
        table: dict[str, list[Any]] = {"messages": [], "nodes": [], "pieces": []}
        tools, option_values = list[tuple[ToolSchema, ...]](), list[Any]()
        for data, _ in parts:
            for name, values in data.get("table", {}).items():
                table[name] += values
        reader = MessageReader(table)
        for data, _ in parts:
            session.delivered.update(data["delivered"])
            if "tools" in data:
                tools.append(tuple(data["tools"]))
            if "call" not in data:
                continue
            option_values += data["values"]
            call = data["call"]
            kept = KeptCall(
                AnswerHead(**call["head"]),
                call["agent"],
                call["key"],
                bytes.fromhex(call["digest"]),
                tools[call["tools"]],
                {name: option_values[index] for name, index in call["options"].items()},
                call["num_begun"],
            )
            session.calls.append((kept, decode_step(data["step"], tree, reader)))
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error}).") from error
    except UNREADABLE as error:
        raise StoreError(
            f"{path} is damaged ({type(error).__name__}: {error}), so the calls of its session "
            "cannot be restored. Move it away to start without them."
        ) from error
    return session


def _frame(data: Mapping[str, Any], tokens: bytes = b"", more: str = "") -> bytes:
    text = f"{{{more}{dumps(dict(data))[1:]}".encode()
    check = zlib.crc32(tokens, zlib.crc32(text))
    return _HEAD.pack(_MAGIC, len(text), len(tokens), check) + text + tokens


def _frames(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the frames of a file, without an incomplete last one: its call was not answered."""
    frames, at = list[tuple[bytes, bytes]](), 0
    while at + _HEAD.size <= len(data):
        magic, num_text, num_tokens, check = _HEAD.unpack_from(data, at)
        begin = at + _HEAD.size
        middle, end = begin + num_text, begin + num_text + num_tokens
        if magic != _MAGIC:
            raise ValueError(f"no frame begins at byte {at}")
        if end > len(data):
            break
        text, tokens = data[begin:middle], data[middle:end]
        if zlib.crc32(tokens, zlib.crc32(text)) != check:
            if end == len(data):  # the last frame; some of its pages were not written
                break
            raise ValueError(f"the frame at byte {at} has a wrong checksum")
        frames.append((text, tokens))
        at = end
    return frames


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be written ({error.strerror or error}), and the gateway keeps finished "
        "calls there. Make room or check the disk."
    )
