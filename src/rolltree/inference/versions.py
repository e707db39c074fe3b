"""The policy version of every sampled token, from the spans that a server reports.

vLLM's token-in endpoint and rolltree's own server say `{"version": "3", "start": 0, "end": 5}` for
tokens `[0, 5)`: weights may change while an answer is sampled. It knows nothing about requests.
"""

from __future__ import annotations

import numpy as np

from rolltree.errors import TokenError
from rolltree.inference.extract import first_choice, read
from rolltree.types import IntArray


def extract_versions(response: object, num_tokens: int, otherwise: int) -> IntArray:
    """Return the version of each sampled token, int32 `[_C]`.

    `otherwise` is what tokens get where the server reports no spans, or a label that is no number
    (vLLM's first weights are called "default").

    Raises:
        TokenError: the spans do not cover every token exactly once.
    """
    spans = read(first_choice(response), "weight_versions")
    versions = np.full(num_tokens, otherwise, np.int32)
    if not isinstance(spans, list | tuple):
        return versions
    at = 0
    for span in spans:
        start, end, label = (read(span, name) for name in ("start", "end", "version"))
        if start != at or not isinstance(end, int) or not at <= end <= num_tokens:
            raise TokenError(
                f"the server's spans of weight versions jump from token {at} to {start}:{end} of "
                f"{num_tokens}, so staleness would be counted wrongly. Check the server."
            )
        if isinstance(label, str) and label.isdecimal():
            versions[start:end] = int(label)
        at = end
    if at != num_tokens:
        raise TokenError(
            f"the server's spans of weight versions end at token {at} of {num_tokens}, so "
            "staleness would be counted wrongly. Check the server."
        )
    return versions
