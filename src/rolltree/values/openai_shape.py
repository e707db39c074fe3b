"""Gives `ModelResponse` the attributes of the openai package's response objects.

The objects and lists are built when they are read. Only the message's fields can be assigned; any
other edit would change a copy, so it raises.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

_READ_ONLY = (
    "this part of a response was built when it was read, so an edit would be lost. Assign a field "
    "of the message (response.choices[0].message.content = ...), or work on a copy: list(...)."
)


class ResponseList(list[Any]):
    """A list in a response that refuses edits; a copy of it is a plain list."""

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(_READ_ONLY)

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)


def same_value(left: Any, right: Any) -> bool:
    """Return whether two fields of a record are equal; arrays are compared by their values."""
    if hasattr(left, "dtype") or hasattr(right, "dtype"):
        import numpy as np

        return left is not None and right is not None and np.array_equal(left, right)
    return bool(left == right)


class ResponsePart(SimpleNamespace):
    """A part of a response that reads like OpenAI's objects: attributes and `model_dump()`."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(_READ_ONLY)

    def model_dump(self, *, mode: str = "python", exclude_none: bool = False) -> dict[str, Any]:
        """Return the part as plain dicts and lists, the same in both of pydantic's modes."""
        dumped = {name: _dumped(value) for name, value in vars(self).items()}
        return without_nones(dumped) if exclude_none else dumped


def without_nones(value: Any) -> Any:
    """Return dicts without the keys whose value is None, at any depth."""
    if isinstance(value, dict):
        return {name: without_nones(item) for name, item in value.items() if item is not None}
    return [without_nones(item) for item in value] if isinstance(value, list) else value


def _dumped(value: Any) -> Any:
    if isinstance(value, list):
        return [_dumped(item) for item in value]
    return value.model_dump() if isinstance(value, ResponsePart) else value


class ResponseMessage(ResponsePart):
    """The message of a `ModelResponse`. A field that is assigned changes in the response, too.

    The sampled ids stay as they are, so the next prompt no longer continues them.
    """

    __slots__ = ("_response",)

    def __init__(self, response: Any) -> None:
        message = response.message
        calls = [
            ResponsePart(
                id=call.get("id"),
                type="function",
                function=ResponsePart(**call.get("function", {})),
            )
            for call in message.get("tool_calls") or ()
        ]
        super().__init__(
            role="assistant",
            content=message.get("content"),
            reasoning_content=message.get("reasoning_content"),
            tool_calls=ResponseList(calls) or None,
        )
        object.__setattr__(self, "_response", response)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value
        response = self._response
        object.__setattr__(response, "message", {**response.message, name: _dumped(value)})


class ResponseChoice:
    """The one choice of a `ModelResponse`, with OpenAI's attributes for chat and for text."""

    __slots__ = ("_response",)
    index = 0

    def __init__(self, response: Any) -> None:
        self._response = response

    @property
    def message(self) -> ResponseMessage:
        """The assistant message: `content`, `reasoning_content`, `tool_calls`."""
        return ResponseMessage(self._response)

    def model_dump(self, *, mode: str = "python", exclude_none: bool = False) -> dict[str, Any]:
        """Return the choice as plain dicts and lists."""
        logprobs = self.logprobs
        dumped = {
            "index": 0,
            "message": self.message.model_dump(),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "logprobs": None if logprobs is None else logprobs.model_dump(),
            "token_ids": _dumped(self.token_ids),
        }
        return without_nones(dumped) if exclude_none else dumped

    @property
    def text(self) -> str:
        """The text that was sampled."""
        return str(self._response.text)

    @property
    def finish_reason(self) -> str:
        """Why the model stopped."""
        return str(self._response.finish_reason.value)

    @property
    def token_ids(self) -> list[int] | None:
        """The sampled ids, as vLLM names them."""
        ids = self._response.completion_ids
        return None if ids is None else ResponseList(ids.tolist())

    @property
    def logprobs(self) -> ResponsePart | None:
        """Logprobs in both of OpenAI's formats: `content` for chat, `token_logprobs` for text."""
        ids, logprobs = self._response.completion_ids, self._response.logprobs
        if ids is None or logprobs is None:
            return None
        tokens = [f"token_id:{token}" for token in ids.tolist()]
        values = logprobs.tolist()
        content = [
            ResponsePart(token=token, logprob=value, bytes=None, top_logprobs=[])
            for token, value in zip(tokens, values, strict=True)
        ]
        return ResponsePart(
            content=ResponseList(content),
            tokens=ResponseList(tokens),
            token_logprobs=ResponseList(values),
        )


def dump_response(response: Any) -> dict[str, Any]:
    """Return a `ModelResponse` as a dict in OpenAI's format, with vLLM's fields for token ids."""
    choice = ResponseChoice(response)
    return {
        "id": response.id,
        "object": response.object,
        "created": response.created,
        "model": response.model,
        "choices": [choice.model_dump()],
        "usage": response.usage.model_dump(),
        "prompt_token_ids": _dumped(response.prompt_token_ids),
    }
