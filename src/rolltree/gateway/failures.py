"""Failures of requests: their status, code and message, and OpenAI's form of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolltree._helpers.untrusted import shorten
from rolltree.inference.template import TemplateError
from rolltree.values.errors import (
    ConfigError,
    PromptTooLong,
    TokenError,
    UnsupportedSetting,
    message_of,
)
from rolltree.web.guard import RequestError

# Errors that the same request would raise again, so that a client must not retry it.
_CLIENT_ERRORS = (ConfigError, PromptTooLong, TokenError, UnsupportedSetting, TemplateError)
_CODES = {
    401: "invalid_api_key",
    403: "admin_key_required",
    404: "not_found",
    408: "request_timeout",
    413: "request_too_large",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer to a failed request: HTTP status, code, message and the field at fault."""

    status: int
    code: str
    message: str
    param: str | None = None


def failure_of_request(error: Exception) -> Failure:
    """Return the failure that is reported to the client for an exception."""
    status, code = 500, "internal_error"
    if isinstance(error, RequestError):
        status, code = error.status, _CODES.get(error.status, "invalid_request")
    elif isinstance(error, PromptTooLong):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, _CLIENT_ERRORS):
        status, code = 400, "invalid_request"
    # Messages quote values of the request, which can be megabytes.
    message = shorten(message_of(error), 2000)
    return Failure(status, code, message, getattr(error, "param", None))


def openai_error(failure: Failure) -> dict[str, Any]:
    """Return a failure in the format of OpenAI's servers."""
    kind = "invalid_request_error" if failure.status < 500 else "server_error"
    return {
        "error": {
            "message": failure.message,
            "type": kind,
            "param": failure.param,
            "code": failure.code,
        }
    }
