"""Losses and KL estimates per sampled token, as tables of pure torch functions.

A loss sees flat arrays of length `_R`, one entry per loss record, in any order and from any scope,
and returns one value per record; `coefficients` decides how they are summed, and corrects for an
engine that samples from a different distribution. There are no value losses.

The KL is computed against a frozen model: the one that training started from, or a teacher
(on-policy distillation). Its coefficient is fixed.

Notation: `r = exp(logprob - behaviour)` is the importance ratio, `A` the advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from rolltree.values.errors import ConfigError, look_up

# The configuration reads these tables without importing torch.
if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Float32 `[_R]` each. `logprob` carries the gradient.

    `behaviour` is the denominator of the ratio: the engine's own logprob, or, with a correction,
    the trainer's at the start of the batch. `rollout_log_ratio[r]` is the mean of the loss's
    `rollout_term` over all trained tokens of the rollout that record r belongs to, without
    gradient; only losses that have such a term read it. `extra` has the loss's own `inputs` by
    name, one value per record each.
    """

    logprob: Tensor
    behaviour: Tensor
    advantage: Tensor
    rollout_log_ratio: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """`loss` `[_R]` with gradient; `clipped` bool `[_R]`: the record's own gradient is cut off."""

    loss: Tensor
    clipped: Tensor


LossFn = Callable[[LossInputs, Mapping[str, float]], LossTerms]
RolloutTerm: TypeAlias = "Callable[[Tensor, Tensor, Mapping[str, float]], Tensor]"
"""(log ratio `[_R]`, advantage `[_R]`, parameters) -> what the loss averages over a rollout."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A row of the table: the function, its parameters with defaults, and what else it needs.

    `rollout_term`: set for a loss over whole rollouts. `supervised`: it reads neither advantage nor
    behaviour logprob. `least`: the smallest value of a parameter, 0 by default. `inputs`: further
    values per token, by the names of the streams that the calls were recorded with.
    `only_advantage`: without an advantage a token has no gradient, whatever the model says. Then
    `train.skip_zero_advantage` need not compute it, and dynamic sampling replaces groups of them.
    """

    fn: LossFn
    defaults: Mapping[str, float]
    rollout_term: RolloutTerm | None = None
    supervised: bool = False
    least: Mapping[str, float] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    only_advantage: bool = False

    def parameters(self, given: Mapping[str, float | None], name: str) -> dict[str, float]:
        """Return the defaults updated with what is given.

        Raises:
            ConfigError: a parameter is given that this loss does not read, or is too small.
        """
        return fill(given, self.defaults, f"the loss {name!r}", self.least)


