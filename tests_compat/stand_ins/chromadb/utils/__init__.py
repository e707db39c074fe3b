"""Part of the stand-in for chromadb."""

from chromadb.utils import embedding_functions

__all__ = ["embedding_functions"]
