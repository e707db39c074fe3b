"""What every engine in this process does alike, whatever decodes behind its thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from local_models import ask, shared_model

from rolltree.inference.engine import EngineThread
from rolltree.inference.local import LocalEngine
from rolltree.scale.vllm import StepOutput, VllmEngine
from rolltree.values.errors import ConfigError, ModelError


class Counting:
    """A backend that samples 0, 1, 2, ... for every request."""

    vocab_size = 50

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    def add(self, request_id: str, prompt_ids: list[int], fields: Any) -> None:
        self.left[request_id] = fields["max_tokens"]

    def step(self) -> list[StepOutput]:
        done = []
        for name in list(self.left):
            self.left[name] -= 1
            last = self.left[name] == 0
            done.append(StepOutput(name, [1], [-0.5], last, "length" if last else None))
            if last:
                del self.left[name]
        return done

    def abort(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self.left.pop(name, None)

    def load(self, weights: Any) -> None:
        for _ in weights:
            pass

    def close(self) -> None:
        self.left.clear()


MAKERS: dict[str, Callable[[], EngineThread[Any]]] = {
    "local": lambda: LocalEngine(shared_model(), max_context=64, max_batch=2),
    "vllm": lambda: VllmEngine(Counting, list, max_context=64, max_batch=2),
}


@pytest.fixture(params=MAKERS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[EngineThread[Any]]:
    engine = MAKERS[request.param]()
    yield engine
    await engine.aclose()


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


async def test_pauses_that_overlap_count_their_time_once(
    engine: EngineThread[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, in_step, go_on = Clock(), threading.Event(), threading.Event()
    monkeypatch.setattr("rolltree.inference.engine.time", clock)

    def hold(token: object) -> None:
        in_step.set()
        assert go_on.wait(30)

    answer = asyncio.wrap_future(engine.submit(ask([1, 2], max_tokens=5), hold))
    await asyncio.to_thread(in_step.wait, 30)
    first, second = engine.paused(), engine.paused()
    entering = asyncio.ensure_future(first.__aenter__())
    await asyncio.sleep(0)
    clock.now_s += 1.0  # the step still runs: no pause yet
    go_on.set()
    await entering
    clock.now_s += 0.3
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    clock.now_s += 0.2
    async with engine.paused():
        clock.now_s += 0.1
    await second.__aexit__(None, None, None)
    assert (await answer).wait_s == pytest.approx(0.6)


async def test_publishing_needs_a_pause(engine: EngineThread[Any]) -> None:
    with pytest.raises(ConfigError, match="paused"):
        engine.publish(1)
    async with engine.paused():
        engine.publish(3)
    assert (await engine.generate(ask([1], max_tokens=2))).versions.tolist() == [3, 3]


async def test_every_token_but_the_last_is_reported(engine: EngineThread[Any]) -> None:
    told: list[Any] = []
    output = await asyncio.wrap_future(engine.submit(ask([1, 2], max_tokens=5), told.append))
    assert [token.id for token in told] == output.completion_ids[:-1].tolist()
    assert engine.stats["num_sampled_tokens"] == 5


async def test_a_closed_engine_says_so(engine: EngineThread[Any]) -> None:
    assert engine.is_alive
    async with engine.paused():
        waiting = asyncio.ensure_future(engine.generate(ask([1])))
        await asyncio.sleep(0)
        await engine.aclose()
        with pytest.raises(ModelError, match="closed"):
            engine.publish(1)
    with pytest.raises(ModelError, match="closed"):
        await waiting
    assert not engine.is_alive
    with pytest.raises(ModelError, match="closed"):
        engine.submit(ask([1]))
