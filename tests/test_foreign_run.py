"""A run that somebody else made is data: opening, listing, showing or exporting it runs no code.

The hostile run has whatever could be taken for code (modules, pickles, templates, environments,
remote code of models, SQL), with right checksums. Each piece, if it ran, would leave a mark.
"""

import json
import os
import pickle
import sqlite3
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from golden_kit import SCHEMAS, unpack
from rolltree.cli import app
from rolltree.store import Run, list_runs, summarize
from rolltree.store.integrity import checksum
from rolltree.store.rows import LIGHT, STORED, with_checksums
from rolltree.values.errors import StoreError

MODULES = ("sitecustomize", "conftest", "numpy", "rich", "torch", "pandas", "datasets", "verifiers")


class Pickled:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def hostile_files(path, mark):
    """Put what could be taken for code into a run directory."""
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\ndef load_environment(): pass\n"
    remote = {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}}
    template = f"{{{{ cycler.__init__.__globals__.os.mkdir({str(mark)!r}) }}}}"
    step = path / "checkpoints" / "step-000004"
    for folder in (path, path / "environments" / "evil", path / "model", step):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*MODULES, "evil", "__init__", "letters"):
            (folder / f"{name}.py").write_text(code)
        for name in ("pytorch_model.bin", "state.pkl", "trainer.pt", "run.pkl", "optimizer.pt"):
            (folder / name).write_bytes(pickle.dumps(Pickled(mark)))
        (folder / "config.json").write_text(json.dumps({"model_type": "evil", **remote}))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**remote, "chat_template": template})
        )
        (folder / "chat_template.jinja").write_text(template)
        (folder / "pyproject.toml").write_text(
            '[project]\nname = "evil"\n[project.entry-points."rolltree.environments"]\nx = "evil"\n'
        )
    (path / "checkpoints" / "latest").write_text("../../../../evil\n")


def rewrite(path, change_meta=None, change_record=None):
    """Change rows of a run with right checksums."""
    database = sqlite3.connect(path / "run.db")
    if change_meta is not None:
        for key, value in database.execute("SELECT key, value FROM meta").fetchall():
            new = (key, change_meta(key, value))
            database.execute(
                "UPDATE meta SET value = ?, checksum = ? WHERE key = ?",
                (new[1], checksum("meta", new), key),
            )
    if change_record is not None:
        for row in database.execute(f"SELECT {', '.join(STORED)} FROM rollouts").fetchall():
            record = zlib.compress(change_record(zlib.decompress(row[-2])), 0)
            new = with_checksums(row[0], (*row[1 : 1 + len(LIGHT)], record, row[-1]))
            sets = ", ".join(f"{name} = ?" for name in STORED)
            database.execute(f"UPDATE rollouts SET {sets} WHERE id = ?", (*new, row[0]))
    database.commit()
    database.close()


@pytest.fixture
def hostile(tmp_path):
    """Return a hostile run and the mark that its code would leave."""
    path, mark = unpack(f"{SCHEMAS[-1]}/train", tmp_path / "runs" / "evil"), tmp_path / "mark"
    hostile_files(path, mark)

    def meta(key, value):
        if key != "config":
            return value
        config = json.loads(value)
        config["env"] = {"id": str(path / "evil.py"), "args": {"x": "__import__('os')"}}
        config["model"]["name"] = str(path / "model")
        return json.dumps(config)

    rewrite(path, meta)
    return path, mark


WATCH = """
import sys
evil, seen = sys.argv[1], []

def watch(event, args):
    if event == "exec" and str(getattr(args[0], "co_filename", "")).startswith(evil):
        seen.append((event, args[0].co_filename))
    elif event == "import" and str(args[1] or "").startswith(evil):
        seen.append((event, args[:2]))
    elif event in ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.fork",
                   "sqlite3.load_extension", "os.posix_spawn", "socket.connect"):
        seen.append((event, str(args)[:200]))

import rolltree
from click.testing import CliRunner
from rolltree.cli import app

sys.addaudithook(watch)
out = evil + "/../../out"
for command in COMMANDS:
    words = [word.format(run=evil, out=out) for word in command.split()]
    result = CliRunner().invoke(app, words)
    text = result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        seen.append((command, repr(result.exception)))
    if result.exit_code not in (0, 1):
        seen.append((command, result.exit_code, text))
with rolltree.read_run(evil) as data:
    for table in (data.rollouts(), data.steps(), data.calls(), data.tokens(), data.events()):
        list(table.rows())
with rolltree.Run.open(evil, "r") as run:
    run.meta, run.steps(), run.events(), list(run.rollouts())
    run.query("SELECT * FROM rollouts LIMIT 1")
forbidden = {"torch", "transformers", "pickle_evil", "evil", "letters"} & set(sys.modules)
print(seen, sorted(forbidden))
sys.exit(bool(seen or forbidden))
"""
COMMANDS = [
    "runs {run}/..",
    "runs {run}",
    "show {run}",
    "show {run} --phase train --transcripts 9",
    "show {run} --failed --transcripts 99",
    "export {run} {out}.jsonl",
    "export {run} {out}-sft.jsonl --as sft",
    "export {run} {out}-results --as results --phase eval_after",
    "data {run}",
    "data {run} rollouts --where reward>0 --sort -reward",
    "data {run} tokens --json",
    "data {run} breaks",
    "audit {run}",
    "compare {run}:eval_before {run}:eval_after",
]


