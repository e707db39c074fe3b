"""From samples to logprobs: how a model reads a pack of samples.

`tree` computes every unique token once; `rows` runs each sample through the model's own causal
attention, for models whose attention is not exact on a tree. Both give the same numbers. Nothing is
padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rolltree.inference.local.shell import body_of
from rolltree.training.head import check_head, head_logits
from rolltree.training.layout import Forest, collate
from rolltree.training.logprobs import RecordLogprobs, Teacher, gather_logprobs
from rolltree.training.rope_lengths import check_lengths, longest_exact
from rolltree.training.tree_attention import tree_attention, tree_layout
from rolltree.training.tree_probe import probe_forest
from rolltree.training.tree_support import check_row_support, check_tree_support, why_not_tree
from rolltree.values.errors import ConfigError, TrainingError
from rolltree.values.types import FloatArray, Sample

if TYPE_CHECKING:
    from rolltree.training.models.routing import Replay

HiddenFn = Callable[[Any, Forest, torch.device, Tensor | None], Tensor]


def _ids(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=torch.long)


def tree_hidden(
    model: Any,
    forest: Forest,
    device: torch.device,
    experts: Tensor | None = None,
    *,
    flex: bool = False,
) -> Tensor:
    """Return the last hidden states `[_T, _D]` of a forest in one pass over unique tokens.

    `experts` is what `Replay.experts` returns, if routing is replayed.
    """
    hidden: Tensor = body_of(model)(
        input_ids=_ids(forest.ids, device)[None],
        position_ids=_ids(forest.positions, device)[None],
        use_cache=False,
        tree_layout=tree_layout(forest, device, flex=flex),
        **_replayed(experts),
    ).last_hidden_state
    return hidden[0]


def _replayed(experts: Tensor | None) -> dict[str, Tensor]:
    if experts is None:
        return {}
    from rolltree.training.models.routing import KEYWORD

    return {KEYWORD: experts}


def rows_hidden(
    model: Any, forest: Forest, device: torch.device, experts: Tensor | None = None
) -> Tensor:
    """Return what `tree_hidden` returns, sample by sample; no sample may branch.

    Raises:
        TrainingError: a sample is a tree.
    """
    parts, first = [], 0
    while first < forest.num_tokens:
        # The subtree of a sample's first token is the whole sample.
        stop = int(forest.subtree_end[first])
        if (forest.subtree_end[first:stop] != stop).any():
            raise TrainingError(
                "a sample branches, and this model reads only unbranched rows, so the branches "
                "would attend to each other. Set train.scope = 'interleave'."
            )
        # No position ids: without branches, the model's own positions equal the depths.
        row = _ids(forest.ids[first:stop], device)[None]
        given = _replayed(None if experts is None else experts[first:stop])
        output = body_of(model)(input_ids=row, use_cache=False, **given)
        parts.append(output.last_hidden_state[0])
        first = stop
    return torch.cat(parts)


FORWARDS: dict[str, HiddenFn] = {
    "tree": tree_hidden,
    "tree_flex": partial(tree_hidden, flex=True),
    "rows": rows_hidden,
}
TREE_FORWARDS = {"segments": "tree", "flex": "tree_flex"}
"""`train.tree_attention` -> the key of `FORWARDS` for trees."""


def choose_forward(model: Any, name: str, scope: str, attention: str = "segments") -> str:
    """Return a key of `FORWARDS` for `"auto"`, or check that the named one fits the model.

    Args:
        model: the model to train.
        name: `train.forward`.
        scope: `train.scope`.
        attention: `train.tree_attention`, for trees.

    Raises:
        TrainingError: the model does not support it.
        ConfigError: rows were requested with the `tree` scope, or FlexAttention for a model that
            is trained row by row or is on a CPU.
    """
    chosen = _tree_or_rows(model, name, scope)
    if attention == "segments":
        return chosen
    if chosen == "rows":
        raise ConfigError(
            f"train.tree_attention is {attention!r}, but {type(model).__name__} is trained row by "
            "row here, with its own attention. Leave train.tree_attention out."
        )
    if model.get_input_embeddings().weight.device.type == "cpu":
        raise ConfigError(
            f"train.tree_attention is {attention!r}, but the model is on a CPU, where torch has no "
            "gradient for FlexAttention. Leave train.tree_attention out; on a CPU the default, "
            "'segments', is fast."
        )
    return TREE_FORWARDS[attention]


def _tree_or_rows(model: Any, name: str, scope: str) -> str:
    if name == "rows" and scope == "tree":
        raise ConfigError(
            "train.forward is 'rows' and train.scope is 'tree', but a row cannot hold branches. "
            "Use train.scope = 'interleave', or train.forward = 'auto'."
        )
    if name == "tree" or scope == "tree":
        check_tree_support(model)
        return "tree"
    # With "auto", a model that is exact on trees reads the samples of every scope as trees.
    if name != "rows" and why_not_tree(model) is None:
        return "tree"
    check_row_support(model)
    return "rows"


def is_padding(one: int, other: int) -> bool:
    """Whether two numbers of output rows are one vocabulary, padded to a multiple of a power of 2.

    >>> is_padding(151_936, 152_064), is_padding(128_256, 151_936)
    (True, False)
    """
    low, high = sorted((one, other))
    return any(-(-low // 2**k) * 2**k == high for k in range(14))


class LogprobModel:
    """A causal LM as a function from forests to record logprobs.

    Args:
        model: the Hugging Face module; it is used in place and never copied.
        forward: a key of `FORWARDS`.
        compute_dtype: autocast to this while computing; float32 turns autocast off.

    The module is put into evaluation mode, as in the engine. Every pass runs inside `around`, so
    that two readers of one module can see it differently (with and without its adapter). With
    `replay`, the recorded experts of a forest are used; otherwise the model's routers choose.
    """

    def __init__(
        self,
        model: Any,
        forward: str = "tree",
        *,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        # Training mode would switch on dropout and router noise, which the engine did not have.
        model.eval()
        check_head(model)
        self.model = model
        self.forward = forward
        self.compute_dtype = compute_dtype
        self.device: torch.device = model.get_input_embeddings().weight.device
        # `shard` replaces it with a method that gathers the weights first.
        self.run: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = self.compute
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.recomputes = False
        self.longest = longest_exact(model)
        self.replay: Replay | None = None
        # A reference with a padded vocabulary leaves out the ids that the trained model lacks.
        self.num_ids: int | None = None

    def move(self, device: torch.device) -> None:
        """Compute on `device` from now on."""
        self.model.to(device)
        self.device = device

    def recompute_layers(self) -> None:
        """Recompute each layer in the backward pass from now on: less memory, a third more time.

        Raises:
            ConfigError: the model does not support it, or its gradient would change.
        """
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        forest = probe_forest(
            vocabulary, (24, () if self.forward == "rows" else ((8, ()), (8, ())))
        )

        def hidden() -> Tensor:
            with self._autocast():
                return FORWARDS[self.forward](self.model, forest, self.device, None)

        from rolltree.training.models.recompute import check_recomputation

        check_recomputation(self.model, hidden, self.context)
        self.recomputes = True

    @contextmanager
    def context(self) -> Iterator[None]:
        """Enter the contexts that a forward pass and its backward pass need."""
        with ExitStack() as held:
            # Entered last, recomputation wraps the others: what it computes again includes the
            # tree's layout and the replayed experts.
            held.enter_context(self.around())
            if self.forward != "rows":
                held.enter_context(tree_attention(self.model))
            if self.replay is not None:
                held.enter_context(self.replay.installed())
            if self.recomputes:
                from rolltree.training.models.recompute import recomputation

                held.enter_context(recomputation(self.model))
            yield

    def __call__(
        self,
        forest: Forest,
        *,
        entropy_gradient: bool = False,
        teacher: LogprobModel | None = None,
    ) -> RecordLogprobs:
        """Return the logprobs of all records of `forest`, in their order.

        With a `teacher`, `kl` is the reverse KL to its whole distribution; only one chunk of either
        model's logits exists at a time.
        """
        frozen = None
        if teacher is not None:
            with torch.no_grad(), teacher.context():
                # Only hidden states: logits are computed chunk by chunk, as the student's are.
                hidden = teacher.wanted_hidden(forest).to(self.device)
            frozen = Teacher(hidden, teacher.head)
        return RecordLogprobs(*self.run(forest, entropy_gradient, frozen))

    def compute(
        self, forest: Forest, entropy_gradient: bool = False, teacher: Teacher | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logprob, entropy and KL; `run` is this method, perhaps wrapped by `shard`."""
        with self._autocast():
            read = gather_logprobs(
                self.wanted_hidden(forest),
                self.head,
                torch.from_numpy(forest.row_temperature).to(self.device),
                torch.from_numpy(forest.record_row).to(self.device),
                _ids(forest.records.target, self.device),
                entropy_gradient=entropy_gradient,
                teacher=teacher,
            )
        # A plain tuple, because FSDP does not look for tensors in a dataclass (design/0007).
        return read.logprob, read.entropy, read.kl

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits `[_S, _V]` of last hidden states `[_S, _D]`."""
        # An adapter may change layers of the head, too.
        with self.around(), self._autocast():
            return head_logits(self.model, hidden)[:, : self.num_ids]

    def wanted_hidden(self, forest: Forest) -> Tensor:
        """Return the last hidden states `[_S, _D]` of the tokens whose logits a record reads.

        Raises:
            TrainingError: a path is so long that it changes the rotary angles of all its tokens.
        """
        check_lengths(self.model, forest, self.longest)
        with self._autocast():
            experts = None if self.replay is None else self.replay.experts(forest, self.device)
            hidden = FORWARDS[self.forward](self.model, forest, self.device, experts)
            # Selected before the head, so that it computes logits for these rows only.
            return hidden.index_select(0, torch.from_numpy(forest.rows).to(self.device))

    def _autocast(self) -> torch.autocast:
        on = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=on)


def logprob_reader(model: Any) -> LogprobModel:
    """Return a reader of a model for `sample_logprobs`, after probing the model.

    Raises:
        TrainingError: its logprobs would not be exact.
    """
    return LogprobModel(model, choose_forward(model, "auto", "interleave"))


def sample_logprobs(logprobs: LogprobModel, samples: Sequence[Sample]) -> FloatArray:
    """Return the logprob of every record, float32 `[_R]`, in sample order, without gradients.

    Raises:
        TrainingError: a sample is longer than the model allows.
    """
    with torch.no_grad(), logprobs.context():
        parts = [logprobs(collate([sample])).logprob.cpu().numpy() for sample in samples]
    return np.concatenate(parts)


@contextmanager
def backward_precision(dtype: str) -> Iterator[None]:
    """Let float32 matrix products on the CPU run in `dtype` while the context is open.

    The switch is global: nothing else may multiply matrices meanwhile, so the engine is paused.
    """
    if dtype == "float32":
        yield
        return
    switch: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009  (untyped in torch)
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before