def fill(
    given: Mapping[str, float | None],
    defaults: Mapping[str, float],
    reader: str,
    least: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return `defaults` updated with what is given and not None; `reader` is named in errors.

    Raises:
        ConfigError: a key that is not among the defaults, or a value below its least.
    """
    chosen = {key: value for key, value in given.items() if value is not None}
    if unread := sorted(set(chosen) - set(defaults)):
        raise ConfigError(
            f"{reader} does not read {', '.join(unread)}, so the setting would do "
            f"nothing. It reads: {', '.join(defaults) or 'no parameter'}."
        )
    for key, value in chosen.items():
        smallest = (least or {}).get(key, 0.0)
        # `not >=` instead of `<`, so that NaN is refused.
        if not value >= smallest:
            raise ConfigError(f"{key} of {reader} is {value}; it must be {smallest:g} or more.")
    return {**defaults, **chosen}


def _none(like: Tensor) -> Tensor:
    return like.new_zeros(like.shape).bool()


def ppo_clip(x: LossInputs, p: Mapping[str, float]) -> LossTerms:
    """Return `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, below 0 at most `-dual_clip A`.

    PPO: Schulman et al. 2017, arXiv:1707.06347, equation 7. GRPO uses it per token: Shao et al.
    2024, arXiv:2402.03300, equation 3. A larger `clip_high` is DAPO's clip-higher: Yu et al. 2025,
    arXiv:2503.14476, equation 10. `dual_clip` bounds what one token with a negative advantage and
    a huge ratio can cost: Ye et al. 2020, arXiv:1912.09729, equation 5 (infinite: off).
    """
    terms = _clipped((x.logprob - x.behaviour).exp(), x.advantage, p)
    # The paper bounds the objective from below, which is the loss from above.
    worst = (-p["dual_clip"] * x.advantage).where(x.advantage < 0, math.inf)
    return LossTerms(terms.loss.minimum(worst), terms.clipped | (worst < terms.loss).detach())


def _clipped(ratio: Tensor, advantage: Tensor, p: Mapping[str, float]) -> LossTerms:
    inside = ratio.clamp(1 - p["clip_low"], 1 + p["clip_high"])
    plain, limited = ratio * advantage, inside * advantage
    # Takes the smaller objective, so a ratio that already does harm is never clipped. Where the
    # clipped one is smaller, `clamp` has no gradient.
    return LossTerms(-plain.minimum(limited), (limited < plain).detach())


def reinforce(x: LossInputs, p: Mapping[str, float]) -> LossTerms:
    """Return `-min(r, ratio_cap) A logprob`, no gradient through the weight.

    REINFORCE (Williams 1992) with truncated importance sampling (Ionides 2008; for engine mismatch
    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    """
    ratio = (x.logprob.detach() - x.behaviour).exp()
    weight = ratio.clamp(max=p["ratio_cap"])
    return LossTerms(-weight * x.advantage * x.logprob, _none(ratio))


def cispo(x: LossInputs, p: Mapping[str, float]) -> LossTerms:
    """Return `-clip(r, 1 - clip_low, 1 + clip_high) A logprob`, no gradient through the weight.

    CISPO: MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5. No token loses its
    gradient; the paper puts no lower bound, which is `clip_low = 1`.
    """
    ratio = (x.logprob.detach() - x.behaviour).exp()
    weight = ratio.clamp(1 - p["clip_low"], 1 + p["clip_high"])
    return LossTerms(-weight * x.advantage * x.logprob, _none(ratio))


def gspo(x: LossInputs, p: Mapping[str, float]) -> LossTerms:
    """Return PPO's clipped term with the ratio of the whole rollout, `s = exp(mean log r)`.

    GSPO: Zheng et al. 2025, arXiv:2507.18071, equations 5 to 7, in the token form of equations 13
    and 14, `s_t = sg(s) r / sg(r)`, which has the same value and, with one advantage and one weight
    per rollout, the same gradient. The sequence is the rollout, never a row.

    Raises:
        ValueError: `rollout_log_ratio` is missing.
    """
    if x.rollout_log_ratio is None:
        raise ValueError("gspo needs rollout_log_ratio, the mean log ratio of each rollout")
    # The value is the rollout's ratio, the gradient the token's own (design/0010).
    log_ratio = x.rollout_log_ratio + x.logprob - x.logprob.detach()
    return _clipped(log_ratio.exp(), x.advantage, p)


def gmpo(x: LossInputs, p: Mapping[str, float]) -> LossTerms:
    """Return `-A` times the geometric mean of a rollout's clipped token ratios.

    GMPO: Zhao et al. 2025, arXiv:2507.20673, section 3 (objective, and clipping per token in log
    space: `log r` at most `clip_high` where A is positive, at least `-clip_low` where it is not),
    in the token form `sg(mean) c / sg(c)` with `c` the token's clipped ratio, as for `gspo`. The
    sequence is the rollout, never a row.

    Raises:
        ValueError: `rollout_log_ratio` is missing.
    """
    if x.rollout_log_ratio is None:
        raise ValueError("gmpo needs rollout_log_ratio, the mean clipped log ratio of each rollout")
    log_ratio = x.logprob - x.behaviour
    limited = _gmpo_term(log_ratio, x.advantage, p)
    # As in `gspo`; a clipped token has no gradient of its own.
    mean = x.rollout_log_ratio + limited - limited.detach()
    return LossTerms(-mean.exp() * x.advantage, (limited != log_ratio).detach())


def _gmpo_term(log_ratio: Tensor, advantage: Tensor, p: Mapping[str, float]) -> Tensor:
    return log_ratio.clamp(min=-p["clip_low"]).where(
        advantage < 0, log_ratio.clamp(max=p["clip_high"])
    )


def cross_entropy(x: LossInputs, p: Mapping[str, float]) -> LossTerms:
    """Return `-logprob`, independent of the reward: supervised fine-tuning.

    Also known as behaviour cloning (Pomerleau 1991).
    """
    return LossTerms(-x.logprob, _none(x.logprob))


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(
        ppo_clip,
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": math.inf},
        least={"dual_clip": 1.0},
        only_advantage=True,
    ),
    "reinforce": Loss(reinforce, {"ratio_cap": 2.0}, only_advantage=True),
    "cispo": Loss(cispo, {"clip_low": 1.0, "clip_high": 2.0}, only_advantage=True),
    # A rollout's ratio is a mean, which stays near 1. Bounds as in the papers; GMPO's are logs.
    "gspo": Loss(
        gspo,
        {"clip_low": 3e-4, "clip_high": 4e-4},
        rollout_term=lambda log_ratio, advantage, p: log_ratio,
        only_advantage=True,
    ),
    "gmpo": Loss(
        gmpo, {"clip_low": 0.4, "clip_high": 0.4}, rollout_term=_gmpo_term, only_advantage=True
    ),
    "cross_entropy": Loss(cross_entropy, {}, supervised=True),
}


def get_loss(name: str) -> Loss:
    """Return a row of `LOSSES`.

    Raises:
        UnknownName: there is no such loss.
    """
    return look_up("loss", name, LOSSES)


# -- KL estimates --------------------------------------------------------------------------------

KlFn: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
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
    return log_ratio.exp() - 1 - log_ratio


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
