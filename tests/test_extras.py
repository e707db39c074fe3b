"""Every extra that a message, a page or a package names is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from rolltree._helpers.machine import PROVIDES

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = SETTINGS["project"]["optional-dependencies"]
SUFFIXES = (".py", ".md", ".toml")


def named_in(*tops):
    """Return (extra, file) for every `rolltree[...]` in the files below some folders."""
    files = [file for top in tops for file in [ROOT / top, *(ROOT / top).rglob("*")]]
    return {
        (extra.strip(), str(file.relative_to(ROOT)))
        for file in files
        if file.suffix in SUFFIXES
        for named in re.findall(r"\brolltree\[([a-z, ]+)\]", file.read_text(encoding="utf-8"))
        for extra in named.split(",")
    }


def test_extras_that_are_named_exist():
    named = named_in(
        "src", "docs", "design", "examples", "environments", "README.md", "pyproject.toml"
    )
    assert len(named) > 20
    assert {(extra, file) for extra, file in named if extra not in EXTRAS} == set()


def test_an_extra_exists_when_the_code_asks_for_it():
    """Every extra is the remedy that some message or docstring names."""
    named = {extra for extra, _ in named_in("src", "environments")}
    assert set(EXTRAS) - {"all", "dev"} - named == set()


def test_the_extra_all_has_every_other_but_the_developers():
    (line,) = EXTRAS["all"]
    listed = set(re.fullmatch(r"rolltree\[(.*)\]", line)[1].split(","))
    within = {
        extra
        for name in listed
        for line in EXTRAS[name]
        for part in re.findall(r"rolltree\[(.*)\]", line)
        for extra in part.split(",")
    }
    assert listed | within == set(EXTRAS) - {"all", "dev"}


def test_the_readme_lists_every_extra():
    readme = (ROOT / "README.md").read_text()
    line = re.search(r"More extras: ([^.]*)\.", readme)[1]
    shown = re.findall(r"pip install 'rolltree\[([a-z,]+)\]'", readme)
    listed = {*re.findall(r"`([a-z]+)`", line), *",".join(shown).split(",")}
    assert listed == set(EXTRAS) - {"torch", "dev"}  # a part of `train`; for contributors


def test_what_doctor_says_of_an_extra_is_what_it_brings():
    assert set(PROVIDES) == set(EXTRAS) - {"all", "dev", "torch"}
    for extra, (modules, _) in PROVIDES.items():
        lines = {line for part in (extra, *["torch"] * (extra == "train")) for line in EXTRAS[part]}
        names = {re.split(r"[>=\[;]", line)[0].replace("-", "_") for line in lines} - {"rolltree"}
        names = {"mlflow" if name == "mlflow_skinny" else name for name in names}
        assert set(modules) <= names, extra
