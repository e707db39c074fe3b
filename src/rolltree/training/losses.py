"""Policy losses and KL estimates per sampled token, as tables of pure torch functions.

A loss sees flat arrays of length `_R`, one entry per loss record, in any order and from any scope,
and returns one value per record; `aggregation.py` says how they are summed. The behaviour logprob
is the engine's own. It knows nothing about models, samples and rewards. It leaves out value losses.

Notation: `r = exp(logprob - behaviour)` is the importance ratio, `A` the advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rolltree.errors import ConfigError, UnknownName, did_you_mean


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Float32 `[_R]` each. `logprob` carries the gradient.

    `rollout_log_ratio[r]` is the mean of `logprob - behaviour` over all trained tokens of the
    rollout that record r belongs to, without gradient; only sequence-level losses read it.
    """

    logprob: Tensor
    behaviour: Tensor
    advantage: Tensor
    rollout_log_ratio: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossTerms:
    """`loss` `[_R]` with gradient; `clipped` bool `[_R]`: the record's own gradient is cut off."""

    loss: Tensor
    clipped: Tensor


LossFn = Callable[[LossInputs, Mapping[str, float]], LossTerms]


@dataclass(frozen=True, slots=True)
class Loss:
    """A row of the table: the function, its parameters with defaults, what its ratio covers."""

    fn: LossFn
    defaults: Mapping[str, float]
    over_rollout: bool = False

    def parameters(self, given: Mapping[str, float | None], name: str) -> dict[str, float]:
        """Return the defaults updated with what is given.

        Raises:
            ConfigError: a parameter is given that this loss does not read.
        """
        chosen = {key: value for key, value in given.items() if value is not None}
        if unread := sorted(set(chosen) - set(self.defaults)):
            raise ConfigError(
                f"the loss {name!r} does not read {', '.join(unread)}, so the setting would do "
                f"nothing. It reads: {', '.join(self.defaults) or 'no parameter'}."
            )
        return {**self.defaults, **chosen}


def ppo_clip(x: LossInputs, p: Mapping[str, float]) -> LossTerms:
    """Return `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`.

    PPO: Schulman et al. 2017, arXiv:1707.06347, equation 7. GRPO uses it per token: Shao et al.
    2024, arXiv:2402.03300, equation 3. A larger `clip_high` is DAPO's clip-higher: Yu et al. 2025,
    arXiv:2503.14476, equation 10.
    """
    return _clipped(torch.exp(x.logprob - x.behaviour), x.advantage, p)


def _clipped(ratio: Tensor, advantage: Tensor, p: Mapping[str, float]) -> LossTerms:
    inside = ratio.clamp(1 - p["clip_low"], 1 + p["clip_high"])
    plain, limited = ratio * advantage, inside * advantage
    return LossTerms(-torch.minimum(plain, limited), (limited < plain).detach())


def reinforce(x: LossInputs, p: Mapping[str, float]) -> LossTerms:
    """Return `-min(r, ratio_cap) A logprob`, no gradient through the weight.

    REINFORCE (Williams 1992) with truncated importance sampling (Ionides 2008; for engine mismatch
    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    """
    ratio = torch.exp(x.logprob.detach() - x.behaviour)
    weight = ratio.clamp(max=p["ratio_cap"])
    return LossTerms(-weight * x.advantage * x.logprob, torch.zeros_like(ratio, dtype=torch.bool))


def cispo(x: LossInputs, p: Mapping[str, float]) -> LossTerms:
    """Return `-clip(r, 1 - clip_low, 1 + clip_high) A logprob`, no gradient through the weight.

    CISPO: MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5. No token loses its
    gradient; the paper puts no lower bound, which is `clip_low = 1`.
    """
    ratio = torch.exp(x.logprob.detach() - x.behaviour)
    weight = ratio.clamp(1 - p["clip_low"], 1 + p["clip_high"])
    return LossTerms(-weight * x.advantage * x.logprob, torch.zeros_like(ratio, dtype=torch.bool))


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
    log_ratio = x.rollout_log_ratio + x.logprob - x.logprob.detach()
    return _clipped(torch.exp(log_ratio), x.advantage, p)


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(ppo_clip, {"clip_low": 0.2, "clip_high": 0.2}),
    "reinforce": Loss(reinforce, {"ratio_cap": 2.0}),
    "cispo": Loss(cispo, {"clip_low": 1.0, "clip_high": 2.0}),
    "gspo": Loss(gspo, {"clip_low": 3e-4, "clip_high": 4e-4}, over_rollout=True),
}


def get_loss(name: str) -> Loss:
    """Return a row of `LOSSES`.

    Raises:
        UnknownName: there is no such loss.
    """
    if name not in LOSSES:
        raise UnknownName(f"there is no loss {name!r}.{did_you_mean(name, LOSSES)}")
    return LOSSES[name]


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


KLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k2": k2, "k3": k3}
"""k1, the plain log ratio, is missing on purpose: as a loss its expected gradient is zero."""
