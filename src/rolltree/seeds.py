"""Seeds: everything random in a run comes from one number through a hash.

No seed depends on how many were drawn before it, so a run that is killed and resumed draws the same
ones.
"""

from __future__ import annotations

import hashlib

MAX_SEED = 2**31
"""Seeds are below it: numpy's legacy interface and several servers take at most 31 bits."""


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """Return a seed in `[0, 2**31)` that depends on every part and on their order.

    >>> derive_seed(0, "train", 3) == derive_seed(0, "train", 3)
    True
    >>> derive_seed(0, "1", 2) == derive_seed(0, 1, "2")
    False
    """
    text = repr((int(run_seed), *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % MAX_SEED
