"""Somebody else's run, small on disk: reading it ends with a plain error and in little memory."""

import json
import os
import subprocess
import sys
import textwrap
import zlib

import numpy as np
import pytest
from corrupt_kit import Corrupter

from golden_kit import unpack
from rolltree.rollouts import message_table
from rolltree.rollouts.message_table import MessageReader
from rolltree.store.codec import MAX_INFLATED_BYTES, deflate, dumps, inflate, loads
from rolltree.tokens import TokenTree
from rolltree.tokens.serialize import Writer
from rolltree.values.errors import TokenError

MEMORY_BYTES = 5 * 2**29
STREAMS = [(-0.5, "<f4"), (1.0, "<f4"), (0, "<i4"), (1.0, "<f4"), (0.0, "<f4")]
READER = textwrap.dedent(
    """
    import json, resource, sys
    from click.testing import CliRunner
    from rolltree.cli import app
    import rolltree.insight.auditing.run, rolltree.tokens, rolltree.rollouts.decode

    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    found = []
    for line in sys.argv[2:]:
        done = CliRunner().invoke(app, line.split())
        is_plain = done.exception is None or isinstance(done.exception, SystemExit)
        error = None if is_plain else repr(done.exception)
        found.append([done.exit_code, done.output, error])
    print(json.dumps(found))
    """
)


def inflating(num_bytes):
    """Return zlib data of so many zeros, made in no time."""
    packer, zeros = zlib.compressobj(9), bytes(2**20)
    parts = [packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2)]
    return parts[0] + parts[1] * (num_bytes // 2**20 - 1) + packer.flush()


def nested(data):
    return b"[" * 10**6 + b"]" * 10**6


def circle(data):
    data["table"]["nodes"] = [[n, 0] for n in range(len(data["table"]["nodes"]))]
    return dumps(data).encode()


RECORDS = {"nested": nested, "circle": circle}


def tree(num_calls):
    """Return a tree of 65,536 tokens, all of which each call sampled."""
    out, ids = Writer(), np.arange(2**16) % 100
    for number in (0, num_calls, 0, 0):
        out.number(number)
    for values in (ids, [0], [-1]):
        out.ints(values)
    for value in (-1, len(ids) - 1, 0, len(ids), -1, 0, -1, len(ids), 1):
        out.ints(np.full(num_calls, value))
    out.number(1)
    out.text("")
    for constant, dtype in STREAMS:
        out.ints(np.full(num_calls, -2))
        out.array(np.full(num_calls, constant, np.float64))
        out.array(np.empty(0, dtype))
    for _ in range(4):
        out.number(0)
    return out.chunk()


def read(folder, words):
    """Return exit code, output and unexpected error of each command, in little memory."""
    done = subprocess.run(
        [sys.executable, "-c", READER, str(MEMORY_BYTES), *words],
        capture_output=True, text=True, check=True, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    return dict(zip(words, json.loads(done.stdout), strict=True))


def test_what_grows_out_of_a_record(tmp_path):
    runs = {kind: unpack("4/train", tmp_path / kind) for kind in ("inflating", *RECORDS)}
    words = []
    for kind, path in runs.items():
        hostile = Corrupter(path)
        name = hostile.ids()[0]
        if kind == "inflating":
            hostile.blob(name, record=inflating(2**33))
        else:
            data = RECORDS[kind](loads(hostile.row(name)[1].record))
            hostile.blob(name, record=zlib.compress(data, 9))
        assert (path / "run.db").stat().st_size < 2**24
        words += [
            f"audit {path}",
            f"show {path} --where request_id={name} --transcripts 1",
            f"data {path} tokens --where request_id={name}",
            f"export {path} out.jsonl",
        ]
    found = read(tmp_path, words)
    for words, (code, output, error) in found.items():
        assert error is None, (words, output)
        said = " ".join(output.split())
        if words.startswith("audit") and "circle" in words:
            continue  # without a tokenizer it reads no message
        assert code == 1, (words, output)
        assert name in said, (words, output)
        assert len(said) < 5000
        assert "inflate to more than" in said or "inflating" not in words


def test_what_grows_out_of_tokens(tmp_path):
    runs = {kind: unpack("4/train", tmp_path / kind) for kind in ("tokens", "trained", "shared")}
    name = Corrupter(runs["tokens"]).ids()[0]
    Corrupter(runs["tokens"]).blob(name, tokens=inflating(2**33))
    Corrupter(runs["trained"]).trained_blob(name, inflating(2**33))
    Corrupter(runs["shared"]).blob(name, tokens=zlib.compress(tree(10**4)))
    words = [
        f"{command} {path}{more}"
        for path in runs.values()
        for command, more in (("audit", ""), ("data", f" tokens --where request_id={name}"))
    ]
    found = read(tmp_path, words)
    for words, (code, output, error) in found.items():
        assert error is None, (words, output)
        assert code == 1, (words, output)
        assert name in " ".join(output.split()), (words, output)


def test_histories_have_an_end_and_share_within_reason(monkeypatch):
    table = {"messages": ["a"], "nodes": [[-1, 0], [0, 0], [2, 0]], "pieces": [[-1, "x"], [1, "y"]]}
    reader = MessageReader(table)
    assert (reader.get(1), reader.get({"t": 0})) == (["a", "a"], "x")
    for reference in (2, -2, {"t": 1}):
        with pytest.raises(ValueError, match="begins with itself"):
            reader.get(reference)
    monkeypatch.setattr(message_table, "MAX_MESSAGES", 5)
    monkeypatch.setattr(message_table, "MAX_CHARACTERS", 2)
    reader.get(1)
    reader.get({"t": 0})
    for reference in (1, {"t": 0}):
        with pytest.raises(ValueError, match="more than"):
            reader.get(reference)


def test_a_tree_may_share_tokens_within_reason():
    assert TokenTree.from_bytes(tree(3)).num_calls == 3
    with pytest.raises(TokenError, match="sampled more than"):
        TokenTree.from_bytes(tree(1000))


def test_what_inflates_a_lot_is_stored_as_it_is(tmp_path):
    much = bytes(MAX_INFLATED_BYTES + 1)
    stored = deflate(much)
    assert len(stored) > len(much)
    assert inflate(stored) == much
    assert len(deflate(much[:-1])) < 2**20
    assert inflate(deflate(much[:-1])) == much[:-1]


def test_an_empty_array_has_few_rows():
    small = {"$t": "array", "dtype": "<f4", "shape": [3, 0], "v": ""}
    assert loads(json.dumps(small)).shape == (3, 0)
    with pytest.raises(ValueError, match="empty array"):
        loads(json.dumps(small | {"shape": [10**9, 0]}))
