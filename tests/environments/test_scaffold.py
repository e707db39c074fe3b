import os
import subprocess
import sys

import pytest

import rolltree as rt
from rolltree.environments.check import check_environment_async
from rolltree.environments.scaffold import KINDS, scaffold
from rolltree.training import load_train_config
from rolltree.training.launch import environment_config
from rolltree.values.errors import ConfigError, UnknownName


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_written_runs_and_is_sound(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = scaffold(f"my-{kind}", kind)
    assert [str(file) for file in files] == [
        f"environments/my_{kind}/my_{kind}.py",
        f"environments/my_{kind}/pyproject.toml",
        f"environments/my_{kind}/README.md",
        f"environments/my_{kind}/train.toml",
        f"environments/my_{kind}/test_my_{kind}.py",
    ]
    report = await check_environment_async(
        lambda: rt.load_environment(f"my-{kind}"), num_examples=6
    )
    assert report.findings == ()
    assert report.mean_rewards["reference"] == 1.0
    assert report.env_id == f"my-{kind}"
    assert "{" not in files[1].read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_clean(kind, tmp_path):
    file = scaffold("mine", kind, tmp_path)[0]
    lint = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,I,UP"]
    done = subprocess.run(
        [*lint, "--line-length", "100", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_nothing_is_overwritten(tmp_path):
    scaffold("one", folder=tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        scaffold("one", folder=tmp_path)


@pytest.mark.parametrize("name", ["", "1st", "My", "a b", "../x", "a.b"])
def test_names_that_are_no_modules(name, tmp_path):
    with pytest.raises(ConfigError, match="cannot name an environment"):
        scaffold(name, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_kinds(tmp_path):
    with pytest.raises(UnknownName, match="Did you mean 'multi'"):
        scaffold("one", "multy", tmp_path)


def test_its_config_fits_the_machine_and_its_test_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = scaffold("mine")
    config = load_train_config(environment_config("mine"))
    assert (config.env.id, config.run.dir) == ("mine", "runs/mine")
    assert config.train.num_threads == len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(files[4].parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@pytest.mark.long
def test_its_training_works_from_end_to_end(tmp_path):
    def rolltree(*words):
        command = [sys.executable, "-m", "rolltree", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    rolltree("init", "mine")
    assert "mine: no faults" in rolltree("env", "check", "mine", "-n", "4")
    quick = ("train.num_steps=2", "eval.num_examples=4", "algorithm.groups_per_step=2")
    said = rolltree("train", "mine", "model.name=tiny", *quick)
    assert "rolltree docs first-hour" in said  # what to do next: the reward is near 0
    assert (tmp_path / "runs" / "mine" / "model").is_dir()
