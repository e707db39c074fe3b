"""An environment package in a virtual environment without verifiers: installed, found, evaluated on
a real server, and trained, with no line of it changed.

The virtual environment has rolltree as a wheel, and sees the project's own packages (torch and
others) through a path file, so that nothing large is installed twice.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ENVIRONMENT = '''\
import verifiers as vf


def load_environment(num_examples: int = 12, **kwargs) -> vf.Environment:
    """Say a letter."""
    from verifiers.utils.data_utils import extract_hash_answer

    from my_env.rewards import share_of_letters

    letters = "abcdefghijkl"[:num_examples]
    rows = [{"question": f"Say {x}.", "answer": extract_hash_answer(f"#### {x}")} for x in letters]
    from datasets import Dataset

    parser = vf.Parser()
    rubric = vf.Rubric(funcs=[share_of_letters], parser=parser)
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), parser=parser, rubric=rubric, **kwargs)
'''

REWARDS = """\
from verifiers.types import Messages


def share_of_letters(completion: Messages, answer: str, **kwargs) -> float:
    text = completion[-1]["content"]
    return text.count(answer) / max(1, len(text))
"""

TRAINING = """\
[run]
dir = "run"
[model]
name = "tiny"
[env]
id = "my-env"
[train]
num_steps = 2
[algorithm]
group_size = 2
groups_per_step = 2
[sampling]
max_tokens = 8
[eval]
before = false
after = false
"""


class Fresh:
    """The virtual environment and a working folder."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "venv" / "bin"
        self.folder = folder
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        (packages / "project.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        source = folder / "rolltree"
        source.mkdir()
        shutil.copytree(ROOT / "src" / "rolltree", source / "src" / "rolltree")
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source / name)
        self.run("python", "-m", "pip", "install", "-q", "--no-deps", source)

    def environment(self) -> dict[str, str]:
        """The shell's variables without those that lead back to the project."""
        leads = ("PYTHON", "VIRTUAL_ENV", "OPENAI")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(leads)}
        return {**kept, "PATH": f"{self.bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def run(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program of the virtual environment."""
        program, *rest = map(str, words)
        done = subprocess.run(
            [str(self.bin / program), *rest],
            cwd=self.folder, env=self.environment(), capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    made = Fresh(tmp_path_factory.mktemp("fresh"))
    code = "import rolltree; print(rolltree.__file__)"
    assert made.run("python", "-c", code).stdout.startswith(str(made.folder / "venv"))
    assert "No module named" in made.run("python", "-c", "import verifiers", check=False).stderr
    return made


@pytest.fixture(scope="module")
def package(fresh: Fresh) -> Path:
    """The files that vf-init makes, with an environment written into them."""
    fresh.run("vf-init", "my-env", "--multi-file")
    folder = fresh.folder / "environments" / "my_env"
    assert '"verifiers>=0.1.8"' in (folder / "pyproject.toml").read_text()
    (folder / "my_env" / "my_env.py").write_text(ENVIRONMENT)
    (folder / "my_env" / "rewards.py").write_text(REWARDS)
    kept = fresh.folder / "elsewhere" / "my_env"
    kept.parent.mkdir()
    return folder.rename(kept)


@pytest.fixture(scope="module")
def installed(fresh: Fresh, package: Path) -> str:
    """The name of the installed environment."""
    said = fresh.run("rolltree", "env", "install", package).stdout
    assert "rolltree eval my-env" in said
    assert "No module named" in fresh.run("python", "-c", "import verifiers", check=False).stderr
    return "my-env"


@pytest.fixture(scope="module")
def server(fresh: Fresh) -> Iterator[tuple[str, str]]:
    """The URL and the token of `rolltree serve tiny`."""
    process = subprocess.Popen(
        [str(fresh.bin / "rolltree"), "serve", "tiny", "--port", "0"],
        cwd=fresh.folder, env=fresh.environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        token = process.stdout.readline().split()[-1]
        yield url if url.endswith("/v1") else f"{url}/v1", token
    finally:
        process.terminate()
        process.communicate()


def test_it_is_evaluated_on_a_real_server(
    fresh: Fresh, installed: str, server: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, token = server
    monkeypatch.setenv("SERVE_TOKEN", token)
    words = ("-m", "tiny", "-b", url, "-k", "SERVE_TOKEN", "-t", "8")
    done = fresh.run("rolltree", "eval", installed, *words, "--json", "--run", "evaluated")
    report = json.loads(done.stdout)
    assert report["num_rollouts"] == 15  # 5 examples, 3 rollouts each: its [tool.verifiers.eval]
    assert report["num_failed"] == 0
    fresh.run("vf-eval", f"someone/{installed}", *words, "-n", "2", "-r", "2", "-s")
    (results,) = (fresh.folder / "outputs" / "evals").rglob("results.jsonl")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(rows) == 4
    assert {"prompt", "completion", "reward", "share_of_letters", "example_id"} <= rows[0].keys()
    assert json.loads((results.parent / "metadata.json").read_text())["num_examples"] == 2


def test_it_is_trained_for_two_steps(fresh: Fresh, installed: str) -> None:
    (fresh.folder / "train.toml").write_text(TRAINING)
    fresh.run("rolltree", "train", "train.toml")
    code = "import rolltree as rt; run = rt.Run.open('run', 'r'); print(len(list(run.rollouts())))"
    assert fresh.run("python", "-c", code).stdout.strip() == "8"
