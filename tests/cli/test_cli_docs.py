"""What the documentation says is what there is."""

import re

from docs_kit import text_of
from rolltree.cli import app
from rolltree.cli import eval as eval_command
from rolltree.evaluation import REDUCERS
from rolltree.store.rows import COLUMNS


def commands():
    return app.commands


def test_every_flag_of_eval_is_documented_and_no_other():
    section = text_of("cli.md").partition("## eval")[2].partition("## train")[0]
    said = set(re.findall(r"`(--?[A-Za-z][a-z-]*)`", section))
    real = {flag for p in commands()["eval"].params for flag in p.opts if flag.startswith("-")}
    assert said == real - {"--help"}


def test_documented_defaults_are_the_defaults():
    section = text_of("cli.md").partition("## eval")[2]
    table = dict(re.findall(r"^\| `-(\w)`, `[^|]*\|[^|]*\| `?([^|`]*?)`? \|$", section, re.M))
    real = {p.opts[0].lstrip("-"): p.default for p in commands()["eval"].params}
    for flag in "mc":
        assert table[flag] == str(real[flag])
    for flag, default in (
        ("n", eval_command.NUM_EXAMPLES),
        ("r", eval_command.ROLLOUTS_PER_EXAMPLE),
    ):
        assert not isinstance(real[flag], int)
        assert table[flag] == f"the environment's own, or {default}"


def test_every_command_is_documented():
    said = set(re.findall(r"^\| `rolltree (\w+)", text_of("cli.md"), re.M))
    assert said == set(commands())


def test_every_column_is_documented():
    section = text_of("store.md").partition("## What a row has")[2].partition("## Space")[0]
    said = set(re.findall(r"`(\w+)`", section))
    assert set(COLUMNS) <= said


def test_every_reducer_is_documented():
    section = text_of("evaluation.md").partition("## What is measured")[2]
    assert set(REDUCERS) <= set(re.findall(r"`(\w+)`", section))
