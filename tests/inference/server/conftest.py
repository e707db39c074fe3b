"""Tiny models that were taught what to say, and servers that serve them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serve_kit
from serve_kit import ADD, Served

from rolltree.inference.chat import ChatRenderer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ASKED = [{"role": "user", "content": "2 and 3?"}]


def lessons(
    renderer: ChatRenderer, answers: dict[str, str], *, with_tools: bool
) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer) ids: plain questions, and one tool call with what comes after it."""
    found = []
    for question, answer in answers.items():
        prompt = renderer.render([{"role": "user", "content": question}])
        found.append((prompt.tolist(), [*answer.encode(), 258]))
    if not with_tools:
        return found
    call = renderer.encode_text(CALL).tolist()
    first = renderer.render(ASKED, [ADD]).tolist()
    found.append((first, [*call, 258]))
    message = renderer.parse([*call, 258], tools=[ADD]).message
    tool = {"role": "tool", "content": "5", "tool_call_id": message["tool_calls"][0]["id"]}
    whole = renderer.extend(
        np.array([*first, *call, 258], np.int32), [*ASKED, message, tool], 2, [ADD]
    )
    found.append((whole.tolist(), [*b"It is 5.", 258]))
    return found


def teach(folder: Path, answers: dict[str, str], *, with_tools: bool) -> None:
    """Write a tiny model into `folder` that answers as it was taught."""
    import torch

    from rolltree.models import load_model

    torch.set_num_threads(1)
    model, tokenizer = load_model("tiny")
    pairs = lessons(ChatRenderer(tokenizer), answers, with_tools=with_tools)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(150):
        losses = []
        for prompt, answer in pairs:
            ids = torch.tensor([prompt + answer])
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :]))
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if max(value.item() for value in losses) < 0.05:
            break
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taught")
    teach(
        folder,
        {"7 + 5 =": "12", "capital?": "Paris, Paris", "count": "one two three four"},
        with_tools=True,
    )
    return folder


@pytest.fixture(scope="session")
def taught_otherwise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("otherwise")
    teach(folder, {"7 + 5 =": "thirteen", "capital?": "Rome", "count": "nine"}, with_tools=False)
    return folder


@pytest.fixture(scope="module")
def served(taught: Path) -> Iterator[Served]:
    server = serve_kit.start(str(taught), name="taught")
    yield server
    serve_kit.stop(server)


@pytest.fixture(scope="module")
def reference(taught: Path) -> Any:
    """The same weights in this process, for teacher forcing."""
    from rolltree.models import load_model

    return load_model(str(taught))
