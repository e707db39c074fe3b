"""Tiny models that were taught what to say, and servers that serve them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serve_kit
from serve_kit import ADD, Served

from chat_templates import extended
from rolltree.inference.chat import ChatRenderer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ASKED = [{"role": "user", "content": "2 and 3?"}]


def lessons(
    renderer: ChatRenderer, answers: dict[str, str], *, with_tools: bool
) -> list[tuple[list[int], list[bool]]]:
    """Return ids and which of them to learn: plain questions, and a tool call and its answer."""
    found = []
    for question, answer in answers.items():
        prompt = renderer.render([{"role": "user", "content": question}]).tolist()
        found.append(([*prompt, *answer.encode(), 258], [False] * len(prompt)))
    if with_tools:
        call = [*renderer.encode_text(CALL).tolist(), 258]
        first = renderer.render(ASKED, [ADD]).tolist()
        message = renderer.parse(call, tools=[ADD]).message
        tool = {"role": "tool", "content": "5", "tool_call_id": message["tool_calls"][0]["id"]}
        history = [*ASKED, message, tool]
        whole = extended(renderer, np.array(first + call, np.int32), history, 2, [ADD]).tolist()
        learned = [False] * len(first) + [True] * len(call)
        learned += [False] * (len(whole) - len(learned))
        found.append(([*whole, *b"It is 5.", 258], learned))
    return [(ids, learned + [True] * (len(ids) - len(learned))) for ids, learned in found]


def teach(folder: Path, answers: dict[str, str], *, with_tools: bool) -> None:
    """Write a tiny model into `folder` that answers as it was taught."""
    import torch

    from rolltree.inference.models import load_model

    torch.set_num_threads(1)
    model, tokenizer = load_model("tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rows = lessons(ChatRenderer(tokenizer), answers, with_tools=with_tools)
    for _ in range(250):
        worst = 0.0
        for ids, learned in rows:
            tokens, chosen = torch.tensor([ids]), torch.tensor(learned)
            logits = model(input_ids=tokens).logits[0, :-1][chosen[1:]]
            losses = torch.nn.functional.cross_entropy(
                logits, tokens[0, 1:][chosen[1:]], reduction="none"
            )
            losses.mean().backward()
            worst = max(worst, losses.max().item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if worst < 0.1:  # every token is the likeliest by far
            break
    assert worst < 0.5, "the tiny model did not learn its lessons"
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
    teach(folder, {"7 + 5 =": "13", "capital?": "Rome", "count": "nine"}, with_tools=False)
    return folder


@pytest.fixture(scope="module")
def served(taught: Path) -> Iterator[Served]:
    server = serve_kit.start(str(taught), name="taught")
    yield server
    serve_kit.stop(server)


@pytest.fixture(scope="module")
def reference(taught: Path) -> Any:
    """The same weights in this process, for teacher forcing."""
    from rolltree.inference.models import load_model

    return load_model(str(taught))
