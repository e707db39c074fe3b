"""`rolltree init`, `rolltree env list` and `rolltree env check`."""

import json

import pytest
from click.testing import CliRunner

from rolltree.cli import app

LEAKING = """
import rolltree as rt

def load_environment(num: int = 6):
    rows = [{"question": f"Say word{n}.", "answer": f"word{n}"} for n in range(num)]
    def exact(completion, answer):
        return float(completion[-1]["content"] == answer)
    return rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric([exact]))
"""

KEYED = """
import rolltree as rt

def load_environment(judge_api_key: str = "", api_key: str = ""):
    if api_key:
        raise rt.ConfigError(f"the judge refused {api_key}")
    def judged(completion):
        raise ValueError(f"the judge refused {judge_api_key}")
    rows = [{"question": f"Say word{n}.", "answer": f"word{n}"} for n in range(6)]
    return rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric([judged]))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def invoke(*words):
    return CliRunner().invoke(app, list(words))


def test_from_nothing_to_a_sound_environment():
    made = invoke("init", "word-count")
    assert made.exit_code == 0
    assert made.stdout.splitlines()[-1] == "next: rolltree env check word-count"
    assert "word_count" in invoke("env", "list").stdout.split()
    checked = invoke("env", "check", "word-count", "-n", "4")
    assert checked.exit_code == 0
    assert "no faults in 17 checks on 4 examples" in checked.stdout
    again = invoke("init", "word-count")
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_faults_are_told_and_end_with_status_1(tmp_path):
    (tmp_path / "leaking.py").write_text(LEAKING)
    found = invoke("env", "check", "./leaking.py", "-a", '{"num": 8}')
    assert found.exit_code == 1
    assert "leak: 100% of the prompts contain their own answer, 0% others'" in found.stdout
    assert "1 fault in" in found.stdout
    allowed = invoke("env", "check", "./leaking.py", "--allow", "leak")
    assert allowed.exit_code == 0
    as_json = invoke("env", "check", "./leaking.py", "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["findings"][0]["check"] == "leak"


def test_no_report_and_no_error_shows_a_key(tmp_path):
    (tmp_path / "keyed.py").write_text(KEYED)
    args = ["-a", '{"judge_api_key": "plain-key-of-the-check"}']
    for words in (["--json"], []):
        found = invoke("env", "check", "./keyed.py", *args, *words)
        assert found.exit_code == 1
        assert "[redacted]" in found.stdout
        assert "plain-key" not in found.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env", "check", "nothing_here"], "there is no environment 'nothing_here'"),
        (["env", "check", "x", "-a", "{"], "-a is not JSON"),
        (["init", "Bad Name"], "cannot name an environment"),
        (["init", "x", "--kind", "tools"], "Did you mean 'tool'"),
    ],
)
def test_mistakes_are_messages(words, said):
    result = invoke(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
