"""The feed of a run with dynamic sampling, which replaces groups that teach nothing.

Groups whose advantages are all zero are replaced, at most `algorithm.dynamic_sampling_max` times
per step (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rolltree.training.advantages import GroupCredit, by_group
from rolltree.training.feeds import Feed, Group, StepRollouts, credit_of, joined
from rolltree.training.no_signal_warning import NoSignalWarning
from rolltree.training.plan import replacement_requests, until_enough
from rolltree.values.types import RolloutRequest


class DynamicFeed(Feed):
    """Samples a step's rollouts, and others instead of the groups without signal.

    Args:
        settings: those of `Feed`.
        warning: counts groups with and without reward variance.
    """

    def __init__(self, *settings: Any, warning: NoSignalWarning, **more: Any) -> None:
        super().__init__(*settings, **more)
        self._warning = warning

    async def next(self, step: int) -> StepRollouts:
        """Return the rollouts of step `step` and of its replacements, stored ones included."""
        planned = await super().next(step)
        self._warning.begin(step)
        async with self._warning.watching():
            replaced = await self._replace(step, planned.credit)
        metrics = {**planned.metrics, **replaced.metrics}
        return replace(replaced, metrics=metrics, is_replayed=planned.is_replayed)

    async def _replace(self, step: int, planned: Sequence[GroupCredit]) -> StepRollouts:
        """Replace groups without signal until none is left or the limit is reached."""
        config, limit = self._config, self._config.algorithm.dynamic_sampling_max
        useful, flat = self._split(planned)
        sampled, num_extra = [each.results for each in planned], 0
        missing = len(planned) - len(useful)
        while missing and num_extra < limit:
            count = min(missing, limit - num_extra)
            requests = replacement_requests(
                config, self._rollouts.source, step, first=num_extra, count=count
            )
            # Judged with the useful groups so far: one bad group beside seven good ones does not
            # stop the step, and a start after a kill decides the same (design/0016).
            beside = joined([each.results for each in useful])
            again = partial(self._again, step, requests, sum(map(len, sampled)), beside)
            results = await until_enough(await again(), again, config, self._notify, beside)
            num_extra += count
            groups = by_group(results)
            sampled += groups
            more, less = self._split([credit_of(group, config) for group in groups])
            useful, flat = useful + more, flat + less
            missing = len(planned) - len(useful)
        if missing:
            # Counted anew over all of them: a useful group starts the counts again.
            self._warning.begin(step)
            for each in flat:
                self._warning.no_signal(each.results)
            self._notify(
                f"step {step} trains on {missing} of {len(planned)} groups without reward "
                f"variance, after {num_extra} replacements (algorithm.dynamic_sampling_max): "
                f"{self._warning.reason(len(sampled))}"
            )
        # The step keeps its planned size, filled up with the newest flat groups. `flat[-missing:]`
        # would be all of them if none is missing.
        trained = useful + flat[len(flat) - missing :]
        return StepRollouts(
            joined([each.results for each in trained]),
            joined(sampled),
            tuple(trained),
            {"dynamic/num_replaced": float(num_extra), "dynamic/num_flat_trained": float(missing)},
        )

    async def _again(
        self, step: int, requests: Sequence[RolloutRequest], num_before: int, beside: Group
    ) -> Group:
        """Run replacements of a step that has sampled `num_before` rollouts already."""
        total = num_before + len(requests)
        collected = await self._gather(
            requests,
            on_progress=lambda done: self._on_progress(step, num_before + done, total),
            beside=beside,
        )
        return collected.results

    def _split(self, groups: Sequence[GroupCredit]) -> tuple[list[GroupCredit], list[GroupCredit]]:
        useful, flat = [], []
        for credit in groups:
            if credit.has_signal:
                useful.append(credit)
                self._warning.signal()
            else:
                flat.append(credit)
                self._warning.no_signal(credit.results)
        return useful, flat
