"""Bytes with a correct checksum and contradictory contents: each contradiction is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rolltree.tokens import TokenTree
from rolltree.tokens.serialize import Writer
from rolltree.values.errors import TokenError

Fields = dict[str, Any]


def fields() -> Fields:
    """A valid tree: calls 5 6 | 7 and 5 6 | 8 9, one dense and one placed stream on call 1."""
    return {
        "since": 0,
        "ids": [5, 6, 7, 8, 9],
        "starts": [0, 3],
        "parents": [-1, 1],
        "columns": {
            "prompt_token": [1, 1],
            "end_token": [2, 4],
            "prompt_len": [2, 2],
            "num_sampled": [1, 2],
            "parent": [-1, -1],
            "agent": [0, 0],
            "turn": [-1, 3],
            "num_tokens": [3, 5],
            "num_runs": [1, 2],
        },
        "agents": ["a"],
        "streams": [
            [np.array([0, -1]), np.zeros(2), np.array([-0.5], np.float32)],
            [np.array([-2, -2]), np.ones(2), np.empty(0, np.float32)],
            [np.array([-2, 0]), np.zeros(2), np.array([1, 2], np.int32)],
            [np.array([-2, -2]), np.ones(2), np.empty(0, np.float32)],
            [np.array([-2, -2]), np.zeros(2), np.empty(0, np.float32)],
        ],
        "dense": [["x", [1], [2], [2], np.array([10, 11])]],
        "num_blobs": 0,
        "blobs": [np.ones(2)],
        "placed": [["image", [(1, [0], [0])]]],
    }


def encode(made: Fields) -> bytes:
    out = Writer()
    for number in (made["since"], len(made["columns"]["turn"]), 0, 0):
        out.number(number)
    for name in ("ids", "starts", "parents"):
        out.ints(made[name])
    for column in made["columns"].values():
        out.ints(column)
    out.number(len(made["agents"]))
    for agent in made["agents"]:
        out.text(agent)
    for offsets, constants, values in made["streams"]:
        out.ints(offsets)
        out.array(constants)
        out.array(values)
    out.number(len(made["dense"]))
    for name, calls, starts, counts, values in made["dense"]:
        out.text(name)
        for numbers in (calls, starts, counts):
            out.ints(numbers)
        out.array(values)
    out.number(made["num_blobs"])
    out.number(len(made["blobs"]))
    for blob in made["blobs"]:
        out.array(blob)
    out.number(len(made["placed"]))
    for name, entries in made["placed"]:
        out.text(name)
        out.number(len(entries))
        for call, positions, blobs in entries:
            out.number(call)
            out.ints(positions)
            out.ints(blobs)
    for extra in made.get("extra", []):
        out.number(extra)
    return out.chunk()


def test_the_unforged_tree_loads() -> None:
    tree = TokenTree.from_bytes(encode(fields()))
    assert tree.path_ids(0).tolist() == [5, 6, 7]
    assert tree.path_ids(1).tolist() == [5, 6, 8, 9]
    assert tree.logprobs(0).tolist() == [-0.5]  # type: ignore[union-attr]
    assert tree.logprobs(1) is None
    assert tree.versions(1).tolist() == [1, 2]
    assert tree.turn(1) == 3
    assert tree.stream("x", 1).values.tolist() == [10, 11]  # type: ignore[union-attr]
    assert tree.stream("image", 1).values[0].tolist() == [1, 1]  # type: ignore[union-attr]


def setter(*path: Any) -> Callable[[Fields], None]:
    """Return a change that sets `made[path[0]][path[1]]... = path[-1]`."""

    def change(made: Fields) -> None:
        *keys, last, value = path
        for key in keys:
            made = made[key]
        made[last] = value

    return change


FORGERIES = {
    "a negative id": setter("ids", 0, -5),
    "an id beyond int32": setter("ids", 0, 2**31),
    "a run that starts late": setter("starts", 0, 1),
    "a run without tokens": setter("starts", 1, 5),
    "runs out of order": setter("starts", [3, 0]),
    "a run below itself": setter("parents", 1, 3),
    "a parent before the root": setter("parents", 1, -2),
    "a run that should have grown in place": setter("parents", 1, 2),
    "two runs with one path": setter("ids", 3, 7),
    "two roots with one path": lambda made: (
        made["ids"].__setitem__(3, 5),
        made["parents"].__setitem__(1, -1),
    ),
    "tokens without a run": lambda made: made.update(starts=[], parents=[]),
    "parents of another length": setter("parents", [-1]),
    "an end outside the arena": setter("columns", "end_token", 1, 5),
    "an end before the prompt": setter("columns", "end_token", 0, 0),
    "a prompt of another length": setter("columns", "prompt_len", 0, 1),
    "a completion of another length": setter("columns", "num_sampled", 1, 1),
    "a prompt on another branch": lambda made: (
        made["columns"]["prompt_token"].__setitem__(1, 2),
        made["columns"]["prompt_len"].__setitem__(1, 3),
        made["columns"]["num_sampled"].__setitem__(1, 1),
    ),
    "a parent from the future": setter("columns", "parent", 0, 0),
    "an agent without a name": setter("columns", "agent", 1, 1),
    "a short column": setter("columns", "parent", [-1]),
    "an unknown offset": setter("streams", 0, 0, np.array([0, -3])),
    "an offset with a hole": setter("streams", 2, 0, np.array([-2, 1])),
    "too few values": setter("streams", 2, 2, np.array([1], np.int32)),
    "values of another type": setter("streams", 2, 2, np.array([1, 2], np.float32)),
    "a constant that is not a number": setter("streams", 1, 1, np.array([np.nan, 1.0])),
    "a version beyond int32": setter("streams", 2, 1, np.array([2.0**40, 0.0])),
    "a value that is not a number": setter("streams", 0, 2, np.array([np.inf], np.float32)),
    "a logprob above 0": setter("streams", 0, 2, np.array([0.5], np.float32)),
    "a placeholder logprob": setter("streams", 0, 2, np.array([-9999.0], np.float32)),
    "a negative temperature": setter("streams", 1, 1, np.array([-1.0, 1.0])),
    "a negative version": setter("streams", 2, 2, np.array([1, -1], np.int32)),
    "a version that is not a whole number": setter("streams", 2, 1, np.array([0.5, 0.0])),
    "a negative mask": setter("streams", 3, 1, np.array([1.0, -1.0])),
    "a call without a mask": setter("streams", 3, 0, np.array([-2, -1])),
    "a constant beside values": setter("streams", 2, 1, np.array([0.0, 1.0])),
    "a negative turn": setter("columns", "turn", 1, -2),
    "a turn beyond int32": setter("columns", "turn", 1, 2**31),
    "a parent that is not a prefix": setter("columns", "parent", 1, 0),
    "a tree that was smaller": setter("columns", "num_tokens", 1, 4),
    "a tree that was larger": setter("columns", "num_tokens", 0, 6),
    "another number of runs": setter("columns", "num_runs", 0, 2),
    "tokens of no call": lambda made: (
        made["ids"].append(4),
        made["columns"]["num_tokens"].__setitem__(1, 6),
    ),
    "a run of no call": lambda made: (
        made["ids"].append(4),
        made["starts"].append(5),
        made["parents"].append(0),
        made["columns"]["num_tokens"].__setitem__(1, 6),
        made["columns"]["num_runs"].__setitem__(1, 3),
    ),
    "two agents with one name": setter("agents", ["a", "a"]),
    "two streams of one call": setter(
        "dense", 0, slice(1, 5), [[1, 1], [2, 2], [1, 1], np.ones(2)]
    ),
    "two placed streams of one call": setter("placed", 0, 1, [(1, [0], [0])] * 2),
    "a stream of another call": setter("dense", 0, 1, [2]),
    "a stream past its call": setter("dense", 0, 2, [3]),
    "a stream before its call": setter("dense", 0, 2, [-1]),
    "a stream with too few values": setter("dense", 0, 4, np.array([10])),
    "a scalar stream": setter("dense", 0, 4, np.array(10)),
    "missing blobs": setter("num_blobs", 1),
    "a blob that is not there": setter("placed", 0, 1, [(1, [0], [1])]),
    "a blob outside its call": setter("placed", 0, 1, [(1, [4], [0])]),
    "a blob of another call": setter("placed", 0, 1, [(7, [0], [0])]),
    "one name for two kinds": setter("placed", 0, 0, "x"),
    "a later piece": setter("since", 1),
    "bytes left over": lambda made: made.update(extra=[1]),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_contradictions_are_refused(what: str) -> None:
    made = fields()
    FORGERIES[what](made)
    with pytest.raises(TokenError):
        TokenTree.from_bytes(encode(made))


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_columns_must_be_flat_integers(dtype: Any) -> None:
    out = Writer()
    for number in (0, 0, 0, 0):
        out.number(number)
    out.array(np.zeros((1, 1), dtype) if dtype is np.int8 else np.zeros(1, dtype))
    with pytest.raises(TokenError, match="integers were expected"):
        TokenTree.from_bytes(out.chunk())


def test_a_foreign_file_is_named_as_such() -> None:
    with pytest.raises(TokenError, match="start with its mark"):
        TokenTree.from_bytes(b"SQLite format 3\x00" + b"\x00" * 32)
    with pytest.raises(TokenError, match="cut off"):
        TokenTree.from_bytes(b"RTT1")
