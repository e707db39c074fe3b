"""Plays environments and probes and writes what happened, the same file on both sides.

    python play.py --server http://127.0.0.1:1234 --out result.json NAME ...

`import verifiers` is the real package on one side and rolltree's on the other; nothing here knows
which. Names are those of `cases.py`. Errors are results, too.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import importlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from canonical import canonical, failure
from cases import CASES, Case
from stage import set_stage

TIME_KEYS = ("timing", "client", "input", "trajectory", "sandbox_id")


def main() -> None:
    """Play the named cases, all of them if none is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--server", required=True)
    parser.add_argument("--out", required=True)
    asked = parser.parse_args()
    faulthandler.enable()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rolltree-compat-") as folder:
        set_stage(Path(folder))
        out = Path(asked.out).resolve()
        os.chdir(folder)
        for name in asked.names or CASES:
            began = time.perf_counter()
            results[name] = play(CASES[name], asked.server)
            print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
            out.write_text(json.dumps(results, indent=1, sort_keys=True))
    sys.stdout.flush()
    os._exit(0)  # exit handlers of environments that have lost their loop do not matter here


def play(case: Case, server: str) -> Any:
    """Return what a case does, an error included."""
    random.seed(0)
    url = f"{server}/{case.name}/{case.script}/v1"
    os.environ["OPENAI_BASE_URL"] = url
    sys.path.insert(0, case.folder)
    try:
        if not case.probe:
            return play_environment(case, url)
        module, _, function = case.probe.partition(":")
        return canonical(getattr(importlib.import_module(module), function)(url))
    except BaseException as error:
        return {**failure(error), "trace": traceback.format_exc()}
    finally:
        sys.path.remove(case.folder)


def play_environment(case: Case, url: str) -> dict[str, Any]:
    """Load an environment by its id, describe it, evaluate it and describe the results."""
    import verifiers as vf

    arguments = json.loads(json.dumps(case.arguments).replace("SERVER", url))
    arguments = json.loads(json.dumps(arguments).replace("PYTHON", sys.executable))
    result: dict[str, Any] = {}
    try:
        env = vf.load_environment(case.environment, **arguments)
    except (Exception, SystemExit) as error:
        return {"load": failure(error), "trace": traceback.format_exc()}
    result["environment"] = describe(env)
    random.seed(1)
    try:
        results = asyncio.run(evaluate(env, case, url))
    except (Exception, SystemExit) as error:
        result["evaluate"] = {**failure(error)}
        result["trace"] = traceback.format_exc()
        return result
    return {**result, "results": outputs(results)}


async def evaluate(env: Any, case: Case, url: str) -> Any:
    """Evaluate with the case's settings on an `AsyncOpenAI` client."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
        settings: dict[str, Any] = {"client": client, "model": "model", "use_tqdm": False}
        if case.inputs:
            rows = env.get_eval_inputs()
            inputs = [{"example_id": n, "task": "default", **rows[n]} for n in case.inputs]
            playing = env.generate(inputs, **settings, **case.settings)
        else:
            settings |= {"num_examples": 5, "rollouts_per_example": 2}
            playing = env.evaluate(**{**settings, **case.settings})
        return await asyncio.wait_for(playing, 90)


def describe(env: Any) -> dict[str, Any]:
    """Return what can be read from an environment."""
    import verifiers as vf

    names = (
        *("env_id", "env_args", "message_type", "system_prompt", "few_shot", "oai_tools"),
        *("sampling_args", "max_turns", "max_seq_len", "rollouts_per_example"),
    )
    kinds = ("Environment", "MultiTurnEnv", "SingleTurnEnv", "ToolEnv", "StatefulToolEnv")
    return {
        **{name: canonical(getattr(env, name, "missing")) for name in names},
        "kind": type(env).__name__,
        "kinds": [kind for kind in kinds if isinstance(env, getattr(vf, kind))],
        "dataset": attempt(lambda: rows(env.dataset)),
        "eval_dataset": attempt(lambda: rows(env.eval_dataset)),
        "parser": type(env.parser).__name__,
        "rubric": attempt(lambda: rubric(env.rubric)),
        "inputs": attempt(lambda: canonical(env.get_eval_inputs(2, 2))),
    }


def attempt(act: Callable[[], Any]) -> Any:
    """Return what `act` returns, or its failure."""
    try:
        return act()
    except (Exception, SystemExit) as error:
        return failure(error)


def rubric(found: Any) -> dict[str, Any]:
    """Return a rubric's class, functions, weights and parser, and the same of what is in it."""
    return {
        "class": type(found).__name__,
        "funcs": [getattr(func, "__name__", type(func).__name__) for func in found.funcs],
        "weights": canonical(found.weights),
        "parser": type(found.parser).__name__,
        "class_objects": sorted(found.class_objects),
        "rubrics": [rubric(part) for part in getattr(found, "rubrics", ())],
    }


