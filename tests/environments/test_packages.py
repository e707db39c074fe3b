"""The environments of the repository: they load by name, play, and keep their contract."""

import json
import re
from pathlib import Path

import pytest
from env_scripts import ScriptedModel, assistant

import rolltree as rt
from rolltree.environments.check import check_environment_async

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "environments"
REAL_GSM8K = ROOT.parent / "shared" / "data" / "gsm8k_test_200.jsonl"
MADE = {"train": "generated", "test": "generated", "num_generated": 40}
SETTINGS = {
    "gsm8k": MADE,
    "math": MADE,
    "wordle": {},
    "tool_calls": {"num_train": 20, "num_eval": 20},
    "reasoning_gym": {"num_train": 20, "num_eval": 20},
    "reverse_text": {"num_train": 20, "num_eval": 20},
}


def load(name, **args):
    if name == "reasoning_gym":
        pytest.importorskip(name, reason="no wheel for one of its needs: no C compiler here")
    return rt.load_environment(str(FOLDER / name), **{**SETTINGS[name], **args})


async def score(env, row, said):
    state = rt.State(
        input=row,
        trajectory=[],
        completion=assistant(said),
        reward=None,
        metrics=None,
        error=None,
    )
    await env.rubric.score_rollout(state)
    assert state["error"] is None
    return state["reward"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long) if n == "math" else n for n in SETTINGS],
)
async def test_it_keeps_its_contract(name):
    num_examples = (
        2 if name == "math" else 8
    )  # its comparisons that never end take their time limit
    report = await check_environment_async(lambda: load(name), num_examples=num_examples)
    assert report.findings == ()
    assert report.mean_rewards["reference"] > 0.9


@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_a_package(name):
    folder = FOLDER / name
    project = (folder / "pyproject.toml").read_text()
    entry, module = re.search(r'^([\w-]+) = "(\w+):load_environment"$', project, re.M).groups()
    assert entry.replace("-", "_") == name
    assert module in (name, f"rolltree_{name}")
    source = folder / (f"{name}.py" if module == name else "__init__.py")
    assert len(source.read_text().splitlines()) <= 100
    readme = " ".join((folder / "README.md").read_text().split())
    assert "# " + entry in readme
    assert re.search("not (a benchmark|the newspaper's|GSM8K|MATH)", readme)


def test_the_names_work_where_the_folder_is(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert rt.load_environment("gsm8k", **MADE).env_id == "gsm8k"
    assert rt.load_environment("math", **MADE).env_id == "math"  # not Python's module
    pytest.importorskip("reasoning_gym", reason="no wheel for one of its needs: no C compiler here")
    assert rt.load_environment("reasoning-gym", num_train=2, num_eval=2).num_examples("eval") == 2


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_generated_rows_are_not_the_benchmark_and_say_so(name):
    env = load(name)
    assert set(env.dataset["task"]) == set(env.eval_dataset["task"]) == {f"{name}-generated"}
    shown = [set(map(json.dumps, rows["prompt"])) for rows in (env.dataset, env.eval_dataset)]
    assert not shown[0] & shown[1]
    assert load(name).dataset.to_list() == env.dataset.to_list()


# gsm8k


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (r"So \boxed{1200}.", 1.0),
        (r"\boxed{\$1,200.00}", 1.0),
        (r"\boxed{1200 \text{ eggs}}", 1.0),
        (r"<think>\boxed{3}</think> \boxed{1{,}200}", 0.0),
        (r"<think>\boxed{1200}</think> \boxed{3}", 0.0),
        (r"\boxed{1201}", 0.0),
        (r"\boxed{nan}", 0.0),
        ("1200", 0.0),
        ("", 0.0),
    ],
)
async def test_gsm8k_rewards(said, reward):
    env = load("gsm8k")
    row = {"prompt": [], "answer": "1200", "example_id": 0, "task": "gsm8k"}
    assert await score(env, row, said) == reward


@pytest.mark.skipif(not REAL_GSM8K.exists(), reason="the real rows are not beside the checkout")
async def test_gsm8k_on_real_rows():
    env = load("gsm8k", train=None, test=str(REAL_GSM8K))
    assert env.num_examples("eval") == 200
    assert set(env.eval_dataset["task"]) == {"gsm8k"}
    assert env.eval_dataset[0]["answer"] == "18"
    solutions = {r["prompt"][-1]["content"]: r["info"]["solution"] for r in env.eval_dataset}

    def solve(messages):
        solution = solutions[messages[-1]["content"]]
        return f"{solution}\nThe answer is \\boxed{{{solution.split('#### ')[1]}}}."

    results = await env.evaluate(ScriptedModel(solve), "m")
    assert results.metadata.avg_reward == 1.0
    wrong = await env.evaluate(ScriptedModel(r"\boxed{0}"), "m")
    assert wrong.metadata.avg_reward == 0.0
    report = await check_environment_async(lambda: load("gsm8k", train=None, test=str(REAL_GSM8K)))
    assert report.findings == ()


