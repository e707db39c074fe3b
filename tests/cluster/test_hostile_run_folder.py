"""A run folder that somebody else made: what its driver's files say is not obeyed."""

import itertools
import json
import os
import socket
import stat
import threading

import pytest
from click.testing import CliRunner
from driver_kit import driving

from rolltree.cli import app
from rolltree.scale.cluster.launchers import RoleProcess
from rolltree.scale.cluster.roles import RoleSpec
from rolltree.scale.cluster.state import STATE_FILE, TOKEN_FILE
from rolltree.values.errors import ClusterError

TOKEN = "t" * 43
LAUNCH = "0123456789abcdef"


def state(**changes):
    made = {
        "control": "http://127.0.0.1:1",
        "launch_id": LAUNCH,
        "driver": {"host": "here", "pid": 1},
        "roles": {},
    }
    return json.dumps({**made, **changes})


def fill(folder, of_state=None, token=TOKEN):
    for name, content in ((STATE_FILE, of_state or state()), (TOKEN_FILE, token)):
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)


def asked(folder, *words):
    """Return what the command says; it must be one line, without a traceback."""
    shown = CliRunner().invoke(app, ["cluster", words[0] if words else "status", str(folder)])
    assert shown.exit_code in (1, 2), shown.output
    assert shown.exception is None or isinstance(shown.exception, SystemExit)
    assert "Traceback" not in shown.output
    assert len(shown.output.strip().splitlines()) == 1
    assert len(shown.output) < 2000
    return shown.output


@pytest.fixture
def nothing_is_sent(monkeypatch):
    def send(*given, **named):
        pytest.fail("a request was sent")

    monkeypatch.setattr("urllib.request.OpenerDirector.open", send)


STATES = {
    "empty": b" ",
    "binary": bytes(range(256)),
    "no JSON": "{",
    "a list": "[1, 2]",
    "null": "null",
    "a number": "7",
    "nested": "[" * 100_000,
    "nested inside": '{"control": ' + '{"a":' * 100_000,
    "nested to the end": '{"x": ' + "[" * 3000 + "]" * 3000 + "}",
    "huge": state(x="y" * 2**21),
    "nothing": "{}",
    "no control": json.dumps({"launch_id": LAUNCH}),
    "a number as control": state(control=7),
    "a list as id": state(launch_id=["x"]),
    "an empty id": state(launch_id=""),
    "roles as a list": state(roles=[1]),
    "a role as text": state(roles={"worker-0": "x"}),
    "a driver as text": state(driver="me"),
    "a driver's pid as text": state(driver={"host": "h", "pid": "1"}),
    "a long host": state(driver={"host": "h" * 5000, "pid": 1}),
}
ADDRESSES = [
    *("", "x", "file:///etc/passwd", "ftp://127.0.0.1:1", "https://127.0.0.1:1"),
    *("http://", "http://127.0.0.1", "http://127.0.0.1:x", "http://127.0.0.1:99999"),
    *("http://127.0.0.1:1/path", "http://127.0.0.1:1?q", "http://127.0.0.1:1#f"),
    *("http://user@127.0.0.1:1", "http://127.0.0.1:1@192.0.2.1:80", "http://evil.example:80"),
    *("http://[::1", "http://192.0.2.1:80", "http://0x7f.1:80", "http://127.0.0.1:1\r\nX: y"),
    *("http://[2001:db8::1]:80", "http://localhost:80", "http://8.8.8.8:80"),
]


@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_no_driver_wrote_is_refused_in_one_line(tmp_path, kind):
    fill(tmp_path, STATES[kind])
    assert "does not have the state of a driver" in asked(tmp_path)


@pytest.mark.parametrize("address", ADDRESSES)
def test_the_token_is_sent_to_a_control_server_of_this_machine_only(
    tmp_path, address, nothing_is_sent
):
    fill(tmp_path, state(control=address))
    assert "nothing is sent there" in asked(tmp_path) or "is not sent there" in asked(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product((STATE_FILE, TOKEN_FILE), ("link", "folder", "pipe", "socket")),
        (TOKEN_FILE, "second name"),
    ],
)
def test_a_file_that_is_not_the_runs_own_is_not_read(tmp_path, name, kind, nothing_is_sent):
    run, secret = tmp_path / "run", tmp_path / "secret"
    run.mkdir()
    fill(run)
    secret.write_text(TOKEN if name == TOKEN_FILE else state())
    (run / name).unlink()
    make = {
        "link": lambda: (run / name).symlink_to(secret),
        "second name": lambda: os.link(secret, run / name),
        "folder": (run / name).mkdir,
        "pipe": lambda: os.mkfifo(run / name),
        "socket": lambda: os.mknod(run / name, stat.S_IFSOCK | 0o600),
    }
    make[kind]()
    assert "not a regular file" in asked(run)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "x",
        "t" * 42,
        "t" * 44,
        "é" * 43,
        "hf_abc def",
        "a" * 42 + "\n",
        b"\xff" * 43,
        "t" * 10**6,
    ],
)
def test_a_text_that_is_no_token_is_not_sent(tmp_path, token, nothing_is_sent):
    fill(tmp_path, token=token)
    assert "does not hold the token of a driver" in asked(tmp_path)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.7\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<p>Hi</p>",
        b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000,
    ],
)
def test_another_program_on_the_drivers_port_is_no_driver(tmp_path, answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply():
            connection, _ = server.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(answer)

        threading.Thread(target=reply, daemon=True).start()
        fill(tmp_path, state(control=f"http://127.0.0.1:{server.getsockname()[1]}"))
        asked(tmp_path)


def test_the_token_goes_through_no_proxy(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        fill(tmp_path)
        assert "was killed" in asked(tmp_path)
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.mark.parametrize("kind", ["link", "pipe", "second name", "dangling link"])
def test_a_log_is_written_to_a_file_of_the_run_only(tmp_path, kind):
    victim, log = tmp_path / "victim", tmp_path / "logs" / "worker-0.log"
    log.parent.mkdir()
    if kind != "dangling link":
        victim.write_text("mine")
    if kind == "pipe":
        os.mkfifo(log)
    elif kind == "second name":
        os.link(victim, log)
    else:
        log.symlink_to(victim)
    spec = RoleSpec("worker-0", ("true",), {}, 1, 0, log)
    with pytest.raises(ClusterError, match="worker-0 cannot be started"):
        RoleProcess(spec, LAUNCH, "127.0.0.1")
    assert not victim.exists() if kind == "dangling link" else victim.read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "pipe"])
async def test_notices_are_not_written_through_a_link_or_into_a_pipe(tmp_path, kind):
    victim, log = tmp_path / "victim", tmp_path / "logs" / "driver.log"
    victim.write_text("mine")
    log.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(log)
    else:
        log.symlink_to(victim)
    async with driving(tmp_path) as d:
        d.driver.notice("worker-0 is gone")
        await d.until_all()
        d.do("trainer", "0")
        await d.task
    assert victim.read_text() == "mine"


async def test_logs_are_not_written_to_a_folder_elsewhere(tmp_path):
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    run.mkdir()
    (run / "logs").symlink_to(elsewhere)
    async with driving(run) as d:
        with pytest.raises(ClusterError, match="logs is a symbolic link"):
            await d.task
    assert not list(elsewhere.iterdir())
