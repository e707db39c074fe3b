"""Tool calls: add up a shopping list in a shop whose prices only a tool knows.

Every row has its own shop, so prices cannot be memorized and must be looked up. The rows are
generated from a seed and are not a benchmark.
"""

from __future__ import annotations

import random
from typing import Any

import rolltree as rt

ITEMS = ("bolt", "brush", "clock", "cup", "flute", "globe", "hammer", "kite", "lamp", "rope")
SYSTEM = "Look up prices with the tools, then answer with the total: <answer>\n...\n</answer>"


def price(item: str, shop: dict[str, int]) -> int:
    """Look up what one piece of an item costs, in cents.

    Args:
        item: The item's name, in the singular.
    """
    if item not in shop:
        raise KeyError(f"the shop has no {item!r}; it has {', '.join(sorted(shop))}")
    return shop[item]


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


class ShopEnv(rt.StatefulToolEnv):
    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: rt.Messages, state: rt.State
    ) -> dict[str, Any]:
        return {**tool_args, "shop": state["info"]["shop"]} if tool_name == "price" else tool_args


def make_rows(num: int, num_items: int, seed: int) -> list[dict[str, Any]]:
    """Return lists of `num_items` items, each with a shop."""
    rng, rows = random.Random(seed), []
    for number in range(num):
        shop = {item: rng.randrange(5, 500) for item in ITEMS}
        wanted = {item: rng.randrange(1, 10) for item in rng.sample(ITEMS, num_items)}
        listed = ", ".join(f"{count} x {item}" for item, count in wanted.items())
        question = f"Order {number + 1}: {listed}. What is the total in cents?"
        total = sum(count * shop[item] for item, count in wanted.items())
        rows.append({"question": question, "answer": str(total), "info": {"shop": shop}})
    return rows


@rt.run_inline
def correct(parser: rt.Parser, completion: rt.Messages, answer: str) -> float:
    return float((parser.parse_answer(completion) or "").replace(",", "").strip() == answer)


def load_environment(
    num_train: int = 500, num_eval: int = 100, num_items: int = 2, max_turns: int = 8, seed: int = 0
) -> rt.Environment:
    """Return the environment; the reward is 1 for the right total, tool calls are metrics."""
    rows = make_rows(num_train + num_eval, num_items, seed)
    parser = rt.XMLParser(["answer"])
    env = ShopEnv(
        tools=[multiply],
        dataset=rows[:num_train] or None,
        eval_dataset=rows[num_train:] or None,
        system_prompt=SYSTEM,
        parser=parser,
        rubric=rt.ToolRubric(funcs=[correct], parser=parser, tools=[price, multiply]),
        max_turns=max_turns,
    )
    env.add_tool(price, args_to_skip=["shop"])
    return env
