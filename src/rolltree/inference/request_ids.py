"""Names of requests, sent as `X-Request-Id`, and the check that an answer fits its request.

HTTP/1.1 pairs answers with requests only by their order: if a server or a proxy answers a request
twice, all later answers on that connection are wrong. vLLM and `ScriptedServer` put the name into
the answer's id, which proves which request was answered; other servers ignore it.
"""

from __future__ import annotations

import itertools
import secrets
from typing import AnyStr

from rolltree.values.errors import BadResponse

HEADER = "X-Request-Id"
_END = 512
"""Servers write the id near an end of the body; a full search costs a tenth of decoding it."""


class RequestIds:
    """Makes unique names for one client's requests."""

    def __init__(self) -> None:
        # Random, so that names from other clients of the same proxy are not taken for ours.
        self._stem = f"rolltree-{secrets.token_hex(8)}-"
        self._stem_bytes = self._stem.encode()
        self._numbers = itertools.count()

    def new(self) -> str:
        """Return the name of a new request."""
        return f"{self._stem}{next(self._numbers):08x}"

    def check(self, name: str, answer: AnyStr) -> None:
        """Reject an answer (its body, or its id) that names a request other than `name`.

        Raises:
            BadResponse: it names a different request.
        """
        own = name
        if isinstance(answer, str):
            found = answer.find(self._stem)
        else:
            found = answer.find(self._stem_bytes, 0, _END)
            if found < 0:
                found = answer.find(self._stem_bytes, -_END)
        # Servers need not repeat the name.
        if found < 0:
            return
        named = answer[found : found + len(own)]
        text = named if isinstance(named, str) else named.decode("ascii", "replace")
        if text != own:
            raise BadResponse(
                f"the server was sent request {own} and answered {text}, so this is not its "
                "answer. Is there a proxy that mixes up answers, or sends them twice?"
            )
