"""Finds the routers of an MoE model, and records or forces the experts that they choose.

Every MoE model in transformers chooses experts with `topk` over their scores, in the forward pass
of one router module per layer. `find_routers` finds these modules by watching a short pass;
`RouterCall` reads or replaces the `topk` of one router call. Nothing here depends on a model's name
(design/0023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rolltree.inference.local.plan import AttentionPlan
from rolltree.inference.local.rows import RowRunner
from rolltree.inference.local.runner import ModelRunner
from rolltree.inference.local.shell import body_of, shell_of
from rolltree.values.errors import UnsupportedSetting
from rolltree.values.types import IntArray

_TOPK = (torch.topk, torch.Tensor.topk)
# A prime that is not a usual number of experts or heads, so a matrix with this many rows has one
# row per token.
_PROBE_LEN = 7


@dataclass(frozen=True, slots=True)
class Router:
    """A module that chooses `top_k` of `num_experts` experts for every token of decoder `layer`."""

    name: str
    module: Any
    layer: int
    # The index of the `topk` in its forward pass that chooses the experts.
    choice: int
    top_k: int
    num_experts: int
    # The number of groups, if the previous `topk` limits the choice to some groups of experts.
    groups: int | None = None


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model of `num_layers` decoder layers, some of which may have none."""

    each: tuple[Router, ...]
    num_layers: int

    @property
    def top_k(self) -> int:
        """Experts per token and layer."""
        return self.each[0].top_k

    @property
    def num_experts(self) -> int:
        """The number of experts, in the layer that has the most."""
        return max(router.num_experts for router in self.each)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest dtype for an expert's index, as in vLLM: uint8 or uint16."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


@torch.no_grad()
def find_routers(model: Any) -> Routers:
    """Return the routers of a causal language model, found in a pass over a few tokens.

    Raises:
        UnsupportedSetting: no router chooses by `topk`, a layer has several, or layers differ in
            their number of experts per token.
    """
    watch = _Discovery()
    with ExitStack() as held, watch:
        for name, module in body_of(model).named_modules():
            held.callback(module.register_forward_pre_hook(watch.enter_hook(name)).remove)
            held.callback(module.register_forward_hook(watch.leave_hook, always_call=True).remove)
        body_of(model)(input_ids=probe_ids(model), use_cache=False)
    found: dict[str, list[_Topk]] = {}
    for topk in watch.seen:
        if len(topk.shape) == 2 and topk.shape[0] == _PROBE_LEN:
            found.setdefault(topk.module, []).append(topk)
    modules = dict(body_of(model).named_modules())
    routers = []
    for name, calls in found.items():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if layer is None:
            continue
        last, before = calls[-1], calls[-2] if len(calls) > 1 else None
        if any(call.entry > 1 for call in calls):
            # The module is shared by several layers, so its calls cannot be told apart.
            continue
        groups = None
        num_experts = last.shape[1]
        if (
            before is not None
            and before.shape[1] < num_experts
            and not num_experts % before.shape[1]
        ):
            # As in DeepSeek: groups are chosen first, then experts within them.
            groups = before.shape[1]
        routers.append(
            Router(name, modules[name], layer, last.number, last.top_k, num_experts, groups)
        )
    layers = [router.layer for router in routers]
    kind = type(model).__name__
    if not routers:
        raise UnsupportedSetting(
            f"no router was found in {kind}: no part of a layer chooses experts with topk, so "
            "the experts of a token are unknown."
        )
    if len(set(layers)) < len(layers) or len({router.top_k for router in routers}) > 1:
        raise UnsupportedSetting(
            f"{kind} has several routers in a layer, or layers with different numbers of experts "
            "per token, which [tokens, layers, experts] cannot represent."
        )
    config = model.config.get_text_config(decoder=True)
    return Routers(tuple(routers), int(config.num_hidden_layers))


def probe_ids(model: Any) -> Tensor:
    """Return token ids `[1, 7]` for a short pass."""
    embedding = model.get_input_embeddings().weight
    ids: Tensor = (torch.arange(_PROBE_LEN) * 7919 + 11) % int(embedding.shape[0])
    return ids[None].to(embedding.device)


@dataclass(frozen=True, slots=True)
class _Topk:
    """A `topk` call of `module`: number `number` (from 0) in its forward pass `entry` (from 1)."""

    module: str
    entry: int
    number: int
    shape: tuple[int, ...]
    top_k: int


