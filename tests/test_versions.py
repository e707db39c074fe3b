"""The table of tested versions is what pip is asked for, and `doctor` names what is outside."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from rolltree._helpers.machine import look
from rolltree._helpers.versions import BAD_PAIRS, TESTED, TESTED_ON, version_problems
from rolltree.cli import app

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
LINES = [line for group in GROUPS for line in group]


def plain(version):
    return re.sub(r"(\.0)+$", "", version)


@pytest.mark.parametrize("package", TESTED)
def test_the_bounds_are_what_was_tested(package):
    oldest, pinned, newest = TESTED[package]
    lines = [line for line in LINES if re.split(r"[\[><=!; ]", line)[0] == package]
    assert lines
    for line in lines:
        assert plain(re.search(r">=([\d.]+)", line)[1]) == plain(oldest), line
        if cap := re.search(r",<([\d.]+)", line):
            major, minor = newest.split(".")[:2]
            assert cap[1] == f"{major}.{int(minor) + 1}"
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"{package}=={pinned}" in pins


def test_the_page_is_the_table():
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert {name: tuple(versions) for name, *versions in rows} == TESTED
    assert f"those of {TESTED_ON}." in page


def test_a_release_that_is_excluded_is_a_known_bad_pair():
    for line in LINES:
        for excluded in re.findall(r"!=([\d.]+)", line):
            package = re.split(r"[><=!]", line)[0]
            assert (package, excluded) in {(pair.package, pair.first) for pair in BAD_PAIRS}


def test_what_was_tested_is_no_problem():
    for index in (0, 1):
        assert version_problems({name: row[index] for name, row in TESTED.items()}) == []
    assert version_problems({"torch": "2.13.0+cpu", "msgspec": "0.21"}) == []


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"transformers": "5.25.0"}, "transformers 5.25.0 is newer than the newest tested release"),
        ({"torch": "2.20.0a0+git1"}, "torch 2.20.0a0+git1 is newer than"),
        ({"msgspec": "0.20.0"}, "msgspec 0.20.0 is older than the oldest release that works, 0.21"),
        (
            {"transformers": "5.24.0", "peft": "0.21.2"},
            "transformers 5.24.0 does not fit peft 0.21.2: ",
        ),
        ({"transformers": "5.24.0", "peft": "0.22.0"}, "peft 0.22.0 is newer"),
        ({"transformers": "5.20.0", "peft": "0.17.1"}, "transformers 5.20.0 does not fit peft"),
    ],
)
def test_doctor_names_what_is_outside(installed, said, monkeypatch):
    machine = replace(look(), versions=installed)
    monkeypatch.setattr("rolltree._helpers.machine.look", lambda: machine)
    text = CliRunner().invoke(app, ["doctor", "--no-measure"], catch_exceptions=False).stdout
    assert f"! {said}" in text
