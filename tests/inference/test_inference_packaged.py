"""Prompts by the real package `renderers`, behind the interface of ChatRenderer."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
from inference_templates import TOOLS, user

from rolltree.errors import ConfigError
from rolltree.inference import ChatRenderer, Sampled, TokenSession
from rolltree.inference.packaged import PackagedRenderer
from rolltree.models.tiny import byte_tokenizer
from rolltree.types import FinishReason

pytest.importorskip("renderers")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def packaged(tokenizer: Any) -> PackagedRenderer:
    return PackagedRenderer(tokenizer, "qwen3")


def test_without_tools_it_writes_what_the_models_own_template_writes(
    tokenizer: Any, packaged: PackagedRenderer
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("7 + 5 =")]
    assert packaged.render(messages).tolist() == ChatRenderer(tokenizer).render(messages).tolist()
    closed = packaged.render(messages, add_generation_prompt=False).tolist()
    assert packaged.render(messages).tolist()[: len(closed)] == closed


def test_tools_are_the_packages_business(packaged: PackagedRenderer) -> None:
    text = packaged.decode(packaged.render([user("2 and 3?")], TOOLS))
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert '"name": "add"' in text


@pytest.mark.parametrize("cut", [frozenset(), frozenset({1, 2})], ids=["whole", "cut"])
def test_a_conversation_extends_turn_by_turn(packaged: PackagedRenderer, cut: set[int]) -> None:
    """As sampled, byte by byte; answers that were cut short are closed as context."""
    session = TokenSession(packaged)
    messages: list[dict[str, Any]] = [user("Count.")]
    calls: list[Any] = []
    for turn in range(6):
        prompt = session.prepare(messages, TOOLS)
        ended = [] if turn in cut else [packaged.end_ids[0]]
        reason = FinishReason.LENGTH if turn in cut else FinishReason.STOP
        sampled = Sampled([*f"It is {turn}".encode(), *ended], None, reason)
        calls.append(session.complete(prompt, sampled, temperature=1.0))
        messages += [calls[-1].message, user(f"And {turn}?")]
    for before, after in itertools.pairwise(calls):
        known = [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]
        assert after.prompt_ids[: len(known)].tolist() == known
        assert after.extends == before.call_id
    assert packaged.decode(calls[-1].prompt_ids).count("<|im_start|>user") == 6


def test_what_the_package_cannot_bridge_goes_through_the_glue(tokenizer: Any) -> None:
    class Unable:
        def __init__(self, bridged: Any) -> None:
            self.bridged = bridged

        def get_stop_token_ids(self) -> list[int]:
            return [258]

        def bridge_to_next_turn(self, *args: Any, **options: Any) -> Any:
            return self.bridged

    class Wrong:
        token_ids = (1, 2, 3)

    plain = ChatRenderer(tokenizer)
    asked = [user("7 + 5 ="), {"role": "assistant", "content": "12"}, user("and 6?")]
    previous = np.array([*plain.render(asked[:1]), *b"12", 258], np.int32)
    expected = plain.continuation(previous, asked, 2).suffix
    for bridged in (None, Wrong()):
        found = PackagedRenderer(tokenizer, Unable(bridged)).continuation(previous, asked, 2)
        np.testing.assert_array_equal(found.suffix, expected)


def test_families_and_packages_that_are_not_there(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="'qwen4'"):
        PackagedRenderer(tokenizer, "qwen4")
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ConfigError, match=r"rolltree\[renderers\]"):
        PackagedRenderer(tokenizer, "qwen3")
