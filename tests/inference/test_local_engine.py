from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from local_models import (
    VOCAB,
    ask,
    greedy,
    new_model,
    next_logits,
    random_prompt,
    shared_model,
    teacher_forced,
    tokenizer,
)

from rolltree.inference.engine import SampledToken
from rolltree.inference.local import LocalEngine
from rolltree.values.errors import (
    ConfigError,
    ModelError,
    PromptTooLong,
    TokenError,
    UnsupportedSetting,
)
from rolltree.values.types import FinishReason


@asynccontextmanager
async def engine_of(model: Any = None, **options: Any) -> AsyncIterator[LocalEngine]:
    options.setdefault("max_context", 128)
    options.setdefault("max_batch", 8)
    engine = LocalEngine(shared_model() if model is None else model, **options)
    try:
        yield engine
    finally:
        await engine.aclose()


async def until_sampling(engine: LocalEngine, count: int = 1) -> None:
    while engine.stats["num_sampled_tokens"] < count:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_greedy_answers_are_those_of_generate() -> None:
    model = shared_model()
    prompts = [random_prompt(n, 3 + 4 * n) for n in range(8)]
    async with engine_of() as engine:
        found = await asyncio.gather(*(engine.generate(ask(p, max_tokens=10)) for p in prompts))
    for prompt, output in zip(prompts, found, strict=True):
        whole = torch.from_numpy(prompt[None]).long()
        theirs = model.generate(
            whole,
            attention_mask=torch.ones_like(whole),
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :]
        assert output.completion_ids.tolist() == theirs.tolist()
        assert output.finish_reason == FinishReason.LENGTH


async def test_one_token_follows_the_models_distribution() -> None:
    prompt = random_prompt(0, 6)
    async with engine_of(max_batch=64) as engine:
        found = await asyncio.gather(
            *(
                engine.generate(ask(prompt, temperature=1.5, max_tokens=1, seed=n))
                for n in range(1500)
            )
        )
    counts = np.bincount([int(output.completion_ids[0]) for output in found], minlength=VOCAB)
    probs = (next_logits(shared_model(), prompt) / 1.5).softmax(-1).numpy()
    noise = np.sqrt(1500 * probs * (1 - probs)) + 1
    assert (np.abs(counts - 1500 * probs) < 5 * noise).all()
    assert counts.max() < 1500


async def test_a_seed_gives_the_same_answer_in_any_batch() -> None:
    request = ask(random_prompt(0, 10), temperature=1.0, max_tokens=20, seed=11)
    async with engine_of() as engine:
        alone = await engine.generate(request)
        company = [
            engine.generate(ask(random_prompt(n, 3 + n), temperature=1.0, max_tokens=25))
            for n in range(1, 12)
        ]
        among, *_ = await asyncio.gather(engine.generate(request), *company)
        other = await engine.generate(
            ask(random_prompt(0, 10), temperature=1.0, max_tokens=20, seed=12)
        )
    assert among.completion_ids.tolist() == alone.completion_ids.tolist()
    assert np.allclose(among.logprobs, alone.logprobs, atol=1e-4)
    assert other.completion_ids.tolist() != alone.completion_ids.tolist()


async def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them() -> None:
    async def draw(seed: int) -> list[list[int]]:
        async with engine_of(seed=seed) as engine:
            found = [
                await engine.generate(ask([1, 2], temperature=1.0, max_tokens=12)) for _ in range(3)
            ]
        return [output.completion_ids.tolist() for output in found]

    first = await draw(5)
    assert first[0] != first[1] != first[2]
    assert await draw(5) == first
    assert await draw(6) != first


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.6}, {"temperature": 1.0, "top_k": 4}, {"top_p": 0.5}]
)
async def test_logprobs_are_of_the_distribution_sampled_from(sampling: dict[str, Any]) -> None:
    model, prompt = shared_model(), random_prompt(0, 8)
    sampling.setdefault("temperature", 1.0)
    async with engine_of() as engine:
        found = await engine.generate(ask(prompt, max_tokens=20, seed=1, **sampling))
    raw = teacher_forced(model, prompt, found.completion_ids)
    assert np.abs(found.raw_logprobs - raw).max() < 1e-4
    known = list(prompt)
    for token, logprob in zip(found.completion_ids, found.logprobs, strict=True):
        logits = next_logits(model, known) / sampling["temperature"]
        probs, order = logits.softmax(-1).sort(descending=True)
        size = sampling.get("top_k") or len(probs)
        if "top_p" in sampling:
            size = int((probs.cumsum(0) < sampling["top_p"]).sum()) + 1
        kept = order[:size].tolist()
        assert token in kept
        share = probs[kept.index(token)] / probs[:size].sum()
        assert logprob == pytest.approx(float(share.log()), abs=1e-4)
        known.append(int(token))


