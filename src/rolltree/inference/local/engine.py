"""The embedded engine decodes with the trainer's own weights, which are shared, not copied.

Inside `async with engine.paused()` a trainer may change the weights in place, and then calls
`publish`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rolltree.inference.engine import DEFAULT_MAX_CONTEXT, EngineThread, extra_of
from rolltree.inference.local.decoder import Decoder, LocalRequest
from rolltree.inference.local.probe import check_invariance, choose_route, max_stable_positions
from rolltree.inference.local.sampling import PROCESSED, make_processors
from rolltree.inference.local.slots import SlotTable
from rolltree.inference.request_fields import CONSTRAINTS
from rolltree.values.errors import ConfigError, UnsupportedSetting
from rolltree.values.types import IntArray, SamplingParams

if TYPE_CHECKING:
    from rolltree.inference.local.grammars import GrammarMask, Grammars

logger = logging.getLogger("rolltree.inference")
# The default number of prompt tokens per pass; on a CPU, the activations then fit into its cache.
_CHUNKS = {"cpu": 1024}
_DEFAULT_CHUNK = 8192


class LocalEngine(EngineThread[LocalRequest]):
    """Batched decoding for one Hugging Face causal language model.

    Args:
        model: the module whose weights are used in place, including later changes.
        decode_text: turns ids into text (special tokens kept); needed only for `stop` strings.
        tokenizer: the model's; needed only for answers in a required form (`response_format`, ...).
        max_context: None is 2,048 tokens, or the model's own limit if that is less.
        kv_budget_bytes: memory for keys and values. None is `max_batch` slots of `max_context`
            tokens; more memory keeps more finished conversations for reuse. On the CPU memory
            is allocated when it is used.
        prefill_chunk: the most prompt tokens in one forward pass; None takes a default for the
            device.
        pack_weights: keep a second, transposed copy of the layers' matrices if that makes products
            faster, which it does for Llama-like models on a CPU. `publish` renews the copy. Meant
            for a model that is not being trained; without it nothing is copied.
        batch_invariant: the same request gives the same ids and bit-equal logprobs whatever else
            is in the batch or in the prefix cache; slower, see docs/engine.md.
        record_experts: record the experts of an MoE model that each token is routed to, for a
            trainer that replays them.

    The other arguments are `EngineThread`'s.

    Raises:
        ConfigError: the budget is too small for `max_batch` slots, or a number is out of range.
        UnsupportedSetting: the engine cannot reproduce the model's logits, the device's products
            depend on the batch despite `batch_invariant`, or there are no experts to record.
    """

    label = "the embedded engine"
    survives_failed_steps = True
    extra_settings = PROCESSED.union(CONSTRAINTS, ["top_logprobs"])

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Iterable[int] = (),
        decode_text: Callable[[list[int]], str] | None = None,
        tokenizer: Any = None,
        max_batch: int = 64,
        max_context: int | None = None,
        kv_budget_bytes: int | None = None,
        prefill_chunk: int | None = None,
        pack_weights: bool = False,
        batch_invariant: bool = False,
        record_experts: bool = False,
        version: int = 0,
        seed: int = 0,
    ) -> None:
        config = model.config.get_text_config()
        own_limit = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_CONTEXT
        steady = max_stable_positions(model) or own_limit
        if max_context is None:
            max_context = min(own_limit, steady, DEFAULT_MAX_CONTEXT)
        super().__init__(
            eos_token_ids=eos_token_ids,
            max_batch=max_batch,
            max_context=max_context,
            version=version,
            seed=seed,
        )
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ConfigError("prefill_chunk is too small for a single request; raise it.")
        if self.max_context > own_limit:
            raise ConfigError(
                f"max_context {self.max_context} exceeds the {own_limit} positions the model was "
                "made for; answers beyond them would be noise. Lower max_context."
            )
        packed = pack_weights and model.device.type == "cpu"
        # Independent of the model's name: this takes the fastest way that gives the model's own
        # logits on a trial copy (design/0002).
        route = choose_route(model, self.max_context, packed)
        if batch_invariant:
            check_invariance(model, route, packed)
        if prefill_chunk is None and route.row_mode is not None:
            # Without a limit, since each row is a pass of its own.
            prefill_chunk = max_batch * self.max_context
        elif prefill_chunk is None:
            prefill_chunk = _CHUNKS.get(model.device.type, _DEFAULT_CHUNK)
        slot_bytes = route.slot_bytes(self.max_context)
        num_slots = max_batch
        if kv_budget_bytes is not None:
            # Additional slots keep finished conversations, so that the next turn finds its prefix.
            # They are bounded, because every slot is compared with every new prompt.
            num_slots = min(kv_budget_bytes // max(slot_bytes, 1), 8 * max_batch)
        if num_slots < max_batch:
            raise ConfigError(
                f"kv_budget_bytes = {kv_budget_bytes:,} holds {num_slots} slots of "
                f"{self.max_context} tokens ({slot_bytes:,} bytes each), not max_batch = "
                f"{max_batch}. Lower max_batch or max_context, or raise the budget."
            )
        self.vocab_size = int(config.vocab_size)
        if any(not 0 <= token < self.vocab_size for token in self.eos_token_ids):
            raise ConfigError(
                f"eos_token_ids {self.eos_token_ids} has an id outside the model's vocabulary of "
                f"{self.vocab_size}, which it can never sample. Take them from its own tokenizer."
            )
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None
        self.takes_grammars = tokenizer is not None
        self.kv_bytes = num_slots * slot_bytes
        # A table by id, because every sampled token is looked up.
        is_end = np.zeros(self.vocab_size, bool)
        is_end[list(self.eos_token_ids)] = True
        self._device = model.device
        capacity = self.max_context
        runner = route.runner(model, num_slots, capacity, packed=packed, invariant=batch_invariant)
        experts = None
        if record_experts:
            from rolltree.inference.local.routing import ExpertTable

            experts = ExpertTable(model, runner, num_slots, capacity)
        self.route = route
        if route.row_mode is not None:
            logger.warning(
                "%s runs row by row in the embedded engine, which is slow: it %s",
                *(type(model).__name__, route.reason),
            )
        self._decoder = Decoder(
            runner,
            SlotTable(num_slots, capacity),
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            is_end=is_end,
            decode_text=decode_text,
            counts=self._counts,
            experts=experts,
        )
        self._outdated = False
        self._start("rolltree-engine")

    @property
    def device(self) -> Any:
        """The `torch.device` of the model."""
        return self._device

    def served_tensors(self) -> list[Any]:
        """Return the tensors that forward passes read, or copies that `publish` renews."""
        return self._decoder.runner.tensors()

    def _new_request(
        self, prompt: IntArray, sampling: SamplingParams, extra: Mapping[str, Any], seed: int
    ) -> LocalRequest:
        if sampling.stop and self._decoder.decode_text is None:
            raise UnsupportedSetting(
                "stop strings need text, but this engine was built without decode_text. Pass "
                "decode_text=tokenizer.decode, or use stop_token_ids."
            )
        limit = self.max_context
        if sampling.max_tokens is not None:
            limit = min(limit, len(prompt) + sampling.max_tokens)
        mask = self._mask(extra, len(prompt))
        processors = make_processors(
            extra,
            mask=mask,
            num_prompt=len(prompt),
            end_ids=[*self.eos_token_ids, *sampling.stop_token_ids],
            vocab_size=self.vocab_size,
            device=self._device,
        )
        request = LocalRequest(prompt, sampling, seed, limit, processors=processors, mask=mask)
        request.num_top = number = extra.get("top_logprobs") or 0
        if type(number) is not int or not 0 <= number <= 20:  # as many as OpenAI's API gives
            raise UnsupportedSetting(f"top_logprobs = {number!r} is not a number from 0 to 20.")
        return request

    def prepare(self, sampling: SamplingParams) -> None:
        """Compile the form of an answer, if one is required; the next request finds it compiled."""
        if sampling.extra:
            self._mask(extra_of(sampling), 0)

    def _mask(self, extra: Mapping[str, Any], num_prompt: int) -> GrammarMask | None:
        if extra.keys().isdisjoint(CONSTRAINTS):
            return None
        if self._grammars is None:
            from rolltree.inference.local.grammars import Grammars

            self._grammars = Grammars(self._tokenizer, self.eos_token_ids, self.vocab_size)
        return self._grammars.mask(extra, num_prompt)

    def _has_work(self) -> bool:
        return self._decoder.busy

    def _step(self, new: list[LocalRequest], version: int) -> None:
        # In the engine's own thread, not in `publish`: packing copies every matrix (425 MB for
        # SmolLM2-135M, design/0002).
        if self._outdated:
            self._outdated = False
            self._decoder.slots.forget()
            self._decoder.runner.pack()
        self._decoder.waiting.extend(new)
        self._decoder.step(version)

    def _drop_cancelled(self) -> None:
        self._decoder.drop_cancelled()

    def _forget_requests(self) -> None:
        self._decoder.forget_requests()

    def _take_weights(self, version: int) -> None:
        # An optimizer changes tensors in place, which needs no refresh, but loading a checkpoint
        # can replace them.
        self._decoder.runner.refresh()
        self._outdated = True
