"""The loss of an optimizer step, put together from an algorithm's parts.

    batch start:  old logprob, advantage (less the KL in the reward), correction factor
    per pack:     weight * (factor * policy loss + kl_coef * KL - entropy_coef * entropy), summed

Functions of arrays per loss record; the trainer decides when each part is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolltree.training.algorithms import Algorithm
from rolltree.training.coefficients import get_correction, rollout_means
from rolltree.training.layout import FloatColumn
from rolltree.training.logprobs import RecordLogprobs
from rolltree.training.losses import KLS, LossInputs, get_loss
from rolltree.values.errors import ConfigError
from rolltree.values.types import Records


@dataclass(frozen=True, slots=True)
class FixedTerms:
    """Terms computed before the first update on a batch and then fixed, float32 `[_R]` each.

    `old` is the denominator of ratios. `factor` scales the policy loss; None: no correction.
    """

    old: FloatColumn
    advantage: FloatColumn
    factor: FloatColumn | None = None

    def part(self, span: slice) -> FixedTerms:
        """Return the records of one pack."""
        factor = None if self.factor is None else self.factor[span]
        return FixedTerms(self.old[span], self.advantage[span], factor)


@dataclass(frozen=True, slots=True)
class ObjectiveTerms:
    """`total` is a number with gradient; the others are per record, without.

    `clipped`: the record's policy loss has no gradient of its own. `kl`: None without a reference.
    """

    total: Tensor
    clipped: Tensor
    kl: Tensor | None


def needs_fixed_terms(algorithm: Algorithm) -> bool:
    """Return whether the trainer's logprobs at the start of a batch are part of the loss."""
    return algorithm.correction is not None or _kl_in_reward(algorithm)


def fixed_terms_need_whole_rollouts(algorithm: Algorithm) -> bool:
    """Return whether `fixed_terms_of` must see all records of a rollout at once."""
    return algorithm.correction is not None and get_correction(algorithm.correction).over_rollout


def _kl_in_reward(algorithm: Algorithm) -> bool:
    return algorithm.kl_coef > 0 and KLS[algorithm.kl].in_reward


def fixed_terms_of(
    algorithm: Algorithm,
    records: Records,
    logprob: FloatColumn | None = None,
    reference: FloatColumn | None = None,
) -> FixedTerms:
    """Return the fixed terms of `records`: whole rollouts if `fixed_terms_need_whole_rollouts`.

    Args:
        algorithm: decides which terms are needed.
        records: with the engine's logprobs and the advantages.
        logprob: the trainer's, before the first update; read if `needs_fixed_terms`.
        reference: the frozen model's; read for a KL in the reward.
    """
    old, advantage, factor = records.logprob, records.advantage, None
    if algorithm.correction is not None:
        assert logprob is not None, "see needs_fixed_terms"
        row = get_correction(algorithm.correction)
        difference = logprob - records.logprob
        factor = row.fn(records, difference, algorithm.correction_parameters)
        # The factor covers the engine's mismatch; a ratio against the engine would count it twice
        # (design/0010).
        old = logprob
    if _kl_in_reward(algorithm):
        assert logprob is not None, "see needs_fixed_terms"
        assert reference is not None, "a KL in the reward needs the reference's logprobs"
        # Each token's own KL, not summed over the following tokens (design/0010).
        advantage = advantage - np.float32(algorithm.kl_coef) * (logprob - reference)
    return FixedTerms(old, advantage, factor)


def rollout_ratios(
    algorithm: Algorithm, records: Records, fixed: FixedTerms, logprob: FloatColumn
) -> FloatColumn | None:
    """Return the mean of the loss's rollout term per record, None for a loss without one.

    `records`, `fixed` and `logprob` (current, not at the start) cover whole rollouts.
    """
    term = get_loss(algorithm.loss).rollout_term
    if term is None:
        return None
    # On the CPU, where the logprobs of all packs and ranks have been collected.
    ratio, advantage = torch.from_numpy(logprob - fixed.old), torch.from_numpy(fixed.advantage)
    return rollout_means(records, term(ratio, advantage, algorithm.parameters).numpy())


def objective(
    algorithm: Algorithm,
    weight: FloatColumn,
    fixed: FixedTerms,
    got: RecordLogprobs,
    *,
    ratios: FloatColumn | None = None,
    reference: Tensor | None = None,
    extra: Mapping[str, FloatColumn] | None = None,
) -> ObjectiveTerms:
    """Return the share of some records in the step's loss; arrays are `[_R]`.

    Args:
        algorithm: the parts and their parameters.
        weight: the coefficient of each record, from `coefficients`.
        fixed: of these records.
        got: logprobs with gradient; entropy with one if `entropy_coef` is set; `kl` for `full`.
        ratios: of these records, from `rollout_ratios`.
        reference: the frozen model's logprobs, without gradient.
        extra: the loss's own inputs by name, from the records.
    """

    def tensor(array: FloatColumn) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(got.logprob.device)

    inputs = LossInputs(
        got.logprob,
        tensor(fixed.old),
        tensor(fixed.advantage),
        None if ratios is None else tensor(ratios),
        {name: tensor(values) for name, values in (extra or {}).items()},
    )
    terms = get_loss(algorithm.loss).fn(inputs, algorithm.parameters)
    loss, kl = terms.loss, None
    if fixed.factor is not None:
        # The factor scales the policy loss only; KL and entropy come after it.
        loss = loss * tensor(fixed.factor)
    if algorithm.kl_coef > 0:
        row = KLS[algorithm.kl]
        kl = _estimate(row.fn, got, reference)
        # A KL in the reward is part of the advantage already and is only measured here.
        if not row.in_reward:
            loss = loss + algorithm.kl_coef * kl
    if algorithm.entropy_coef > 0:
        loss = loss - algorithm.entropy_coef * got.entropy
    # The weights include the normalizers of the whole step, so packs and ranks simply add up.
    total = (tensor(weight) * loss).sum()
    return ObjectiveTerms(total, terms.clipped, None if kl is None else kl.detach())


def _estimate(
    fn: Callable[[Tensor, Tensor], Tensor] | None, got: RecordLogprobs, reference: Tensor | None
) -> Tensor:
    if fn is None:
        assert got.kl is not None, "the full KL was not computed"
        return got.kl
    assert reference is not None, "the reference was not computed"
    return fn(got.logprob, reference)


_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")


def check_auxiliary(model: Any) -> None:
    """Refuse a model whose configuration asks for a loss that the trainer does not add.

    transformers adds it to the cross entropy of labels, which the trainer never asks for.

    Raises:
        ConfigError: it asks for the load balancing of routers, or for a z-loss.
    """
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        known = {name: getattr(config, name) for name in _COEFFICIENTS if hasattr(config, name)}
        asked = {"z_loss_coefficient": getattr(config, "z_loss_coefficient", 0)}
        # Without a known coefficient, the loss may have any weight.
        if getattr(config, "output_router_logits", False) and (any(known.values()) or not known):
            asked = {"output_router_logits": True, **known}
        if any(asked.values()):
            given = ", ".join(f"{name} = {value!r}" for name, value in asked.items())
            first = next(iter(asked))
            off = "false" if asked[first] is True else "0"
            raise ConfigError(
                f"the configuration of {type(model).__name__} asks for an auxiliary loss "
                f"({given}), which would not be trained: the objective is that of the algorithm "
                f"alone. Set {first} to {off} in the model's config.json to train without it; with "
                "adapters on other layers than the router, it stays as it is."
            )
