"""What the embedded engine's routers chose, kept beside the keys and values of every slot.

It goes where these go: a prompt that takes over the first tokens of another row takes over their
experts, and what is computed again after new weights is recorded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rolltree.inference.local.body import body_of
from rolltree.inference.local.plan import AttentionPlan
from rolltree.inference.local.routing import Recorder, Routers, find_routers
from rolltree.inference.local.rows import RowRunner
from rolltree.inference.local.runner import ModelRunner
from rolltree.inference.local.shell import shell_of
from rolltree.types import IntArray


class ExpertTable:
    """Routed experts `[slots, capacity, layers, top_k]` of a runner's rows, uint8 or uint16.

    Raises:
        UnsupportedSetting: the model's routers cannot be recorded, or it has none.
    """

    def __init__(
        self, model: Any, runner: ModelRunner | RowRunner, num_slots: int, capacity: int
    ) -> None:
        self._routers = find_routers(shell_of(model))
        items = self._routers.num_layers, self._routers.top_k
        self._chosen = np.zeros((num_slots, capacity, *items), self._routers.dtype)
        self._follow_model(runner)
        if isinstance(runner, RowRunner):
            self._follow_rows(runner)
        else:
            self._follow_passes(runner)

    def read(self, row: int, num_tokens: int) -> NDArray[Any]:
        """Return those of a row's first tokens, `[num_tokens, layers, top_k]`."""
        return self._chosen[row, :num_tokens].copy()

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Give `target` the first `num_tokens` tokens of `source`."""
        self._chosen[target, :num_tokens] = self._chosen[source, :num_tokens]

    def swap(self, one: int, two: int, num_tokens: int) -> None:
        """Exchange the first `num_tokens` tokens of two rows."""
        pair = [one, two]
        self._chosen[pair, :num_tokens] = self._chosen[pair[::-1], :num_tokens]

    def _follow_model(self, runner: Any) -> None:
        """Record the routers of the runner's own module tree, also of one that it makes later."""

        def watch() -> None:
            self._recorder = Recorder(_routers_of(runner._model, self._routers))

        def read_model() -> None:
            read()
            watch()

        read = runner._read_model
        runner._read_model = read_model
        watch()

    def _follow_passes(self, runner: Any) -> None:
        def logits(plan: AttentionPlan) -> torch.Tensor:
            self._recorder.clear()  # a pass that failed may have left something
            found: torch.Tensor = compute(plan)
            at = plan.rows.cpu().numpy(), plan.positions.cpu().numpy()
            self._chosen[at] = self._recorder.take()
            return found

        compute = runner._logits
        runner._logits = logits

    def _follow_rows(self, runner: Any) -> None:
        def run(row: int, ids: IntArray, start: int, stop: int) -> torch.Tensor:
            self._recorder.clear()
            found: torch.Tensor = compute(row, ids, start, stop)
            chosen = self._recorder.take()
            self._chosen[row, stop - len(chosen) : stop] = chosen
            return found

        compute: Callable[..., torch.Tensor] = runner._run
        runner._run = run


def _routers_of(model: Any, routers: Routers) -> Routers:
    """Return the same routers in another module tree of the same model."""
    modules = dict(body_of(model).named_modules())
    each = tuple(replace(router, module=modules[router.name]) for router in routers.each)
    return replace(routers, each=each)