async def test_requests_join_while_others_decode() -> None:
    async with engine_of(max_batch=4) as engine:
        long = asyncio.create_task(engine.generate(ask([1, 2, 3], max_tokens=100)))
        await until_sampling(engine, 5)
        short = await engine.generate(ask([4, 5], max_tokens=3))
        assert not long.done()
        assert short.completion_ids.tolist() == greedy(shared_model(), [4, 5], 3)
        assert len((await long).completion_ids) == 100


async def test_a_stop_string_ends_an_answer_when_its_last_byte_is_sampled() -> None:
    model = new_model()
    prompt = tokenizer().encode("say it: ")
    text = "abcabcSTOPxyz"
    with torch.no_grad():
        model.lm_head.weight.zero_()  # tied to the embeddings: all logits are 0 ...
    async with engine_of(model, decode_text=tokenizer().decode) as engine:
        spoken = iter(text.encode())
        forward = engine._decoder.runner.forward

        def scripted(*args: Any) -> torch.Tensor:  # ... except for the next byte of the text
            logits = forward(*args)
            logits[:, next(spoken)] = 50.0
            return logits

        engine._decoder.runner.forward = scripted  # type: ignore[method-assign]
        found = await engine.generate(ask(prompt, max_tokens=13, stop=("nothing", "STOP", "zz")))
    assert bytes(found.completion_ids.astype(np.uint8)) == b"abcabcSTOP"
    assert found.finish_reason == FinishReason.STOP
    assert found.stop == "STOP"


async def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    prompt = tokenizer().encode("STO")
    with_stop = ask(prompt, max_tokens=4, stop=("STO", "TO"))
    async with engine_of(decode_text=tokenizer().decode) as engine:
        found = await engine.generate(with_stop)
    assert found.completion_ids.tolist() == greedy(shared_model(), prompt, 4)


async def test_end_tokens_end_an_answer() -> None:
    continuation = greedy(shared_model(), [1, 2, 3], 8)
    end = continuation[4]
    async with engine_of(eos_token_ids=(end,)) as engine:
        found = await engine.generate(ask([1, 2, 3], max_tokens=8))
    assert found.completion_ids.tolist() == continuation[: continuation.index(end) + 1]
    assert found.finish_reason == FinishReason.STOP


async def test_without_max_tokens_the_window_is_the_limit() -> None:
    async with engine_of(max_context=24) as engine:
        found = await engine.generate(ask(random_prompt(0, 20), max_tokens=None))
    assert len(found.completion_ids) == 4
    assert found.finish_reason == FinishReason.LENGTH


async def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    async with engine_of(max_context=24) as engine:
        assert len((await engine.generate(ask(random_prompt(0, 23)))).completion_ids) == 1
        with pytest.raises(PromptTooLong, match="24 tokens and max_context is 24"):
            await engine.generate(ask(random_prompt(0, 24)))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "at least one token"), ([1, VOCAB], "vocabulary"), ([-1], "vocabulary")],
)
async def test_bad_ids_are_refused_before_they_reach_others(
    prompt: list[int], message: str
) -> None:
    async with engine_of() as engine:
        with pytest.raises(TokenError, match=message):
            await engine.generate(ask(prompt))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"stop": ("x",)}, "decode_text"),
        ({"extra": {"min_p": 1.5}}, "min_p = 1.5"),
        ({"extra": {"extra_body": {"guided_json": {}}}}, "need a fast tokenizer"),
        ({"extra": {"tempreature": 1}}, "Did you mean 'temperature'"),
    ],
)
async def test_what_the_engine_cannot_do_is_refused(sampling: dict[str, Any], message: str) -> None:
    async with engine_of() as engine:
        with pytest.raises(UnsupportedSetting, match=message):
            await engine.generate(ask([1], **sampling))


async def test_fields_that_ask_for_what_is_done_anyway_are_accepted() -> None:
    extra = {"logprobs": True, "extra_body": {"return_token_ids": True}, "presence_penalty": 0.0}
    async with engine_of() as engine:
        assert len((await engine.generate(ask([1], extra=extra))).completion_ids) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_budget_bytes": 1000}, "holds 0 slots of 128 tokens"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_context": 513}, "512 positions"),
        ({"max_context": 1}, "max_context"),
        ({"max_context": 0}, "max_context"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"eos_token_ids": (VOCAB,)}, "vocabulary"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalEngine(shared_model(), **{"max_context": 128, "max_batch": 8, **options})


