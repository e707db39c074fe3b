"""A run directory that is removed, moved or replaced while it is written is an error."""

import shutil

import pytest
from click.testing import CliRunner

from rolltree.cli import app
from rolltree.store import Run, StoredRollout
from rolltree.values.errors import StoreError

GONE = {
    "removed": shutil.rmtree,
    "moved": lambda path: path.rename(path.with_name("elsewhere")),
    "only its file": lambda path: (path / "run.db").unlink(),
}


def replaced(path):
    shutil.rmtree(path)
    Run.create(path).close()


@pytest.mark.parametrize("how", [*GONE, "replaced"])
def test_storing_into_it_is_an_error(how, tmp_path):
    run = Run.create(tmp_path / "run")
    run.add_rollouts([StoredRollout(request_id="a")])
    {**GONE, "replaced": replaced}[how](tmp_path / "run")
    with pytest.raises(StoreError, match="removed, moved or replaced"):
        run.add_rollouts([StoredRollout(request_id="b")])
    run.close()


def left(path, how, error=None):
    with Run.create(path):
        GONE[how](path)
        if error is not None:
            raise error


@pytest.mark.parametrize("how", GONE)
def test_so_is_leaving_it(how, tmp_path):
    with pytest.raises(StoreError, match="removed, moved or replaced"):
        left(tmp_path / "run", how)


def test_another_error_is_the_one_that_is_told(tmp_path):
    with pytest.raises(ZeroDivisionError):
        left(tmp_path / "run", "removed", ZeroDivisionError())


def test_another_working_folder_is_fine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Run.create("run") as run:
        monkeypatch.chdir("/")
        run.add_event("e")


def test_an_evaluation_ends_with_status_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(
        "import shutil\n"
        "import rolltree as rt\n"
        "def gone(completion):\n"
        "    shutil.rmtree('run', ignore_errors=True)\n"
        "    return 1.0\n"
        "def load_environment():\n"
        "    rows = [{'question': str(n), 'answer': 'a'} for n in range(4)]\n"
        "    return rt.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=rt.Rubric([gone]))\n"
    )
    done = CliRunner().invoke(
        app, ["eval", "./sums.py", "-m", "tiny", "-n", "4", "-r", "1", "-t", "4", "--run", "run"]
    )
    assert done.exit_code == 1, done.output
    assert "removed, moved or replaced" in " ".join(done.output.split())
    assert not (tmp_path / "run").exists()
