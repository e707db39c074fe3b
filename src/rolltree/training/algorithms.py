"""Algorithms by name: which credit, loss and aggregation belong together.

A row per algorithm of the literature; a new one is a new row. It knows the tables of `credit`,
`losses` and `aggregation` and nothing of training. It leaves out what an algorithm does to
sampling, such as DAPO's dynamic sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolltree.errors import ConfigError, UnknownName, did_you_mean
from rolltree.training.aggregation import AGGREGATIONS
from rolltree.training.credit import CREDITS
from rolltree.training.losses import LOSSES, get_loss


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Credit, loss with its parameters, and aggregation with its length (0: not used).

    `over_rollout` is the loss's: its ratio, and so every token's weight, is one per rollout.
    """

    credit: str
    loss: str
    aggregation: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    fixed_length: int = 0
    over_rollout: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    # DeepSeekMath, arXiv:2402.03300
    "grpo": Algorithm("grpo", "ppo_clip", "sequence"),
    # Understanding R1-Zero-Like Training, arXiv:2503.20783
    "dr_grpo": Algorithm("dr_grpo", "ppo_clip", "fixed_length"),
    # DAPO, arXiv:2503.14476: token mean and clip-higher
    "dapo": Algorithm("grpo", "ppo_clip", "token", {"clip_low": 0.2, "clip_high": 0.28}),
    # GSPO, arXiv:2507.18071
    "gspo": Algorithm("grpo", "gspo", "rollout"),
    # MiniMax-M1, arXiv:2506.13585
    "cispo": Algorithm("grpo", "cispo", "token"),
    # Back to Basics, arXiv:2402.14740
    "rloo": Algorithm("leave_one_out", "reinforce", "sequence"),
    # Williams 1992
    "reinforce": Algorithm("reinforce", "reinforce", "sequence"),
    # the control run: everything as in grpo, but nothing to learn
    "zero": Algorithm("zero", "ppo_clip", "sequence"),
}


def resolve_algorithm(
    name: str,
    *,
    credit: str | None = None,
    loss: str | None = None,
    aggregation: str | None = None,
    parameters: Mapping[str, float | None] | None = None,
    fixed_length: int | None = None,
) -> Algorithm:
    """Return a row of `ALGORITHMS` with parts replaced and parameters filled in.

    Raises:
        UnknownName: the algorithm or a part does not exist.
        ConfigError: a parameter that the loss or the aggregation does not read, or one it needs.
    """
    if name not in ALGORITHMS:
        raise UnknownName(f"there is no algorithm {name!r}.{did_you_mean(name, ALGORITHMS)}")
    row = ALGORITHMS[name]
    chosen = Algorithm(
        credit or row.credit, loss or row.loss, aggregation or row.aggregation, row.parameters
    )
    for kind, key, table in (
        ("credit", chosen.credit, CREDITS),
        ("loss", chosen.loss, LOSSES),
        ("aggregation", chosen.aggregation, AGGREGATIONS),
    ):
        if key not in table:
            raise UnknownName(f"there is no {kind} {key!r}.{did_you_mean(key, table)}")
    given = {key: value for key, value in (parameters or {}).items() if value is not None}
    own = row.parameters if chosen.loss == row.loss else {}
    filled = get_loss(chosen.loss).parameters({**own, **given}, chosen.loss)
    if out := [key for key, value in filled.items() if value < 0]:
        raise ConfigError(f"{out[0]} is {filled[out[0]]}; it must be 0 or more.")
    if (fixed_length is not None) != (chosen.aggregation == "fixed_length"):
        raise ConfigError(
            "algorithm.fixed_length and the aggregation 'fixed_length' go together: the "
            f"aggregation is {chosen.aggregation!r} and fixed_length is {fixed_length}. The length "
            "is usually sampling.max_tokens."
        )
    if fixed_length is not None and fixed_length < 1:
        raise ConfigError(f"algorithm.fixed_length is {fixed_length}; it must be at least 1.")
    return Algorithm(
        chosen.credit,
        chosen.loss,
        chosen.aggregation,
        filled,
        fixed_length=fixed_length or 0,
        over_rollout=get_loss(chosen.loss).over_rollout,
    )
