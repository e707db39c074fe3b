import os
import sys
import time
from pathlib import Path

import pytest
from rubric_states import a_state

from rolltree.parsers import Parser
from rolltree.rubrics import MathRubric
from rolltree.rubrics.math_workers import WorkerPool


async def score(said, answer, **settings):
    state = a_state(said, answer)
    await MathRubric(**settings).score_rollout(state)
    return state


@pytest.mark.parametrize(
    ("said", "answer", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"<think>\boxed{7}</think> It is \boxed{1,000}.", "1000", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{4}", r"$4$", 1.0),
        (r"\boxed{\text{east}}", r"\text{east}", 1.0),
        (r"\boxed{5}", "4", 0.0),
        ("4", "4", 0.0),  # no box, no answer
        ("", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        (r"\boxed{%s}" % ("1+" * 2000 + "1"), "2001", 0.0),  # longer than an answer may be
    ],
)
async def test_answers_are_compared_as_mathematics(said, answer, reward):
    state = await score(said, answer)
    assert state["reward"] == reward
    assert state["error"] is None
    assert state["metrics"] == {"correct_answer": reward}


async def test_a_reference_that_cannot_be_read_is_an_error_and_no_zero():
    state = await score(r"\boxed{5}", "")
    assert state["reward"] is None
    assert state["metrics"] == {"correct_answer": None}
    assert "reference answer '' is no expression" in state["error"].message


async def test_another_parser():
    state = await score("0.50", "1/2", parser=Parser())
    assert state["reward"] == 1.0


def test_a_comparison_that_takes_for_ever_is_ended_and_the_next_one_works():
    pool = WorkerPool(num_workers=1, time_limit_s=1.0)
    assert pool.compare("4", "2+2").is_equal
    started = time.monotonic()
    verdict = pool.compare("1", r"9^{9^{9^{9}}}")
    elapsed_s = time.monotonic() - started
    assert not verdict.is_equal
    assert elapsed_s < 4.0
    assert pool.compare("4", "2+2").is_equal
    assert not pool.compare("4", "5").is_equal


def test_a_worker_that_hangs_is_killed(monkeypatch):
    pool = WorkerPool(num_workers=1, time_limit_s=0.2)
    assert pool.compare("1", "1").is_equal
    worker = pool._slots.get()
    os.kill(worker._process.pid, 19)  # SIGSTOP: it never answers again
    pool._slots.put(worker)
    started = time.monotonic()
    verdict = pool.compare("1", "1")
    assert verdict.gave_up
    assert time.monotonic() - started < 2.0
    assert worker._process.poll() is not None
    assert pool.num_killed == 1
    pool.time_limit_s = 5.0
    assert pool.compare("1", "1").is_equal


def test_answers_run_no_code_and_workers_see_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    pool = WorkerPool(num_workers=1)
    target = tmp_path / "made"
    for said in (
        f"__import__('os').system('touch {target}')",
        f"$__import__('os').system('touch {target}')$",
        rf"\boxed{{open('{target}', 'w')}}",
    ):
        assert not pool.compare("1", said).is_equal
    assert not target.exists()
    if sys.platform == "linux":
        worker = pool._slots.get()
        environment = Path(f"/proc/{worker._process.pid}/environ").read_text()
        assert "HF_TOKEN" not in environment


def test_a_worker_ends_with_its_pool():
    pool = WorkerPool(num_workers=1)
    pool.compare("1", "1")
    worker = pool._slots.get()
    process = worker._process
    pool._slots.put(worker)
    del pool, worker
    assert process.poll() is not None


def test_a_worker_that_cannot_start_says_how_to_find_out(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the process that compares"):
        WorkerPool(num_workers=1).compare("1", "2")
