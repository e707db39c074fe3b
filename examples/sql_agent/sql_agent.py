"""Questions about a shop's stock, answered from a sqlite database that the model has to ask.

    user       price of lamp?
    assistant  <tool_call>{"name": "sql", "arguments": {"query": "SELECT price FROM items WHERE
               name='lamp'"}}</tool_call>
    tool       47
    assistant  47

Every row has a database of its own, so no answer can be learned by heart. The database is in
memory, is made anew for each query, and only reading is allowed.
"""

from __future__ import annotations

import random
import sqlite3
from typing import Any

import rolltree as rt

NAMES = ("bolt", "cup", "fan", "hat", "jar", "kite", "lamp", "map", "net", "oar", "pen", "rope")
COLUMNS = ("price", "stock", "weight")
NUM_STEPS = 100_000  # of sqlite's machine: a query that does more is stopped


def ask(seed: int, query: str) -> str:
    """Return what a query answers: its values, a line for each row, at most ten."""
    rng = random.Random(seed)
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE items (name TEXT, price INT, stock INT, weight INT)")
        rows = [(name, *(rng.randint(10, 99) for _ in COLUMNS)) for name in NAMES]
        database.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", rows)
        database.commit()
        database.execute("PRAGMA query_only = ON")
        database.set_progress_handler(lambda: 1, NUM_STEPS)
        try:
            found = database.execute(query).fetchmany(10)
        except (sqlite3.Error, sqlite3.Warning) as error:
            return f"error: {error}"
    database.close()
    return "\n".join(" ".join(map(str, row)) for row in found) or "no rows"


def sql(query: str, seed: int) -> str:
    """Ask the table items (name, price, stock, weight).

    Args:
        query: SQL.
    """
    return ask(seed, query)


class SqlEnv(rt.StatefulToolEnv):
    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: rt.Messages, state: rt.State
    ) -> dict[str, Any]:
        return {**tool_args, "seed": state["info"]["seed"]}


@rt.run_inline
def right(completion: rt.Messages, answer: str) -> float:
    """1 if the last message is the wanted number."""
    said = completion[-1]
    return float(said["role"] == "assistant" and (said["content"] or "").strip() == answer)


@rt.run_inline
def asked(state: rt.State) -> float:
    """1 if the model asked the database."""
    return float(len(state["trajectory"]) > 1)


def row(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    name, column = rng.choice(NAMES), rng.choice(COLUMNS)
    return {
        "question": f"{column} of {name}?",
        "answer": ask(seed, f"SELECT {column} FROM items WHERE name='{name}'"),
        "info": {"seed": seed, "name": name, "column": column},
    }


def load_environment(num_train: int = 1000, num_eval: int = 100) -> rt.Environment:
    """Return the environment; databases of evaluation are not those of training."""
    rubric = rt.Rubric([right])
    rubric.add_metric(asked)
    env = SqlEnv(
        dataset=[row(seed) for seed in range(10_000, 10_000 + num_train)],
        eval_dataset=[row(seed) for seed in range(num_eval)],
        rubric=rubric,
        max_turns=3,
    )
    env.add_tool(sql, args_to_skip=["seed"])
    return env


def teacher(seed: int) -> Any:
    """Return a player for the warm-up who often asks for the wrong column or name."""
    rng = random.Random(seed)

    def play(messages: rt.Messages) -> Any:
        last = messages[-1]
        if last["role"] == "tool":
            return last["content"]
        column, name = last["content"].rstrip("?").split(" of ")
        if rng.random() < 0.6:
            column = rng.choice(COLUMNS)
        if rng.random() < 0.5:
            name = rng.choice(NAMES)
        query = f"SELECT {column} FROM items WHERE name='{name}'"
        return '<tool_call>\n{"name": "sql", "arguments": {"query": "' + query + '"}}\n</tool_call>'

    return play


WARM_UP = {"num_games": 1000, "num_steps": 200, "batch_size": 32, "lr": 2e-3}
