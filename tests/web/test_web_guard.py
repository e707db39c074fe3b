"""One guard for every server: what it refuses, what it reads, and what it needs."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from aiohttp.test_utils import make_mocked_request
from aiohttp.web import Response
from multidict import CIMultiDict

from house.texts import SRC
from rolltree.gateway.app import GatewayApp
from rolltree.gateway.serve import ServedModel, create_app
from rolltree.gateway.server import Gateway
from rolltree.insight.page.app import Guard
from rolltree.scale.cluster.control import token_guard
from rolltree.testing import ScriptedClient
from rolltree.web.guard import RequireToken, has_token, header, key_in, url_at
from rolltree.web.limits import MAX_BODY_BYTES, is_too_large

TOKEN, OWN = "a-token", "127.0.0.1:8321"
HOST, GOOD = (b"host", OWN.encode()), (b"authorization", b"Bearer a-token")


async def inside(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


def gateway():
    return GatewayApp(Gateway(ScriptedClient(lambda messages: ""), admin_key=TOKEN), [OWN])


def serve(token, admin_token=None):
    engine = SimpleNamespace(max_context=9)
    return create_app(ServedModel(engine, None, "m"), token, admin_token=admin_token)


SERVERS = {
    "serve": ("/v1/models", lambda: serve(TOKEN)),
    "serve, admin": ("/resume", lambda: serve("other", TOKEN)),
    "page": ("/api/runs", lambda: Guard(inside, TOKEN, [OWN])),
    "gateway": ("/sessions", gateway),
    "vllm": ("/collective_rpc", lambda: RequireToken(inside)),
}
"""A path that needs the token, and the server."""


async def status_of(name, *headers):
    """Return the status of the answer; no server may read the body."""
    if name == "cluster":
        given = CIMultiDict((key.decode(), value.decode("latin-1")) for key, value in headers)

        async def handle(request):
            return Response()

        answer = await token_guard(TOKEN)(make_mocked_request("GET", "/x", given), handle)
        return answer.status
    path, make = SERVERS[name]
    method = "POST" if path == "/resume" else "GET"
    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    sent = []

    async def send(message):
        sent.append(message)

    await make()(scope | {"query_string": b"", "server": ("127.0.0.1", 8321)}, None, send)
    return sent[0]["status"]


BAD = {
    "none": [],
    "empty": [b""],
    "no token": [b"Bearer"],
    "no scheme": [b"a-token"],
    "other scheme": [b"Basic a-token"],
    "shorter": [b"Bearer a-toke"],
    "longer": [b"Bearer a-token2"],
    "upper case": [b"Bearer A-TOKEN"],
    "no text": [b"Bearer \xfc"],
    "several in one": [b"Bearer a-token, Bearer a-token"],
    "a second one": [GOOD[1], b"Bearer other"],
    "second": [b"Bearer other", GOOD[1]],
    "twice": [GOOD[1], GOOD[1]],
}


@pytest.mark.parametrize("name", [*SERVERS, "cluster"])
async def test_each_server_refuses_the_same_tokens(name, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    assert await status_of(name, HOST, GOOD) == 200
    for why, values in BAD.items():
        given = [(b"authorization", value) for value in values]
        assert await status_of(name, HOST, *given) == 401, why


@pytest.mark.parametrize("name", ["page", "gateway"])
async def test_servers_that_a_browser_could_reach_refuse_the_same_hosts_and_origins(name):
    for host in (b"", b"evil.example", b"127.0.0.1", b"127.0.0.1:1", b"a@127.0.0.1:8321"):
        assert await status_of(name, (b"host", host), GOOD) == 421
    assert await status_of(name, GOOD) == 421
    assert await status_of(name, HOST, HOST, GOOD) == 421
    for origin in (b"", b"null", b"http://evil.example", b"https://127.0.0.1:8321"):
        assert await status_of(name, HOST, (b"origin", origin), GOOD) == 403
    own = (b"origin", b"http://127.0.0.1:8321")
    # A gateway has no page of its own.
    assert await status_of(name, HOST, own, GOOD) == (200 if name == "page" else 403)
    assert await status_of(name, HOST, own, own, GOOD) == 403


def test_tokens_are_compared_and_servers_configured_in_one_place():
    for text, place in (("compare_digest(", "guard.py"), ("uvicorn.Config(", "start.py")):
        files = [path for path in SRC.rglob("*.py") if text in path.read_text(encoding="utf-8")]
        assert files == [SRC / "web" / place]


def test_headers_are_read_whatever_their_case_and_a_repeated_one_is_empty():
    found = [(b"X-Api-Key", b"k"), (b"Twice", b"1"), (b"twice", b"2"), (b"odd", b"\xfc")]
    assert [header(found, name) for name in (b"x-api-key", b"twice", b"odd", b"none")] == [
        *("k", "", "\xfc", None)
    ]
    assert key_in(found) == "k"
    assert key_in([*found, (b"authorization", b"bearer  a ")]) == "a"
    assert key_in([(b"authorization", b"Basic a")]) == ""
    assert has_token([(b"Authorization", "Bearer töken".encode())], "töken")
    assert url_at("::1", 80) == "http://[::1]:80"


def test_a_declared_size_is_compared_before_the_body_is_read():
    sizes = {b"%d" % MAX_BODY_BYTES: False, b"%d" % (MAX_BODY_BYTES + 1): True, b"9" * 5000: True}
    for given, expected in (sizes | {b"": False, b"-1": False, b"\xb2": False}).items():
        assert is_too_large([(b"content-length", given)]) is expected
    assert not is_too_large([])


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("guard", "starlette uvicorn aiohttp msgspec numpy rolltree.values rolltree.scale"),
        ("limits", "starlette uvicorn aiohttp rolltree.scale"),
    ],
)
def test_the_guard_and_the_limits_need_no_web_framework(module, absent):
    code = f"import sys, rolltree.web.{module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(absent.split()) & set(run.stdout.split())