def watched(commands, path, folder, cwd):
    """Run commands in a process that notes what runs, imports, unpickles and starts processes."""
    script = folder / "bin" / "watch.py"
    script.parent.mkdir()
    script.write_text(WATCH.replace("COMMANDS", repr(commands)))
    return subprocess.run(
        [sys.executable, script, path], cwd=cwd, capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_readers_run_nothing_of_it(hostile, tmp_path):
    """The commands that read, in a process that watches, from within the run's directory."""
    path, mark = hostile
    done = watched(COMMANDS, path, tmp_path, cwd=path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not mark.exists()


def test_the_watch_sees_code_that_runs(hostile, tmp_path):
    path, mark = hostile
    done = watched(["replay {run} --env {run}/evil.py"], path, tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert "('exec', " in done.stdout
    assert mark.exists()


def test_replay_follows_no_path_that_a_run_names(hostile):
    path, mark = hostile
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 2
    assert "a path is not followed" in result.output
    assert not mark.exists()


SCHEMAS_THAT_ACT = {
    "view": "CREATE VIEW extra AS SELECT load_extension('evil')",
    "trigger": "CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM rollouts; END",
    "virtual table": "CREATE VIRTUAL TABLE extra USING fts5(x)",
}


@pytest.mark.parametrize("kind", SCHEMAS_THAT_ACT)
@pytest.mark.parametrize("mode", ["r", "w"])
def test_a_database_whose_schema_acts_is_refused(tmp_path, kind, mode):
    path = tmp_path / "runs" / "it"
    Run.create(path).close()
    database = sqlite3.connect(path / "run.db")
    database.execute(SCHEMAS_THAT_ACT[kind])
    database.commit()
    database.close()
    with pytest.raises(StoreError, match=f"has a {kind}.*rolltree never makes"):
        Run.open(path, mode)
    assert list_runs(tmp_path) == []


def test_functions_in_a_schema_are_not_trusted(tmp_path):
    with Run.create(tmp_path) as run:
        for mode in ("r",):
            with Run.open(tmp_path, mode) as reader:
                assert reader.query("PRAGMA trusted_schema") == [{"trusted_schema": 0}]
        assert run.query("PRAGMA trusted_schema") == [{"trusted_schema": 0}]


BAD_JSON = {
    "unknown tag": '{"$t":"pickle","v":"gASVIA=="}',
    "objects": '{"$t":"array","dtype":"O","shape":[1],"v":"AAAAAAAAAAA="}',
    "huge": '{"$t":"array","dtype":"<i8","shape":[1000000000000],"v":""}',
    "no JSON": "os.system('true')",
    "deep": "[" * 100_000,
    "other": "[1, 2]",
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_values_that_rolltree_did_not_write_are_one_message(name, tmp_path):
    path = unpack(f"{SCHEMAS[-1]}/agents", tmp_path / "runs" / "it")
    rewrite(path, change_record=lambda record: BAD_JSON[name].encode())
    result = CliRunner().invoke(app, ["show", str(path)])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    assert "a record that rolltree did not write" in result.stderr
    rewrite(path, change_meta=lambda key, value: BAD_JSON[name])
    for mode in ("r", "w"):
        with Run.open(path, mode) as run, pytest.raises(StoreError, match="is damaged: "):
            summarize(run)
    assert list_runs(tmp_path) == []


def test_a_configuration_too_large_to_read_at_every_look_is_refused_before_it_is_parsed(tmp_path):
    path = unpack(f"{SCHEMAS[-1]}/train", tmp_path / "runs" / "it")

    def large(key, value):
        return value if key != "config" else json.dumps({"env": ["x"] * 2**20})

    rewrite(path, change_meta=large)
    with Run.open(path, "r") as run, pytest.raises(StoreError, match="'config' of table meta has"):
        summarize(run)
    for words in (["show", str(path)], ["runs", str(path.parent)], ["audit", str(path)]):
        result = CliRunner().invoke(app, words)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "more than 4,194,304 bytes" in result.output + result.stderr or words[0] == "runs"


def test_a_configuration_that_could_not_be_read_again_is_not_stored(tmp_path):
    with pytest.raises(StoreError, match="Put it into a file"):
        Run.create(tmp_path / "run", config={"env": {"args": {"rows": "x" * 2**23}}}, kind="train")
    with Run.create(tmp_path / "fine", config={}, kind="train") as run:
        with pytest.raises(StoreError, match="'x' has more than"):
            run.set_meta("x", "y" * 2**23)
        assert not run.keep_report("eval", {"x": "y" * 2**23}, num_requests=0)
        assert run.config == {}
