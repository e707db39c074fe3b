"""Is B better than A? Paired over the examples that both played.

Pairing takes out how hard an example is, which is most of the spread between examples. Pure;
knows nothing about models. It leaves out unpaired comparison: two reports over different
examples are two reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from rolltree.errors import ConfigError
from rolltree.evaluation.estimate import Estimate, estimate
from rolltree.evaluation.reducers import rewards_by_example
from rolltree.evaluation.report import EvalReport


@dataclass(frozen=True, slots=True)
class Comparison:
    """Mean reward of A and B on their common examples, and the paired difference B - A.

    `difference` is a t interval over the examples' differences. `num_only_a` and `num_only_b`
    count scored examples that the other report lacks; they are not used.
    """

    before: Estimate
    after: Estimate
    difference: Estimate
    num_only_a: int
    num_only_b: int

    @property
    def is_significant(self) -> bool:
        """Whether the interval of the difference leaves out zero."""
        low, high = self.difference.low, self.difference.high
        return low is not None and high is not None and (low > 0.0 or high < 0.0)


def compare(a: EvalReport, b: EvalReport) -> Comparison:
    """Compare two reports example by example, at A's confidence.

    Raises:
        ConfigError: they have no scored example in common.
    """
    rewards_a, rewards_b = rewards_by_example(a.outcomes), rewards_by_example(b.outcomes)
    common = [example for example in rewards_a if example in rewards_b]
    if not common:
        raise ConfigError(
            f"the evaluations {a.phase!r} and {b.phase!r} have no scored example in common, so "
            "their difference would compare the examples, not the models. Evaluate both on the "
            "same split with the same num_examples."
        )
    confidence = a.settings.confidence
    before = estimate({key: rewards_a[key] for key in common}, confidence=confidence)
    after = estimate({key: rewards_b[key] for key in common}, confidence=confidence)
    gains = {key: [fmean(rewards_b[key]) - fmean(rewards_a[key])] for key in common}
    difference = estimate(gains, confidence=confidence, are_shares=False)
    assert before is not None, "a common example has a value"
    assert after is not None, "a common example has a value"
    assert difference is not None, "a common example has a difference"
    return Comparison(
        before, after, difference, len(rewards_a) - len(common), len(rewards_b) - len(common)
    )
