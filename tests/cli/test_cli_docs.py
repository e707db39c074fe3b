"""What the documentation says is what there is."""

import re
import textwrap

import docs_kit
import rolltree
from docs_kit import text_of
from rolltree.cli import app
from rolltree.cli import eval as eval_command
from rolltree.evaluation import REDUCERS
from rolltree.rollouts.record import encode_result
from rolltree.store.rows import COLUMNS
from rolltree.types import RolloutRequest, RolloutResult


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


def test_the_store_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = RolloutRequest(
        request_id="r", env_id="e", input={"prompt": "p", "example_id": 0, "task": "t"}, seed=0,
        sampling_seed=0, group_id="g", index_in_group=0,
    )  # fmt: skip
    states = (rolltree.State(trajectory=rolltree.Trajectory(), reward=1.0),)
    names = {"result": RolloutResult(request, states, None)}
    assert encode_result(names["result"])
    assert len(docs_kit.blocks("store.md")) == 1
    docs_kit.run("store.md", names)
    assert names["done"] == {"r"}
    assert (tmp_path / "rollouts.jsonl").read_text().count("\n") == 1


async def test_the_evaluation_example_runs(tmp_path, monkeypatch, capsys):
    from rolltree.testing import ScriptedServer

    rows = [{"question": str(i), "answer": str(i)} for i in range(4)]
    rubric = rolltree.Rubric([lambda completion, answer: float(answer == "1")])
    env = rolltree.SingleTurnEnv(eval_dataset=rows, rubric=rubric, env_id="gsm8k")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rolltree.environments.load_environment", lambda name: env)
    monkeypatch.setitem(vars(rolltree), "load_environment", lambda name: env)
    (example,) = docs_kit.blocks("evaluation.md")
    with ScriptedServer(lambda messages: "ok", model="my-model") as server:
        text = example.replace("http://127.0.0.1:8000/v1", server.base_url)
        body = textwrap.indent(text, "    ")
        names: dict = {}
        exec(f"async def example():\n{body}\n    await client.aclose()\n", names)
        await names["example"]()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("0.250 [")
    assert printed[1].startswith("0.250 [")
    assert printed[2] == "0 {}"
