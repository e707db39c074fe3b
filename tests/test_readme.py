"""What the README shows is true: its Python runs, its commands exist, its rooms are there."""

import re
import subprocess
import sys

import pytest

from docs_kit import ROOT, blocks, text_of

README = text_of("README.md")


@pytest.mark.slow
def test_the_python_blocks_run_in_order(tmp_path):
    code = "\n".join(blocks("README.md"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    before, after = re.findall(r"^eval_\w+: held-out reward ([\d.]+)$", done.stdout, re.MULTILINE)
    assert float(before) < 0.1
    assert float(after) > 0.3  # 0.642 here, whichever the seed
    assert (tmp_path / "runs" / "sums" / "model").is_dir()
    last = [line.split() for line in done.stdout.splitlines()[-4:]]
    tokens = {scope: int(count) for scope, _, count in last}
    samples = {scope: int(count) for scope, count, _ in last}
    assert list(tokens) == ["step", "turn", "interleave", "tree"]
    assert samples["step"] == 2
    assert samples["tree"] == 1
    assert tokens["tree"] < tokens["step"]


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", "\n".join(blocks("README.md", "sh")), re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test\n" in (ROOT / ".ci" / "run").read_text()  # CI runs what users run


def test_the_commands_and_their_flags_exist():
    lines = re.findall(r"^rolltree (.*)$", "\n".join(blocks("README.md", "sh")), re.MULTILINE)
    assert len(lines) == 8
    for line in lines:
        command, *words = line.partition("#")[0].split()
        shown = subprocess.run(
            [sys.executable, "-m", "rolltree", command, "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for flag in (word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)):
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", shown), (command, flag)


def test_the_map_has_one_line_per_room():
    rooms = [
        path.name
        for path in (ROOT / "src" / "rolltree").iterdir()
        if path.is_dir() and (path / "__init__.py").exists()
    ]
    table = README[README.index("| room |") : README.index("`environments/` at the top")]
    named = re.findall(r"^\| `(\w+)/`", table, re.MULTILINE)
    assert sorted(named) == sorted(rooms)


def test_links_and_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    for config in re.findall(r"(examples/\S+\.toml)", README):
        assert (ROOT / config).exists()
