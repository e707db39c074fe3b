"""The blocks of docs/gateway.md run, from the agent to the trained model."""

import asyncio
import re
import shlex
import textwrap
import tomllib

import pytest
from click.testing import CliRunner

import docs_kit
import rolltree as rt
from rolltree.cli import app
from rolltree.cli.gateway import serve_sessions
from rolltree.sandbox import LocalBackend

PAGE = "gateway.md"


def invoke(line, *more):
    words = shlex.split(line, comments=True)
    assert words[0] == "rolltree"
    result = CliRunner().invoke(app, [*words[1:], *more])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_from_an_agent_to_a_trained_model(tmp_path, monkeypatch):
    """As a reader does it, with the tiny model and one step."""
    pytest.importorskip("openai")
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    agent, environment, *_ = docs_kit.blocks(PAGE)
    (tmp_path / "my_agent").mkdir()
    (tmp_path / "my_agent" / "agent.py").write_text(agent)
    (tmp_path / "my_agent" / "my_agent.py").write_text(environment)
    (config,) = docs_kit.blocks(PAGE, "toml")
    (tmp_path / "my_agent.toml").write_text(config)
    measure, train, *_ = docs_kit.blocks(PAGE, "sh")
    shown = invoke(measure.replace("smollm2-135m", "tiny"), "-n", "2")
    assert "4 over 2 examples" in shown
    assert "failed" not in shown or "0 failed" in shown
    small = ("model.name=tiny", "train.num_steps=1", "algorithm.groups_per_step=1")
    few = ("algorithm.group_size=2", "eval.num_examples=1", "checkpoint.export=false")
    invoke(train, *small, *few)
    with rt.Run.open("runs/my_agent", mode="r") as run:
        assert run.num_rollouts(phase="train", status="ok") == 2
    assert tomllib.loads(config)["env"]["id"] == "./my_agent"


def test_the_other_examples_run(capsys):
    pytest.importorskip("openai")
    _, _, settings, function, sandboxed, sessions = docs_kit.blocks(PAGE)
    names = {"__name__": "docs", "rt": rt}
    exec(settings, names)
    client = rt.ScriptedClient(lambda messages: "12")
    (state,) = names["env"].evaluate_sync(client).state
    # The command of the example asks no model.
    assert (state["program"]["exit_status"], state["error"].type) == (3, "ProgramError")
    assert '"language": "c"' in state["program"]["stdout"]
    exec(function, names)
    assert capsys.readouterr().out == "12 1\n"
    exec(sandboxed, names)
    assert isinstance(names["env"].backend, LocalBackend)
    exec(f"async def example():\n{textwrap.indent(sessions, '    ')}\n", names)
    asyncio.run(names["example"]())
    assert capsys.readouterr().out == "answer 1 1 ()\n"


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
