"""Algorithms by name: combinations of credit, loss, aggregation and penalties.

One row per algorithm of the literature; a new algorithm is a new row. What an algorithm does to
sampling, such as DAPO's dynamic sampling, has separate settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rolltree.training.coefficients import AGGREGATIONS, get_correction
from rolltree.training.credit import CREDITS
from rolltree.training.losses import KLS, LOSSES, get_loss
from rolltree.values.errors import ConfigError, look_up


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Credit, loss with its parameters, aggregation with its length (0: not used), and the rest.

    `correction` with its parameters: a row of `CORRECTIONS`, or None. `kl`: a row of `KLS`, not
    read while `kl_coef` is 0. `entropy_coef`: weight of the entropy that is added to the objective.
    `teaches`: everything is learned from the reference, which must be a different model.
    """

    credit: str
    loss: str
    aggregation: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    fixed_length: int = 0
    correction: str | None = None
    correction_parameters: Mapping[str, float] = field(default_factory=dict)
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    teaches: bool = False

    @property
    def over_rollout(self) -> bool:
        """Whether the loss's ratio, and so every token's weight, is one per rollout."""
        return get_loss(self.loss).rollout_term is not None

    @property
    def supervised(self) -> bool:
        """Whether the loss reads tokens only, neither advantages nor behaviour logprobs."""
        return get_loss(self.loss).supervised

    @property
    def loss_inputs(self) -> tuple[str, ...]:
        """The names of the per-token values that the loss reads in addition to the common ones."""
        return get_loss(self.loss).inputs

    @property
    def only_advantage(self) -> bool:
        """Whether a token without an advantage has no gradient."""
        others = self.kl_coef != 0 or self.entropy_coef != 0
        return get_loss(self.loss).only_advantage and not others


ALGORITHMS: dict[str, Algorithm] = {
    # DeepSeekMath, arXiv:2402.03300
    "grpo": Algorithm("grpo", "ppo_clip", "rollout"),
    # Understanding R1-Zero-Like Training, arXiv:2503.20783
    "dr_grpo": Algorithm("dr_grpo", "ppo_clip", "fixed_length"),
    # DAPO, arXiv:2503.14476: token mean and clip-higher
    "dapo": Algorithm("grpo", "ppo_clip", "token", {"clip_low": 0.2, "clip_high": 0.28}),
    # GSPO, arXiv:2507.18071
    "gspo": Algorithm("grpo", "gspo", "rollout"),
    # Geometric-Mean Policy Optimization, arXiv:2507.20673
    "gmpo": Algorithm("grpo", "gmpo", "rollout"),
    # MiniMax-M1, arXiv:2506.13585
    "cispo": Algorithm("grpo", "cispo", "token"),
    # Back to Basics, arXiv:2402.14740
    "rloo": Algorithm("leave_one_out", "reinforce", "rollout"),
    # Williams 1992
    "reinforce": Algorithm("reinforce", "reinforce", "rollout"),
    # supervised fine-tuning on samples from anywhere; see supervised.py
    "sft": Algorithm("zero", "cross_entropy", "token"),
    # on-policy distillation, arXiv:2306.13649: the teacher is algorithm.reference
    "distill": Algorithm("zero", "reinforce", "token", kl="reward", kl_coef=1.0, teaches=True),
    # the control run: everything as in grpo, but nothing to learn
    "zero": Algorithm("zero", "ppo_clip", "rollout"),
}


def resolve_algorithm(
    name: str,
    *,
    credit: str | None = None,
    loss: str | None = None,
    aggregation: str | None = None,
    parameters: Mapping[str, float | None] | None = None,
    fixed_length: int | None = None,
    correction: str | None = None,
    kl: str | None = None,
    kl_coef: float | None = None,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Return a row of `ALGORITHMS` with parts replaced and parameters filled in.

    `parameters` are the loss's, and the correction's, whose names begin with `correction_`.

    Raises:
        UnknownName: the algorithm or a part does not exist.
        ConfigError: a parameter that no part reads, one that is missing, or incompatible parts.
    """
    row = look_up("algorithm", name, ALGORITHMS)
    chosen = replace(
        row,
        credit=credit or row.credit,
        loss=loss or row.loss,
        # The settings of older runs say "sequence".
        aggregation="call" if aggregation == "sequence" else aggregation or row.aggregation,
        correction=correction or row.correction,
        kl=kl or row.kl,
        kl_coef=row.kl_coef if kl_coef is None else kl_coef,
        entropy_coef=entropy_coef,
    )
    look_up("credit", chosen.credit, CREDITS)
    look_up("loss", chosen.loss, LOSSES)
    look_up("aggregation", chosen.aggregation, AGGREGATIONS)
    look_up("KL estimate", chosen.kl, KLS)
    given = {key: value for key, value in (parameters or {}).items() if value is not None}
    of_correction = {key: given.pop(key) for key in list(given) if key.startswith("correction_")}
    # A different loss does not read the parameters of the row's loss.
    own = row.parameters if chosen.loss == row.loss else {}
    _check_fit(chosen, fixed_length, of_correction, kl_given=kl is not None)
    return replace(
        chosen,
        parameters=get_loss(chosen.loss).parameters({**own, **given}, chosen.loss),
        fixed_length=fixed_length or 0,
        correction_parameters={}
        if chosen.correction is None
        else get_correction(chosen.correction).parameters(of_correction, chosen.correction),
    )


def _check_fit(
    chosen: Algorithm,
    fixed_length: int | None,
    of_correction: Mapping[str, float],
    *,
    kl_given: bool,
) -> None:
    """Refuse settings that would do nothing.

    Raises:
        ConfigError: with what to change.
    """
    if (fixed_length is not None) != (chosen.aggregation == "fixed_length"):
        raise ConfigError(
            "algorithm.fixed_length and the aggregation 'fixed_length' go together: the "
            f"aggregation is {chosen.aggregation!r} and fixed_length is {fixed_length}. The length "
            "is usually sampling.max_tokens."
        )
    if fixed_length is not None and fixed_length < 1:
        raise ConfigError(f"algorithm.fixed_length is {fixed_length}; it must be at least 1.")
    if of_correction and chosen.correction is None:
        raise ConfigError(
            f"{', '.join(of_correction)} is set, but algorithm.correction is not, so it would do "
            "nothing. Choose a correction, or leave its bounds out."
        )
    if kl_given and chosen.kl_coef == 0:
        raise ConfigError(
            f"algorithm.kl is {chosen.kl!r}, but algorithm.kl_coef is 0, so no KL is computed. Set "
            "the coefficient, or leave algorithm.kl out."
        )
    in_reward = chosen.kl_coef > 0 and KLS[chosen.kl].in_reward
    if chosen.supervised and (chosen.correction is not None or in_reward):
        part = f"correction = {chosen.correction!r}" if chosen.correction else "kl = 'reward'"
        raise ConfigError(
            f"the loss {chosen.loss!r} reads neither ratios nor advantages, so algorithm.{part} "
            "would do nothing. Leave it out, or choose another loss."
        )
    if chosen.teaches and chosen.kl_coef == 0:
        raise ConfigError(
            "this algorithm learns only from the KL to algorithm.reference, but algorithm.kl_coef "
            "is 0, so nothing would be learned. Leave kl_coef out (1), or set it above 0."
        )
