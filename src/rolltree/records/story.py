"""The story of a stored run, which the narrator tells."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from rolltree.narrator.detectors import story
from rolltree.narrator.facts import read_facts
from rolltree.store import Run
from rolltree.tokens.breaks import Decoder
from rolltree.values.types import State


def run_story(run: Run, *, quick: bool = False, idle_gpu: bool = False) -> dict[str, Any]:
    """Return `{"sentences": [...]}` of a stored run, the most alarming first.

    With `quick`, the story of a long run is made from a sample, as its last sentence says.
    `idle_gpu`: the machine has a GPU, and the model was on the CPU.
    """

    @cache
    def decode() -> Decoder | None:
        from rolltree.records.tokenizer import shown_tokenizer

        tokenizer = shown_tokenizer(run)
        return None if tokenizer is None else tokenizer.decode

    def breaks(state: State) -> list[dict[str, Any]]:
        from rolltree.records.token_rows import break_rows  # it loads numpy

        # With a decoder, so that the causes of breaks are those that the page names.
        return break_rows(state, decode())

    facts = read_facts(run, quick=quick, breaks=breaks)
    return {"sentences": story(replace(facts, idle_gpu=idle_gpu))}
