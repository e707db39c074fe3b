"""Files under a final name are whole or not there: their writers are killed at every step.

A program is killed at each file that it opens, each write, each folder and each rename. Whatever it
leaves, the target is the old one or the new one, and the same command then succeeds.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import golden_kit
from rolltree._helpers.files import read_regular, whole_file, whole_folder, write_whole

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import numpy, pyarrow.parquet, matplotlib.figure, matplotlib.backends.backend_agg
import rolltree as rt
from rolltree.environments.scaffold import scaffold
from rolltree.insight.export import export_run
from rolltree.reports.curves import Curve, save_curve
from rolltree.store.settings import write_config

run, root = sys.argv[1], Path(sys.argv[2])
env = rt.SingleTurnEnv(dataset=[{"question": "a", "answer": "b"}], rubric=rt.Rubric([]))

WRITERS = {
    "rollouts.jsonl": lambda target: export_run(run, target),
    "results": lambda target: export_run(run, target, "results", phase="eval_after"),
    "dataset": lambda target: export_run(run, target, "dataset", phase="eval_after"),
    "sft.parquet": lambda target: export_run(run, target, "sft", phase="eval_after"),
    "sft.csv": lambda target: export_run(run, target, "sft", phase="eval_after"),
    "curve.png": lambda target: save_curve(Curve("a", [1, 2], [0.0, 1.0], []), target),
    "config.json": lambda target: write_config(target, {"a": list(range(9))}),
    "rows.jsonl": lambda target: env.dataset.to_jsonl(target),
    "letters": lambda target: scaffold("letters", folder=target.parent),
}

def content(path):
    if path.is_dir():
        files = [f for f in sorted(path.rglob("*")) if f.is_file() and ".part" not in f.name]
        return {str(f.relative_to(path)): f.read_bytes() for f in files}
    return path.read_bytes() if path.exists() else None

def killed_at(number, write, target):
    # say whether the process was killed at this step
    if (child := os.fork()) == 0:
        steps = 0
        def step():
            nonlocal steps
            steps += 1
            if steps == number:
                os.kill(os.getpid(), signal.SIGKILL)
        def audit(event, args):
            if event in ("os.mkdir", "os.rename"):
                step()
            elif event == "open" and str(args[0]).startswith(str(root)) and args[2] & 3:
                step()
        def profile(frame, event, arg):
            if event == "c_call" and getattr(arg, "__name__", "") in CALLS:
                step()
        sys.addaudithook(audit)
        sys.setprofile(profile)
        write(target)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

CALLS = ("write", "writerow", "write_batch", "close", "fsync")
failures = []
for name in sys.argv[3:]:
    write, target = WRITERS[name], root / name / name
    target.parent.mkdir()
    number, seen = 0, []
    while killed_at(number := number + 1 + number // 4, write, target):
        found = content(target)
        if found not in seen:
            seen.append(found)
        if number > 12:  # long files are written in many pieces
            break
    if name not in ("letters", "dataset") or not target.exists():
        write(target)
    final, left = content(target), sorted(os.listdir(target.parent))
    torn = [each for each in seen if each not in (None, final)]
    if name == "results":  # two files, each of them whole
        torn = [one for one in torn if any(final[f].split(b'"date"')[0] != text.split(b'"date"')[0]
                                           for f, text in one.items())]
    if torn or left != [name]:
        failures.append([name, left, [repr(each)[:200] for each in torn]])
print(json.dumps([failures, number]))
"""
NAMES = (
    *("rollouts.jsonl", "results", "dataset", "sft.parquet", "sft.csv", "curve.png"),
    *("config.json", "rows.jsonl", "letters"),
)


def test_no_kill_leaves_a_half_file(tmp_path):
    run = golden_kit.unpack(f"{golden_kit.SCHEMAS[-1]}/train", tmp_path / "run")
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, run, tmp_path / "out", *NAMES],
        capture_output=True, text=True, env={**os.environ, "MPLBACKEND": "agg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    failures, num_steps = json.loads(done.stdout.splitlines()[-1])
    assert num_steps > 1
    assert failures == []


def test_an_error_leaves_the_older_file_and_nothing_else(tmp_path):
    target = tmp_path / "a"
    target.write_text("old")

    def fail(writer, write):
        with writer as part:
            write(part)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(whole_file(target), lambda part: part.write_text("new"))
    with pytest.raises(ZeroDivisionError):
        fail(whole_folder(tmp_path / "b"), lambda part: (part / "c").write_text("new"))
    assert (os.listdir(tmp_path), target.read_text()) == (["a"], "old")


def test_links_modes_and_streams(tmp_path):
    real = tmp_path / "real"
    real.write_text("old")
    real.chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "new")
    assert (real.read_text(), real.stat().st_mode & 0o777) == ("new", 0o640)
    assert (tmp_path / "link").is_symlink()
    write_whole(tmp_path / "link", "own", follow=False)
    assert (real.read_text(), (tmp_path / "link").is_symlink()) == ("new", False)
    os.mkfifo(tmp_path / "pipe")
    read = []
    thread = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    thread.start()
    write_whole(tmp_path / "pipe", "through")
    thread.join()
    assert read == ["through"]
    write_whole("/dev/null", "away")
    assert Path("/dev/null").is_char_device()


def test_a_writer_that_goes_on_keeps_its_unfinished_file(tmp_path):
    target = tmp_path / ("long" * 60)
    with whole_file(target) as first:
        first.write_text("first")
        write_whole(target, "second")
        assert target.read_text() == "second"
    assert target.read_text() == "first"
    assert len(os.listdir(tmp_path)) == 1


def test_small_files_are_read_up_to_a_bound(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_regular(tmp_path / "a", 4)