class _Discovery(TorchFunctionMode):
    """Lists every `topk` of a pass with the innermost module that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[_Topk] = []
        self._inside: list[str] = []
        self._entries: dict[str, int] = {}

    def enter_hook(self, name: str) -> Callable[[Any, Any], None]:
        def enter(_module: Any, _args: Any) -> None:
            self._inside.append(name)
            self._entries[name] = self._entries.get(name, 0) + 1

        return enter

    def leave_hook(self, _module: Any, _args: Any, _output: Any) -> None:
        self._inside.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _TOPK and self._inside:
            # The innermost module, since outer modules contain the same call.
            name = self._inside[-1]
            entry = self._entries[name]
            number = sum(one.module == name and one.entry == entry for one in self.seen)
            shape = tuple(_scores(args, kwargs).shape)
            self.seen.append(_Topk(name, entry, number, shape, int(out.indices.shape[-1])))
        return out


def _scores(args: Any, kwargs: dict[str, Any] | None) -> Tensor:
    scores: Tensor = args[0] if args else (kwargs or {})["input"]
    return scores


class RouterCall(TorchFunctionMode):
    """One forward pass of a router; `chosen`, `[_T, top_k]`, are the experts that it chose.

    With `forced`, int64 `[_T, top_k]`, it uses these experts instead, in this order, with the
    scores that it computes for them; a row of -1 leaves the token its own experts.
    """

    def __init__(self, router: Router, forced: Tensor | None = None) -> None:
        super().__init__()
        self._router, self._forced, self._number = router, forced, 0
        self.chosen: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return out
        number, router = self._number, self._router
        self._number += 1
        if number == router.choice:
            indices = out.indices
            if self._forced is not None:
                indices = torch.where(self._forced < 0, indices, self._forced)
                # The router's own scores of the given experts, with the gradient that `topk` would
                # have.
                values = _scores(args, kwargs).gather(-1, indices)
                out = torch.return_types.topk((values, indices))
            self.chosen = indices
        elif number == router.choice - 1 and router.groups and self._forced is not None:
            scores = _scores(args, kwargs)
            if scores.ndim == 2 and scores.shape[-1] == router.groups:
                return self._forced_groups(scores, out.indices)
        return out

    def _forced_groups(self, scores: Tensor, own: Tensor) -> Any:
        """Choose the groups of the forced experts, because scores of other groups are masked."""
        assert self._forced is not None
        size = self._router.num_experts // scores.shape[-1]
        # Some routers set the scores of other groups to 0 and take the weights from the result.
        known = torch.zeros_like(scores).scatter_(1, self._forced.clamp(min=0) // size, 1.0)
        needed = known.topk(own.shape[-1], dim=-1).indices
        indices = torch.where(self._forced[:, :1] < 0, own, needed)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


def replace_forward(module: Any, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the `forward` of one module instance; return a function that undoes it."""
    # An earlier wrapper may already have set `forward` on the instance.
    before = vars(module).get("forward")
    module.forward = forward

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


class Recorder:
    """Records which experts the routers of one model choose, until `remove`."""

    def __init__(self, routers: Routers) -> None:
        self.routers = routers
        self._chosen: dict[int, list[Tensor]] = {router.layer: [] for router in routers.each}
        self._undo = [
            replace_forward(router.module, self._wrap_forward(router, router.module.forward))
            for router in routers.each
        ]

    def _wrap_forward(self, router: Router, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with RouterCall(router) as watch:
                out = forward(*args, **kwargs)
            assert watch.chosen is not None
            self._chosen[router.layer].append(watch.chosen)
            return out

        return watched

    def remove(self) -> None:
        """Restore the routers' own forward passes."""
        for undo in self._undo:
            undo()

    def clear(self) -> None:
        """Forget the choices so far."""
        for passes in self._chosen.values():
            passes.clear()

    def take(self) -> NDArray[Any]:
        """Return the choices since `clear`, uint8 or uint16 `[_T, layers, top_k]`.

        They are 0 in layers without a router.
        """
        layers = list(self._chosen)
        chosen = torch.stack([torch.cat(self._chosen[layer]) for layer in layers], dim=1)
        self.clear()
        shape = (len(chosen), self.routers.num_layers, self.routers.top_k)
        found = np.zeros(shape, self.routers.dtype)
        found[:, layers] = chosen.cpu().numpy()
        return found


@contextmanager
def record_routing(routers: Routers) -> Iterator[Recorder]:
    """Record the routers' choices while the context is open."""
    recorder = Recorder(routers)
    try:
        yield recorder
    finally:
        recorder.remove()


class ExpertTable:
    """Routed experts `[slots, capacity, layers, top_k]` of a runner's rows, uint8 or uint16.

    They are handled like keys and values: a prompt that copies the first tokens of another row
    copies their experts, and tokens that are computed again with new weights are recorded again.

    Raises:
        UnsupportedSetting: the model has no routers, or they cannot be recorded.
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
        """Return the experts of a row's first tokens, `[num_tokens, layers, top_k]`."""
        return self._chosen[row, :num_tokens].copy()

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the experts of the first `num_tokens` tokens from row `source` to row `target`."""
        self._chosen[target, :num_tokens] = self._chosen[source, :num_tokens]

    def swap(self, one: int, two: int, num_tokens: int) -> None:
        """Exchange the experts of the first `num_tokens` tokens of two rows."""
        pair = [one, two]
        self._chosen[pair, :num_tokens] = self._chosen[pair[::-1], :num_tokens]

    def _follow_model(self, runner: Any) -> None:
        """Record the routers of the runner's module tree, and of any that it creates later."""

        def watch() -> None:
            self._recorder = Recorder(_routers_of(runner._model, self._routers))

        def read_model() -> None:
            read()
            watch()

        # The runner creates a new module tree when parameters are replaced.
        read = runner._read_model
        runner._read_model = read_model
        watch()

    def _follow_passes(self, runner: Any) -> None:
        def logits(plan: AttentionPlan) -> torch.Tensor:
            # An earlier pass that failed may have left choices.
            self._recorder.clear()
            found: torch.Tensor = compute(plan)
            # By slot and position, like keys and values.
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
            # Rows are computed from `start` or, without a cache, from 0.
            self._chosen[row, stop - len(chosen) : stop] = chosen
            return found

        compute: Callable[..., torch.Tensor] = runner._run
        runner._run = run


def _routers_of(model: Any, routers: Routers) -> Routers:
    """Return the same routers in another module tree of the same model."""
    modules = dict(body_of(model).named_modules())
    each = tuple(replace(router, module=modules[router.name]) for router in routers.each)
    return replace(routers, each=each)
