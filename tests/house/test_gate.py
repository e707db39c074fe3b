"""The gate runs a suite again after every change that could turn it red, and after no other."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITES = """
[lists]
every = ["pins.txt", "Makefile"]
core = ["src/rolltree/tokens", "src/rolltree/values/types.py"]

[suite.test]
command = "echo test >> $RAN"
always = true

[suite.models]
command = "echo models >> $RAN; test ! -e src/rolltree/tokens/fault.py"
inputs = ["@core", "tests_models"]

[suite.page]
command = "echo page >> $RAN"
inputs = ["src/rolltree/insight/page"]

[suite.site]
command = "echo site >> $RAN"
inputs = ["docs"]
faces = ["src"]

[suite.all-models]
command = "echo all-models >> $RAN"
inputs = ["@core"]
nightly = true
"""
MODULE = 'def area(side: float) -> float:\n    """Return the area."""\n    return side * side\n'


class Repository:
    """A checkout with two rooms, five suites and the real gate."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran = folder, folder.parent / "ran"
        files = {
            ".ci/suites.toml": SUITES,
            ".gitattributes": (ROOT / ".gitattributes").read_text(),
            "pins.txt": "torch==1\n",
            "Makefile": "test:\n",
            "src/rolltree/tokens/area.py": MODULE,
            "src/rolltree/values/types.py": "",
            "src/rolltree/insight/page/page.py": MODULE.replace("area", "page"),
            "tests_models/test_area.py": "",
            "docs/index.md": "",
        }
        for path, text in files.items():
            self.write(path, text)
        shutil.copy(ROOT / ".ci/gate.py", folder / ".ci/gate.py")
        self.git("init", "-q", "-b", "main")
        self.commit()

    def git(self, *words: str) -> str:
        env = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        names = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        done = subprocess.run(
            ["git", *names, *words],
            cwd=self.folder,
            env={**os.environ, **env},
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "-q", "-m", "a change")

    def gate(self, *words: str, red: bool = False) -> set[str]:
        """Run the gate, and return which suites it ran."""
        self.ran.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, ".ci/gate.py", *words],
            cwd=self.folder,
            env={**os.environ, "RAN": str(self.ran)},
            capture_output=True,
            text=True,
        )
        self.output = done.stdout + done.stderr
        assert done.returncode == int(red), self.output
        return set(self.ran.read_text().split()) if self.ran.exists() else set()

    @property
    def green(self) -> Path:
        return self.folder / ".ci/green"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "clone")
    assert made.gate() == {"test", "models", "page", "site"}  # nothing is green yet
    made.commit()
    assert made.gate() == {"test"}
    return made


@pytest.mark.parametrize(
    ("path", "text", "again"),
    [
        ("src/rolltree/tokens/area.py", MODULE.replace("*", "+"), {"models"}),
        ("src/rolltree/tokens/area.py", MODULE.replace("the area", "it"), {"models", "site"}),
        (
            "src/rolltree/tokens/area.py",
            MODULE.replace("side: float", "side: int"),
            {"models", "site"},
        ),
        ("src/rolltree/values/types.py", "TEN = 10\n", {"models", "site"}),
        ("src/rolltree/insight/page/page.py", MODULE.replace("*", "+"), {"page", "site"}),
        ("src/rolltree/insight/page/new.js", "", {"page", "site"}),
        ("tests_models/test_area.py", "# more\n", {"models"}),
        ("docs/index.md", "A page.\n", {"site"}),
        ("pins.txt", "torch==2\n", {"models", "page", "site"}),
        ("Makefile", "test: .venv\n", {"models", "page", "site"}),
        ("README.md", "", set()),
        (".ci/suites.toml", SUITES.replace("echo page", "echo  page"), {"page"}),
    ],
)
def test_a_changed_file_runs_the_suites_that_read_it(repository, path, text, again):
    repository.write(path, text)
    assert repository.gate() >= {"test", *again}  # also before it is committed
    repository.commit()
    assert repository.gate() == {"test", *again}
    assert repository.gate() == {"test"}


def test_a_deleted_a_renamed_and_an_executable_file_are_changes(repository):
    repository.git("mv", "src/rolltree/insight/page/page.py", "src/rolltree/insight/page/pages.py")
    repository.commit()
    assert "page" in repository.gate()
    repository.git("rm", "-q", "src/rolltree/insight/page/pages.py")
    repository.write("src/rolltree/insight/page/page.py", MODULE)
    repository.commit()
    assert "page" in repository.gate()
    (repository.folder / "src/rolltree/insight/page/page.py").chmod(0o755)
    repository.commit()
    assert "page" in repository.gate()