async def test_math_reads_the_columns_of_its_data_sets(tmp_path):
    rows = [
        {"problem": "p", "solution": r"so \boxed{\frac{3}{4}}", "level": "Level 1", "type": "A"},
        {"problem": "q", "solution": r"\boxed{1}", "answer": "2", "subject": "B", "unique_id": "u"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = load("math", train=None, test=str(path))
    first, second = env.eval_dataset
    assert (first["answer"], first["info"]) == (r"\frac{3}{4}", {"level": "Level 1", "type": "A"})
    assert (second["answer"], second["info"]) == ("2", {"subject": "B"})
    assert await score(env, first, r"\boxed{0.75}") == 1.0
    assert await score(env, first, r"\boxed{0.74}") == 0.0


# wordle


def wordle_module():
    load("wordle")
    import sys

    return sys.modules["rolltree_environment_wordle"]


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("speed", "abide", "XXYXY"),
        ("speed", "erase", "YXYYX"),
        ("allow", "label", "YYYXX"),
        ("geese", "eagle", "YYXXG"),
        ("zzzzz", "crane", "XXXXX"),
    ],
)
def test_wordle_colours(guess, secret, marks):
    assert wordle_module().colours(guess, secret) == marks


async def test_a_game_of_wordle():
    env = load("wordle")
    row = env.get_eval_dataset(1)[0]
    secret = row["answer"]
    model = ScriptedModel("<guess>zzzzz</guess>", "hm", f"<guess>{secret.upper()}</guess>")
    state = (await env.generate([row], model)).state[0]
    said = [m["content"] for m in state["completion"] if m["role"] == "user"]
    assert said[0] == "Z Z Z Z Z\nX X X X X\n5 guesses are left."
    assert said[1].startswith("Guess one word of five letters")
    assert len(state["trajectory"]) == 3
    assert (state["reward"], state["stop_condition"], state["terminated"]) == (1.0, "solved", True)


async def test_a_lost_game_of_wordle():
    env = load("wordle")
    row = env.get_eval_dataset(1)[0]
    near = row["answer"][:4] + ("z" if row["answer"][4] != "z" else "q")
    state = (await env.generate([row], ScriptedModel(f"<guess>{near}</guess>"))).state[0]
    assert len(state["trajectory"]) == 6
    assert state["truncation_reason"] == "max_steps"
    assert state["reward"] == pytest.approx(0.2 * 4 / 5)


def test_wordle_words(tmp_path):
    env = load("wordle")
    train, held_out = set(env.dataset["answer"]), set(env.eval_dataset["answer"])
    assert len(held_out) == 40
    assert not train & held_out
    assert all(len(word) == 5 and word.isalpha() and word.islower() for word in train | held_out)
    path = tmp_path / "words.txt"
    path.write_text("Crane\nslate\ntoolong\nab1de\n")
    own = load("wordle", words=str(path), num_eval=1)
    assert {*own.dataset["answer"], *own.eval_dataset["answer"]} == {"crane", "slate"}


# tool calls


def call(name, **arguments):
    return {"id": name, "function": {"name": name, "arguments": json.dumps(arguments)}}


async def test_a_purchase():
    env = load("tool_calls")
    row = env.get_eval_dataset(1)[0]
    wanted = re.findall(r"(\d+) x (\w+)", row["prompt"][-1]["content"])
    assert len(wanted) == 2
    asked = [call("price", item=item) for _, item in wanted] + [call("price", item="yacht")]

    def answer(messages):
        told = [m["content"] for m in messages if m["role"] == "tool"]
        prices = [int(text) for text in told if text.isdigit()]
        total = sum(int(n) * p for (n, _), p in zip(wanted, prices, strict=True))
        return f"<answer>\n{total}\n</answer>"

    first = {"role": "assistant", "content": "", "tool_calls": asked}
    state = (await env.generate([row], ScriptedModel(first, answer))).state[0]
    assert state["error"] is None
    assert state["reward"] == 1.0
    assert state["metrics"]["price_calls"] == 3.0
    assert state["metrics"]["failed_tool_calls"] == 1.0
    assert "shop" not in json.dumps(env.oai_tools)
