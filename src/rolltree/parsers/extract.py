r"""Functions that pull an answer out of text: `\boxed{...}` and `#### ...`.

They know two conventions of mathematics data sets and nothing else. They leave out whether two
answers mean the same number.
"""

from __future__ import annotations


def extract_boxed_answer(text: str) -> str:
    r"""Return what the last `\boxed{...}` holds, braces balanced; without one, the text itself.

    >>> extract_boxed_answer(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return text


def extract_hash_answer(text: str) -> str | None:
    """Return what follows the last `####`, stripped; None without one (GSM8K's convention).

    >>> extract_hash_answer("12 / 4 = 3\\n#### 3")
    '3'
    """
    _, found, answer = text.rpartition("####")
    return answer.strip() if found else None
