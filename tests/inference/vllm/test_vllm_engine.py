"""The engine's thread, pauses and versions, over a backend whose tokens can be computed by hand.

The fake samples `1000 * weight + how many tokens precede`, so every token tells with which weight
it was made. Real vLLM is tested in `tests_vllm`.
"""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rolltree.scale.vllm import StepOutput, VllmEngine, vllm_client
from rolltree.testing import ByteTokenizer
from rolltree.values.errors import (
    ConfigError,
    ModelError,
    PromptTooLong,
    TokenError,
    UnsupportedSetting,
)
from rolltree.values.types import FinishReason, GenerateRequest, SamplingParams


class FakeBackend:
    vocab_size = 5000

    def __init__(self):
        self.requests = {}
        self.weight = 0
        self.aborted = []
        self.most_at_once = self.num_steps = 0
        self.closed = self.fail = False
        self.end = "length"
        self.gate = threading.Event()
        self.gate.set()
        self.in_step = threading.Event()
        self.made_in = threading.current_thread().name

    def add(self, request_id, prompt_ids, fields):
        if fields.get("min_tokens") == -1:
            raise ValueError("min_tokens must be at least 0")
        self.requests[request_id] = [len(prompt_ids), 0, fields["max_tokens"]]

    def step(self):
        self.in_step.set()
        assert self.gate.wait(10)
        if self.fail:
            raise RuntimeError("out of memory")
        self.num_steps += 1
        self.most_at_once = max(self.most_at_once, len(self.requests))
        done = []
        for name, state in list(self.requests.items()):
            token = 1000 * self.weight + state[0] + state[1]
            state[1] += 1
            last = state[1] == state[2]
            done.append(
                StepOutput(name, [token], [-0.25], last, self.end if last else None, None, 1)
            )
            if last:
                del self.requests[name]
        return done

    def abort(self, request_ids):
        self.aborted += request_ids
        for name in request_ids:
            self.requests.pop(name, None)

    def load(self, weights):
        for name, value in weights:
            if name == "bad":
                raise KeyError("bad")
            self.weight = value

    def close(self):
        self.closed = True


class Setup:
    def __init__(self, **settings):
        self.weights = {"w": 0}
        self.engine = VllmEngine(
            FakeBackend, lambda: list(self.weights.items()), eos_token_ids=(7, 3), **settings
        )
        self.backend = self.engine._backend

    async def ask(self, num_prompt=3, **sampling):
        prompt = np.arange(1, num_prompt + 1, dtype=np.int32)
        return await self.engine.generate(GenerateRequest(prompt, SamplingParams(**sampling)))

    async def hold_in_step(self):
        """Let the backend stop inside its next step."""
        self.backend.in_step.clear()
        self.backend.gate.clear()
        assert await asyncio.to_thread(self.backend.in_step.wait, 10)


@pytest.fixture
async def setup():
    made = []

    def make(**settings):
        made.append(Setup(**settings))
        return made[-1]

    yield make
    for one in made:
        one.backend.gate.set()
        await one.engine.aclose()
        assert one.backend.closed


async def test_a_request_is_answered_token_by_token(setup):
    one = setup()
    output = await one.ask(3, max_tokens=4)
    assert output.completion_ids.tolist() == [3, 4, 5, 6]
    assert output.logprobs.tolist() == [-0.25] * 4
    assert output.versions.tolist() == [0] * 4
    assert output.finish_reason == FinishReason.LENGTH
    assert (output.num_prompt_tokens, output.num_cached_tokens) == (3, 1)
    assert one.engine.eos_token_ids == (3, 7)
    assert one.backend.made_in == "rolltree-vllm"


async def test_requests_beyond_the_batch_wait_and_none_is_lost(setup):
    one = setup(max_batch=3, max_context=64)
    outputs = await asyncio.gather(*(one.ask(n, max_tokens=n) for n in range(1, 11)))
    for n, output in enumerate(outputs, 1):
        assert output.completion_ids.tolist() == list(range(n, 2 * n))
        assert output.wait_s >= 0
    assert one.backend.most_at_once == 3


async def test_without_a_limit_the_context_is_filled(setup):
    one = setup(max_context=10)
    assert len((await one.ask(4)).completion_ids) == 6


async def test_tokens_after_an_update_in_flight_carry_the_new_version(setup):
    one = setup(version=4)
    await_hold = asyncio.ensure_future(one.hold_in_step())
    await asyncio.sleep(0.01)
    task = asyncio.ensure_future(one.ask(3, max_tokens=5))
    await await_hold

    async def update():
        async with one.engine.paused():
            steps = one.backend.num_steps
            one.weights["w"] = 2
            one.engine.publish(5)
            await asyncio.sleep(0.02)
            assert one.backend.num_steps == steps  # nothing runs inside the pause
            return steps

    updating = asyncio.ensure_future(update())
    await asyncio.sleep(0.02)
    assert not updating.done()  # it waits for the step that is running
    one.backend.gate.set()
    steps = await updating
    output = await task
    old = steps
    assert 1 <= old <= 4
    assert output.versions.tolist() == [4] * old + [5] * (5 - old)
    expected = [3 + i for i in range(old)] + [2003 + i for i in range(old, 5)]
    assert output.completion_ids.tolist() == expected
    assert one.engine.version == 5
    assert output.wait_s >= 0.02  # the pause is time waited


