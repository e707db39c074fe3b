"""What to do next: each rule by hand, from measured numbers and from reports."""

from dataclasses import replace

import pytest

from docs_kit import ROOT
from rolltree.rollouts.advice import MOST, RULES, Measured, advise, of_training
from test_pages import anchors

EVAL = Measured(kind="eval", num_rollouts=100, num_examples=50, reward=0.5, half_width=0.05)
TRAIN = Measured(kind="train", num_rollouts=30, num_steps=30, reward=0.5, reward_before=0.2)
CASES = {
    "all_failed": replace(EVAL, failed=1.0, reward=None),
    "failures": replace(EVAL, failed=0.2),
    "cut": replace(EVAL, cut_by_tokens=0.98),
    "none_scored": replace(EVAL, reward=None),
    "cold_eval": replace(EVAL, reward=0.02),
    "cold_train": replace(TRAIN, reward=0.016, reward_before=0.016),
    "solved_eval": replace(EVAL, reward=0.97),
    "equal_groups": replace(TRAIN, equal_groups=1.0),
    "fell": replace(TRAIN, reward=0.1),
    "flat": replace(TRAIN, reward=0.21),
    "idle_gpu": replace(EVAL, idle_gpu=True),
    "few_examples": replace(EVAL, half_width=0.3),
    "train_it": EVAL,
    "go_on": TRAIN,
}


def test_every_rule_has_a_case():
    assert list(CASES) == list(RULES)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_the_first_that_holds_in_its_case(name):
    found = advise(CASES[name])
    assert found[0].rule == name
    assert len(found) <= MOST
    assert "{" not in found[0].text
    assert str(found[0]).endswith(f"(rolltree docs {RULES[name].page.replace('.md', '')})")


def test_figures_are_in_the_sentence():
    assert "0.020" in advise(CASES["cold_eval"])[0].text
    assert "98%" in advise(CASES["cut"])[0].text
    assert "from 0.200 to 0.500" in advise(CASES["go_on"])[0].text


def test_a_reward_below_zero_is_on_another_scale():
    assert advise(replace(EVAL, reward=-3.0)) == ()


def test_a_training_is_measured_at_its_end():
    steps = [
        {"reward/mean": at / 30, "train/frac_reward_zero_std": float(at >= 27)} for at in range(30)
    ]
    found = of_training(steps, [])
    assert found.equal_groups == 1.0
    assert (found.reward_before, found.reward) == pytest.approx((1 / 30, 28 / 30))
    assert of_training(steps, [0.1, None, 0.7]).gain == pytest.approx(0.6)
    assert of_training([], []).reward is None
    # Too short for a beginning and an end.
    assert of_training(steps[:4], []).gain is None


def test_every_rule_names_a_page_and_a_heading_that_exist():
    for name, rule in RULES.items():
        page, _, anchor = rule.page.partition("#")
        file = ROOT / "docs" / page
        assert file.is_file(), name
        assert not anchor or anchor in anchors(file), name
