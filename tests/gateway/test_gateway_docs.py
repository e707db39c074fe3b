"""The tables of docs/gateway.md are whole."""

import re

import docs_kit
from rolltree.gateway.cli.gateway import serve_sessions

PAGE = "gateway.md"


def test_the_table_of_flags_is_whole():
    section = docs_kit.text_of(PAGE).partition("## `rolltree gateway`")[2]
    rows = re.findall(r"^\| (`-.*?) \|", section, re.MULTILINE)
    documented = {flag for row in rows for flag in re.findall(r"`(-[\w-]+)`", row)}
    flags = {flag for parameter in serve_sessions.params for flag in parameter.opts}
    assert documented == {flag for flag in flags if flag.startswith("-")} - {"--help"}


def test_the_keys_of_a_program_are_documented():
    from dataclasses import fields

    from rolltree.gateway.program import NAMES, ProgramOutcome

    text = docs_kit.text_of(PAGE)
    for field in fields(ProgramOutcome):
        assert f"`{field.name}`" in text, field.name
    for name in NAMES:
        assert f"`{{{name}}}`" in text, name
