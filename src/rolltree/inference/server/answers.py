"""Completions as OpenAI's JSON, with vLLM's token fields.

Ids and logprobs have one entry per sampled token, end token included. It knows what was asked and
what was sampled. It knows nothing about HTTP; streaming is `stream`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from rolltree.inference.engine import EngineOutput
from rolltree.inference.server.fields import Asked
from rolltree.inference.server.served import ServedModel, spans
from rolltree.types import ChatMessage, FloatArray, IntArray, ToolSchema


def head(served: ServedModel, *, chat: bool, stream: bool = False) -> dict[str, Any]:
    """Return what an answer, or each chunk of one, begins with."""
    kind = "chat.completion" if chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": f"{kind}.chunk" if chat and stream else kind,
        "created": int(time.time()),
        "model": served.name,
    }


def usage(prompts: Sequence[IntArray], outputs: Sequence[EngineOutput]) -> dict[str, Any]:
    """Return how many tokens were read and sampled; a prompt counts once for all its choices."""
    num_prompt = sum(map(len, prompts))
    num_completion = sum(len(output.completion_ids) for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs)
        },
    }


def chat_answer(
    served: ServedModel,
    asked: Asked,
    tools: Sequence[ToolSchema] | None,
    prompt: IntArray,
    outputs: Sequence[EngineOutput],
) -> dict[str, Any]:
    """Return a chat completion with one choice per output."""
    choices = []
    for index, output in enumerate(outputs):
        message, reason = served.message(output, tools)
        choice = {
            "index": index,
            "message": outgoing_message(message),
            "finish_reason": reason.value,
            "logprobs": None,
            **token_fields(asked, output),
        }
        if asked.logprobs:
            values = served.logprobs_of(output)
            choice["logprobs"] = chat_logprobs(served, asked, output.completion_ids, values)
        choices.append(choice)
    answer = head(served, chat=True) | {"choices": choices, "usage": usage([prompt], outputs)}
    if asked.token_ids:
        answer["prompt_token_ids"] = prompt.tolist()
    return answer


def text_answer(
    served: ServedModel,
    asked: Asked,
    prompts: Sequence[IntArray],
    outputs: Sequence[EngineOutput],
) -> dict[str, Any]:
    """Return a text completion: `asked.n` outputs for each prompt in turn."""
    choices = []
    for index, output in enumerate(outputs):
        choice = {
            "index": index,
            "text": served.text(output),
            "finish_reason": output.finish_reason.value,
            "logprobs": None,
            **token_fields(asked, output),
        }
        if asked.logprobs:
            values = served.logprobs_of(output)
            choice["logprobs"] = text_logprobs(served, asked, output.completion_ids, values)
        if asked.token_ids:
            choice["prompt_token_ids"] = prompts[index // asked.n].tolist()
        choices.append(choice)
    return head(served, chat=False) | {"choices": choices, "usage": usage(prompts, outputs)}


def ids_answer(
    served: ServedModel,
    prompt: IntArray,
    outputs: Sequence[EngineOutput],
    *,
    request_id: str,
    logprobs: bool,
    prompt_ids: bool,
) -> dict[str, Any]:
    """Return the answer of vLLM's token-in endpoint: ids, logprobs, and spans of versions."""
    choices = []
    for index, output in enumerate(outputs):
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": output.finish_reason.value,
            "stop_reason": output.stop,
            "token_ids": output.completion_ids.tolist(),
            "logprobs": None,
            "weight_versions": spans(output.versions),
        }
        if logprobs:
            pairs = zip(choice["token_ids"], served.logprobs_of(output).tolist(), strict=True)
            content = [{"token_id": i, "logprob": value, "top_logprobs": []} for i, value in pairs]
            choice["logprobs"] = {"content": content}
        choices.append(choice)
    answer = {
        "request_id": request_id,
        "model": served.name,
        "created": int(time.time()),
        "choices": choices,
        "usage": usage([prompt], outputs),
    }
    return answer | {"prompt_token_ids": prompt.tolist()} if prompt_ids else answer


def outgoing_message(message: ChatMessage) -> ChatMessage:
    """Return a parsed message as servers send it: no notes, no empty content beside calls."""
    sent = {name: value for name, value in message.items() if name != "parse_problems"}
    if sent.get("tool_calls") and not sent["content"]:
        sent["content"] = None
    return sent


def token_fields(asked: Asked, output: EngineOutput) -> dict[str, Any]:
    """Return vLLM's fields of a choice: what stopped it and, where asked for, ids and versions."""
    ids = {"token_ids": output.completion_ids.tolist()} if asked.token_ids else {}
    return ids | stop_fields(asked, output)


def stop_fields(asked: Asked, output: EngineOutput) -> dict[str, Any]:
    """Return what is known of a choice when it ends."""
    fields: dict[str, Any] = {"stop_reason": output.stop}
    if asked.token_ids:
        fields["weight_versions"] = spans(output.versions)
    return fields


def chat_logprobs(
    served: ServedModel, asked: Asked, ids: IntArray, values: FloatArray
) -> dict[str, Any]:
    """Return `logprobs` for tokens of a chat choice, int32 and float32 `[_T]`."""
    return {
        "content": [
            {
                "token": text,
                "logprob": value,
                "bytes": None if "\ufffd" in text else list(text.encode()),
                "top_logprobs": [],
            }
            for text, value in zip(_texts(served, asked, ids), values.tolist(), strict=True)
        ],
        "refusal": None,
    }


def text_logprobs(
    served: ServedModel, asked: Asked, ids: IntArray, values: FloatArray
) -> dict[str, Any]:
    """Return `logprobs` for tokens of a text choice; no others than the sampled ones are listed."""
    return {
        "tokens": _texts(served, asked, ids),
        "token_logprobs": values.tolist(),
        "top_logprobs": None,
        "text_offset": [],
    }


def _texts(served: ServedModel, asked: Asked, ids: IntArray) -> list[str]:
    if asked.tokens_as_ids:
        return [f"token_id:{token}" for token in ids.tolist()]
    return [served.renderer.decode([token]) for token in ids.tolist()]
