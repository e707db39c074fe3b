"""`scaffold`: the files of a new environment package, ready to run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from rolltree._helpers.files import whole_folder
from rolltree._helpers.machine import describe, look, suggested_config, toml_sections
from rolltree.environments.code_hashes import TRAIN_CONFIG
from rolltree.environments.registry import FOLDER
from rolltree.values.errors import ConfigError, look_up

_HEAD = '''\
"""{title}: say here what the model must do.

The rows are made here and are not a benchmark.
"""

from __future__ import annotations

import random

import rolltree as rt

'''

_SINGLE = (
    _HEAD
    + '''\
SYSTEM = "Answer with the number only."
# Solved examples in front of each question: a small model has to see what is wanted.
EXAMPLES = [
    {{"role": "user", "content": "What is 31 + 5?"}},
    {{"role": "assistant", "content": "36"}},
    {{"role": "user", "content": "What is 8 + 64?"}},
    {{"role": "assistant", "content": "72"}},
]


def make_rows(num: int, seed: int) -> list[dict[str, str]]:
    """Return rows with different questions."""
    rng = random.Random(seed)
    pairs = rng.sample([(a, b) for a in range(100) for b in range(100)], num)
    return [{{"question": f"What is {{a}} + {{b}}?", "answer": str(a + b)}} for a, b in pairs]


@rt.run_inline
def correct(completion: rt.Messages, answer: str) -> float:
    return float((completion[-1]["content"] or "").strip() == answer)


def load_environment(num_train: int = 500, num_eval: int = 100, seed: int = 0) -> rt.Environment:
    """Return the environment; training and evaluation questions do not overlap."""
    rows = make_rows(num_train + num_eval, seed)
    return rt.SingleTurnEnv(
        dataset=rows[:num_train],
        eval_dataset=rows[num_train:],
        system_prompt=SYSTEM,
        few_shot=EXAMPLES,
        # With partial credit: rt.Rubric([correct, near], weights=[0.7, 0.3])
        rubric=rt.Rubric([correct]),
    )
'''
)

_MULTI = (
    _HEAD
    + '''\
SYSTEM = "Find the number. Say one number per turn, in this form:\\n<guess>\\n...\\n</guess>"


class Game(rt.MultiTurnEnv):
    async def setup_state(self, state: rt.State) -> rt.State:
        state["won"] = False
        return state

    async def env_response(self, messages: rt.Messages, state: rt.State) -> rt.Messages:
        guess = (self.parser.parse_answer(messages) or "").strip()
        if not (guess.isascii() and guess.isdigit() and len(guess) < 10):  # a model writes anything
            hint = "Say one number."
        else:
            hint = "higher" if int(guess) < int(state["answer"]) else "lower"
        return [{{"role": "user", "content": hint}}]

    @rt.stop
    async def won(self, state: rt.State) -> bool:
        steps = state["trajectory"]
        guess = self.parser.parse_answer(steps[-1]["completion"]) if steps else None
        state["won"] = guess == state["answer"]
        return bool(state["won"])


@rt.run_inline
def win(state: rt.State) -> float:
    return float(state["won"])


def load_environment(num_train: int = 500, num_eval: int = 100, seed: int = 0) -> rt.Environment:
    """Return the game; the range in the question tells the rows apart."""
    rng = random.Random(seed)
    rows = []
    for low in rng.sample(range(100_000), num_train + num_eval):
        question = f"I think of a number from {{low}} to {{low + 99}}."
        rows.append({{"question": question, "answer": str(low + rng.randrange(100))}})
    return Game(
        dataset=rows[:num_train],
        eval_dataset=rows[num_train:],
        system_prompt=SYSTEM,
        parser=rt.XMLParser(["guess"], answer_field="guess"),
        rubric=rt.Rubric([win]),
        max_turns=10,
    )
'''
)

_TOOL = (
    _HEAD
    + '''\
SYSTEM = "Use the tool, then answer in this form:\\n<answer>\\n...\\n</answer>"


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


@rt.run_inline
def correct(parser: rt.Parser, completion: rt.Messages, answer: str) -> float:
    return float(parser.parse_answer(completion) == answer)


def load_environment(num_train: int = 500, num_eval: int = 100, seed: int = 0) -> rt.Environment:
    """Return the environment; training and evaluation questions do not overlap."""
    rng = random.Random(seed)
    pairs = rng.sample([(a, b) for a in range(100, 200) for b in range(100)], num_train + num_eval)
    rows = [{{"question": f"What is {{a}} * {{b}}?", "answer": str(a * b)}} for a, b in pairs]
    parser = rt.XMLParser(["answer"])
    return rt.ToolEnv(
        tools=[multiply],
        max_turns=4,
        dataset=rows[:num_train],
        eval_dataset=rows[num_train:],
        system_prompt=SYSTEM,
        parser=parser,
        rubric=rt.ToolRubric(funcs=[correct], parser=parser, tools=[multiply]),
    )
'''
)

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
description = "An environment for rolltree"
requires-python = ">=3.11"
dependencies = ["rolltree>=0.1"]

[project.entry-points."rolltree.environments"]
{name} = "{module}:load_environment"

[tool.setuptools]
py-modules = ["{module}"]
"""

