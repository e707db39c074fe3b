"""Which tokens a grammar allows next: constrained decoding with llguidance."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from rolltree.inference.constraints import grammar_in
from rolltree.inference.request_fields import CONSTRAINTS, is_form
from rolltree.values.errors import UnsupportedSetting

logger = logging.getLogger("rolltree.inference")
_REMEMBERED = 64
"""How many compiled grammars are kept: the requests of an agent have the same few."""


class Grammars:
    """The grammars of one tokenizer, each compiled once. May be used from any thread.

    Args:
        tokenizer: a fast tokenizer of transformers.
        end_ids: the tokens that end an answer; a finished answer can only be followed by one.
        vocab_size: the width of the model's logits.
    """

    def __init__(self, tokenizer: Any, end_ids: tuple[int, ...], vocab_size: int) -> None:
        self._tokenizer, self._ends = tokenizer, list(end_ids)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._library: tuple[Any, Any] | None = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def mask(self, extra: Mapping[str, Any], num_prompt: int) -> GrammarMask | None:
        """Return the mask of an answer for the settings in `extra`; None: every token is allowed.

        Raises:
            UnsupportedSetting: they cannot be compiled, or llguidance is missing.
        """
        grammar = grammar_in(extra)
        if grammar is None:
            return None
        if extra.get("min_tokens"):
            raise UnsupportedSetting(
                "min_tokens forbids the end that a finished answer of a constrained form needs. "
                "Leave one of them out."
            )
        name = next(name for name in CONSTRAINTS if is_form(name, extra.get(name)))
        if name == "structured_outputs":
            name = extra[name].get("_asked", name)
        return GrammarMask(self._matcher(grammar, name), num_prompt, self._vocab_size, self._ends)

    def _matcher(self, grammar: Mapping[str, Any], name: str) -> Any:
        own = grammar.get("lark_grammar", "")
        # One that `constrained` has put together is JSON already.
        text = own if own.startswith("{") else json.dumps({"grammars": [grammar]})
        with self._lock:
            made = self._compiled.get(text)
        if made is None:
            # Without the lock: compiling may take a second, and a step must not wait for it.
            made = self._made(text, name)
            with self._lock:
                self._compiled[text] = made
                if len(self._compiled) > _REMEMBERED:
                    self._compiled.popitem(last=False)
        return made.deep_copy()

    def _made(self, text: str, name: str) -> Any:
        library, tokenizer = self._loaded()
        try:
            made = library.LLMatcher(tokenizer, _as_lark(text), log_level=0)
            error = made.get_error() if made.is_error() else ""
        except ValueError as problem:
            error = str(problem)
        if error:
            raise UnsupportedSetting(
                f"{name} cannot be compiled, so the answer would not be held to it: "
                f"{_reason(error)}. Change it, or leave it out."
            )
        return made

    def _loaded(self) -> tuple[Any, Any]:
        """Return llguidance and its form of the tokenizer, which takes a second to make."""
        if self._library is None:
            core = getattr(self._tokenizer, "backend_tokenizer", None)
            if core is None or not self._ends:
                raise UnsupportedSetting(
                    "answers in a required form need a fast tokenizer of transformers and an end "
                    f"token; this engine has a {type(self._tokenizer).__name__} and the end "
                    f"tokens {self._ends}."
                )
            try:
                import llguidance
            except ImportError as error:
                raise UnsupportedSetting(
                    "answers in a required form (response_format, structured_outputs, a forced "
                    "tool_choice) need constrained decoding, and the package llguidance is not "
                    "installed. Run pip install 'rolltree[constrained]', or leave the field out."
                ) from error
            settings = {**json.loads(core.to_str()), "truncation": None, "padding": None}
            made = llguidance.LLTokenizer(json.dumps(settings), eos_token=self._ends)
            self._library = llguidance, made
        return self._library


def _reason(error: str) -> str:
    """Return an error of llguidance in one line.

    >>> _reason("regex parse error:\\n    (b\\n    ^\\nerror: unclosed group")
    'regex parse error: (b: unclosed group'
    """
    if "not present in a registry" in error:
        return "a $ref leads out of the schema, and nothing is fetched"
    # The lines between are the pattern or the grammar, with a mark below the place.
    first, *lines = error.strip().splitlines()
    for line in lines:
        if line.startswith("error: "):
            return f"{first} {lines[0].strip()}: {line.removeprefix('error: ')}"
    return first


def _as_lark(text: str) -> str:
    """Return a definition in which grammars of users, which may be GBNF, are Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    definition = json.loads(text)
    for part in definition["grammars"]:
        if "lark_grammar" in part and part.get("name") != "chat":
            part["lark_grammar"] = any_to_lark(part["lark_grammar"])
    return json.dumps(definition)


class GrammarMask(LogitsProcessor):  # type: ignore[misc]
    """Sets the logits of tokens that a grammar forbids to -inf, for one answer."""

    def __init__(self, matcher: Any, num_prompt: int, vocab_size: int, end_ids: list[int]) -> None:
        self._matcher, self._num_read = matcher, num_prompt
        self._vocab_size, self._ends = vocab_size, end_ids
        self.is_broken = False
        """Whether the grammar needed more work than allowed: the answer is cut there."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the masked logits; `input_ids` are the prompt and the answer so far."""
        matcher, new = self._matcher, input_ids[0, self._num_read :].tolist()
        self._num_read += len(new)
        if new:
            matcher.consume_tokens(new)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        # A model may have more logits than its tokenizer has tokens.
        allowed = np.zeros(self._vocab_size, bool)
        allowed[: len(known)] = known
        if matcher.is_error() or not known.any():
            logger.warning("an answer was cut: %s", matcher.get_error().partition("\n")[0])
            self.is_broken = True
            allowed[:] = False
            allowed[self._ends] = True
        forbidden = torch.from_numpy(~allowed).to(scores.device)
        return scores.masked_fill(forbidden, float("-inf"))
