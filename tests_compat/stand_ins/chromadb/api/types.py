"""Part of the stand-in for chromadb: names for annotations."""

from typing import Any, Generic, TypeVar

T = TypeVar("T")
Embeddable = Any


class EmbeddingFunction(Generic[T]):
    """An annotation."""
