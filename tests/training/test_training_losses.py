import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_kit import Call, records_of

from rolltree.training.algorithms import ALGORITHMS, resolve_algorithm
from rolltree.training.coefficients import AGGREGATIONS, coefficients, rollout_means, rollout_sums
from rolltree.training.losses import LOSSES, LossInputs, get_loss
from rolltree.values.errors import ConfigError, UnknownName

LN2 = math.log(2)


def run(name, log_ratio, advantage, rollout_log_ratio=None, **parameters):
    """Loss, clipped and d loss / d logprob per record, with behaviour logprob -3 throughout."""
    loss = get_loss(name)
    behaviour = torch.full((len(log_ratio),), -3.0, dtype=torch.float64)
    logprob = (behaviour + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_()
    given_ratio = None if rollout_log_ratio is None else torch.tensor(rollout_log_ratio)
    inputs = LossInputs(logprob, behaviour, torch.tensor(advantage), given_ratio)
    terms = loss.fn(inputs, loss.parameters(parameters, name))
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprob)
    return terms.loss.tolist(), terms.clipped.tolist(), gradient.tolist()


class TestPpoClip:
    def test_inside_the_clip_it_is_the_plain_ratio(self):
        loss, clipped, gradient = run("ppo_clip", [math.log(1.1)], [2.0])
        assert loss == pytest.approx([-2.2])  # -r A
        assert gradient == pytest.approx([-2.2])  # -r A, since dr/dlogprob = r
        assert clipped == [False]

    def test_above_the_clip_a_good_token_has_no_gradient(self):
        loss, clipped, gradient = run("ppo_clip", [LN2], [3.0])
        assert loss == pytest.approx([-3.6])  # -1.2 A
        assert gradient == [0.0]
        assert clipped == [True]

    def test_above_the_clip_a_bad_token_keeps_its_gradient(self):
        loss, clipped, gradient = run("ppo_clip", [LN2], [-3.0])
        assert loss == pytest.approx([6.0])
        assert gradient == pytest.approx([6.0])
        assert clipped == [False]

    def test_below_the_clip_it_is_the_other_way_round(self):
        loss, clipped, gradient = run("ppo_clip", [-LN2, -LN2], [1.0, -1.0])
        assert loss == pytest.approx([-0.5, 0.8])
        assert gradient == pytest.approx([-0.5, 0.0])
        assert clipped == [False, True]

    def test_clip_higher(self):
        loss, clipped, _ = run("ppo_clip", [math.log(1.25)], [1.0], clip_high=0.28)
        assert loss == pytest.approx([-1.25])
        assert clipped == [False]


class TestDualClip:
    def test_it_bounds_what_a_bad_token_with_a_huge_ratio_costs(self):
        loss, clipped, gradient = run("ppo_clip", [math.log(8)] * 2, [-2.0, 2.0], dual_clip=3.0)
        assert loss == pytest.approx([6.0, -2.4])  # 3 * 2 instead of 8 * 2; -1.2 * 2
        assert gradient == [0.0, 0.0]
        assert clipped == [True, True]

    def test_below_the_bound_nothing_changes(self):
        loss, clipped, gradient = run("ppo_clip", [LN2], [-3.0], dual_clip=3.0)
        assert (loss, gradient) == (pytest.approx([6.0]), pytest.approx([6.0]))
        assert clipped == [False]

    def test_a_bound_that_clips_on_policy_tokens_is_refused(self):
        with pytest.raises(
            ConfigError, match=r"dual_clip of the loss 'ppo_clip' is 0.5.*1 or more"
        ):
            run("ppo_clip", [0.0], [1.0], dual_clip=0.5)


