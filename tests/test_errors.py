"""The exception tree is what its docstring draws, and failures become data with a traceback."""

import asyncio
import socket
import sys
from email.message import Message
from multiprocessing.connection import Client
from urllib.error import HTTPError, URLError

import pytest

from rolltree._helpers import lazy
from rolltree.values import errors
from rolltree.values.errors import (
    ConfigError,
    RolloutTimeout,
    ServerError,
    did_you_mean,
    import_extra,
    record_error,
)


def test_every_exception_of_the_module_is_in_the_drawing_and_under_the_root():
    assert errors.__doc__ is not None
    own = [v for v in vars(errors).values() if getattr(v, "__module__", "") == errors.__name__]
    classes = [value for value in own if isinstance(value, type)]
    assert len(classes) > 10
    for value in classes:
        assert issubclass(value, errors.RolltreeError)
        assert value.__name__ in errors.__doc__


def test_rolltree_errors_are_the_builtin_kind_a_caller_expects():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(errors.TokenError, ValueError)
    assert issubclass(errors.UnknownName, LookupError)
    assert issubclass(RolloutTimeout, TimeoutError)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("tempreature", ["temperature", "top_p"], " Did you mean 'temperature'?"),
        ("zzz", ["b", "a"], " Known: a, b."),
        ("zzz", [], " None are known."),
    ],
)
def test_did_you_mean(name, known, expected):
    assert did_you_mean(name, known) == expected


def test_a_package_that_is_missing_is_to_be_installed():
    with pytest.raises(ConfigError) as caught:
        import_extra("no_such_package", "playing 'x'", "rolltree[worlds]", ", or play 'y'")
    assert str(caught.value) == (
        "playing 'x' needs the package no-such-package, which is not installed. Install it: "
        "pip install 'rolltree[worlds]', or play 'y'."
    )


def test_a_package_that_cannot_be_imported_is_not_said_to_be_missing(tmp_path, monkeypatch):
    """As peft 0.17 beside transformers 5, which no longer has a class that it imports."""
    (tmp_path / "old_peft").mkdir()
    (tmp_path / "old_peft" / "__init__.py").write_text("from json import HybridCache\n")
    (tmp_path / "old_peft-0.17.dist-info").mkdir()
    (tmp_path / "old_peft-0.17.dist-info" / "METADATA").write_text(
        "Name: old-peft\nVersion: 0.17\n"
    )
    (tmp_path / "old_peft-0.17.dist-info" / "top_level.txt").write_text("old_peft\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        import_extra("old_peft", "model.lora_rank", "rolltree[train]")
    said = str(caught.value)
    assert "old-peft 0.17 is installed, but cannot be imported (cannot import name 'Hybrid" in said
    assert "pip install --upgrade old-peft 'rolltree[train]'" in said
    assert "not installed" not in said
    # The same for names that are loaded on first use.
    monkeypatch.setitem(lazy.EXTRAS, "old_peft", "rolltree[train]")
    (tmp_path / "a_room").mkdir()
    (tmp_path / "a_room" / "__init__.py").write_text("")
    text = "raise ImportError('as Python says it', name='old_peft')\n"
    (tmp_path / "a_room" / "adapters.py").write_text(text)
    with pytest.raises(ImportError, match=r"a_room.LoRA needs .* old-peft 0.17 is installed"):
        lazy.loader("a_room", {"adapters": "LoRA"})("LoRA")


def test_record_error_keeps_type_message_traceback_and_phase():
    with pytest.raises(ServerError) as caught:
        raise ServerError("the server answered 503", status=503, retryable=True)
    assert caught.value.status == 503
    assert caught.value.retryable
    record = record_error(caught.value, "model")
    assert record.type == "ServerError"
    assert record.message == "the server answered 503"
    assert "test_record_error_keeps" in record.traceback
    assert record.as_dict() == {
        "type": "ServerError",
        "message": "the server answered 503",
        "traceback": record.traceback,
        "phase": "model",
        "kind": "infrastructure",
    }


class TestKinds:
    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (errors.CallTimeout("late"), "infrastructure"),
            (errors.BadResponse("no choices"), "infrastructure"),
            (ServerError("it broke", status=500, retryable=False), "infrastructure"),
            (ServerError("too many", status=429, retryable=True), "infrastructure"),
            (ServerError("wrong key", status=401, retryable=False), "infrastructure"),
            (ServerError("no such field", status=400, retryable=False), "episode"),
            (errors.AnswerTooLarge("1 GB"), "episode"),
            (errors.SandboxError("closed"), "infrastructure"),
            (errors.SandboxFileError("a link"), "episode"),
            (errors.SandboxUnavailable("no bubblewrap"), "machine"),
            (type("Ours", (errors.WorldUnavailable,), {})("gone"), "infrastructure"),
            (type("ServerError", (Exception,), {})("the author's"), "episode"),
            (type("APIConnectionError", (Exception,), {})("the author's"), "episode"),
        ],
    )
    def test_a_kind_belongs_to_the_exception_and_not_to_its_name(self, error, kind):
        assert record_error(error, "environment").kind == kind

    def test_failures_of_the_openai_package_are_of_its_servers(self):
        openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
        request = httpx.Request("POST", "http://judge")
        refused = openai.BadRequestError(
            "no", response=httpx.Response(400, request=request), body=None
        )
        assert errors.error_kind(openai.APITimeoutError(request)) == "infrastructure"
        assert errors.error_kind(refused) == "episode"

    def test_an_address_that_is_none_needs_no_network(self):
        httpx = pytest.importorskip("httpx")
        assert errors.error_kind(httpx.UnsupportedProtocol("no http://")) == "episode"
        assert errors.error_kind(httpx.ConnectError("refused")) == "machine"

    @pytest.mark.parametrize(
        ("stored", "kind"),
        [
            ({"type": "ServerError"}, "infrastructure"),
            ({"type": "ValueError"}, "episode"),
            ({"type": "ServerError", "kind": "episode"}, "episode"),
            ({"type": "Oops", "kind": "infrastructure"}, "infrastructure"),
        ],
    )
    def test_a_failure_that_was_stored_without_a_kind_has_that_of_its_type(self, stored, kind):
        assert errors.stored_kind(stored) == kind


def test_urllibs_error_is_of_the_kind_of_its_reason():
    assert errors.error_kind(URLError(ConnectionRefusedError())) == "machine"
    assert errors.error_kind(URLError("unknown url type: x")) == "episode"
    assert errors.error_kind(HTTPError("http://x", 404, "gone", Message(), None)) == "episode"


async def test_a_pipe_to_a_process_of_this_machine_is_no_network(tmp_path):
    address = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(address)  # nobody listens
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import os; os.close(0)"), stdin=asyncio.subprocess.PIPE
    )
    await process.wait()
    with pytest.raises(ConnectionError) as drained:
        await written(process.stdin)
    assert errors.error_kind(drained.value) == "episode"
    with pytest.raises(ConnectionError) as refused:
        Client(address)
    assert errors.error_kind(refused.value) == "episode"
    with pytest.raises(ConnectionError) as away:
        await asyncio.open_connection("127.0.0.1", 1)
    assert errors.error_kind(away.value) == "machine"


async def written(pipe):
    for _ in range(100):
        pipe.write(b"x" * 100_000)
        await pipe.drain()
