"""What the README shows is true: its blocks run, its rooms are there."""

import re
import tomllib

import pytest

from docs_kit import ROOT, blocks, paste, text_of

README = text_of("README.md")


@pytest.mark.slow
def test_every_block_runs_in_order(tmp_path):
    printed = paste("README.md", tmp_path)
    # The training of the Python blocks is the first.
    before, after = re.findall(r"^eval_\w+: held-out reward ([\d.]+)$", printed, re.MULTILINE)[:2]
    assert float(before) < 0.1
    assert float(after) > 0.3  # 0.642 here, whichever the seed
    assert (tmp_path / "runs" / "sums" / "model").is_dir()
    assert (tmp_path / "runs" / "demo" / "model").is_dir()
    rows = re.findall(r"^(step|turn|interleave|tree) (\d+) (\d+)$", printed, re.MULTILINE)
    assert [scope for scope, _, _ in rows] == ["step", "turn", "interleave", "tree"]
    assert (int(rows[0][1]), int(rows[-1][1])) == (2, 1)  # samples
    assert int(rows[-1][2]) < int(rows[0][2])  # tokens


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", "\n".join(blocks("README.md", "sh")), re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    suites = tomllib.loads((ROOT / ".ci" / "suites.toml").read_text())["suite"]
    assert suites["test"]["command"] == "make test"  # CI runs what users run
    assert suites["test"]["always"]


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