def test_a_red_suite_loses_its_line_and_runs_until_it_passes(repository):
    repository.write("src/rolltree/tokens/fault.py", "")
    repository.commit()
    assert "models" in repository.gate(red=True)
    assert not re.search("^models ", repository.green.read_text(), re.M)
    assert "models" in repository.gate(red=True)
    repository.git("rm", "-q", "src/rolltree/tokens/fault.py")
    repository.commit()
    assert "models" in repository.gate()  # also with inputs that were green before
    assert repository.gate() == {"test"}


def test_suites_after_a_red_one_run(repository):
    repository.write("src/rolltree/tokens/fault.py", "")
    repository.write("src/rolltree/insight/page/page.py", "")
    repository.commit()
    assert repository.gate(red=True) == {"test", "models", "page", "site"}
    assert "RED" in repository.output


@pytest.mark.parametrize("field", range(6))
def test_a_line_that_was_edited_counts_for_nothing(repository, field):
    lines = repository.green.read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines) if line.startswith("page "))
    fields = lines[number].split(" ")
    fields[field] = "3" * len(fields[field])
    lines[number] = " ".join(fields)
    repository.green.write_text("\n".join(lines) + "\n")
    assert repository.gate() == {"test", "page"}


def test_a_line_of_one_suite_is_not_anothers(repository):
    text = repository.green.read_text()
    line = next(line for line in text.splitlines() if line.startswith("models "))
    repository.green.write_text(line.replace("models", "page", 1) + "\n")
    assert repository.gate() == {"test", "models", "page", "site"}


def test_nothing_is_noted_while_a_file_is_not_committed(repository):
    before = repository.green.read_text()
    repository.write("src/rolltree/insight/page/page.py", "")
    repository.write("notes.txt", "")
    assert repository.gate() == {"test", "page", "site"}
    assert repository.green.read_text() == before
    assert "is not committed" in repository.output


def test_both_sides_of_a_merge_stay_and_the_merged_tree_runs(repository):
    repository.git("checkout", "-q", "-b", "other")
    repository.write("src/rolltree/insight/page/page.py", "")
    repository.commit()
    repository.gate()
    repository.commit()
    repository.git("checkout", "-q", "main")
    repository.write("src/rolltree/insight/page/more.py", "")
    repository.commit()
    repository.gate()
    repository.commit()
    repository.git("merge", "-q", "other")
    assert len(re.findall("^page ", repository.green.read_text(), re.M)) == 2
    assert repository.gate() == {"test", "page", "site"}
    repository.commit()
    assert repository.gate() == {"test"}


def test_a_conflict_that_nobody_resolved_is_safe(repository):
    text = repository.green.read_text()
    theirs = text.replace("page ", "page 0")
    repository.green.write_text(f"<<<<<<< ours\n{text}=======\n{theirs}>>>>>>> theirs\n")
    assert repository.gate() == {"test"}
    repository.green.write_text(f"<<<<<<< ours\n=======\n{theirs}>>>>>>> theirs\n")
    assert repository.gate() == {"test", "page"}


def test_nightly_runs_everything_with_and_without_a_green_file(repository):
    everything = {"test", "models", "page", "site", "all-models"}
    assert repository.gate("--nightly") == everything
    repository.green.unlink()
    assert repository.gate("--nightly") == everything
    repository.commit()
    assert repository.gate() == {"test"}
    repository.green.unlink()
    assert repository.gate() == everything - {"all-models"}


def test_a_row_that_names_nothing_is_refused(repository):
    text = SUITES.replace('"src/rolltree/insight/page"', '"src/rolltree/viewers"')
    repository.write(".ci/suites.toml", text)
    done = subprocess.run(
        [sys.executable, ".ci/gate.py"], cwd=repository.folder, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "src/rolltree/viewers" in done.stderr


def test_the_history_counts_what_each_commit_would_have_run(repository):
    repository.write("src/rolltree/tokens/area.py", MODULE.replace("*", "+"))
    repository.commit()
    repository.gate("--history", "2")
    first, second, *_ = repository.output.splitlines()
    assert first.split()[3:] == ["core", "test", "models"]
    assert second.split()[3:] == ["no", "code", "test"]


@pytest.mark.parametrize(
    ("command", "number"),
    [("make test-long ARGS=", 6), ("make test-vllm (?:ARGS|VLLM_TESTS)=", 2)],
)
def test_a_suite_in_parts_has_each_file_once(command, number):
    text = (ROOT / ".ci/suites.toml").read_text()
    parts = re.findall(f"{command}'([^']*)'", text)
    rest = next(part for part in parts if "--ignore" in part)
    named = [path for part in parts if part is not rest for path in part.split()]
    assert sorted(named) == sorted(re.findall(r"--ignore (\S+)", rest))
    assert len(parts) == number
    assert len(set(named)) == len(named)
    assert all((ROOT / path).exists() for path in named)