def rows(dataset: Any, num: int = 4) -> Any:
    """Return a data set's size, columns and first rows."""
    if dataset is None:
        return None
    return {
        "num": len(dataset),
        "columns": sorted(dataset.column_names),
        "rows": canonical(dataset.select(range(min(num, len(dataset)))).to_list()),
    }


def outputs(results: Any) -> dict[str, Any]:
    """Return the columns of results and what their states hold."""
    columns = (*("prompt", "completion", "answer", "task", "info", "example_id", "reward"),)
    metadata = {
        name: value
        for name, value in dict(results["metadata"]).items()
        if name not in ("date", "time_ms", "path_to_save")
    }
    metadata["base_url"] = metadata["base_url"].split("/", 3)[-1]
    made = {
        "keys": sorted(results),
        "metadata_keys": sorted(results["metadata"]),
        "metadata": canonical(metadata),
        "metrics": canonical(results["metrics"]),
        "rows": [
            {
                **{name: canonical(results[name][index]) for name in columns},
                "state": state_of(state),
            }
            for index, state in enumerate(results["state"])
        ],
    }
    made["order"] = [row["example_id"] for row in made["rows"]]
    order = sorted(range(len(made["rows"])), key=lambda index: row_key(made["rows"][index]))
    made["rows"] = [made["rows"][index] for index in order]
    made["metrics"] = {
        name: [values[index] for index in order] if len(values) == len(order) else values
        for name, values in made["metrics"].items()
    }
    return made


def row_key(row: dict[str, Any]) -> tuple[int, str]:
    """Order rows by example, then by what was said: rollouts of one example may swap places."""
    return row["example_id"], json.dumps([row["prompt"], row["completion"]], sort_keys=True)


def state_of(state: Any) -> dict[str, Any]:
    """Return everything in a state but times, and its steps."""
    return {
        "keys": sorted(state.keys()),
        "timing": sorted(state["timing"]),
        "client": type(state["client"]).__name__ if "client" in state else None,
        "input": canonical(state.get("input")),
        **{name: canonical(state[name]) for name in state if name not in TIME_KEYS},
        "trajectory": [step_of(step) for step in state["trajectory"]],
    }


def step_of(step: Any) -> dict[str, Any]:
    """Return a step with what its response answers."""
    response = step["response"]
    choice = response.choices[0]
    made = {name: canonical(step[name]) for name in step if name != "response"}
    made["keys"] = sorted(step)
    made["response"] = {
        "class": type(response).__name__,
        "id": response.id,
        "finish_reason": choice.finish_reason,
        "text": choice.message.content if hasattr(choice, "message") else choice.text,
        "tool_calls": canonical(getattr(getattr(choice, "message", None), "tool_calls", None)),
        "logprobs": canonical(choice.logprobs),
        "usage": canonical(response.usage),
        "model_dump": sorted(response.model_dump()),
    }
    return made


if __name__ == "__main__":
    main()
