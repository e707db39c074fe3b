"""Questions about a shop's stock, answered from a sqlite database that the model has to query.

    user       price of lamp?
    assistant  SELECT price FROM items WHERE name='lamp'
    user       7
    assistant  7

Every row has its own database, so no answer can be learned by heart. The database is in
memory, is created again for each query, and can only be read. A message that begins with SELECT
is a query: a tool call that a model of 0.8M parameters can spell.
"""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from typing import Any

import rolltree as rt

NAMES = ("bolt", "cup", "fan", "hat", "jar", "kite", "lamp", "map", "net", "oar", "pen", "rope")
COLUMNS = ("price", "stock", "weight")
NUM_STEPS = 100_000  # of sqlite's virtual machine; a longer query is stopped


def ask(seed: int, query: str) -> str:
    """Return the result of a query: its values, a line for each row, at most ten rows."""
    rng = random.Random(seed)
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE items (name TEXT, price INT, stock INT, weight INT)")
        rows = [(name, *(rng.randint(0, 9) for _ in COLUMNS)) for name in NAMES]
        database.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", rows)
        database.commit()
        database.execute("PRAGMA query_only = ON")
        database.set_progress_handler(lambda: 1, NUM_STEPS)
        try:
            found = database.execute(query).fetchmany(10)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return f"error: {error}"[:200]
    return "\n".join(" ".join(map(str, row)) for row in found) or "no rows"


def is_query(text: str) -> bool:
    return text.lstrip().upper().startswith("SELECT")


class SqlEnv(rt.MultiTurnEnv):
    async def env_response(self, messages: rt.Messages, state: rt.State) -> rt.Messages:
        query = messages[-1]["content"] or ""
        return [{"role": "user", "content": ask(state["info"]["seed"], query)}]

    @rt.stop
    async def answered(self, state: rt.State) -> bool:
        """The last message is not a query, so it is the answer."""
        return bool(state["trajectory"]) and not is_query(last(state))


def last(state: rt.State) -> str:
    return state["trajectory"][-1]["completion"][-1]["content"] or ""


@rt.run_inline
def right(state: rt.State) -> float:
    """1 if the last message is the wanted number."""
    return float(last(state).strip() == state["answer"])


@rt.run_inline
def asked(state: rt.State) -> float:
    """1 if the model asked the database."""
    return float(len(state["trajectory"]) > 1)


def row(seed: int) -> dict[str, Any]:
    rng = random.Random(f"question {seed}")
    name, column = rng.choice(NAMES), rng.choice(COLUMNS)
    return {
        "question": f"{column} of {name}?",
        "answer": ask(seed, f"SELECT {column} FROM items WHERE name='{name}'"),
        "info": {"seed": seed},
    }


def load_environment(num_train: int = 1000, num_eval: int = 200) -> rt.Environment:
    """Return the environment; databases of evaluation are not those of training."""
    rubric = rt.Rubric([right])
    rubric.add_metric(asked)
    return SqlEnv(
        dataset=[row(seed) for seed in range(10_000, 10_000 + num_train)],
        eval_dataset=[row(seed) for seed in range(num_eval)],
        rubric=rubric,
        max_turns=3,
    )


def teacher(seed: int) -> Any:
    """Return a player for the warm-up who often asks for the wrong column or name."""
    rng = random.Random(seed)

    def play(messages: rt.Messages) -> str:
        if len(messages) > 1:
            return messages[-1]["content"]
        column, name = messages[0]["content"].rstrip("?").split(" of ")
        if rng.random() < 0.6:
            column = rng.choice(COLUMNS)
        if rng.random() < 0.5:
            name = rng.choice(NAMES)
        return f"SELECT {column} FROM items WHERE name='{name}'"

    return play


WARM_UP = {"num_games": 1000, "num_steps": 300, "batch_size": 32, "lr": 2e-3}
