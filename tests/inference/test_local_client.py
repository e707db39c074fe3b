from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from local_models import ask, greedy, new_model, shared_model, teacher_forced, tokenizer

import rolltree as rt
from rolltree.inference import ModelClient, as_client
from rolltree.inference.local import LocalClient, LocalEngine, local_client
from rolltree.values.errors import ModelError, PromptTooLong, UnsupportedSetting
from rolltree.values.types import FinishReason, SamplingParams

USER = {"role": "user", "content": "7 + 5 ="}
SHORT = SamplingParams(temperature=0.0, max_tokens=5)


@pytest.fixture
async def client() -> AsyncIterator[LocalClient]:
    client = local_client(shared_model(), tokenizer(), name="tiny", max_context=512, max_batch=4)
    yield client
    await client.aclose()


def scripted(client: LocalClient, text: str, end: int | None = 258) -> None:
    """Make the model say `text` (and then the end token), whatever it is asked."""
    script = [*tokenizer().encode(text), *([] if end is None else [end])]
    forward = client.engine._decoder.runner.forward
    said = iter(script)

    def forced(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        return logits.zero_().index_fill_(1, torch.tensor([next(said)]), 50.0)

    client.engine._decoder.runner.forward = forced  # type: ignore[method-assign]


async def test_it_is_a_model_client(client: LocalClient) -> None:
    assert isinstance(client, ModelClient)
    assert as_client(client) is client
    assert client.model == client.session().model == "tiny"


async def test_a_chat_call_carries_exactly_what_was_sampled(client: LocalClient) -> None:
    found = await client.chat([USER], sampling=SHORT)
    prompt = tokenizer().apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert found.prompt_ids is not None
    assert found.completion_ids is not None
    assert found.prompt_ids.tolist() == prompt
    assert found.completion_ids.tolist() == greedy(shared_model(), prompt, 5)
    forced = teacher_forced(shared_model(), prompt, found.completion_ids)
    assert np.abs(found.logprobs - forced).max() < 1e-4
    assert found.finish_reason == FinishReason.LENGTH
    assert found.temperature == 0.0
    assert (found.num_prompt_tokens, found.num_completion_tokens) == (len(prompt), 5)
    assert found.versions is not None
    assert found.versions.tolist() == [0] * 5


async def test_an_answer_ends_with_its_end_token_and_reads_as_a_message(
    client: LocalClient,
) -> None:
    scripted(client, "<think>\nadd\n</think>\n\n12")
    found = await client.chat([USER])
    assert found.message == {"role": "assistant", "content": "12", "reasoning_content": "add"}
    assert found.finish_reason == FinishReason.STOP
    assert found.completion_ids is not None
    assert found.completion_ids[-1] == 258


async def test_tool_calls_are_read(client: LocalClient) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    scripted(client, '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>')
    found = await client.chat([USER], tools=[tool])
    assert found.finish_reason == FinishReason.TOOL_CALLS
    assert found.message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 7}'}


async def test_a_session_continues_exact_ids_from_the_prefix_cache(client: LocalClient) -> None:
    session = client.session()
    first = await session.chat([USER], sampling=SHORT)
    again = {"role": "user", "content": "Wrong, try again."}
    second = await session.chat([USER, first.message, again], sampling=SHORT)
    assert first.prompt_ids is not None
    assert first.completion_ids is not None
    assert second.prompt_ids is not None
    known = [*first.prompt_ids, *first.completion_ids]
    assert second.prompt_ids[: len(known)].tolist() == known
    assert second.extends == first.call_id
    assert second.info["num_cached_tokens"] == len(known) - 1  # the last id was never fed
    assert second.completion_ids is not None
    assert second.completion_ids.tolist() == greedy(shared_model(), second.prompt_ids, 5)


async def test_without_a_session_nothing_is_remembered(client: LocalClient) -> None:
    first = await client.chat([USER], sampling=SHORT)
    second = await client.chat([USER, first.message, USER], sampling=SHORT)
    assert second.extends is None


async def test_text_ends_before_a_stop_string_and_ids_after_it(client: LocalClient) -> None:
    scripted(client, "12\n13\n14")
    found = await client.chat([USER], sampling=SamplingParams(stop=("\n1", "\n2")))
    assert found.message["content"] == found.text == "12"
    assert tokenizer().decode(found.completion_ids) == "12\n1"
    assert found.finish_reason == FinishReason.STOP


