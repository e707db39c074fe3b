"""`HOSTILE`: a table of what servers, proxies and networks do to a request, as faults by name.

With each of them, a client must get the right answer by a retry, raise a typed error, or return a
call that is not trained, all within its deadline. Pass them to `ScriptedServer(faults=...)`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rolltree.testing.faults import HttpFault

Answer: TypeAlias = dict[str, Any]
"""The JSON of a completion."""


def _spoil(change: Callable[[Answer], object], **more: Any) -> HttpFault:
    """Return a fault that sends what `change` returns, or, if that is None, the changed answer."""

    def spoil(answer: Answer) -> object:
        changed = change(answer)
        return answer if changed is None else changed

    return HttpFault(spoil=spoil, **more)


def _choice(**fields: Any) -> HttpFault:
    """Return a fault that sets fields of the first choice."""
    return _spoil(lambda answer: answer["choices"][0].update(fields))


def _without(*names: str) -> HttpFault:
    """Return a fault that leaves out fields of the first choice and of the answer."""

    def drop(answer: Answer) -> None:
        for holder in (answer, answer["choices"][0]):
            for name in names:
                holder.pop(name, None)

    return _spoil(drop)


def _broken_off(reason: object) -> HttpFault:
    """Return a fault that keeps half of the ids, as many characters, and sets `finish_reason`."""

    def spoil(answer: Answer) -> None:
        choice = answer["choices"][0]
        half = len(choice.get("token_ids") or []) // 2
        choice["finish_reason"] = reason
        for holder, name in ((choice, "text"), (choice.get("message"), "content")):
            if holder and name in holder:
                holder[name] = holder[name][:half]
        _keep(choice, choice.get("token_ids", [])[:half])
        answer["usage"] = {}

    return _spoil(spoil)


def _keep(choice: dict[str, Any], ids: list[int]) -> None:
    """Set the sampled ids, and a logprob for each, if the choice has them."""
    if "token_ids" in choice:
        choice["token_ids"] = ids
    logprobs = choice.get("logprobs") or {}
    for name in logprobs:
        entry = {"token_logprobs": -1.0, "tokens": "x"}.get(name, {"token": "x", "logprob": -1.0})
        logprobs[name] = [entry] * len(ids)


def _sampled(change: Callable[[list[int]], list[Any]]) -> HttpFault:
    """Return a fault that changes the sampled ids, with as many logprobs."""

    def spoil(answer: Answer) -> None:
        choice = answer["choices"][0]
        _keep(choice, change(choice.get("token_ids") or []))

    return _spoil(spoil)


def _prompt(change: Callable[[list[int]], list[Any]]) -> HttpFault:
    """Return a fault that changes the prompt's ids, if the answer has them."""

    def spoil(answer: Answer) -> None:
        for holder in (answer, answer["choices"][0]):
            if "prompt_token_ids" in holder:
                holder["prompt_token_ids"] = change(holder["prompt_token_ids"])

    return _spoil(spoil)


def _logprobs(change: Callable[[list[Any]], list[Any]]) -> HttpFault:
    """Return a fault that changes the list of logprobs."""

    def spoil(answer: Answer) -> None:
        logprobs = answer["choices"][0].get("logprobs") or {}
        if "token_logprobs" in logprobs:
            logprobs["token_logprobs"] = change(logprobs["token_logprobs"])
        if "content" in logprobs:
            values = change([entry["logprob"] for entry in logprobs["content"]])
            logprobs["content"] = [{"token": "x", "logprob": value} for value in values]

    return _spoil(spoil)


def _text(text: str) -> HttpFault:
    """Return a fault that changes the text, but not the ids."""

    def spoil(answer: Answer) -> None:
        choice = answer["choices"][0]
        if "message" in choice:
            choice["message"]["content"] = text
        else:
            choice["text"] = text

    return _spoil(spoil)


def _count(answer: Answer) -> None:
    answer["usage"] = {"prompt_tokens": 10**30, "completion_tokens": -1}


def _nested(answer: Answer) -> bytes:
    deep = "[" * 200_000 + "]" * 200_000
    return f'{{"note": {deep}, {json.dumps(answer)[1:]}'.encode()


def _swap(answer: Answer) -> None:
    """Exchange the first two sampled ids; text and logprobs stay."""
    choice = answer["choices"][0]
    if "token_ids" in choice:
        choice["token_ids"][:2] = choice["token_ids"][1::-1]


def _huge_id(answer: Answer) -> bytes:
    body = json.dumps(answer).encode()
    return body.replace(b'"token_ids": [', b'"token_ids": [%b, ' % (b"9" * 5000))