async def test_the_memory_budget_is_kept_and_used() -> None:
    slot_bytes = 2 * 2 * 2 * 8 * 4 * 128  # layers, keys and values, heads, width, fp32, tokens
    async with engine_of(kv_budget_bytes=20 * slot_bytes + 1) as engine:
        assert engine.kv_bytes == 20 * slot_bytes
        (data,) = engine._decoder.runner.cache.data
        assert data.nbytes == engine.kv_bytes
    async with engine_of() as engine:
        assert engine.kv_bytes == 8 * slot_bytes


@pytest.mark.parametrize("pack", [False, True])
async def test_weights_are_the_trainers_and_stay_where_they_are(pack: bool) -> None:
    model = new_model()
    prompt = random_prompt(0, 12)
    async with engine_of(model, pack_weights=pack) as engine:
        forward = engine._decoder.runner._model
        assert (forward._layers[0].down._packed is not None) == pack
        before = await engine.generate(ask(prompt))
        pointers = [parameter.data_ptr() for parameter in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        async with engine.paused():
            model.train()
            model(torch.from_numpy(prompt[None]).long()).logits.square().mean().backward()
            optimizer.step()
            engine.publish(1)
        after = await engine.generate(ask(prompt))
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]
    assert after.num_cached_tokens == 0
    assert after.versions.tolist() == [1] * 6
    assert before.versions.tolist() == [0] * 6
    assert model.training
    model.eval()
    assert after.completion_ids.tolist() == greedy(model, prompt, 6)
    assert after.completion_ids.tolist() != before.completion_ids.tolist()


async def test_an_update_in_flight_is_exact_for_every_token() -> None:
    """Tokens before are the old policy's, tokens after the new one's, each with its version."""
    model, old = new_model(), new_model()
    prompt = random_prompt(0, 12)
    async with engine_of(model) as engine:
        task = asyncio.create_task(
            engine.generate(ask(prompt, max_tokens=100, temperature=1.0, seed=3))
        )
        await until_sampling(engine, 10)
        async with engine.paused():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 1.05
            engine.publish(7)
        found = await task
    switch = int((found.versions == 0).sum())
    assert 10 <= switch < 100
    assert found.versions.tolist() == [0] * switch + [7] * (100 - switch)
    by_old = teacher_forced(old, prompt, found.completion_ids)
    by_new = teacher_forced(model, prompt, found.completion_ids)
    expected = np.where(found.versions == 0, by_old, by_new)
    assert np.abs(found.logprobs - expected).max() < 1e-4
    assert np.abs(by_old - by_new).max() > 1e-2


@pytest.mark.parametrize("lean", [True, False])
async def test_parameters_that_were_replaced_are_taken_over(lean: bool) -> None:
    model = new_model()
    async with engine_of(model) as engine:
        engine._decoder.runner.lean = lean
        engine._decoder.runner._read_model()
        async with engine.paused():
            for layer in model.model.layers:
                layer.mlp.up_proj.weight = torch.nn.Parameter(-layer.mlp.up_proj.weight.detach())
            engine.publish(1)
        found = await engine.generate(ask([1, 2, 3]))
    assert found.completion_ids.tolist() == greedy(model, [1, 2, 3], 6)
    assert found.completion_ids.tolist() != greedy(new_model(), [1, 2, 3], 6)


async def test_nothing_is_decoded_while_paused() -> None:
    async with engine_of() as engine:
        task = asyncio.create_task(engine.generate(ask([1, 2], max_tokens=100)))
        await until_sampling(engine, 3)
        async with engine.paused():
            async with engine.paused():
                before = engine.stats
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)  # the outer pause still holds
            assert engine.stats == before
            assert not task.done()
        found = await task
    assert found.completion_ids.tolist() == greedy(shared_model(), [1, 2], 100)
    assert 0.1 <= found.wait_s < 60


async def test_waiting_for_a_slot_is_counted_as_waiting() -> None:
    async with engine_of(max_batch=1) as engine:
        async with engine.paused():  # both are there before the first token
            first = asyncio.create_task(engine.generate(ask([1, 2], max_tokens=100)))
            await asyncio.sleep(0)
            began = time.monotonic()
            waiting = asyncio.create_task(engine.generate(ask([3, 4], max_tokens=1)))
            await asyncio.sleep(0)
        second = await waiting
        took = time.monotonic() - began
        assert first.done()
    assert 0.5 * took < second.wait_s <= took


