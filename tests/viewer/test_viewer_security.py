"""Who is answered: this machine's browser with the link's token, and nobody else."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time

import httpx
import pytest

from rolltree.viewer.app import HEADERS, create_viewer_app, user_of


def raw(page, request):
    """Send bytes; return the status of the answer."""
    host, _, port = page.base.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request)
        return int(connection.recv(4096).split()[1])


def test_the_link_is_of_this_machine_and_keeps_its_token_behind_the_hash(page):
    assert page.link.startswith("http://127.0.0.1:")
    assert len(page.token) >= 32
    port = int(page.base.rpartition(":")[2])
    with pytest.raises(OSError), socket.create_connection(("::1", port), timeout=5):
        pass


def test_data_needs_the_token_and_the_page_itself_does_not(page):
    assert page.get("/api/runs").status_code == 200
    assert page.get("/api/runs", token="").status_code == 401
    assert page.get("/api/runs", token=page.token[:-1]).status_code == 401
    own = page.base.removeprefix("http://").encode()
    odd = b"GET /api/runs HTTP/1.1\r\nHost: " + own + b"\r\nAuthorization: Bearer \xfc\r\n\r\n"
    assert raw(page, odd) == 401
    assert page.get(f"/api/runs?token={page.token}", token="").status_code == 401
    assert page.get("/api/nothing", token="").status_code == 401
    assert page.get("/", token="").status_code == 200
    assert "error" in page.get("/api/runs", token="").json()


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1", "127.0.0.1:1", "localhost", "evil.example:80", ""),
        *("own.", "own,evil.example", "[::1]:PORT", "LOCALHOST.:PORT", "0.0.0.0:PORT", "a@own"),
        *("2130706433:PORT", "127.1:PORT", "localtest.me:PORT", "127.0.0.1:0PORT"),
    ],
)
def test_a_foreign_host_is_refused_everywhere(page, host):
    own = page.base.removeprefix("http://")
    host = host.replace("own", own).replace("PORT", own.partition(":")[2])
    for path in ("/", "/static/api.js", "/api/runs", "/api/token", "/nothing"):
        assert page.get(path, Host=host).status_code == 421


def test_the_address_may_be_called_localhost(page):
    port = page.base.rpartition(":")[2]
    assert page.get("/api/runs", Host=f"localhost:{port}").status_code == 200


def test_two_hosts_and_none_are_refused(page):
    own = page.base.removeprefix("http://").encode()
    one = b"Host: " + own + b"\r\n"
    assert raw(page, b"GET / HTTP/1.1\r\n" + one + b"Connection: close\r\n\r\n") == 200
    two = b"GET / HTTP/1.1\r\n" + one + b"Host: evil.example\r\nConnection: close\r\n\r\n"
    assert raw(page, two) in (400, 421)
    assert raw(page, b"GET / HTTP/1.0\r\n\r\n") == 421
    same = b"GET / HTTP/1.1\r\n" + one + one + b"Connection: close\r\n\r\n"
    assert raw(page, same) in (400, 421)
    absolute = b"GET http://evil.example/api/runs HTTP/1.1\r\n" + one + b"\r\n"
    assert raw(page, absolute) in (400, 401, 404, 421)


def test_two_origins_are_refused(page):
    own = page.base.removeprefix("http://").encode()
    for origins in ((own, b"evil.example"), (b"evil.example", own), (own, own)):
        lines = b"".join(b"Origin: http://" + each + b"\r\n" for each in origins)
        request = b"GET / HTTP/1.1\r\nHost: " + own + b"\r\n" + lines + b"\r\n"
        assert raw(page, request) == 403


def test_a_proxy_says_nothing_that_is_believed(page):
    forged = {"X_Forwarded_For": "10.0.0.1", "X_Forwarded_Proto": "https", "Forwarded": "for=x"}
    assert page.get("/api/runs", **forged).status_code == 200
    assert page.get("/", X_Forwarded_Host=page.base, Host="evil.example").status_code == 421
    answer = page.get("/static/main.js/", **forged)
    assert (answer.status_code, "location" in answer.headers) == (404, False)


def test_a_part_of_a_file_is_the_whole_file(page):
    whole = page.get("/static/main.js")
    for asked_for in ("bytes=0-1", "bytes=" + ",".join(f"{at}-{at}" for at in range(2000))):
        answer = page.get("/static/main.js", Range=asked_for, If_None_Match="*")
        assert (answer.status_code, answer.content) == (200, whole.content)


def test_a_link_that_is_far_too_long_is_refused_and_the_server_goes_on(page):
    for size in (10_000, 100_000, 2_000_000):
        own = page.base.removeprefix("http://").encode()
        request = b"GET /" + b"a" * size + b" HTTP/1.1\r\nHost: " + own + b"\r\n\r\n"
        with contextlib.suppress(ConnectionError, IndexError):  # it may hang up
            assert raw(page, request) in (400, 404, 414, 431)
    assert page.get("/api/runs").status_code == 200


def test_a_thousand_connections_at_once_leave_the_server_standing(page):
    host, _, port = page.base.removeprefix("http://").partition(":")
    own = f"{host}:{port}".encode()
    open_ones = []
    try:
        for _ in range(1000):
            made = socket.create_connection((host, int(port)), timeout=30)
            open_ones.append(made)
            made.sendall(b"GET /api/runs HTTP/1.1\r\nHost: " + own + b"\r\n")  # and no more
        assert page.get("/").status_code == 200
    finally:
        for made in open_ones:
            made.close()
    assert page.get("/api/runs").status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "own+s"])
def test_a_foreign_origin_is_refused(page, origin):
    origin = page.base.replace("http://", "https://") if origin == "own+s" else origin
    answer = page.get("/api/runs", Origin=origin)
    assert answer.status_code == 403
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_the_own_origin_is_answered(page):
    assert page.get("/api/runs", Origin=page.base).status_code == 200


def test_what_the_browser_says_came_from_elsewhere_is_refused(page):
    for site, status in (("same-origin", 200), ("none", 200), ("same-site", 403), ("x", 403)):
        assert page.get("/api/runs", Sec_Fetch_Site=site).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading_is_served(page, method):
    headers = {"Authorization": f"Bearer {page.token}"}
    answer = httpx.request(method, page.base + "/api/runs", headers=headers)
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_every_answer_has_the_headers(page):
    answers = [
        page.get("/"),
        page.get("/static/api.js"),
        page.get("/api/runs"),
        page.get("/api/runs", token=""),
        page.get("/nothing"),
        page.get("/", Host="evil.example"),
        page.get("/api/runs/none"),
    ]
    for answer in answers:
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        assert "server" not in answer.headers
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


def test_the_page_has_no_inline_script_or_style(page):
    text = page.get("/").text
    assert "<style" not in text
    assert " style=" not in text
    assert not re.search(r"<[^>]*\son\w+=", text)
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", text, re.DOTALL)
    assert scripts
    assert all("src=" in attributes and not body for attributes, body in scripts)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../api.py",
        "/static/..%2fapi.py",
        "/static/%2e%2e%2fapi.py",
        "/static/..%5capi.py",
        "/static/%2fetc%2fpasswd",
        "/static/",
        "/static/main.js%00.css",
        "/static//etc/passwd",
        "/static/%252e%252e%252fapi.py",
        "/static/..%255capi.py",
        "/static/..\\api.py",
        "//etc/passwd",
        "/static/main.js/",
        "/static/" + "a" * 5000 + ".js",
    ],
)
def test_only_the_pages_own_files_are_served(page, path):
    own = page.base.removeprefix("http://").encode()
    request = b"GET " + path.encode() + b" HTTP/1.1\r\nHost: " + own + b"\r\n\r\n"
    assert raw(page, request) == 404


@pytest.mark.parametrize(
    "name", ["..", ".", "", "..%2fruns%2ftrain", "%2fetc", "deep", "deep%2f..%2ftrain", "a%00b"]
)
def test_only_runs_below_the_folder_are_served(page, name):
    own = page.base.removeprefix("http://")
    head = f"GET /api/runs/{name} HTTP/1.1", f"Host: {own}", f"Authorization: Bearer {page.token}"
    request = "\r\n".join([*head, "", ""])
    assert raw(page, request.encode()) == 404


def test_the_store_is_not_written(page, runs):
    before = {file: file.stat().st_mtime_ns for file in runs.rglob("run.db")}
    for path in ("/api/runs", "/api/runs/train", "/api/runs/train/rollouts?sort=-reward"):
        assert page.get(path).status_code == 200
    assert {file: file.stat().st_mtime_ns for file in runs.rglob("run.db")} == before


async def asked(app, code, **headers):
    given = {"Host": "127.0.0.1:1", "X-Code": code, **headers}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:1"
    ) as client:
        return await client.get("/api/token", headers=given)


async def test_a_code_gives_the_token_once_and_to_the_page_only(tmp_path):
    app = create_viewer_app(tmp_path, "the token", ["127.0.0.1:1"], code="the code")
    assert (await asked(app, "")).status_code == 401
    assert (await asked(app, "another")).status_code == 401
    assert (await asked(app, "the code", Origin="http://evil.example")).status_code == 403
    assert (await asked(app, "the code", Host="evil.example")).status_code == 421
    assert (await asked(app, "the code")).json() == {"token": "the token"}
    assert (await asked(app, "the code")).status_code == 401


async def test_another_users_program_does_not_get_the_token_for_the_code(tmp_path, monkeypatch):
    app = create_viewer_app(tmp_path, "the token", ["127.0.0.1:1"], code="the code")
    monkeypatch.setattr("rolltree.viewer.app.user_of", lambda *_: os.getuid() + 1)
    assert (await asked(app, "the code")).status_code == 401
    monkeypatch.setattr("rolltree.viewer.app.user_of", lambda *_: os.getuid())
    assert (await asked(app, "the code")).json() == {"token": "the token"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_is_known_to_be_its_users(family):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
        port = server.getsockname()[1]
        client.connect(("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1", port))
        assert user_of("127.0.0.1", client.getsockname()[1], port) == os.getuid()
        assert user_of("127.0.0.2", client.getsockname()[1], port) is None
        assert user_of("127.0.0.1", 1, port) is None


async def test_who_has_the_token_is_told_so_and_keeps_the_code(tmp_path):
    app = create_viewer_app(tmp_path, "the token", ["127.0.0.1:1"], code="the code")
    for given, status in (("the token", 200), ("another", 401), ("", 401)):
        assert (await asked(app, "", Authorization=f"Bearer {given}")).status_code == status
    assert (await asked(app, "the code")).status_code == 200


async def test_without_a_browser_there_is_no_code(page, tmp_path):
    assert page.get("/api/token", token="").status_code == 401
    app = create_viewer_app(tmp_path, "the token", ["127.0.0.1:1"])
    assert (await asked(app, "")).status_code == 401
    assert (await asked(app, "None")).status_code == 401


def test_the_browser_that_is_opened_gets_a_code_and_not_the_token(tmp_path):
    """A browser that asks for the token with what it was given, then for the runs."""
    program = tmp_path / "browser"
    program.write_text(
        f"#!{sys.executable}\nimport sys, pathlib\n"
        f"pathlib.Path({str(tmp_path / 'given')!r}).write_text(sys.argv[1])\n"
    )
    program.chmod(0o755)
    command = [sys.executable, "-m", "rolltree", "view", str(tmp_path)]
    environment = {**os.environ, "BROWSER": f"{program} %s"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            link = process.stdout.readline().strip()
            deadline = time.monotonic() + 60
            while not (tmp_path / "given").is_file() or not (tmp_path / "given").read_text():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            base, _, code = (tmp_path / "given").read_text().partition("#code=")
            token = link.partition("#token=")[2]
            assert code
            assert token not in base + code
            answer = httpx.get(f"{base}api/token", headers={"X-Code": code})
            assert answer.json() == {"token": token}
        finally:
            process.terminate()
