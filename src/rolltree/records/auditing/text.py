"""Text against ids: what was sampled must read as the answer, and prompts as their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rolltree.records.tokenizer import RunTokenizer
from rolltree.rollouts.message_table import MessageReader
from rolltree.tokens import TokenTree

if TYPE_CHECKING:
    from rolltree.records.auditing.rollout import _One

_REMEMBERED = 4096
_CUT = 160


class TextCheck:
    """Compares calls with their messages, by what a tokenizer decodes."""

    def __init__(self, tokenizer: RunTokenizer) -> None:
        self.tokenizer = tokenizer
        self.folder, self.end_ids = tokenizer.folder, tokenizer.end_ids
        self._known: dict[bytes, str] = {}

    def _plain(self, ids: Any) -> str:
        """Return the text of an int32 array without spaces; that of a prompt is remembered."""
        key = ids.tobytes()
        text = self._known.get(key)
        if text is None:
            text = _squeezed(self.tokenizer.decode(ids.tolist()))
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = text
        return text

    def check(
        self,
        one: _One,
        tree: TokenTree,
        steps: Sequence[Mapping[str, Any]],
        handles: Sequence[int | None],
        messages: MessageReader,
        request: Mapping[str, Any],
    ) -> None:
        """Compare every call of a rollout with its messages."""
        stop = request["sampling"].get("stop") or []
        for index, (step, handle) in enumerate(zip(steps, handles, strict=True)):
            if handle is None or (step.get("assigned") or {}).keys() & {"completion_ids"}:
                continue
            one.ledger.count("text")
            completion = messages.get(step["completion"])
            self._answer(one, tree, index, handle, completion, step.get("answer") or {}, stop)
            self._prompt(one, tree, index, handle, messages.get(step["prompt"]))

    def _answer(
        self,
        one: _One,
        tree: TokenTree,
        index: int,
        handle: int,
        completion: Any,
        answer: Mapping[str, Any],
        stop: Sequence[str],
    ) -> None:
        message = completion
        if isinstance(completion, list):
            message = completion[0] if len(completion) == 1 else {}
        content = message.get("content") if isinstance(message, Mapping) else message
        text = answer.get("text", content)
        if not isinstance(text, str):
            return
        ids = tree.completion_ids(handle)
        while len(ids) and int(ids[-1]) in self.end_ids:
            ids = ids[:-1]
        sampled = _squeezed(self.tokenizer.decode(ids.tolist()))
        said = _squeezed(text)
        cut = bool(stop) and sampled.startswith(said)
        if sampled != said and not cut and said != self._without_special(ids):
            one.find(
                *("text", "answer_differs"),
                f"call {index} sampled ids that read {_short(sampled)} and its answer says "
                f"{_short(said)}",
            )
            return
        if isinstance(message, Mapping):
            parts = [message.get("reasoning_content"), content]
            for part in parts:
                if isinstance(part, str) and _squeezed(part) not in said:
                    one.find(
                        *("text", "message_differs"),
                        f"the message of call {index} says {_short(_squeezed(part))}, which is "
                        f"not in the sampled text {_short(said)}",
                    )

    def _without_special(self, ids: Any) -> str:
        return _squeezed(self.tokenizer.decode_plain(ids.tolist()))

    def _prompt(self, one: _One, tree: TokenTree, index: int, handle: int, prompt: Any) -> None:
        shown = self._plain(tree.prompt_ids(handle))
        parts = (
            [prompt]
            if isinstance(prompt, str)
            else [
                text
                for message in prompt or ()
                if isinstance(message, Mapping)
                and message.get("role") in ("system", "user", "tool")
                for text in _texts(message.get("content"))
            ]
        )
        at = 0
        for part in parts:
            wanted = _squeezed(part)
            found = shown.find(wanted, at)
            if found < 0 and shown.find(wanted) < 0:
                one.find(
                    *("text", "prompt_differs"),
                    f"the prompt of call {index} has the message {_short(wanted)}, and the ids "
                    "that the engine was given do not say it",
                )
                return
            at = max(at, found + len(wanted)) if found >= 0 else at


def _squeezed(text: str) -> str:
    """Return a text without spaces and without what decoders put for torn characters."""
    return "".join(text.split()).replace("\ufffd", "")


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, Mapping) and "text" in part]


def _short(text: str) -> str:
    return repr(text if len(text) <= _CUT else text[: _CUT - 3] + "...")
