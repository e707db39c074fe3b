"""Whether an environment cleans up once, and tells a failure from a bad answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rolltree.environments import Environment
from rolltree.errors import ServerError
from rolltree.testing.findings import Finding
from rolltree.testing.probes import Probe
from rolltree.types import State

_CANCEL_LIMIT_S = 10.0


async def lifecycle_findings(env: Environment) -> list[Finding]:
    """Play one row to its end, into a failing model call, and into a cancellation."""
    rows = env.get_eval_dataset(1)
    findings: list[Finding] = []
    failure = ServerError("the model server is down (a probe)", status=500, retryable=False)
    for name, probe in {"a rollout": Probe("1"), "a failed rollout": Probe(error=failure)}.items():
        with counted(env) as counts:
            results = await env.generate(rows, probe, seed=1)
        state = results.state[0]
        findings += _count_findings(env, counts, name)
        for error in state.get("cleanup_errors") or ():
            findings.append(Finding("cleanup-raises", f"{error['type']}: {error['message']}"))
        if name == "a failed rollout" and probe.prompts:
            findings += _failure_findings(state)
    with counted(env) as counts:
        if await _cancelled(env, rows):
            findings += _count_findings(env, counts, "a cancelled rollout")
    return findings


@contextmanager
def counted(env: Environment) -> Iterator[Counter[str]]:
    """Count the calls of the environment's cleanups, by name, however they are called."""
    counts: Counter[str] = Counter()
    handlers = list(env._cleanup_handlers)

    def counting(handler: Any) -> Any:
        def call(state: State) -> Any:
            counts[handler.__name__] += 1
            return handler(state)

        call.__name__ = handler.__name__
        return call

    try:
        env._cleanup_handlers = [counting(handler) for handler in handlers]
        for handler in env._cleanup_handlers:
            setattr(env, handler.__name__, handler)
        yield counts
    finally:
        env._cleanup_handlers = handlers
        for handler in handlers:
            delattr(env, handler.__name__)


async def _cancelled(env: Environment, rows: Any) -> bool:
    """Cancel a rollout while the model is being asked; whether it came to that."""
    probe = Probe(hang=True)
    task = asyncio.ensure_future(env.rollout(env.example("eval", 0), probe, probe.model))
    asked = asyncio.ensure_future(probe.is_asked.wait())
    await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED, timeout=_CANCEL_LIMIT_S)
    for waiting in (task, asked):
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    return probe.is_asked.is_set()


def _count_findings(env: Environment, counts: Counter[str], name: str) -> list[Finding]:
    return [
        Finding(
            "cleanup-count", f"{handler.__name__} ran {counts[handler.__name__]} times in {name}"
        )
        for handler in env._cleanup_handlers
        if counts[handler.__name__] != 1
    ]


def _failure_findings(state: State) -> list[Finding]:
    if state.get("error") is not None and state["reward"] is None:
        return []
    return [
        Finding(
            "failure-hidden",
            f"a model call failed, and the rollout has the reward {state['reward']} and the error "
            f"{state.get('error')}; the model would be trained on it",
        )
    ]
