"""The comparing process's own functions, and its protocol over pipes."""

import json
import subprocess
import sys

import pytest

from rolltree.rubrics.math_worker import compare


@pytest.mark.parametrize(
    ("gold", "said", "equal"),
    [
        ("2", "2.0", True),
        (r"\frac{2}{4}", r"\dfrac12", True),
        ("50%", "0.5", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("(1,2)", "(2,1)", False),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("x=3", "3", True),
        ("12", "21", False),
        ("12", "", False),
        ("12", "no idea", False),
    ],
)
def test_compare(gold, said, equal):
    assert compare(gold, said) is equal


def test_lines_in_lines_out():
    asked = [
        {"gold": "1", "said": "1"},
        {"gold": "1", "said": "2"},
        {"gold": "", "said": "2"},
        {"gold": "ü", "said": "\n"},
    ]
    done = subprocess.run(
        [sys.executable, "-m", "rolltree.rubrics.math_worker"],
        input="".join(json.dumps(line) + "\n" for line in asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert replies[:3] == [{"ready": True}, {"equal": True}, {"equal": False}]
    assert "no expression" in replies[3]["error"]
    assert len(replies) == 5
