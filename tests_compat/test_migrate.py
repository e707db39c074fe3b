"""`rolltree env migrate` on the published environments: edited, and played before and after."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import CASES, PUBLISHED
from server import Scripted

from rolltree.compat.migrate import migrate
from rolltree.compat.replay import check_migration
from rolltree.errors import ConfigError

HERE = Path(__file__).parent
NAMES = sorted(case.environment for case in CASES.values() if case.name == case.environment)


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with Scripted() as running:
        yield running


JUDGED = "its reward passes `task` to the judge: a TypeError, scored 0, in verifiers; played here"
DIFFERS = {
    "continuation_quality": (r"(reward|metric \w+) was 0.0, is [\d.]+", JUDGED),
    "doublecheck": (r"(reward|metric \w+) was 1.0, is 0.0", "MathRubric wants the answer in a box"),
    "math_group": (r"metric \w+ was 0.0, is null", "no metric of an environment not played"),
    "math_python": (
        r"(completion|tokens|reward|metric \w+) was .*",
        "PythonEnv runs code in rolltree's sandbox, which words its errors itself",
    ),
    "reasoning_gym_env": (
        r"(prompt|completion|tokens|reward|metric \w+) was .*",
        "ReasoningGymEnv draws other rows and gives shorter instructions",
    ),
    "self_reward": (r"(reward|error|metric \w+) was (0.0|null), is .*", "no judge is a failure"),
    "simpleqa": (r"(reward|metric \w+) was 0.0, is [\d.]+", JUDGED),
    "tool_test": (
        r"(reward|error|metric \w+) was (0.0|null), is .*",
        "it reads tool calls as objects, and they are dicts",
    ),
    "toxicity_explanation": (r"(reward|metric \w+) was 0.0, is [\d.]+", JUDGED),
    "wiki_search": (r"(completion|tokens) was .*", "an error of a tool names its class"),
    "wordle": (
        r"(reward|metric format_reward_func) was .*",
        "the format of an answer without tags earns nothing",
    ),
}
"""Where rolltree's own names are meant to play otherwise: the fields, and why."""

NOT_PLAYED = {
    "math": "NotImplementedError: its load_environment is an empty template",
    "mcp_env": "sets self.tools",
}


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("name", NAMES)
def test_a_published_environment_migrates(
    server: Scripted, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(PUBLISHED / name, tmp_path / name))
    migration = migrate(folder)
    imports = [line for text in migration.after.values() for line in text.splitlines()]
    assert not [line for line in imports if re.match(r"\s*(from|import) verifiers", line)]
    url = f"{server.url}/{name}/judge/v1"
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    args = json.loads(json.dumps(CASES[name].arguments).replace("SERVER", url))
    args = json.loads(json.dumps(args).replace("PYTHON", sys.executable))
    command = (sys.executable, str(HERE / "staged_replay.py"))
    if name == "mcp_env":
        assert "self.add_tool" in str(migration.remarks[0])
        return
    assert not migration.remarks
    if name in NOT_PLAYED:
        with pytest.raises(ConfigError, match=NOT_PLAYED[name].partition(":")[0]):
            check_migration(folder, migration, args, command=command)
        return
    checked = check_migration(folder, migration, args, command=command)
    assert checked.num_rollouts >= 40
    pattern, _ = DIFFERS.get(name, ("nothing", ""))
    meant = [text for text in checked.differences if re.search(rf": {pattern}$", text)]
    assert sorted({*checked.differences} - {*meant})[:8] == []
    assert bool(meant) == (name in DIFFERS)
