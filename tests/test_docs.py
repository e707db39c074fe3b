"""README.md and docs/ are true: every block of every page runs, or says in the page why not."""

import ast
import re
import shlex

import click
import pytest

import docs_kit
import rolltree as rt
from docs_kit import PAGES, ROOT, blocks, blocks_of, commands, paste, text_of
from rolltree.cli import app
from rolltree.training import load_train_config
from rolltree.values.errors import SandboxUnavailable


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_a_page_runs_from_top_to_bottom(page, tmp_path):
    """As a newcomer pastes it. `test_readme.py` runs README.md, and looks at what it printed."""
    try:
        paste(page, tmp_path)
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox here: {error}")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_says_why_not(page):
    found = blocks_of(page)
    assert text_of(page).count("```") == 2 * len(found)
    for block in found:
        where = f"{page}:{block.first_line}"
        assert block.language in (*docs_kit.RUN, *docs_kit.SHOWN), f"{where} names no language"
        if block.language in docs_kit.SHOWN:
            assert not re.search(r"^rolltree \w", block.text, re.MULTILINE), where
        if block.language == "python":
            compile(block.text, where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if block.language == "sh" and block.is_run:
            assert commands(block), f"{where}: nothing of it is run: mark the block"
        for mark in block.marks:
            lines = block.text.splitlines()
            assert any(line.startswith(mark.begins) for line in lines), f"{where}: {mark}"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_its_flags_exist(page):
    """Also of the lines that are not run."""
    for line in re.findall(r"^rolltree (.*)", "".join(blocks(page, "sh")), re.MULTILINE):
        words = shlex.split(line, comments=True)
        command = app
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        known = {flag for parameter in command.params for flag in parameter.opts}
        flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert flags <= known, line


def test_a_page_that_is_wrong_fails(tmp_path, monkeypatch):
    """The harness can fail: on a name, a command, a setting, and on what was to be printed."""
    pages = {
        "name": "```python\nprint(undefined)\n```\n",
        "command": "```sh\nrolltree show runs/nothing\n```\n",
        "unmarked": "```sh\npip install rolltree\n```\n",
        "setting": "```toml\n[optim]\nlearning = 1\n```\n",
        "prints": "```python\nprint(1 + 1)  # prints 3\n```\n",
    }
    monkeypatch.setattr(docs_kit, "text_of", pages.__getitem__)
    for page in pages:
        with pytest.raises((NameError, AssertionError, rt.ConfigError)):
            paste(page, tmp_path)
    pages["left out"] = "<!-- not run: a reason -->\n" + pages["name"]
    pages["two"] = "```python\nx = 1\n```\n\n```python\nprint(x)  # prints 1\n```\n"
    assert [paste(page, tmp_path) for page in ("left out", "two")] == ["", "1\n"]


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("examples/**/*.toml")), ids=lambda path: path.parent.name
)
def test_the_config_of_an_example_is_accepted(path):
    if path.name != "pyproject.toml":
        assert load_train_config(path).env.id


def test_gsm8k_for_one_gpu_and_for_eight_is_the_same_training():
    one, eight = (
        load_train_config(ROOT / "examples" / "gsm8k" / f"{name}_gpu{plural}.toml").as_dict()
        for name, plural in (("one", ""), ("eight", "s"))
    )
    cluster = eight.pop("cluster")
    assert cluster["engines"]["count"] + cluster["trainer"]["ranks"] == 8
    assert one.pop("run")["dir"] != eight.pop("run")["dir"]
    assert one.pop("cluster", None) is None
    eight["engine"].pop("max_concurrent")
    num_in_flight = cluster["rollout_workers"] * cluster["slots_per_worker"]
    assert one["engine"].pop("max_concurrent") == num_in_flight
    assert one == eight


def test_the_site_has_every_page_and_the_reference_every_name():
    names = {"__name__": "site_hooks", "__file__": str(ROOT / "docs" / "site_hooks.py")}
    exec((ROOT / "docs" / "site_hooks.py").read_text(encoding="utf-8"), names)
    assert {*names["public_names"](), "__version__"} == set(rt.__all__)
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    for path in (ROOT / "docs").glob("*.md"):
        assert f"{path.name}\n" in nav, f"mkdocs.yml has no line for {path.name}"
        assert text_of(path.name).startswith("# ")
