import time

import pytest
from rubric_states import a_state

from rolltree._helpers.workers import WorkerPool
from rolltree.environments.parsers import Parser
from rolltree.environments.rubrics import MathRubric, math_worker


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
    assert "cannot parse the reference answer ''" in state["error"].message


async def test_another_parser():
    state = await score("0.50", "1/2", parser=Parser())
    assert state["reward"] == 1.0


async def test_a_comparison_that_takes_for_ever_is_ended_and_the_next_one_works():
    settings = {"time_limit_s": 3.0}
    assert (await score(r"\boxed{2+2}", "4", **settings))["reward"] == 1.0
    started = time.monotonic()
    state = await score(r"\boxed{9^{9^{9^{9}}}}", "1", **settings)
    assert time.monotonic() - started < 60.0
    assert state["reward"] == 0.0
    assert state["math_gave_up"]
    assert state["error"] is None
    assert (await score(r"\boxed{2+2}", "4", **settings))["reward"] == 1.0


def test_what_sympy_raises_for_an_answer_is_no_fault_of_the_reference(monkeypatch):
    """Such a reward was None: a model could leave the baseline by a senseless answer."""

    def senseless(*args, **kwargs):
        raise ValueError("sympy is at a loss")

    monkeypatch.setattr(math_worker, "verify", senseless)
    with pytest.raises(ValueError, match="at a loss"):  # told as an error of the call
        math_worker.answer(["1", "2"])
    assert "cannot parse the reference" in math_worker.answer(["", "2"])["unreadable"]


def test_answers_run_no_code(tmp_path):
    pool = WorkerPool("rolltree.environments.rubrics.math_worker:answer")
    target = tmp_path / "made"
    for said in (
        f"__import__('os').system('touch {target}')",
        f"$__import__('os').system('touch {target}')$",
        rf"\boxed{{open('{target}', 'w')}}",
    ):
        assert pool.call(["1", said]) == {"equal": False}
    assert not target.exists()


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
    assert math_worker.compare_answers(gold, said) is equal
