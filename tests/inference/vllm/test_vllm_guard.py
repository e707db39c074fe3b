"""The token of vLLM's server: every path but one needs it."""

import pytest

from rolltree.web.guard import RequireToken


async def answer(path, *headers, kind="http"):
    """Return what is sent; "in" if the server behind the guard is reached."""
    sent = []

    async def app(scope, receive, send):
        sent.append("in")

    async def send(message):
        sent.append(message.get("status", message.get("code")))

    scope = {"type": kind, "path": path, "headers": list(headers)}
    await RequireToken(app)(scope, None, send)
    return sent[0]


@pytest.mark.parametrize("path", ["/v1/models", "/collective_rpc", "/init_weight_transfer_engine"])
async def test_every_path_needs_the_token(monkeypatch, path):
    monkeypatch.setenv("VLLM_API_KEY", "the-token")
    assert await answer(path, (b"authorization", b"Bearer the-token")) == "in"
    assert await answer(path) == 401
    assert await answer(path, (b"authorization", b"Bearer the-toke")) == 401
    assert await answer(path, kind="websocket") == 1008
    assert await answer("/health") == "in"
    assert await answer("/health/../collective_rpc") == 401
