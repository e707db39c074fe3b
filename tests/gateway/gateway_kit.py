"""What tests of the gateway share: agents of the official packages, and tools."""

from __future__ import annotations

import asyncio

import openai

from rolltree.inference.client_base import DelegatingClient

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def openai_agent(session, **options):
    # On a busy machine a hundred connections take longer than the client waits by default.
    options = {"api_key": session.api_key, "max_retries": 0, "timeout": 300.0, **options}
    return openai.AsyncOpenAI(base_url=session.base_url, **options)


def calling(name, arguments):
    """Return what a scripted model says to call a tool."""
    function = {"name": name, "arguments": arguments}
    return {"content": "", "tool_calls": [{"function": function}]}


def is_one_path(session):
    """Whether every call continues the one before: the tree has no token twice."""
    tree = session.trajectory.tree
    return session.breaks == () and tree.num_tokens == tree.path_len(tree.num_calls - 1)


def paths(session):
    """Return the ids of every call, prompt and completion."""
    tree = session.trajectory.tree
    return [tree.path_view(call).tolist() for call in range(tree.num_calls)]


class Lingering(DelegatingClient):
    """A client whose calls need a while to end after they were cancelled."""

    def __init__(self, client):
        super().__init__(client)
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def call(self, call):
        try:
            self.has_begun.set()
            return await asyncio.Event().wait()
        finally:
            await self.may_end.wait()