_TEST = """\
\"\"\"The environment loads, keeps its contract, and rewards the right answer.\"\"\"

from pathlib import Path

import rolltree as rt
from rolltree.environments.check import check_environment

FOLDER = Path(__file__).parent


def test_it_keeps_its_contract():
    report = check_environment(lambda: rt.load_environment(FOLDER), num_examples=4)
    assert report.findings == ()
    assert report.mean_rewards["reference"] > 0.9


def test_held_out_questions_are_new():
    env = rt.load_environment(FOLDER)
    trained = {{row["prompt"][-1]["content"] for row in env.dataset}}
    assert not trained & {{row["prompt"][-1]["content"] for row in env.eval_dataset}}
"""

_TRAIN = """\
# Settings for {machine}. Every setting: `rolltree docs settings`.
# rolltree train {name}                     (again: continues)
# rolltree train {name} model.name=tiny     a trial of the pipeline in a minute; it learns nothing

[run]
dir = "runs/{name}"

[env]
id = "{name}"
{sections}"""

_README = """\
# {name}

Say here what the model must do, where the rows come from, and what earns a reward.

| argument | default | meaning |
|---|---|---|
| `num_train` | 500 | training rows |
| `num_eval` | 100 | held-out rows |
| `seed` | 0 | which rows are made |

```
rolltree env check {name}                  # probes: is it sound?
python -m pytest {folder}                  # its test (pip install pytest)
rolltree eval {name} -n 20                 # where does the model stand? (max_tokens: train.toml)
rolltree train {name}                      # the settings are in train.toml
rolltree view runs
```

Training can start from a mean reward of 5 to 95 %. If it is lower, put solved examples into the
prompt (`few_shot=` takes chat messages), or give partial credit: functions of a rubric add up, and
`weights=[0.7, 0.3]` keeps the sum between 0 and 1.
"""

KINDS: dict[str, str] = {"single": _SINGLE, "multi": _MULTI, "tool": _TOOL}


def scaffold(name: str, kind: str = "single", folder: str | Path = FOLDER) -> list[Path]:
    """Write the package `folder/<name>/` and return its files.

    It has the environment, a training config that fits this machine, a test and a README.

    Raises:
        ConfigError: the name cannot be a module name, or the folder exists (it is not overwritten).
        UnknownName: there is no such kind.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module):
        raise ConfigError(
            f"{name!r} cannot name an environment: it becomes a Python module. Use lower-case "
            "letters, digits and dashes, such as word-count."
        )
    code = look_up("kind", kind, KINDS)
    target = Path(folder) / module
    if target.exists():
        raise ConfigError(f"{target} exists already; nothing was written. Choose another name.")
    machine = look(folder if Path(folder).is_dir() else ".")
    fill: Callable[[str], str] = lambda text: text.format(  # noqa: E731
        name=name,
        module=module,
        title=name.replace("-", " ").replace("_", " ").capitalize(),
        folder=target,
        machine=describe(machine),
        sections=toml_sections(suggested_config(machine)),
    )
    files = {
        f"{module}.py": code,
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        TRAIN_CONFIG: _TRAIN,
        f"test_{module}.py": _TEST,
    }
    with whole_folder(target) as part:
        for file, text in files.items():
            (part / file).write_text(fill(text), encoding="utf-8")
    return [target / file for file in files]
