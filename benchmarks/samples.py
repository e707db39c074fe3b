"""Cost of recording a rollout and building its samples, by turns, pattern and scope.

    python benchmarks/samples.py            the tables, figures on the last line
    python benchmarks/samples.py --check    exit 1 when a bar is missed
    python benchmarks/samples.py --json     one JSON object instead of tables

Each turn brings 400 new prompt tokens and 300 sampled ones. A break drops the first 200 tokens of
the last completion from history, as a template does that strips reasoning. Raw tokens are what all
prompts and completions add up to. Times are CPU time, best of several runs, on one thread.
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from verdict import Bar, conclude, make_parser

from rolltree.samples import build_samples
from rolltree.tokens import StepTokens, TokenTree, Trajectory
from rolltree.values.types import FinishReason, ModelResponse

NEW_TOKENS, SAMPLED_TOKENS, REASONING_TOKENS = 400, 300, 200
TURNS = (8, 32, 128)
SCOPES = ("step", "turn", "interleave", "tree")
PATTERNS: dict[str, Callable[[int], bool]] = {
    "prefix holds": lambda turn: False,
    "breaks 10 %": lambda turn: turn % 10 == 9,
    "breaks 50 %": lambda turn: turn % 2 == 1,
    "every turn breaks": lambda turn: True,
    "8 agents round robin": lambda turn: False,
}


@dataclass(frozen=True)
class RecordedCall:
    """One call as an engine reports it: fresh arrays. `parent` is set if the prefix holds."""

    prompt: NDArray[np.int32]
    completion: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    agent: str
    parent: int | None


def make_calls(turns: int, pattern: str, seed: int = 0) -> list[RecordedCall]:
    rng = np.random.default_rng(seed)
    num_agents = 8 if pattern.startswith("8 agents") else 1
    history = [np.empty(0, np.int32) for _ in range(num_agents)]
    calls: list[RecordedCall] = []
    for turn in range(turns):
        agent = turn % num_agents
        new = rng.integers(0, 150_000, NEW_TOKENS, dtype=np.int32)
        sampled = rng.integers(0, 150_000, SAMPLED_TOKENS, dtype=np.int32)
        logprobs = -rng.random(SAMPLED_TOKENS, dtype=np.float32)
        breaks = PATTERNS[pattern](turn)
        parent = None if turn < num_agents or breaks else turn - num_agents
        kept = history[agent]
        if breaks and turn:
            end = len(kept) - SAMPLED_TOKENS
            kept = np.concatenate([kept[:end], kept[end + REASONING_TOKENS :]])
        prompt = np.concatenate([kept, new])
        history[agent] = np.concatenate([prompt, sampled])
        calls.append(RecordedCall(prompt, sampled, logprobs, f"agent {agent}", parent))
    return calls


def insert_arrays(calls: list[RecordedCall]) -> TokenTree:
    """Record every call from its full prompt array, matching it by id."""
    tree = TokenTree()
    for call in calls:
        tree.insert(call.prompt, call.completion, logprobs=call.logprobs, agent=call.agent)
    return tree


def insert_token_in(calls: list[RecordedCall]) -> TokenTree:
    """Record every call from its parent and what is new, as a token-in client does."""
    tree = TokenTree()
    for call in calls:
        if call.parent is None:
            tree.insert(call.prompt, call.completion, logprobs=call.logprobs, agent=call.agent)
        else:
            new = call.prompt[tree.path_len(call.parent) :]
            tree.insert_suffix(
                call.parent, new, call.completion, logprobs=call.logprobs, agent=call.agent
            )
    return tree


def steps_of(tree: TokenTree) -> list[Any]:
    return [
        {
            "tokens": StepTokens(tree, call),
            "advantage": 1.0,
            "extras": {"turn": call // 4, "agent": tree.agent(call)},
        }
        for call in range(tree.num_calls)
    ]


def best_s(work: Callable[[], Any], at_least_s: float = 0.15) -> float:
    """Return the smallest CPU time of repeated runs."""
    work()
    gc.collect()
    best, spent = float("inf"), 0.0
    while spent < at_least_s:
        start = time.process_time()
        work()
        took = time.process_time() - start
        best, spent = min(best, took), spent + max(took, 1e-6)
    return best


def growth(turns: int = 128, parts: int = 4, rounds: int = 9) -> float:
    """Return the cost of one rollout over that of `parts` rollouts of as many calls together.

    Both record and build the same number of tokens in the same memory, so no cache decides. Linear
    cost gives 1, quadratic `parts`. The median of runs that alternate.
    """
    whole = [make_calls(turns, "prefix holds")]
    short = [make_calls(turns // parts, "prefix holds", seed) for seed in range(parts)]

    def cost_s(rollouts: list[list[RecordedCall]]) -> float:
        start = time.process_time()
        trees = [insert_token_in(calls) for calls in rollouts]
        build_samples([steps_of(tree) for tree in trees], "interleave")
        return time.process_time() - start

    gc.collect()
    pairs = [(cost_s(whole), cost_s(short)) for _ in range(rounds)]
    return float(np.median([one / other for one, other in pairs]))


def peak_bytes(work: Callable[[], Any]) -> int:
    """Return the most memory that `work` held at once, its result included."""
    gc.collect()
    tracemalloc.start()
    result = work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del result
    return peak


def num_unique_tokens(calls: list[RecordedCall]) -> int:
    """Count distinct prefixes without a tree: 64-bit rolling hashes of all of them."""
    paths = [np.concatenate([call.prompt, call.completion]) for call in calls]
    weights = np.random.default_rng(1).integers(1, 2**63, max(map(len, paths)), dtype=np.uint64)
    weights |= np.uint64(1)
    hashes = [np.cumsum((path.astype(np.uint64) + 1) * weights[: len(path)]) for path in paths]
    return len(np.unique(np.concatenate(hashes)))


def trajectory_bytes(calls: list[RecordedCall]) -> int:
    """Return what a `Trajectory` of these calls holds: tree, steps and message lists."""
    generations = [
        ModelResponse(
            message={"role": "assistant", "content": ""},
            text="",
            finish_reason=FinishReason.STOP,
            prompt_ids=call.prompt,
            completion_ids=call.completion,
            logprobs=call.logprobs,
            versions=np.zeros(len(call.completion), np.int32),
            temperature=1.0,
            call_id=index,
            extends=call.parent,
        )
        for index, call in enumerate(calls)
    ]
    messages = [{"role": "user", "content": str(index)} for index in range(2 * len(calls))]
    gc.collect()
    tracemalloc.start()
    trajectory = Trajectory()
    for index, response in enumerate(generations):
        trajectory.append_call(
            prompt=messages[: 2 * index + 1],
            completion=messages[2 * index + 1 : 2 * index + 2],
            response=response,
        )
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


def measure(turns: int, pattern: str) -> list[dict[str, Any]]:
    calls = make_calls(turns, pattern)
    raw = sum(len(call.prompt) + len(call.completion) for call in calls)
    insert_s = best_s(lambda: insert_arrays(calls))
    token_in_s = best_s(lambda: insert_token_in(calls))
    tree = insert_arrays(calls)
    steps = steps_of(tree)
    rows = []
    for scope in SCOPES:

        def build(scope: Any = scope) -> Any:
            return build_samples([steps], scope)

        batch = build()
        build_time_s = best_s(build)
        rows.append(
            {
                "turns": turns,
                "pattern": pattern,
                "scope": scope,
                "raw_tokens": raw,
                "unique_tokens": tree.num_tokens,
                "tree_bytes": tree.nbytes,
                "insert_s": insert_s,
                "token_in_s": token_in_s,
                "build_s": build_time_s,
                "raw_tokens_per_s": raw / (insert_s + build_time_s),
                "peak_bytes": peak_bytes(build),
                "samples": len(batch.samples),
                "breaks": len(batch.breaks),
                "tokens": int(batch.report["num_tokens"]),
                "trained": int(batch.report["num_trained_tokens"]),
            }
        )
    return rows


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """Return everything that is promised."""
    by = {(row["turns"], row["pattern"], row["scope"]): row for row in rows}
    holds = by[128, "prefix holds", "interleave"]
    broken = by[128, "every turn breaks", "interleave"]
    excess = max(
        abs(row["tokens"] / num_unique_tokens(make_calls(row["turns"], row["pattern"])) - 1)
        for row in rows
        if row["scope"] == "tree"
    )
    resident = trajectory_bytes(make_calls(128, "prefix holds"))
    worst = 1e3 * (broken["insert_s"] + broken["build_s"])
    speed = holds["raw_tokens_per_s"] / 1e6
    return [
        Bar.at_least("raw Mtokens/s, arrays, prefix holds, insert + interleave, T=128", speed, 500),
        Bar.at_most("times the CPU of 4 rollouts of T=32, token-in + build, T=128", growth(), 1.5),
        Bar.below("resident MB of a 128-turn trajectory", resident / 1e6, 2),
        Bar.at_most("tree tokens over unique tokens, worst case, %", 100 * excess, 1),
        Bar.below("ms, every turn breaks, insert + build, T=128", worst, 50),
    ]


def stripped_table() -> list[dict[str, Any]]:
    """Tokens computed per scope for a conversation whose reasoning is stripped every turn."""
    table = []
    for turns in (4, 8, 16, 32, 64):
        steps = steps_of(insert_arrays(make_calls(turns, "every turn breaks")))
        row: dict[str, Any] = {"turns": turns}
        for scope in SCOPES:
            row[scope] = int(build_samples([steps], scope).report["num_tokens"])  # type: ignore[arg-type]
        table.append(row)
    return table


def print_tables(rows: list[dict[str, Any]], stripped: list[dict[str, Any]]) -> None:
    print(
        f"{'turns':>5} {'pattern':22} {'scope':10} {'raw tokens':>10} {'insert ms':>9} "
        f"{'token-in':>8} {'build ms':>8} {'Mtok/s':>7} {'peak MB':>7} {'samples':>7} "
        f"{'tokens':>9} {'trained':>7}"
    )
    for row in rows:
        print(
            f"{row['turns']:5} {row['pattern']:22} {row['scope']:10} {row['raw_tokens']:10,} "
            f"{1e3 * row['insert_s']:9.2f} {1e3 * row['token_in_s']:8.2f} "
            f"{1e3 * row['build_s']:8.2f} {row['raw_tokens_per_s'] / 1e6:7.0f} "
            f"{row['peak_bytes'] / 1e6:7.2f} {row['samples']:7} {row['tokens']:9,} "
            f"{row['trained']:7,}"
        )
    print("\nreasoning stripped every turn: tokens computed per scope")
    print(f"{'turns':>5} " + " ".join(f"{scope:>12}" for scope in SCOPES))
    for line in stripped:
        print(f"{line['turns']:5} " + " ".join(f"{line[scope]:12,}" for scope in SCOPES))


def main() -> int:
    options = make_parser(__doc__).parse_args()
    rows = [row for turns in TURNS for name in PATTERNS for row in measure(turns, name)]
    stripped = stripped_table()
    results = {"rows": rows, "stripped": stripped}
    return conclude(options, bars(rows), results, lambda: print_tables(rows, stripped))


if __name__ == "__main__":
    sys.exit(main())