def test_reinforce_weighs_with_the_truncated_ratio():
    loss, clipped, gradient = run("reinforce", [0.0, LN2, math.log(8)], [1.0, 1.0, 0.5])
    # weights 1, 2 and min(8, 2); logprobs -3, -3 + ln 2, -3 + ln 8
    assert loss == pytest.approx([3.0, 2 * (3 - LN2), 3 - math.log(8)])
    assert gradient == pytest.approx([-1.0, -2.0, -1.0])
    assert clipped == [False] * 3
    _, _, capped = run("reinforce", [LN2], [1.0], ratio_cap=1.5)
    assert capped == pytest.approx([-1.5])


def test_cispo_clips_the_weight_and_never_the_gradient():
    loss, clipped, gradient = run("cispo", [math.log(8), -LN2], [1.0, 2.0])
    assert gradient == pytest.approx([-3.0, -1.0])  # min(8, 1 + 2) * 1; 0.5 * 2
    assert loss == pytest.approx([3.0 * (3 - math.log(8)), 3 + LN2])
    assert clipped == [False, False]


class TestGspo:
    def test_every_token_sees_the_rollouts_ratio(self):
        # a rollout with log ratios 0.2 and -0.1: s = exp(0.05)
        s = math.exp(0.05)
        loss, _, gradient = run(
            "gspo", [0.2, -0.1], [2.0, 2.0], [0.05, 0.05], clip_low=0.5, clip_high=0.5
        )
        assert loss == pytest.approx([-2 * s, -2 * s])
        assert gradient == pytest.approx([-2 * s, -2 * s])

    def test_the_mean_over_tokens_has_the_papers_gradient(self):
        """d/dlogprob of -min(s A, clip(s) A) with s = exp(mean log r), by autograd on the paper."""
        log_ratio = torch.tensor([0.2, -0.1, 0.3], dtype=torch.float64, requires_grad=True)
        s = torch.exp(log_ratio.mean())
        (wanted,) = torch.autograd.grad(-s * 1.5, log_ratio)
        mean = float(log_ratio.detach().mean())
        _, _, gradient = run(
            "gspo", log_ratio.tolist(), [1.5] * 3, [mean] * 3, clip_low=0.9, clip_high=0.9
        )
        assert [g / 3 for g in gradient] == pytest.approx(wanted.tolist())

    def test_a_clipped_rollout_loses_all_its_tokens(self):
        _, clipped, gradient = run("gspo", [0.2, -0.1], [1.0, 1.0], [0.05, 0.05])
        assert gradient == [0.0, 0.0]
        assert clipped == [True, True]

    def test_it_needs_the_rollouts_ratio(self):
        with pytest.raises(ValueError, match="rollout_log_ratio"):
            run("gspo", [0.1], [1.0])


class TestGmpo:
    def test_the_rollouts_value_is_the_geometric_mean(self):
        # ratios 2 and 0.5 with clips far away: geometric mean 1
        loss, clipped, gradient = run(
            "gmpo", [LN2, -LN2], [3.0, 3.0], [0.0, 0.0], clip_low=1.0, clip_high=1.0
        )
        assert loss == pytest.approx([-3.0, -3.0])
        assert gradient == pytest.approx([-3.0, -3.0])
        assert clipped == [False, False]

    def test_the_mean_over_tokens_has_the_papers_gradient(self):
        """Autograd on the paper: -A (prod of clipped ratios)^(1/n), clipped in log space."""
        for advantage, limit in ((1.5, lambda x: x.clamp(max=0.4)), (-2.0, lambda x: x)):
            log_ratio = torch.tensor([0.2, 0.9, -0.3], dtype=torch.float64, requires_grad=True)
            value = -advantage * torch.exp(limit(log_ratio).mean())
            (wanted,) = torch.autograd.grad(value, log_ratio)
            loss = get_loss("gmpo")
            term = loss.rollout_term(
                log_ratio.detach(), torch.tensor([advantage] * 3), loss.defaults
            )
            mean = float(term.mean())
            got, clipped, gradient = run("gmpo", log_ratio.tolist(), [advantage] * 3, [mean] * 3)
            assert got == pytest.approx([value.item()] * 3)
            assert [g / 3 for g in gradient] == pytest.approx(wanted.tolist())
            assert clipped == [False, advantage > 0, False]

    def test_a_bad_token_is_clipped_from_below(self):
        _, clipped, gradient = run("gmpo", [-0.9, 0.9], [-1.0, -1.0], [0.25, 0.25])
        assert clipped == [True, False]
        assert gradient == pytest.approx([0.0, math.exp(0.25)])

    def test_it_needs_the_rollouts_ratio(self):
        with pytest.raises(ValueError, match="rollout_log_ratio"):
            run("gmpo", [0.1], [1.0])


