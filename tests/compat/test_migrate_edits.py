"""The edits of `rolltree env migrate`: exact, few, and what cannot be edited is named."""

import json
import sys

import pytest
from click.testing import CliRunner
from unchanged import write_module, write_package

from rolltree.cli import app
from rolltree.compat import replay
from rolltree.compat.migrate import migrate
from rolltree.errors import ConfigError

V = "import verifiers as vf\n"
R = "import rolltree as vf\n"


def edited(tmp_path, source):
    file = tmp_path / "env.py"
    file.write_bytes(source.encode())
    migration = migrate(file)
    return migration.after.get(file, source), [str(remark) for remark in migration.remarks]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (V, R),
        (
            "import verifiers\nx = verifiers.Parser\n",
            "import rolltree as verifiers\nx = verifiers.Parser\n",
        ),
        ("import os, verifiers as vf  # both\n", "import os, rolltree as vf  # both\n"),
        ("from verifiers.types import State\n", "from rolltree import State\n"),
        (
            "from verifiers.types import (\n    Messages,  # said\n    State as S,\n)\n",
            "from rolltree import (\n    Messages,  # said\n    State as S,\n)\n",
        ),
        (
            "def f():\n    from verifiers.utils.data_utils import BOXED_SYSTEM_PROMPT, "
            "extract_boxed_answer\n",
            "def f():\n    from rolltree import extract_boxed_answer\n"
            "    from rolltree.compat.datasets import BOXED_SYSTEM_PROMPT\n",
        ),
        (
            V + "\nß = 'ü'; x: vf.types.Messages = vf.utils.data_utils.strip_non_numeric('1')\n",
            R + "from rolltree.compat.datasets import strip_non_numeric\n"
            "\nß = 'ü'; x: vf.Messages = strip_non_numeric('1')\n",
        ),
        (
            V + "r = vf.JudgeRubric(\n    judge_model='m',\n"
            "    parallelize_scoring=True,\n    parser=p,\n)\n",
            R + "r = vf.JudgeRubric(\n    judge_model='m',\n    parser=p,\n)\n",
        ),
        (
            V + "r = vf.JudgeRubric(parser=p, parallelize_scoring=True)\n",
            R + "r = vf.JudgeRubric(parser=p)\n",
        ),
        (
            V + "e = vf.ReasoningGymEnv(gym='x', num_train_examples=3)\n",
            R + "e = vf.ReasoningGymEnv(tasks='x', num_train=3)\n",
        ),
        (
            "from openai import OpenAI\nimport verifiers as vf\n"
            "r = vf.JudgeRubric(judge_client=OpenAI())\n",
            "from openai import AsyncOpenAI\nimport rolltree as vf\n"
            "r = vf.JudgeRubric(judge_client=AsyncOpenAI())\n",
        ),
        ("import verifiers as vf\r\nx = 1\r\n", "import rolltree as vf\r\nx = 1\r\n"),
        ("import json\n", "import json\n"),
    ],
)
def test_only_the_names_change(tmp_path, old, new):
    assert edited(tmp_path, old) == (new, [])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (V + "t = vf.RLTrainer()\n", "env.py:2: rolltree has no RLTrainer; train"),
        ("from verifiers.rl.trainer import RLTrainer\n", "env.py:1: rolltree has no RLTrainer"),
        ("from verifiers.types import *\n", "env.py:1: rolltree has no *"),
        ("import verifiers.utils.tools as t\n", "env.py:1: import the names"),
        (
            V + "e = vf.SingleTurnEnv(\n    level=3,\n)\n",
            "env.py:3: SingleTurnEnv has no argument 'level'",
        ),
        ("rubric.funcs.append(f)\n", "env.py:1: rubric.funcs cannot be changed"),
        (
            "class E:\n    def f(self):\n        self.tools = []\n",
            "env.py:3: the tools of a ToolEnv",
        ),
        (
            "from openai import OpenAI\nOpenAI().chat.completions.create()\n",
            "env.py:1: OpenAI blocks",
        ),
    ],
)
def test_the_rest_is_named_with_its_place(tmp_path, source, said):
    _, remarks = edited(tmp_path, source)
    assert remarks
    assert remarks[0].startswith(said)