async def test_text_ends_before_a_stop_id(client: LocalClient) -> None:
    scripted(client, "12;13")
    found = await client.chat([USER], sampling=SamplingParams(stop_token_ids=(ord(";"),)))
    assert found.text == "12"
    assert tokenizer().decode(found.completion_ids) == "12;"


async def test_a_string_is_continued(client: LocalClient) -> None:
    scripted(client, " 6, 7", end=None)
    found = await client.chat(
        "4, 5,", message_type="completion", sampling=SamplingParams(max_tokens=5)
    )
    assert found.text == " 6, 7"
    assert found.prompt_ids is not None
    assert found.prompt_ids.tolist() == tokenizer().encode("4, 5,")


async def test_generate_is_token_in_token_out(client: LocalClient) -> None:
    request = ask(tokenizer().encode("4, 5,"), max_tokens=4)
    scripted(client, " 6")
    found = await client.generate(request)
    assert found.text == " 6"
    assert found.completion_ids is not None
    assert found.completion_ids.tolist() == [32, 54, 258]
    assert found.finish_reason == FinishReason.STOP
    assert found.prompt_ids is not request.prompt_ids


async def test_another_models_name_is_refused(client: LocalClient) -> None:
    assert (await client.chat([USER], sampling=SHORT, model="tiny")).text
    with pytest.raises(UnsupportedSetting, match="but 'gpt-5' was requested"):
        await client.chat([USER], model="gpt-5")


async def test_closing_a_session_leaves_the_engine_open() -> None:
    before = threading.active_count()
    client = local_client(new_model(), tokenizer(), max_context=128, max_batch=2)
    session = client.session()
    await session.aclose()
    assert (await session.chat([USER], sampling=SHORT)).completion_ids is not None
    await client.aclose()
    assert threading.active_count() == before
    with pytest.raises(ModelError, match="closed"):
        await session.chat([USER], sampling=SHORT)


async def test_end_tokens_come_from_model_tokenizer_and_template() -> None:
    model = new_model()
    model.generation_config.eos_token_id = [7, 258]
    client = local_client(model, tokenizer(), eos_token_ids=[9], max_context=64, max_batch=1)
    assert client.engine.eos_token_ids == (7, 9, 258)
    await client.aclose()


async def test_a_client_can_be_put_on_an_engine() -> None:
    engine = LocalEngine(shared_model(), eos_token_ids=(258,), max_context=128, max_batch=1)
    client = LocalClient(engine, tokenizer(), "mine")
    assert client.model == "mine"
    assert (await client.chat([USER], sampling=SHORT)).num_completion_tokens == 5
    await client.aclose()


@pytest.mark.parametrize("form", ["text", "string", "parts", "messages"])
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    client: LocalClient, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenize(text: str) -> None:
        raise AssertionError(f"{len(text)} characters are tokenized")

    monkeypatch.setattr(client.renderer.vocabulary, "_encode", tokenize)
    limit = client.engine.max_context * client.renderer.vocabulary.longest_token
    text = "a" * (limit + 1)
    prompts: dict[str, Any] = {
        "text": [{"role": "user", "content": text}],
        "parts": [{"role": "user", "content": [{"type": "text", "text": text}]}],
        "messages": [{"role": "user", "content": half} for half in (text[:9], text[9:])],
        "string": text,
    }
    kind: Any = "completion" if form == "string" else "chat"
    with pytest.raises(PromptTooLong, match=rf"{limit + 1:,} characters.*max_context is 512 "):
        await client.chat(prompts[form], message_type=kind, sampling=SHORT)


async def test_a_rollout_ends_truncated_where_its_prompt_cannot_fit(client: LocalClient) -> None:
    rows = [{"question": "word " * 1_000_000, "answer": "12"}]
    environment = rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric([lambda completion: 0.5]))
    report = await rt.evaluate_async(environment, client, num_examples=1, split="train")
    assert report.num_failed == 0
    (outcome,) = report.outcomes
    assert outcome.reward == 0.5
    assert report.num_truncated == 1