async def test_cancelling_a_task_takes_its_request_out() -> None:
    async with engine_of(max_batch=1) as engine:
        long = asyncio.create_task(engine.generate(ask([1, 2], max_tokens=120)))
        queued = asyncio.create_task(engine.generate(ask([5, 6], max_tokens=120)))
        await until_sampling(engine, 2)
        long.cancel()
        queued.cancel()
        found = await engine.generate(ask([3, 4], max_tokens=2))
        assert found.completion_ids.tolist() == greedy(shared_model(), [3, 4], 2)
        assert engine.stats["num_sampled_tokens"] < 100
        for task in (long, queued):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not engine._decoder.busy


async def test_an_error_in_a_step_reaches_everybody_and_the_engine_goes_on() -> None:
    async with engine_of() as engine:
        forward = engine._decoder.runner.forward

        def broken(*args: Any) -> torch.Tensor:
            raise RuntimeError("out of memory")

        engine._decoder.runner.forward = broken  # type: ignore[method-assign]
        found = await asyncio.gather(
            *(engine.generate(ask([n])) for n in range(12)), return_exceptions=True
        )
        assert all(isinstance(error, ModelError) for error in found)
        assert all("out of memory" in str(error) for error in found)
        assert isinstance(found[0].__cause__, RuntimeError)  # type: ignore[union-attr]
        engine._decoder.runner.forward = forward  # type: ignore[method-assign]
        again = await engine.generate(ask([1, 2]))
        assert again.completion_ids.tolist() == greedy(shared_model(), [1, 2], 6)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_the_threads_death_reaches_everybody() -> None:
    async with engine_of(max_batch=1) as engine:

        def dying(*args: Any) -> torch.Tensor:
            raise KeyboardInterrupt

        engine._decoder.runner.forward = dying  # type: ignore[method-assign]
        found = await asyncio.gather(
            *(engine.generate(ask([n])) for n in range(3)), return_exceptions=True
        )
        assert all(isinstance(error, ModelError) for error in found)
        engine._thread.join(5)
        assert not engine.is_alive
        with pytest.raises(ModelError, match="thread has died"):
            await engine.generate(ask([1]))


async def test_every_token_but_the_last_is_told_when_it_is_sampled() -> None:
    told: list[SampledToken] = []
    async with engine_of() as engine:
        answer = engine.submit(ask([1, 2], temperature=1.0, seed=2), told.append)
        found = await asyncio.wrap_future(answer)
        assert engine.is_alive
    assert [token.id for token in told] == found.completion_ids[:-1].tolist()
    assert [token.version for token in told] == [0] * 5
    np.testing.assert_array_equal(
        np.array([token.logprob for token in told], np.float32), found.logprobs[:-1]
    )


async def test_closing_leaves_no_thread_and_answers_what_was_in_flight() -> None:
    before = threading.active_count()
    engine = LocalEngine(shared_model(), max_context=128, max_batch=1)
    assert threading.active_count() == before + 1
    tasks = [asyncio.create_task(engine.generate(ask([n], max_tokens=120))) for n in range(3)]
    await until_sampling(engine)
    await engine.aclose()
    await engine.aclose()
    assert threading.active_count() == before
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, ModelError)
        assert "closed" in str(error)
    with pytest.raises(ModelError, match="closed"):
        engine.submit(ask([1]))


async def test_closing_ends_a_pause() -> None:
    engine = LocalEngine(shared_model(), max_context=32, max_batch=1)
    async with engine.paused():
        task = asyncio.create_task(engine.generate(ask([1])))
        await asyncio.sleep(0)
        await engine.aclose()
    with pytest.raises(ModelError, match="closed"):
        await task


def test_it_serves_several_event_loops_and_plain_threads() -> None:
    engine = LocalEngine(shared_model(), max_context=64, max_batch=4)
    expected = greedy(shared_model(), [1, 2], 6)
    answers = []

    def in_a_loop() -> None:
        answers.append(asyncio.run(engine.generate(ask([1, 2]))).completion_ids.tolist())

    threads = [threading.Thread(target=in_a_loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    answers.append(engine.submit(ask([1, 2])).result(timeout=30).completion_ids.tolist())
    for thread in threads:
        thread.join()
    engine.close()
    assert answers == [expected] * 4
