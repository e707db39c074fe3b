"""Plays an environment with scripted answers and writes the results; compares two such plays.

    python -m rolltree.compat.replay ENV OUT.json '{"env": "args"}'

Each play has its own process, because a process can load an environment's modules only once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rolltree.compat.migrate import Migration
from rolltree.environments import Environment, load_environment
from rolltree.environments.check_probes import Probe, Style, styles_of
from rolltree.errors import ConfigError
from rolltree.types import ModelResponse

# Each row is played with about a dozen answers.
NUM_ROWS = 4
TIME_LIMIT_S = 600
NEW_METRICS = {
    "format_reward_func": "format_reward",
    "correct_answer_reward_func": "correct_answer",
    "check_answer_reward_func": "task_score",
}
"""Metrics of rolltree's own classes have other names than verifiers'."""
_COMPARED = ("prompt", "completion", "reward", "error", "tokens")
_LEFT_OUT = (".*", "outputs", "runs", "__pycache__")
_CONSTANTS = ("", "yes", "I do not know.", "42")


class TokenProbe(Probe):
    """A probe whose answers have one token per byte; with `calls`, it calls the first tool once."""

    calls = False
    tools: Sequence[Any] = ()

    async def chat(self, messages: Any, **settings: Any) -> ModelResponse:
        """Return the reply, with tokens."""
        answer = await super().chat(messages, **settings)
        tools, said = settings.get("tools"), isinstance(messages, list) and messages[-1]["role"]
        if self.calls and tools and said != "tool":
            answer.message["tool_calls"] = [_call(tools[0]["function"])]
        self.tools = tools or ()
        prompt = json.dumps(messages, sort_keys=True, default=str)
        # Tokens are derived from the text: equal messages have equal tokens.
        ids = np.frombuffer(json.dumps(answer.message).encode(), np.uint8).astype(np.int32)
        return replace(
            answer,
            prompt_ids=np.frombuffer(prompt.encode(), np.uint8).astype(np.int32),
            completion_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
        )


def _call(function: dict[str, Any]) -> dict[str, Any]:
    samples = {"integer": 3, "number": 1.5, "boolean": True, "array": [], "object": {}}
    properties = (function.get("parameters") or {}).get("properties") or {}
    given = {key: samples.get(shape.get("type"), "a b") for key, shape in properties.items()}
    written = {"name": function["name"], "arguments": json.dumps(given)}
    return {"id": "call-1", "type": "function", "function": written}


async def play(env: Environment) -> list[dict[str, Any]]:
    """Play the first rows with every answer, and return a summary of each rollout."""
    rows = [
        {"example_id": index, **row} for index, row in enumerate(env.get_eval_dataset(NUM_ROWS))
    ]
    played = []
    for name, probe, row in _plays(env, rows):
        # Environments draw from the global generator, and both plays must draw the same.
        random.seed(1)
        # Not `env.generate`: that of an old environment raises if all rollouts have failed.
        results = await Environment.generate(env, [row], probe, seed=1)
        about = {"answer": name, "example_id": row["example_id"], "tools": probe.tools}
        played.append(about | _summary(results.state[0]))
    return played


def _plays(env: Environment, rows: list[Any]) -> Iterator[tuple[str, TokenProbe, Any]]:
    styles: dict[str, Style] = styles_of(env.parser)
    for row in rows:
        reference = str(row.get("answer") or "").strip()
        answers = {f"always {text!r}": text for text in _CONSTANTS}
        answers |= {f"reference, {name}": style(reference) for name, style in styles.items()}
        for name, text in answers.items():
            yield name, TokenProbe(text), row
        caller = TokenProbe(reference)
        caller.calls = True
        yield "a tool call, then the reference", caller, row


def _summary(state: Any) -> dict[str, Any]:
    plain = json.loads(
        json.dumps(
            {key: state.get(key) for key in ("prompt", "completion", "metrics")}, default=str
        )
    )
    error = state.get("error")
    return {
        **plain,
        "reward": state["reward"],
        "error": getattr(error, "type", None) if error is not None else None,
        "tokens": [
            [len(step["tokens"]["prompt_ids"]), len(step["tokens"]["completion_ids"])]
            for step in state["trajectory"]
            if step["tokens"]
        ],
    }


def check_migration(
    path: Path, migration: Migration, args: dict[str, Any], **options: Any
) -> Comparison:
    """Play copies of an environment before and after its migration; `options` are `compare`'s."""
    with tempfile.TemporaryDirectory(prefix="rolltree-migrate-") as scratch:
        copies = []
        for name in ("old", "new"):
            copy = _beside_its_siblings(path.resolve(), Path(scratch, name))
            if path.is_dir():
                shutil.copytree(path, copy, ignore=shutil.ignore_patterns(*_LEFT_OUT))
            else:
                shutil.copy(path, copy)
            copies.append(copy)
        old, new = copies
        migration.write(new if path.is_dir() else new.parent)
        return compare(old, new, Path(scratch), args, **options)