def test_a_project_depends_on_rolltree(tmp_path):
    folder = write_package(tmp_path)
    text = migrate(folder).after[folder / "pyproject.toml"]
    assert '    "rolltree>=0.1",\n' in text
    assert "[tool.rolltree.eval]" in text
    assert text.count("\n") == (folder / "pyproject.toml").read_text().count("\n")


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no Python file"):
        migrate(tmp_path)
    with pytest.raises(ConfigError, match="not valid Python"):
        edited(tmp_path, "def f(:\n")


def test_the_command_shows_writes_and_checks(tmp_path):
    folder = write_module(tmp_path)
    before = (folder / "my_env.py").read_text()
    shown = CliRunner().invoke(app, ["env", "migrate", str(folder), "--no-check"])
    assert shown.exit_code == 0, shown.output
    assert "-import verifiers as vf\n" in shown.stdout
    assert "+import rolltree as vf\n" in shown.stdout
    assert (folder / "my_env.py").read_text() == before
    args = json.dumps({"num_examples": 2})
    done = CliRunner().invoke(app, ["env", "migrate", str(folder), "--write", "-a", args])
    assert done.exit_code == 0, done.output
    assert "before and after: all the same" in done.stdout
    assert "verifiers" not in (folder / "my_env.py").read_text()


def raising_module(tmp_path):
    folder = write_module(tmp_path)
    file = folder / "my_env.py"
    file.write_text("#!/usr/bin/env python\n" + file.read_text().replace("1.0 / ", "1.0 / 0 / "))
    return folder, file


def test_what_plays_differently_is_not_written(tmp_path):
    folder, file = raising_module(tmp_path)
    before = file.read_text()
    done = CliRunner().invoke(app, ["env", "migrate", str(folder), "--write"])
    assert done.exit_code == 1
    assert "differs: example 0" in done.stdout
    assert "nothing was written" in done.stdout
    assert "--force" in done.stdout
    assert file.read_text() == before
    done = CliRunner().invoke(app, ["env", "migrate", str(folder), "--write", "--force"])
    assert done.exit_code == 1
    written = file.read_text()
    assert written.startswith("#!/usr/bin/env python\n# TODO: since `rolltree env migrate`, ")
    assert "# example 0, always '': reward was 0.0, is null\n" in written
    assert "import rolltree as vf\n" in written
    compile(written, "my_env.py", "exec")


def test_what_cannot_be_played_is_not_written(tmp_path):
    folder = write_module(tmp_path)
    file = folder / "my_env.py"
    file.write_text(file.read_text() + "\nimport no_such_package_anywhere\n")
    before = file.read_text()
    done = CliRunner().invoke(app, ["env", "migrate", str(folder), "--write", "--force"])
    assert done.exit_code != 0
    assert file.read_text() == before


@pytest.mark.parametrize("up", [1, 2])
def test_an_environment_that_imports_from_a_sibling_is_played(tmp_path, up):
    home = tmp_path / "work" / "envs"
    folder = write_module(home)
    shared = folder.parents[up - 1] / "shared"
    shared.mkdir()
    (shared / "shared_rewards.py").write_text("def half(completion, **kwargs):\n    return 0.5\n")
    file = folder / "my_env.py"
    where = f"Path(__file__).resolve().parents[{up}] / 'shared'"
    file.write_text(
        f"import sys\nfrom pathlib import Path\nsys.path.insert(0, str({where}))\n"
        "from shared_rewards import half\n" + file.read_text().replace("shortness],", "half],")
    )
    done = CliRunner().invoke(app, ["env", "migrate", str(folder), "-a", '{"num_examples": 2}'])
    assert done.exit_code == 0, done.output
    assert "before and after: all the same" in done.stdout


def test_an_environment_that_plays_without_end_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "TIME_LIMIT_S", 0.2)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(ConfigError, match=r"the old environment could not be played: .*0\.2 s"):
        replay.compare(tmp_path, tmp_path, tmp_path, {}, command=command)
