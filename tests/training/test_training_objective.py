import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_kit import Call, records_of

from rolltree.training.algorithms import resolve_algorithm
from rolltree.training.logprobs import RecordLogprobs, Teacher, gather_logprobs
from rolltree.training.losses import KLS, k1
from rolltree.training.objective import fixed_terms_of, needs_fixed_terms, objective, rollout_ratios

LN2 = math.log(2)


class TestKl:
    def test_by_hand(self):
        logprob = torch.tensor([-1.0], requires_grad=True)
        reference = torch.tensor([-1.0 + LN2])
        assert k1(logprob, reference).item() == pytest.approx(-LN2)
        assert KLS["k2"].fn(logprob, reference).item() == pytest.approx(LN2**2 / 2)
        assert KLS["k3"].fn(logprob, reference).item() == pytest.approx(2 - 1 - LN2)
        (gradient,) = torch.autograd.grad(KLS["k2"].fn(logprob, reference).sum(), logprob)
        assert gradient.item() == pytest.approx(-LN2)  # log policy - log reference
        (gradient,) = torch.autograd.grad(KLS["k3"].fn(logprob, reference).sum(), logprob)
        assert gradient.item() == pytest.approx(1 - 2)  # 1 - reference / policy

    def test_all_are_estimates_of_the_kl(self):
        policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        reference = torch.tensor([0.48, 0.3, 0.22], dtype=torch.float64)
        exact = (policy * (policy / reference).log()).sum().item()
        for name, tolerance in (("reward", 1e-9), ("k3", 1e-9), ("k2", 0.05)):
            estimate = (policy * KLS[name].fn(policy.log(), reference.log())).sum().item()
            assert estimate == pytest.approx(exact, rel=tolerance)

    def test_k2_has_the_gradient_of_the_kl_on_policy(self):
        logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
        reference = torch.tensor([0.1, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
        logprob = logits.log_softmax(0)
        probability = logprob.exp()
        (wanted,) = torch.autograd.grad((probability * (logprob - reference)).sum(), logits)
        logprob = logits.log_softmax(0)
        expected = (probability.detach() * KLS["k2"].fn(logprob, reference)).sum()
        (got,) = torch.autograd.grad(expected, logits)
        assert torch.allclose(got, wanted)

    @given(st.floats(-5, 5), st.floats(-5, 5))
    def test_as_a_loss_it_is_never_negative(self, left, right):
        for name in ("k2", "k3"):
            assert KLS[name].fn(torch.tensor(left), torch.tensor(right)) >= -1e-6

    def test_k1_is_offered_in_the_reward_only(self):
        assert [name for name, row in KLS.items() if row.fn is k1] == ["reward"]
        assert KLS["reward"].in_reward


RECORDS = records_of(
    [
        (0, i, Call([1], [2, 3], rollout, 0, advantage, logprob=[-1.0, -2.0]))
        for rollout, advantage in enumerate((1.0, -2.0))
        for i in range(2)
    ]
)
"""Two rollouts of two tokens, engine logprobs -1 and -2, advantages 1 and -2."""


def column(*values):
    return np.array(values, np.float32)


def evaluate(algorithm, now, before=None, reference=None, entropy=None, kl=None):
    """Total and d total / d logprob, every record weighing 1."""
    before = column(*(now if before is None else before))
    fixed = None if reference is None else column(*reference)
    start = fixed_terms_of(algorithm, RECORDS, before, fixed)
    logprob = torch.tensor(now, requires_grad=True)
    got = RecordLogprobs(logprob, torch.tensor(entropy or [0.0] * 4), kl)
    ratios = rollout_ratios(algorithm, RECORDS, start, column(*now))
    terms = objective(
        algorithm,
        column(1, 1, 1, 1),
        start,
        got,
        ratios=ratios,
        reference=None if fixed is None else torch.from_numpy(fixed),
    )
    (gradient,) = torch.autograd.grad(terms.total, logprob)
    return terms, gradient.tolist()


class TestStart:
    def test_without_a_correction_ratios_are_against_the_engine(self):
        algorithm = resolve_algorithm("reinforce")
        assert not needs_fixed_terms(algorithm)
        start = fixed_terms_of(algorithm, RECORDS)
        assert start.old is RECORDS.logprob
        assert start.advantage is RECORDS.advantage
        assert start.factor is None

    def test_with_one_they_are_against_the_batchs_start(self):
        algorithm = resolve_algorithm("grpo", correction="token_tis")
        assert needs_fixed_terms(algorithm)
        # the trainer said -0.5, -2, -1, -2 at the start: k is exp(0.5), 1, 1, 1; it has moved since
        _, gradient = evaluate(algorithm, [-0.4, -2.0, -1.0, -2.1], [-0.5, -2.0, -1.0, -2.0])
        ratio = math.exp(0.1)
        k = math.exp(0.5)
        assert gradient == pytest.approx([-ratio * k, -1.0, 2.0, 2.0 / ratio], rel=1e-5)

    def test_a_masked_token_has_no_policy_gradient_but_its_kl(self):
        options = {"correction": "icepop", "kl_coef": 0.5, "kl": "k2"}
        algorithm = resolve_algorithm("grpo", **options)
        now = [3.0, -2.0, -1.0, -2.0]  # k of the first is exp(4)
        _, gradient = evaluate(algorithm, now, reference=[2.0, -2.0, -1.0, -2.0])
        assert gradient == pytest.approx([0.5, -1.0, 2.0, 2.0])

    def test_a_masked_rollout_leaves_the_others_alone(self):
        algorithm = resolve_algorithm("grpo", correction="geometric_mask")
        _, gradient = evaluate(algorithm, [-1.0, -2.0, -1.1, -2.1])  # geometric mean exp(-0.1)
        assert gradient == pytest.approx([-1.0, -1.0, 0.0, 0.0])

    def test_gspo_and_gmpo_average_their_own_term_over_the_rollout(self):
        now = column(-0.5, -2.0, -1.5, -2.0)  # log ratios 0.5, 0, -0.5, 0
        for name, expected in (("gspo", [0.25, -0.25]), ("gmpo", [0.2, -0.2])):  # cut at 0.4
            algorithm = resolve_algorithm(name)
            means = rollout_ratios(algorithm, RECORDS, fixed_terms_of(algorithm, RECORDS), now)
            assert means.tolist() == pytest.approx(np.repeat(expected, 2).tolist())
        assert rollout_ratios(resolve_algorithm("grpo"), RECORDS, None, now) is None


class TestPenalties:
    def test_a_kl_in_the_reward_moves_the_advantage(self):
        algorithm = resolve_algorithm("reinforce", kl="reward", kl_coef=0.5)
        assert needs_fixed_terms(algorithm)
        now = [-1.0, -2.0, -1.0, -2.0]
        terms, gradient = evaluate(algorithm, now, reference=[-1.0, -4.0, -1.0, -1.0])
        # advantage - 0.5 (logprob - reference): 1, 1 - 1, -2, -2 + 0.5; the loss is -A logprob
        assert gradient == pytest.approx([-1.0, 0.0, 2.0, 1.5])
        assert terms.kl.tolist() == pytest.approx([0.0, 2.0, 0.0, -1.0])

    def test_distillation_learns_from_the_teacher_alone(self):
        algorithm = resolve_algorithm("distill")
        zero = fixed_terms_of(resolve_algorithm("zero"), RECORDS)
        assert zero.advantage.tolist() == [1.0, 1.0, -2.0, -2.0]  # credit, not the loss, is zero
        start = fixed_terms_of(algorithm, RECORDS, column(-1, -2, -1, -2), column(-3, -2, -0.5, -2))
        assert start.advantage.tolist() == pytest.approx([1 - 2, 1, -2 + 0.5, -2])

    def test_entropy_is_added_to_the_objective(self):
        algorithm = resolve_algorithm("reinforce", entropy_coef=0.1)
        plain, _ = evaluate(resolve_algorithm("reinforce"), [-1.0, -2.0, -1.0, -2.0])
        terms, _ = evaluate(algorithm, [-1.0, -2.0, -1.0, -2.0], entropy=[1.0, 2.0, 3.0, 4.0])
        assert terms.total.item() == pytest.approx(plain.total.item() - 1.0)

    def test_the_full_kl_is_what_the_model_computed(self):
        algorithm = resolve_algorithm("reinforce", kl="full", kl_coef=2.0)
        plain, _ = evaluate(resolve_algorithm("reinforce"), [-1.0, -2.0, -1.0, -2.0])
        terms, _ = evaluate(algorithm, [-1.0, -2.0, -1.0, -2.0], kl=torch.tensor([1.0, 0, 0, 0.5]))
        assert terms.total.item() == pytest.approx(plain.total.item() + 3.0)
        assert terms.kl.tolist() == [1.0, 0.0, 0.0, 0.5]


class TestWholeVocabulary:
    @pytest.mark.parametrize("chunk_rows", [1, 2, 100])
    def test_entropy_and_kl_have_the_gradients_of_their_definitions(self, chunk_rows):
        torch.manual_seed(0)
        hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(9, 4, dtype=torch.float64)
        other, other_weight = torch.randn(5, 3).double(), torch.randn(9, 3).double()
        temperature = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0], dtype=torch.float64)
        row = torch.tensor([0, 4, 2, 2, 1, 3])
        got = gather_logprobs(
            hidden,
            lambda part: part @ weight.t(),
            temperature,
            row,
            torch.tensor([1, 2, 3, 4, 5, 6]),
            chunk_rows=chunk_rows,
            entropy_gradient=True,
            teacher=Teacher(other, lambda part: part @ other_weight.t()),
        )
        p = ((hidden @ weight.t()) / temperature[:, None]).softmax(-1)[row]
        q = ((other @ other_weight.t()) / temperature[:, None]).softmax(-1)[row]
        entropy = -(p * p.log()).sum(-1)
        kl = (p * (p / q).log()).sum(-1)
        assert torch.allclose(got.entropy, entropy)
        assert torch.allclose(got.kl, kl)
        direction = torch.randn(6, dtype=torch.float64)
        for ours, theirs in ((got.entropy, entropy), (got.kl, kl)):
            (left,) = torch.autograd.grad((ours * direction).sum(), hidden, retain_graph=True)
            (right,) = torch.autograd.grad((theirs * direction).sum(), hidden, retain_graph=True)
            assert torch.allclose(left, right)

    def test_entropy_has_no_gradient_unless_asked(self):
        hidden = torch.randn(2, 3, requires_grad=True)
        zero = torch.tensor([0])
        got = gather_logprobs(hidden, lambda part: part, torch.ones(2), zero, zero)
        assert not got.entropy.requires_grad
        assert got.kl is None
