"""The conversation of `http.py` and `rollouts.py`: an environment, its rows, a server's answers.

It needs the standard library only: the environment is written once for rolltree and verifiers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

NUM_VARIANTS = 8
"""How many conversations there are; the first message names its own ("task-3")."""


def words(rng: random.Random, num: int) -> str:
    """Return text of about `num` tokens."""
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=3)) for _ in range(num))


def make_environment(library: Any, num_turns: int, said: str, own_text: bool = False) -> Any:
    """Return an environment of `library` that says `said` after every answer.

    With `own_text` every message is a separate string in memory.
    """

    class Talk(library.MultiTurnEnv):  # type: ignore[misc, name-defined]
        """Says the same after every answer."""

        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [{"role": "user", "content": f"{said} ." if own_text else said}]

    async def length(completion: Any) -> float:
        return float(len(completion))

    rows: Any = [{"question": "task-0", "answer": ""}]
    if library.__name__ == "verifiers":
        from datasets import Dataset

        rows = Dataset.from_list(rows)
    return Talk(dataset=rows, rubric=library.Rubric(funcs=[length]), max_turns=num_turns)


def make_rows(num: int, num_ids: int) -> list[dict[str, Any]]:
    """Return inputs of `generate` whose first message has about `num_ids` tokens."""
    asked = words(random.Random(7), num_ids)
    return [
        {
            "prompt": [{"role": "user", "content": f"task-{i % NUM_VARIANTS} number {i} {asked}"}],
            "answer": "",
            "example_id": i,
            "task": "talk",
        }
        for i in range(num)
    ]


def make_answers(
    number: int,
    num_turns: int,
    *,
    first_ids: int,
    new_ids: int,
    sampled_ids: int,
    token_bytes: Callable[[str], list[int]],
) -> list[bytes]:
    """Return the answers of variant `number` as vLLM's JSON, without their first field, the id.

    The prompt has `first_ids` ids and grows by `sampled_ids` and `new_ids` in every turn.
    """
    rng = random.Random(number)
    prompt = [rng.randrange(300, 150_000) for _ in range(first_ids)]
    answers = []
    for _ in range(num_turns):
        sampled = [rng.randrange(300, 150_000) for _ in range(sampled_ids)]
        names = [f"token_id:{id}" for id in sampled]
        logprobs = [
            {"token": t, "logprob": -rng.random(), "bytes": token_bytes(t), "top_logprobs": []}
            for t in names
        ]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": words(rng, sampled_ids)},
            "logprobs": {"content": logprobs},
            "finish_reason": "stop",
            "token_ids": sampled,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sampled_ids}
        answer = {
            "object": "chat.completion",
            "created": 1,
            "model": "scripted",
            "choices": [choice],
            "prompt_token_ids": prompt,
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }
        answers.append(json.dumps(answer, separators=(",", ":")).encode()[1:])
        prompt = prompt + sampled + [rng.randrange(300, 150_000) for _ in range(new_ids)]
    return answers