def test_cross_entropy_reads_the_token_only():
    loss, clipped, gradient = run("cross_entropy", [0.5, 0.0], [7.0, -7.0])
    assert loss == pytest.approx([2.5, 3.0])  # logprobs -2.5 and -3
    assert gradient == [-1.0, -1.0]
    assert clipped == [False, False]


@pytest.mark.parametrize("name", sorted(name for name in LOSSES if not LOSSES[name].supervised))
def test_on_policy_every_loss_is_the_policy_gradient(name):
    over = [0.0, 0.0] if LOSSES[name].rollout_term else None
    _, _, gradient = run(name, [0.0, 0.0], [1.5, -0.5], over)
    assert gradient == pytest.approx([-1.5, 0.5])


def test_parameters_a_loss_does_not_read_are_refused():
    with pytest.raises(ConfigError, match="'reinforce' does not read clip_low"):
        get_loss("reinforce").parameters({"clip_low": 0.1, "ratio_cap": None}, "reinforce")
    with pytest.raises(UnknownName, match="Did you mean 'gspo'"):
        get_loss("gsop")


def records(*calls):
    """(rollout, call, number of tokens, weight) -> records."""
    entries = [
        (0, i, Call([1], [2] * count, rollout, call, weight=weight))
        for rollout, call, count, weight in calls
        for i in range(count)
    ]
    return records_of(entries)


TWO_ROLLOUTS = records((0, 0, 2, 1.0), (0, 1, 4, 1.0), (1, 0, 1, 1.0), (1, 1, 3, 0.0))
"""Rollout 0: calls of 2 and 4 tokens. Rollout 1: one token, and a masked call of 3."""


class TestAggregation:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("token", [1 / 7] * 7 + [0] * 3),
            ("call", [1 / 6] * 2 + [1 / 12] * 4 + [1 / 3] + [0] * 3),
            ("rollout", [1 / 12] * 6 + [1 / 2] + [0] * 3),
            ("fixed_length", [1 / 20] * 7 + [0] * 3),
        ],
    )
    def test_by_hand(self, name, expected):
        assert coefficients(TWO_ROLLOUTS, name, 10).tolist() == pytest.approx(expected)

    def test_weights_scale_within_their_mean(self):
        mixed = records((0, 0, 1, 3.0), (0, 0, 1, 1.0))
        assert coefficients(mixed, "rollout", 1).tolist() == pytest.approx([0.75, 0.25])

    def test_nothing_to_train_gives_zeros(self):
        for name in AGGREGATIONS:
            assert coefficients(records((0, 0, 2, 0.0)), name, 5).tolist() == [0, 0]

    @given(st.permutations(range(10)), st.sampled_from(sorted(AGGREGATIONS)))
    def test_order_does_not_matter(self, order, name):
        order = np.array(order)
        names = TWO_ROLLOUTS.__dataclass_fields__.keys() - {"extra"}
        columns = {n: getattr(TWO_ROLLOUTS, n)[order] for n in names}
        shuffled = coefficients(type(TWO_ROLLOUTS)(**columns), name, 10)
        assert shuffled.tolist() == coefficients(TWO_ROLLOUTS, name, 10)[order].tolist()

    def test_unknown(self):
        with pytest.raises(UnknownName, match="Did you mean 'token'"):
            coefficients(TWO_ROLLOUTS, "tokens", 1)

    def test_rollout_sums(self):
        values = np.array([1, 2, 3, 4, 5, 6, 7, 1, 1, 1], np.float32)
        assert rollout_sums(TWO_ROLLOUTS, values).tolist() == [21.0] * 6 + [10.0] * 4

    def test_rollout_means(self):
        values = np.array([1, 2, 3, 4, 5, 6, 7, 1, 1, 1], np.float32)
        assert rollout_means(TWO_ROLLOUTS, values).tolist() == [3.5] * 6 + [2.5] * 4