def _beside_its_siblings(path: Path, scratch: Path) -> Path:
    """Return the place for a copy of `path`, with links to what is next to it and to its parent.

    Environments import from there, by way of `__file__`. The linked files are not edited.
    """
    folder = scratch / path.parent.name
    folder.mkdir(parents=True)
    for left_out, target in ((path.parent, scratch), (path, folder)):
        with suppress(PermissionError):
            for sibling in left_out.parent.iterdir() if left_out.name else ():
                if sibling != left_out and not sibling.name.startswith("."):
                    (target / sibling.name).symlink_to(sibling)
    return folder / path.name


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many rollouts were compared, the fields in which they differ, and expected differences.

    `notes` are the latter: new names of metrics, new metrics, and other descriptions of tools.
    """

    num_rollouts: int
    differences: tuple[str, ...]
    notes: tuple[str, ...]


def compare(
    old: Path,
    new: Path,
    folder: Path,
    args: dict[str, Any],
    *,
    command: Sequence[str] = (sys.executable, "-m", "rolltree.compat.replay"),
) -> Comparison:
    """Play two environments and compare their rollouts. The results are written into `folder`.

    Raises:
        ConfigError: one of them could not be played; the message has its error.
    """
    plays = []
    for name, env in (("old", old), ("new", new)):
        out = folder / f"{name}.json"
        words = [*command, str(env), str(out), json.dumps(args)]
        # Sets of strings would have a different order in each process.
        env_vars = {**os.environ, "PYTHONHASHSEED": "0"}
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=TIME_LIMIT_S, env=env_vars
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"the {name} environment could not be played: {NUM_ROWS} rows took more than "
                f"{TIME_LIMIT_S:g} s. Does it wait for a server? --no-check leaves the play out."
            ) from None
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise ConfigError(f"the {name} environment could not be played: {lines[-1]}")
        plays.append(json.loads(out.read_text(encoding="utf-8")))
    before, after = plays
    found, notes = [], dict[str, None]()
    if len(before) != len(after):
        found.append(f"{len(before)} rollouts before, {len(after)} after")
    for one, other in zip(before, after, strict=False):
        # rolltree describes tools in other words. This is a note, since otherwise every tool
        # environment would differ (design/0020-import-verifiers.md).
        if one["tools"] != other["tools"]:
            notes["the tools are described to the model in other words"] = None
        scores = _by_new_names(one["metrics"] or {}, other["metrics"] or {}, notes)
        differing = [key for key in _COMPARED if one[key] != other[key]]
        pairs = [(key, one[key], other[key]) for key in differing]
        pairs += [(f"metric {key}", old, new) for key, (old, new) in scores.items() if old != new]
        where = f"example {one['example_id']}, {one['answer']}"
        found += [f"{where}: {key} was {_short(x)}, is {_short(y)}" for key, x, y in pairs]
    return Comparison(len(before), tuple(found), tuple(notes))


def _by_new_names(
    before: dict[str, Any], after: dict[str, Any], notes: dict[str, None]
) -> dict[str, tuple[Any, Any]]:
    """Pair the metrics of one rollout; known new names and new metrics go into `notes`."""
    pairs = {}
    for name, value in before.items():
        new = name if name in after else NEW_METRICS.get(name, name)
        if new != name and new in after:
            notes[f"the metric {name} is called {new}"] = None
        pairs[name] = (value, after.get(new))
    new_names = {NEW_METRICS.get(name, name) for name in before} | set(before)
    for name in after.keys() - new_names:
        notes[f"there is a new metric {name}"] = None
    return pairs


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:120]} ..."


def main(words: Sequence[str]) -> None:
    """Play the environment `words[0]` with the arguments `words[2]`; write to `words[1]`."""
    name, out, args = words
    random.seed(0)

    async def played() -> list[dict[str, Any]]:
        async with load_environment(name, compat=True, **json.loads(args)) as env:
            return await play(env)

    Path(out).write_text(json.dumps(asyncio.run(played())), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:4])
