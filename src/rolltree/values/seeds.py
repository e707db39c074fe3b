"""Seeds: everything random in a run comes from one number through a hash.

No seed depends on how many were drawn before it, so a run that is killed and resumed draws the same
seeds.
"""

from __future__ import annotations

import hashlib

MAX_SEED = 2**31
"""All seeds are smaller: numpy's legacy interface and several servers take at most 31 bits."""


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """Return a seed in `[0, 2**31)` that depends on every part and on their order.

    >>> derive_seed(0, "train", 3) == derive_seed(0, "train", 3)
    True
    >>> derive_seed(0, "1", 2) == derive_seed(0, 1, "2")
    False
    """
    text = repr((int(run_seed), *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % MAX_SEED


def asked_seed(own: int, asked: int) -> int:
    """Return the seed of a call whose agent asks for the seed `asked`, in a rollout with its `own`.

    An agent that always asks for the same seed must not make the rollouts of a group equal.
    """
    return derive_seed(own, "asked", asked)


class CallSeeds:
    """The seeds of one rollout's model calls, handed out as the calls are made.

    Call 0 has the rollout's seed, and call i a seed derived from it. Calls are numbered in the
    order in which they are made, so concurrent calls get the same seeds again if they are started
    in the same order (`asyncio.gather` does). A seed that was set for one call is kept, and that
    call is not numbered.

    Args:
        seed: the rollout's seed.
        also: other seeds that stand for the whole rollout: a call with one of them counts as a call
            without its own seed.
    """

    __slots__ = ("_num_calls", "_of_rollout", "seed")

    def __init__(self, seed: int, *also: int | None) -> None:
        self.seed = seed
        self._of_rollout = {None, seed, *also}
        self._num_calls = 0

    def next(self, asked: int | None) -> int:
        """Return the seed of the next call, whose request has the seed `asked`."""
        if asked is not None and asked not in self._of_rollout:
            return asked
        number = self._num_calls
        self._num_calls += 1
        return derive_seed(self.seed, "turn", number) if number else self.seed
