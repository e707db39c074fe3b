"""Requests that cannot be answered: what went wrong, as OpenAI's error object.

It knows which of rolltree's errors is whose fault. It knows nothing about HTTP servers.
"""

from __future__ import annotations

from typing import Any

from rolltree.errors import ConfigError, PromptTooLong, TokenError, UnsupportedSetting
from rolltree.inference.template import TemplateError

CALLERS_FAULT = (ConfigError, PromptTooLong, TokenError, UnsupportedSetting, TemplateError)
"""Errors that the same request would meet again."""


class RequestError(Exception):
    """The request is answered with `status` and `message`; `param` names the field at fault."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and the body that say what happened."""
    status, code = 500, "internal_error"
    if isinstance(error, RequestError):
        status, code = error.status, _CODES.get(error.status, "invalid_request")
    elif isinstance(error, PromptTooLong):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, CALLERS_FAULT):
        status, code = 400, "invalid_request"
    kind = "invalid_request_error" if status < 500 else "server_error"
    content = {
        "message": str(error),
        "type": kind,
        "param": getattr(error, "param", None),
        "code": code,
    }
    return status, {"error": content}


_CODES = {401: "invalid_api_key", 404: "not_found", 413: "request_too_large"}
