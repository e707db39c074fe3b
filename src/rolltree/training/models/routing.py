"""Replay of routed experts: the trainer's mixture layers use the experts that the engine chose.

Trainer and engine round differently, so a router may decide close calls differently, and a token's
logprob is then that of a different function. Replay (R3, Ma et al. 2025, arXiv:2510.11370) takes
the engine's choices as given. Their scores are the trainer's own, so the router learns. The experts
are passed as a keyword argument, like the layout of a tree, so that a recomputed layer finds them
again. A reference model's router chooses for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolltree.inference.local.routing import (
    Router,
    RouterCall,
    find_routers,
    probe_ids,
    record_routing,
    replace_forward,
)
from rolltree.inference.local.shell import body_of
from rolltree.training.layout import BoolArray, Forest
from rolltree.values.errors import TrainingError, UnsupportedSetting

KEYWORD = "routed_experts"
_WITHOUT = "Set train.replay_experts = false to train with the trainer's own choice of experts."


class Replay:
    """Makes one model use given experts.

    Raises:
        TrainingError: the model's routers cannot be replayed exactly; the message says why.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._name = model, type(model).__name__
        try:
            self._routers = find_routers(model)
        except UnsupportedSetting as error:
            raise TrainingError(f"{error} {_WITHOUT}") from error
        modules = dict(body_of(model).named_modules())
        first = self._routers.each[0].name.split(".")
        # Routers have names such as `layers.3.mlp.gate`; the part before the number is the list of
        # layers.
        at = next(index for index, part in enumerate(first) if part.isdigit())
        self._layers: list[Any] = list(modules[".".join(first[:at])])
        self.routers = {router.layer: router for router in self._routers.each}
        self._num_replayed = 0
        self._probe()

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of decoder layers and of experts per token and layer."""
        return self._routers.num_layers, self._routers.top_k

    def experts(self, forest: Forest, device: torch.device) -> Tensor | None:
        """Return the recorded experts of a forest, int32 `[_T, layers, top_k]`, -1 where unknown.

        Raises:
            TrainingError: they do not fit this model.
        """
        recorded = forest.routed_experts
        if recorded is None:
            return None
        bad, why = self.foreign(recorded)
        if bad.any():
            raise TrainingError(why)
        return torch.from_numpy(recorded).to(device)

    def foreign(self, values: Any) -> tuple[BoolArray, str]:
        """Return which tokens `[_T]` have experts that are not this model's, and why the first."""
        bad, what = np.ones(len(values), np.bool_), "is not one array of integers"
        if not isinstance(values, tuple) and values.ndim == 3 and values.dtype.kind in "iu":
            if values.shape[1:] == self.shape:
                bad, what = self._misfits(values)
            else:
                what = (
                    f"has {values.shape[1]} layers with {values.shape[2]} experts each, but the "
                    f"model {self.shape[0]} with {self.shape[1]}"
                )
        return bad, (
            f"the recorded routing {what}: it is not that of {self._name}, so replaying it would "
            f"train a different function. Does the engine have the trainer's model? {_WITHOUT}"
        )

    def _misfits(self, values: NDArray[Any]) -> tuple[BoolArray, str]:
        bad, what = np.zeros(len(values), np.bool_), ""
        for layer, router in self.routers.items():
            chosen = np.sort(values[:, layer], axis=-1)
            # Only -1, "unknown", may repeat.
            twice = ((chosen[:, 1:] == chosen[:, :-1]) & (chosen[:, 1:] >= 0)).any(-1)
            over = chosen[:, -1] >= router.num_experts
            if over.any():
                named = f"names expert {int(chosen.max())} of {router.num_experts} in layer {layer}"
                what = what or named
            elif twice.any():
                what = what or f"names an expert of layer {layer} twice for one token"
            bad |= over | twice
        return bad, what

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make the model accept the keyword `routed_experts` while the context is open.

        Backward passes with gradient checkpointing must run inside it too.
        """
        with ExitStack() as held:
            # Each layer puts its experts here while it runs, so a layer that is recomputed alone
            # finds those of its own row (design/0023).
            given: dict[int, Tensor] = {}
            for index, layer in enumerate(self._layers):
                router = self.routers.get(index)
                held.callback(replace_forward(layer, self._layer(layer.forward, router, given)))
                if router is not None:
                    forward = self._router(router.module.forward, router, given)
                    held.callback(replace_forward(router.module, forward))
            yield

    def _layer(
        self, forward: Callable[..., Any], router: Router | None, given: dict[int, Tensor]
    ) -> Callable[..., Any]:
        def with_experts(*args: Any, routed_experts: Tensor | None = None, **kwargs: Any) -> Any:
            # Layers without experts also receive the keyword, but their `forward` does not take it.
            if router is None or routed_experts is None:
                return forward(*args, **kwargs)
            # int64 only here, layer by layer: the whole tensor lives until the backward pass.
            given[router.layer] = routed_experts[:, router.layer].long()
            try:
                return forward(*args, **kwargs)
            finally:
                del given[router.layer]

        return with_experts

    def _router(
        self, forward: Callable[..., Any], router: Router, given: dict[int, Tensor]
    ) -> Callable[..., Any]:
        def replayed(*args: Any, **kwargs: Any) -> Any:
            forced = given.get(router.layer)
            if forced is None:
                return forward(*args, **kwargs)
            with RouterCall(router, forced) as watch:
                out = forward(*args, **kwargs)
            if watch.chosen is None or watch.chosen.shape != forced.shape:
                raise TrainingError(
                    f"{router.name} of {self._name} chose its experts in a different way than in "
                    f"a short pass, so the recorded ones were not replayed. {_WITHOUT}"
                )
            self._num_replayed += 1
            return out

        return replayed

    @torch.no_grad()
    def _probe(self) -> None:
        """Replay the model's own choices, which must not change a bit, and others, which must."""

        def hidden(experts: Tensor | None) -> Tensor:
            given = {} if experts is None else {KEYWORD: experts}
            base = body_of(self._model)
            states: Tensor = base(input_ids=ids, use_cache=False, **given).last_hidden_state[0]
            return states

        ids = probe_ids(self._model)
        with record_routing(self._routers) as recorder:
            plain = hidden(None)
            own = recorder.take().astype(np.int64)
        num_experts = np.ones(self._routers.num_layers, np.int64)
        for layer, router in self.routers.items():
            num_experts[layer] = router.num_experts
        # Shifted by one, a token's experts are different, and still distinct.
        others = (own + 1) % num_experts[:, None]
        unknown = np.full_like(own, -1)
        try:
            with self.installed():
                replays = [
                    hidden(torch.from_numpy(e).to(ids.device)) for e in (own, unknown, others)
                ]
                if self._num_replayed != len(replays) * len(self._routers.each):
                    raise self._refusal("it does not hand the keyword on to all of its layers")
        except (TypeError, ValueError, RuntimeError, TrainingError) as error:
            raise self._refusal(f"a probe failed ({error})") from error
        same, untouched, changed = replays
        scale = float(plain.abs().max())
        # A GPU may add up in a different order each time.
        limit = 0.0 if ids.device.type == "cpu" else 1e-3 * scale
        if any(float((states - plain).abs().max()) > limit for states in (same, untouched)):
            raise self._refusal("replaying its own choices changes its hidden states")
        # If every token goes to all experts, there are no others to try.
        if self._routers.num_experts > self._routers.top_k:
            moved = float((changed - plain).abs().max())
            if not moved > max(limit, 1e-6 * scale):
                raise self._refusal("other experts change nothing; the experts do not reach them")

    def _refusal(self, why: str) -> TrainingError:
        return TrainingError(
            f"the experts of {self._name} cannot be replayed: {why}. Its logprobs would not be "
            f"those of the experts that were recorded. {_WITHOUT}"
        )
