import pytest
from credit_games import credited
from hypothesis import given
from hypothesis import strategies as st

from rolltree.training import load_train_config
from rolltree.training.advantages import CreditPolicy, SoftOverlong
from rolltree.values.errors import ConfigError
from rolltree.values.types import RolloutRequest, RolloutResult, State


def test_equation_13_by_hand():
    shape = SoftOverlong(100, 20)  # L_max 100, L_cache 20: from 80 on it grows by 1/20 per token
    assert [shape.penalty(n) for n in (0, 80, 81, 90, 99, 100, 5000)] == pytest.approx(
        [0, 0, 0.05, 0.5, 0.95, 1, 1]
    )


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2000))
def test_it_never_falls_with_length(limit, buffer, length):
    if buffer > limit:
        with pytest.raises(ConfigError, match="at most overlong_tokens"):
            SoftOverlong(limit, buffer)
        return
    shape = SoftOverlong(limit, buffer)
    assert 0 <= shape.penalty(length) <= shape.penalty(length + 1) <= 1


def result(index, reward, *lengths):
    request = RolloutRequest(
        f"r{index}", "env", {"prompt": "p", "example_id": 0, "task": "t"}, 0, 0, "g", index
    )
    steps = [{"extras": {"num_completion_tokens": length}} for length in lengths]
    return RolloutResult(request, (State(reward=reward, trajectory=steps),), None)


def test_advantages_see_it_and_the_stored_reward_does_not():
    results = [result(0, 1.0, 40, 40), result(1, 1.0, 40, 50), result(2, 0.0, 10)]
    report = credited(results, "dr_grpo", CreditPolicy(overlong=SoftOverlong(100, 20)))
    # rewards 1, 1 - 10/20, 0: mean 0.5; lengths are those of all calls together
    assert [r.states[0]["advantage"] for r in results] == pytest.approx([0.5, 0.0, -0.5])
    assert [r.states[0]["reward"] for r in results] == [1.0, 1.0, 0.0]
    assert report.metrics["credit/overlong_penalty"] == pytest.approx(0.5 / 3)
    assert "credit/overlong_penalty" not in credited(results, "dr_grpo").metrics


def test_it_gives_a_flat_group_something_to_learn():
    results = [result(0, 1.0, 80), result(1, 1.0, 100)]
    report = credited(results, "dr_grpo", CreditPolicy(overlong=SoftOverlong(100, 20)))
    assert report.metrics["train/frac_reward_zero_std"] == 0.0
    assert [r.states[0]["advantage"] for r in results] == pytest.approx([0.5, -0.5])


def test_it_is_configured():
    config = load_train_config({"algorithm": {"overlong_tokens": 100, "overlong_buffer": 20}})
    assert config.algorithm.policy(None).overlong == SoftOverlong(100, 20)
    assert load_train_config({}).algorithm.policy(None).overlong is None
    for section, message in (
        ({"overlong_tokens": 100}, "go together"),
        ({"overlong_buffer": 100}, "go together"),
        ({"overlong_tokens": 10, "overlong_buffer": 20}, "at most overlong_tokens"),
        (
            {"overlong_tokens": 100, "overlong_buffer": 20, "credit": "zero"},
            "does not read the episode's reward",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            load_train_config({"algorithm": section})
