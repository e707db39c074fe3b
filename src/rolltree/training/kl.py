"""Distance to a frozen model: what each kind of KL estimate computes, as a table.

The frozen model is the one training started from, or a teacher (on-policy distillation). Pure torch
functions per loss record. It knows nothing about models. It leaves out adaptive coefficients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

KlFn = Callable[[Tensor, Tensor], Tensor]
"""(logprob `[_R]`, reference logprob `[_R]`) -> estimate `[_R]`."""


def k1(logprob: Tensor, reference: Tensor) -> Tensor:
    """Return `log policy - log reference`: unbiased for the KL, of either sign.

    Schulman 2020, "Approximating KL divergence". As a loss its expected gradient is zero, so it is
    offered in the reward only.
    """
    return logprob - reference


def k2(logprob: Tensor, reference: Tensor) -> Tensor:
    """Return `(log r)^2 / 2` with `r = reference / policy`; on policy its gradient is the KL's.

    Schulman 2020, "Approximating KL divergence".
    """
    return 0.5 * (reference - logprob) ** 2


def k3(logprob: Tensor, reference: Tensor) -> Tensor:
    """Return `r - 1 - log r` with `r = reference / policy`: unbiased for the KL, never negative.

    Schulman 2020, "Approximating KL divergence"; GRPO's penalty, arXiv:2402.03300, equation 4.
    """
    log_ratio = reference - logprob
    return torch.exp(log_ratio) - 1 - log_ratio


@dataclass(frozen=True, slots=True)
class Kl:
    """A row of the table.

    `fn` estimates from the sampled token; None: the sum over the vocabulary at each position, which
    `logprobs.py` computes. `in_reward`: the estimate, times its coefficient, is subtracted from the
    token's advantage before the first update and has no gradient of its own.
    """

    fn: KlFn | None
    in_reward: bool = False


KLS: dict[str, Kl] = {
    "k2": Kl(k2),
    "k3": Kl(k3),
    # Exact reverse KL per position, as in distillation on the student's own samples: Agarwal et
    # al. 2024, GKD, arXiv:2306.13649, section 3
    "full": Kl(None),
    # InstructGPT's per-token penalty, arXiv:2203.02155, equation 2; alone, with the teacher as
    # reference, on-policy distillation: Lu 2025, "On-Policy Distillation"
    "reward": Kl(k1, in_reward=True),
}