async def test_pauses_nest(setup):
    one = setup()
    async with one.engine.paused():
        async with one.engine.paused():
            task = asyncio.ensure_future(one.ask(max_tokens=1))
        await asyncio.sleep(0.02)
        assert not task.done()
    assert (await task).completion_ids.tolist() == [3]


async def test_publishing_needs_a_pause(setup):
    one = setup()
    with pytest.raises(ConfigError, match="paused"):
        one.engine.publish(1)
    assert one.engine.version == 0


async def test_half_an_update_closes_the_engine(setup):
    one = setup()
    one.weights["bad"] = 1
    async with one.engine.paused():
        task = asyncio.ensure_future(one.ask(max_tokens=2))
        await asyncio.sleep(0)
        with pytest.raises(ModelError, match="could not take over the weights of version 1"):
            one.engine.publish(1)
    with pytest.raises(ModelError, match="version 1"):
        await task
    with pytest.raises(ModelError, match="version 1"):
        await one.ask(max_tokens=2)


async def test_a_failing_step_ends_every_request_with_its_cause(setup):
    one = setup(max_batch=1)
    one.backend.fail = True
    outcomes = await asyncio.gather(
        *(one.ask(max_tokens=2) for _ in range(3)), return_exceptions=True
    )
    assert all(isinstance(outcome, ModelError) for outcome in outcomes)
    assert "out of memory" in str(outcomes[0])


async def test_a_cancelled_request_leaves_the_batch(setup):
    one = setup(max_batch=1)
    holding = asyncio.ensure_future(one.hold_in_step())
    await asyncio.sleep(0.01)
    first = asyncio.ensure_future(one.ask(3, max_tokens=500))
    waiting = asyncio.ensure_future(one.ask(3, max_tokens=500))
    await holding
    first.cancel()
    waiting.cancel()
    await asyncio.sleep(0)
    last = asyncio.ensure_future(one.ask(5, max_tokens=2))
    one.backend.gate.set()
    assert (await last).completion_ids.tolist() == [5, 6]
    assert len(one.backend.aborted) == 1  # the one that waited had never been added
    assert not one.backend.requests


async def test_a_request_that_vllm_refuses_fails_alone(setup):
    one = setup()
    good, bad = await asyncio.gather(
        one.ask(max_tokens=2), one.ask(extra={"min_tokens": -1}), return_exceptions=True
    )
    assert good.completion_ids.tolist() == [3, 4]
    assert isinstance(bad, ModelError)
    assert "min_tokens" in str(bad)


async def test_an_unknown_finish_reason_is_an_error(setup):
    one = setup()
    one.backend.end = "somehow"
    with pytest.raises(ModelError, match="somehow"):
        await one.ask(max_tokens=1)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], TokenError),
        ([[1, 2]], TokenError),
        ([-1], TokenError),
        ([5000], TokenError),
        ([1] * 16, PromptTooLong),
    ],
)
async def test_prompts_that_cannot_be_continued(setup, prompt, error):
    one = setup(max_context=16)
    request = GenerateRequest(np.array(prompt, np.int32), SamplingParams())
    with pytest.raises(error):
        await one.engine.generate(request)


async def test_settings_are_checked_before_anything_is_queued(setup):
    one = setup()
    with pytest.raises(UnsupportedSetting, match="n_best"):
        await one.ask(extra={"n_best": 3})
    assert not one.backend.requests


async def test_closing_answers_what_is_in_flight():
    one = Setup()
    holding = asyncio.ensure_future(one.hold_in_step())
    await asyncio.sleep(0.01)
    task = asyncio.ensure_future(one.ask(max_tokens=100))
    await holding
    closing = asyncio.ensure_future(one.engine.aclose())
    await asyncio.sleep(0)
    one.backend.gate.set()
    await closing
    with pytest.raises(ModelError, match="closed"):
        await task
    assert one.backend.closed
    await one.engine.aclose()  # twice does no harm


def test_numbers_out_of_range_and_a_backend_that_cannot_be_made():
    with pytest.raises(ConfigError, match="max_batch"):
        VllmEngine(FakeBackend, list, max_batch=0)
    with pytest.raises(ConfigError, match="max_context"):
        VllmEngine(FakeBackend, list, max_context=1)

    def broken():
        raise ConfigError("no vLLM here")

    with pytest.raises(ConfigError, match="no vLLM here"):
        VllmEngine(broken, list)


async def test_the_context_of_a_model_whose_config_is_in_parts_is_that_of_its_text(monkeypatch):
    made = []

    def backend(folder, **options):
        made.append(options)
        return FakeBackend()

    monkeypatch.setattr("rolltree.scale.vllm.engine.VllmBackend", backend)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=64))
    model = SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=3))
    client = vllm_client(Path("no-folder"), model, ByteTokenizer())
    await client.aclose()
    assert [options["max_context"] for options in made] == [64]