def _bomb(answer: Answer) -> bytes:
    """Return 64 KiB that unpack to 64 MiB."""
    packed = gzip.compress(b" " * 2**26)
    return packed + gzip.compress(json.dumps(answer).encode())


_GZIP = {"Content-Encoding": "gzip"}
_HTML = {"Content-Type": "text/html; charset=no-such-charset"}
_EVER_S = 3600.0

HOSTILE: Mapping[str, HttpFault] = {
    # No answer, or not in time
    "gone": HttpFault(gone=True),
    "reset": HttpFault(reset=True),
    "reset in the body": HttpFault(body="truncated"),
    "silent": HttpFault(delay_s=_EVER_S),
    "stalls in the body": HttpFault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"),
    "dripping": HttpFault(drip_s=0.05),
    "late": HttpFault(delay_s=1.0),
    # Not HTTP, or not this request's
    "no HTTP": HttpFault(raw=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n"),
    "endless header": HttpFault(raw=b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**20),
    "answers twice": HttpFault(num_copies=2),
    "answers twice, later": HttpFault(num_copies=2, gap_s=0.02),
    "redirects": HttpFault(status=307, headers={"Location": "http://127.0.0.1:9/"}),
    # Errors by status
    "status 400": HttpFault(status=400, message="Unrecognized argument: return_token_ids"),
    "status 413": HttpFault(status=413, message="request entity too large"),
    "status 429": HttpFault(status=429, retry_after_s=0.05),
    "status 500": HttpFault(status=500),
    "status 503 for an hour": HttpFault(status=503, retry_after_s=3600.0),
    "status 503 with a bad date": HttpFault(status=503, headers={"Retry-After": "nan"}),
    # Bodies that cannot be read
    "HTML": HttpFault(spoil=lambda _: b"<html>Bad gateway</html>", headers=_HTML),
    "empty body": HttpFault(spoil=lambda _: b""),
    "broken JSON": HttpFault(body="broken"),
    "deep JSON": HttpFault(spoil=_nested),
    "no gzip": HttpFault(headers=_GZIP),
    "gzip bomb": HttpFault(spoil=_bomb, headers=_GZIP),
    "lone surrogate": _text("half of \ud83d"),
    "wrong types": _spoil(lambda answer: {**answer, "choices": {"0": answer["choices"][0]}}),
    # Answers without an answer
    "no choices": _spoil(lambda answer: {**answer, "choices": []}),
    "no message": _without("message", "text", "token_ids", "logprobs"),
    "an error with status 200": _spoil(lambda _: {"error": {"message": "out of memory"}}),
    "finish_reason null": _broken_off(None),
    "finish_reason abort": _broken_off("abort"),
    "finish_reason unknown": _broken_off("insufficient_system_resource"),
    "counts that no model has": _spoil(_count),
    # Tokens that contradict themselves
    "id of no vocabulary": _sampled(lambda ids: [*ids[:-1], 2**31 - 1]),
    "id of 2^31": _sampled(lambda ids: [*ids[:-1], 2**31]),
    "id of 2^63": _sampled(lambda ids: [*ids[:-1], 2**63]),
    "negative id": _sampled(lambda ids: [*ids[:-1], -1]),
    "no sampled ids": _sampled(lambda _: []),
    "5,000 sampled ids": _sampled(lambda _: [7] * 5000),
    "id of 5,000 digits": _spoil(_huge_id),
    "choice 1 of 1": _choice(index=1),
    "one id too few": _spoil(
        lambda answer: answer["choices"][0].update(
            token_ids=answer["choices"][0].get("token_ids", [0])[:-1]
        )
    ),
    "no prompt ids": _prompt(lambda _: []),
    "prompt id of 2^63": _prompt(lambda ids: [*ids[:-1], 2**63]),
    "another prompt": _prompt(lambda ids: [1, *ids]),
    "one logprob too few": _logprobs(lambda values: values[:-1]),
    "one logprob too many": _logprobs(lambda values: [*values, -1.0]),
    "logprobs of NaN": _logprobs(lambda values: [float("nan")] * len(values)),
    "placeholder logprobs": _logprobs(lambda values: [-9999.0] * len(values)),
    "version of 2^63": _choice(weight_versions=[{"version": str(2**63), "start": 0, "end": 1}]),
    # Wrong tokens that only a tokenizer, or a comparison with the ids that were sent, can detect
    "another prompt of the same length": _prompt(lambda ids: ids[::-1]),
    "swapped ids": _spoil(_swap),
    # Missing tokens, so that the call is not trained
    "no ids": _without("token_ids", "prompt_token_ids", "logprobs"),
    "no logprobs": _without("logprobs"),
}
"""Faults of one request, by name."""