class TestAlgorithms:
    @pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce", "zero"])
    def test_a_rollout_of_many_calls_weighs_as_much_as_one_of_few(self, name):
        """As in TRL and verl, whose sequence is the whole rollout."""
        row = resolve_algorithm(name)
        weight = coefficients(TWO_ROLLOUTS, row.aggregation, row.fixed_length)
        assert rollout_sums(TWO_ROLLOUTS, weight).tolist() == pytest.approx([0.5] * 10)

    def test_all_rows_resolve(self):
        for name, row in ALGORITHMS.items():
            length = 8 if row.aggregation == "fixed_length" else None
            assert resolve_algorithm(name, fixed_length=length).loss == row.loss

    def test_parts_and_parameters_can_be_replaced(self):
        got = resolve_algorithm("dapo", aggregation="call", parameters={"clip_low": 0.1})
        assert (got.credit, got.loss, got.aggregation) == ("grpo", "ppo_clip", "call")
        assert got.parameters == {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": math.inf}
        # As older settings spell it.
        assert resolve_algorithm("grpo", aggregation="sequence").aggregation == "call"

    def test_another_loss_drops_the_rows_parameters(self):
        got = resolve_algorithm("dapo", loss="reinforce")
        assert got.parameters == {"ratio_cap": 2.0}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"name": "grop"}, "Did you mean 'grpo'"),
            ({"name": "grpo", "loss": "ppo"}, "no loss 'ppo'"),
            ({"name": "grpo", "credit": "gae"}, "no credit 'gae'"),
            ({"name": "grpo", "aggregation": "mean"}, "no aggregation 'mean'"),
            ({"name": "grpo", "fixed_length": 5}, "go together"),
            ({"name": "dr_grpo"}, "go together"),
            ({"name": "dr_grpo", "fixed_length": 0}, "at least 1"),
            ({"name": "grpo", "parameters": {"clip_low": -1.0}}, "0 or more"),
            ({"name": "grpo", "correction": "tis"}, "no correction 'tis'"),
            ({"name": "grpo", "kl": "k9", "kl_coef": 1.0}, "no KL estimate 'k9'"),
            ({"name": "grpo", "kl": "k3"}, "no KL is computed"),
            ({"name": "grpo", "parameters": {"correction_high": 2.0}}, "correction is not"),
            (
                {
                    "name": "grpo",
                    "correction": "token_tis",
                    "parameters": {"correction_low": 0.5},
                },
                "'token_tis' does not read correction_low",
            ),
            (
                {
                    "name": "grpo",
                    "correction": "icepop",
                    "parameters": {"correction_low": 9.0},
                },
                "band of the correction 'icepop' is empty",
            ),
            ({"name": "sft", "correction": "icepop"}, "reads neither ratios nor advantages"),
            ({"name": "sft", "kl": "reward", "kl_coef": 1.0}, "reads neither"),
            ({"name": "sft", "parameters": {"clip_low": 0.1}}, "does not read clip_low"),
            ({"name": "distill", "kl_coef": 0.0}, "nothing would be learned"),
        ],
    )
    def test_mistakes_are_named(self, options, message):
        with pytest.raises((UnknownName, ConfigError), match=message):
            resolve_algorithm(**options)
