"""What one does with stored runs: read them as tables, audit, rescore, replay and compare them.

Everything here reads through the store. Only what says so needs an environment, a model or torch.
"""

from __future__ import annotations

from rolltree.lazy import loader

__all__: list[str] = []
__getattr__ = loader(__name__, {})
