"""vLLM's `/inference/v1/generate`: ids in, ids out, with the logprob and the version of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rolltree.gateway.calls import AgentAnswer, AgentCall, AnswerDelta, AnswerHead
from rolltree.gateway.fields import NO_EFFECT, READ, Field, each, passed, read_fields, read_part
from rolltree.gateway.openai_chat import (
    COMPLETION_FIELDS,
    CompletionWriter,
    Decode,
    answer_options,
    ids_in,
)
from rolltree.gateway.protocol import Answering, WireProtocol
from rolltree.inference.engine import TopLogprobs
from rolltree.inference.request_fields import FIELDS
from rolltree.values.types import FloatArray, IntArray
from rolltree.web.guard import RequestError

_OWN = each("model return_token_ids stream stream_options", READ)
GENERATE_FIELDS: dict[str, Field] = {
    **each(" ".join(name for name, field in FIELDS.items() if field.kind == "note"), NO_EFFECT),
    **_OWN,
    **each("token_ids sampling_params request_id", READ),
    "priority": passed(0),
}
_PARAMS = {name: field for name, field in COMPLETION_FIELDS.items() if name not in _OWN}


def read_generate(body: Mapping[str, Any], session: Answering) -> AgentCall:
    """Return the call that a body of `generate` asks for."""
    given, passed_on, _ = read_fields(body, GENERATE_FIELDS)
    name = given.get("request_id", "")
    if not isinstance(name, str):
        raise RequestError("request_id is not a string.", param="request_id")
    params, asked, _ = read_part(given.get("sampling_params", {}), _PARAMS, "sampling_params")
    logprobs = params.get("logprobs", 0)
    if logprobs not in (0, 1):
        raise RequestError("only logprobs of sampled tokens are supported. Use 0 or 1.")
    wanted = answer_options({**given, "n": params.get("n", 1)})
    only_ids = {"only_ids": True, "logprobs": logprobs is not False and "logprobs" in params}
    wanted["options"] = {**wanted["options"], **only_ids, "request_id": name[:128]}
    asked = replace(asked, extra={**asked.extra, **passed_on.extra})
    prompt = ids_in(given.get("token_ids"), session, "token_ids")
    return AgentCall(prompt, asked, message_type="completion", **wanted)


class TokenWriter(CompletionWriter):
    """Writes the answers to one request, without text."""

    def __init__(self, call: AgentCall) -> None:
        super().__init__(call)
        self._wants_prompt, self._wants_ids = self._wants_ids, True
        self._choices_have_prompts = False

    def _head(self, head: AnswerHead) -> dict[str, Any]:
        named = {"request_id": head.id}
        if self._call.stream:
            return named
        return {**named, "model": head.model, "created": head.created_s}

    def _content(self, answer: AgentAnswer) -> dict[str, Any]:
        return {}

    def _parts(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        return [{}]

    def _prompt(self, ids: IntArray | None) -> dict[str, Any]:
        return super()._prompt(ids) if self._wants_prompt else {}

    def _tokens(
        self,
        index: int,
        ids: IntArray,
        values: FloatArray,
        decode: Decode,
        top: Sequence[TopLogprobs],
    ) -> dict[str, Any]:
        listed = ids.tolist()
        if not self._wants_logprobs:
            return {"token_ids": listed}
        content = [
            {"token": f"token_id:{i}", "token_id": i, "logprob": value, "top_logprobs": []}
            for i, value in zip(listed, values.tolist(), strict=True)
        ]
        return {"token_ids": listed, "logprobs": {"content": content}}


def write_tokens(call: AgentCall, answers: Sequence[AgentAnswer]) -> dict[str, Any]:
    """Return the response body for the answers."""
    return TokenWriter(call).whole(answers)


GENERATE = WireProtocol(
    "generate",
    "/inference/v1/generate",
    GENERATE_FIELDS,
    read_generate,
    write_tokens,
    TokenWriter,
    echoes_id=True,
)
