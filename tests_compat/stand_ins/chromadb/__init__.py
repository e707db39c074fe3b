"""Stands in for chromadb: a collection that ranks titles by the words they share with a query."""

from __future__ import annotations

from typing import Any


class Collection:
    """Documents by id."""

    def __init__(self) -> None:
        self.documents: dict[str, str] = {}
        self.metadatas: dict[str, dict[str, Any]] = {}

    def get(self, ids: list[str]) -> dict[str, Any]:
        """Return which of the ids are known."""
        return {"ids": [name for name in ids if name in self.documents]}

    def upsert(self, ids: list[str], documents: list[str], metadatas: list[dict[str, Any]]) -> None:
        """Add or replace documents."""
        self.documents.update(zip(ids, documents, strict=True))
        self.metadatas.update(zip(ids, metadatas, strict=True))

    def query(self, query_texts: list[str], n_results: int) -> dict[str, Any]:
        """Return the ids and metadata of the documents nearest to the first query."""
        words = set(query_texts[0].lower().split())

        def distance(name: str) -> tuple[int, str]:
            return -len(words & set(self.documents[name].lower().split())), name

        ids = sorted(self.documents, key=distance)[:n_results]
        return {"ids": [ids], "metadatas": [[self.metadatas[name] for name in ids]]}


class PersistentClient:
    """Makes collections, in memory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def get_or_create_collection(self, name: str, embedding_function: Any) -> Collection:
        """Return a new collection."""
        return Collection()
