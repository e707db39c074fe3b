"""Who is answered: this machine's browser with the link's token, and nobody else."""

import contextlib
import os
import re
import signal
import socket
import stat
from pathlib import Path
from urllib.request import url2pathname

import httpx
import pytest

from rolltree.insight.page.app import HEADERS, create_viewer_app


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


async def asked(app, given, query="", **headers):
    named = {"Host": "127.0.0.1:1", **headers}
    if given:
        named["Authorization"] = f"Bearer {given}"
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:1"
    ) as client:
        return (await client.get(f"/api/token{query}", headers=named)).status_code


async def test_the_file_is_removed_when_the_page_that_it_leads_to_has_the_token(tmp_path):
    file = tmp_path / "redirect.html"
    file.touch()
    app = create_viewer_app(tmp_path, "the token", ["127.0.0.1:1"], redirect=file)
    used = "?from=file"
    assert await asked(app, "", used) == 401
    assert await asked(app, "another", used) == 401
    assert await asked(app, "the token", used, Origin="http://evil.example") == 403
    assert await asked(app, "the token", used, Host="evil.example") == 421
    assert await asked(app, "the token", used, **{"Sec-Fetch-Site": "cross-site"}) == 403
    assert file.is_file()
    # The printed link, in a browser that was faster.
    assert await asked(app, "the token", "?from=token") == 200
    assert file.is_file()
    assert await asked(app, "the token", used) == 200
    assert not file.exists()
    assert await asked(app, "the token", used) == 200  # the tab was reloaded meanwhile


async def test_a_token_is_checked_without_a_file_too(tmp_path):
    app = create_viewer_app(tmp_path, "the token", ["127.0.0.1:1"])
    for given, status in (("the token", 200), ("another", 401), ("", 401), ("None", 401)):
        assert await asked(app, given, "?from=file") == status


@pytest.mark.parametrize("runtime", ["runtime", "missing", ""])
def test_the_browser_that_is_opened_gets_a_private_file_and_not_the_token(
    opening, tmp_path, runtime
):
    folders = [tmp_path / "runtime", tmp_path / "temporary"]
    for folder in folders:
        folder.mkdir()
    variables = {"XDG_RUNTIME_DIR": runtime and str(tmp_path / runtime), "TMPDIR": str(folders[1])}
    with opening(**variables) as (_, link, given):
        base, _, token = link.partition("#token=")
        assert token not in given
        file = Path(url2pathname(given.removeprefix("file://")))
        assert file.parent == folders[0 if runtime == "runtime" else 1]
        status = file.lstat()
        assert stat.S_ISREG(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.getuid()
        assert f"url={base}#file={token}" in file.read_text()
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{base}api/token?from=file", headers=headers).status_code == 200
        assert not file.exists()
        assert httpx.get(f"{base}api/runs", headers=headers).status_code == 200  # the link, later


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_the_file_that_no_browser_used_is_removed_when_the_server_ends(opening, tmp_path, by):
    with opening(XDG_RUNTIME_DIR=str(tmp_path / "runs")) as (process, _, _):
        assert len(list((tmp_path / "runs").iterdir())) == 1
        process.send_signal(by)
        process.wait(timeout=60)
        assert list((tmp_path / "runs").iterdir()) == []
