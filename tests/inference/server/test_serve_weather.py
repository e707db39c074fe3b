"""Requests that are too large, never finished, or of the wrong shape, to a real server."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import serve_kit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_kit import Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = serve_kit.start("tiny", "--read-timeout", "2")
    yield server
    serve_kit.stop(server)


def address(served: Served) -> tuple[str, int]:
    parts = urlsplit(served.url)
    return str(parts.hostname), int(parts.port or 0)


def ask(
    served: Served, path: str, body: bytes | None, token: str | None = None
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(*address(served), timeout=60)
    headers = {"Authorization": f"Bearer {token or served.token}"}
    connection.request("GET" if body is None else "POST", path, body, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content or b"{}")


def chat(served: Served, messages: object, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"messages": messages, "max_tokens": 1, **fields}
    return ask(served, "/v1/chat/completions", json.dumps(body).encode())


WORK = b"[%b]" % b",".join([b"65"] * 2_000_000)


def work_s() -> float:
    """Return how long a fixed piece of work takes here and now: 0.1 s on a quiet machine."""
    start = time.monotonic()
    json.loads(WORK)
    return time.monotonic() - start


def slowest_health(served: Served, body: bytes, path: str) -> tuple[float, int]:
    """Return how long `/health` took at most while a request is answered, and its status.

    The unit is `work_s`, before or after: a busy machine stretches both.
    """
    found: list[int] = []
    before = work_s()
    asking = threading.Thread(target=lambda: found.append(ask(served, path, body)[0]))
    asking.start()
    slowest = 0.0
    while asking.is_alive():
        start = time.monotonic()
        assert ask(served, "/health", None)[0] == 200
        slowest = max(slowest, time.monotonic() - start)
    return slowest / max(before, work_s()), found[0]


class TestLarge:
    @pytest.mark.parametrize("kind", ["words", "one word", "messages"])
    def test_a_prompt_of_twelve_megabytes_is_refused_and_health_answers(
        self, served: Served, kind: str
    ) -> None:
        text = "a" * 12_000_000 if kind == "one word" else "word " * 2_400_000
        body: dict[str, Any] = {"prompt": text}
        if kind == "messages":
            body = {"messages": [{"role": "user", "content": text}]}
        path = "/v1/chat/completions" if kind == "messages" else "/v1/completions"
        for _ in range(3):
            slowest, status = slowest_health(served, json.dumps(body).encode(), path)
            if status != 408:  # on a busy machine the body itself may come too late
                break
        assert status == 400
        assert slowest < 30

    def test_a_length_over_the_limit_is_refused_before_the_body_comes(self, served: Served) -> None:
        with socket.create_connection(address(served), timeout=60) as sent:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(served.url).netloc}\r\n"
            head += f"Authorization: Bearer {served.token}\r\nContent-Length: 10000000000\r\n\r\n"
            sent.sendall(head.encode())
            assert b" 413 " in sent.recv(65536).splitlines()[0]

    def test_a_body_over_the_limit_is_refused(self, served: Served) -> None:
        body = json.dumps({"prompt": "a" * 20_000_000}).encode()
        status, answer = ask(served, "/v1/completions", body)
        assert status == 413
        assert "bytes" in answer["error"]["message"]

    def test_a_request_asks_for_a_limited_number_of_completions(self, served: Served) -> None:
        body = json.dumps({"prompt": ["a"] * 1024, "n": 256, "max_tokens": 1}).encode()
        slowest, status = slowest_health(served, body, "/v1/completions")
        assert status == 400
        assert slowest < 30

    def test_the_largest_request_leaves_health_alone(self, served: Served) -> None:
        body = json.dumps({"prompt": ["a"] * 256, "n": 4, "max_tokens": 1}).encode()
        slowest, status = slowest_health(served, body, "/v1/completions")
        assert status == 200
        assert slowest < 30

    @pytest.mark.parametrize(
        ("path", "name", "number"),
        [
            ("/detokenize", "tokens", 4_000_000),
            ("/inference/v1/generate", "token_ids", 4_000_000),
            ("/v1/completions", "prompt", 4_000_000),
            ("/detokenize", "tokens", 2049),  # the context of the tiny model holds 2,048
        ],
    )
    def test_more_ids_than_the_context_holds_are_refused_before_any_work(
        self, served: Served, path: str, name: str, number: int
    ) -> None:
        ids = b'{"%b": [%b]}' % (name.encode(), b",".join([b"65"] * number))
        slowest, status = slowest_health(served, ids, path)
        assert status == 400
        assert slowest < 15

    def test_ids_that_fit_are_text(self, served: Served) -> None:
        status, answer = ask(served, "/detokenize", json.dumps({"tokens": [65] * 2048}).encode())
        assert (status, answer) == (200, {"prompt": "A" * 2048})

    @pytest.mark.parametrize(
        "fields",
        [
            {"messages": [{"role": "user", "content": [""] * 1_000_000}]},
            {"tools": [{"type": "function", "function": {"name": "f"}}] * 20_000},
            {"messages": [{"role": "assistant", "content": "", "reasoning_content": "a " * 10**6}]},
            {"stop": [f"{number} times" for number in range(300_000)], "stream": True},
            {"stop": "a" * 5000},
            {"stop_token_ids": list(range(1025))},
            {"a" * 10_000_000: 1},
            {"response_format": ["a"] * 1_000_000},
        ],
        ids=["parts", "tools", "reasoning", "stops", "stop", "stop ids", "a name", "a value"],
    )
    def test_large_fields_are_refused_and_health_answers(
        self, served: Served, fields: dict[str, Any]
    ) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **fields}
        slowest, status = slowest_health(served, json.dumps(body).encode(), "/v1/chat/completions")
        assert status == 400
        assert slowest < 30

    def test_a_body_of_too_many_objects_is_refused_unread(self, served: Served) -> None:
        body = b'{"prompt": [%b]}' % b",".join([b"{}"] * 5_000_000)
        slowest, status = slowest_health(served, body, "/tokenize")
        assert status == 413
        assert slowest < 15

    def test_what_is_wrong_is_said_in_short(self, served: Served) -> None:
        for fields in ({"a" * 10**6: 1}, {"model": ["a"] * 10**6}, {"stop": [1] * 4000}):
            status, answer = ask(served, "/tokenize", json.dumps(fields).encode())
            assert status in (400, 404)
            assert len(json.dumps(answer)) < 4000


class TestUnfinished:
    @pytest.mark.parametrize(
        "sent",
        [
            b"",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
            b"Authorization: Bearer a-token-for-tests\r\n\r\n{",
        ],
        ids=["nothing", "head", "body"],
    )
    def test_connections_that_send_half_a_request_are_closed(
        self, served: Served, sent: bytes
    ) -> None:
        open_sockets = [socket.create_connection(address(served)) for _ in range(100)]
        try:
            for each in open_sockets:
                each.sendall(sent)
            for each in open_sockets:
                each.settimeout(30)
                while each.recv(65536):  # an answer (408) or nothing, then the end
                    pass
            assert ask(served, "/health", None)[0] == 200
        finally:
            for each in open_sockets:
                each.close()

    def test_a_request_that_takes_longer_to_answer_stays_open(self, served: Served) -> None:
        status, answer = chat(
            served, [{"role": "user", "content": "1"}], n=16, max_tokens=200, stop_token_ids=[]
        )
        assert status == 200, answer


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "arguments", "name"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
MESSAGES = VALUES | st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool", "system"]) | VALUES,
            "content": st.text(max_size=8) | VALUES,
            "tool_calls": VALUES | st.lists(VALUES, max_size=2),
            "tool_call_id": VALUES,
            "name": VALUES,
            "reasoning_content": VALUES,
        },
    ),
    max_size=3,
)


def test_an_answer_names_its_request(served: Served) -> None:
    """A client can tell that an answer is its own: see `rolltree.inference.request_ids`."""
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"max_tokens": 1}}),
    ):
        connection = http.client.HTTPConnection(*address(served), timeout=60)
        headers = {"Authorization": f"Bearer {served.token}", "X-Request-Id": "mine-7"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert str(answer.get("id", answer.get("request_id"))).endswith("mine-7"), path


def test_logprobs_of_false_are_none(served: Served) -> None:
    for value, number in ((False, 0), (None, 0), (0, 1), (1, 1)):
        params = {"max_tokens": 1, "logprobs": value}
        body = json.dumps({"token_ids": [97], "sampling_params": params}).encode()
        status, answer = ask(served, "/inference/v1/generate", body)
        given = (answer["choices"][0].get("logprobs") or {}).get("content", [])
        assert (status, len(given)) == (200, number)


def test_tokenize_takes_only_true_and_false_as_flags(served: Served) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}]}
    for name in ("add_generation_prompt", "return_token_strs"):
        for wrong in (1, 0, "yes"):
            status, answer = ask(served, "/tokenize", json.dumps({**asked, name: wrong}).encode())
            assert (status, answer["error"]["param"]) == (400, name)
    counts = [
        ask(served, "/tokenize", json.dumps({**asked, **fields}).encode())[1]["count"]
        for fields in ({}, {"add_generation_prompt": True}, {"add_generation_prompt": False})
    ]
    assert counts[0] == counts[1] > counts[2]


class TestShape:
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(MESSAGES, VALUES)
    def test_messages_and_tools_of_any_shape_are_answered_or_refused(
        self, served: Served, messages: Any, tools: Any
    ) -> None:
        status, answer = chat(served, messages, tools=tools)
        assert status in (200, 400), answer

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.sampled_from(
            [
                *("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"),
                *("/tokenize", "/detokenize", "/collective_rpc", "/update_weight_version"),
                *("/init_weight_transfer_engine", "/update_weights", "/reset_prefix_cache"),
            ]
        ),
        st.dictionaries(
            st.sampled_from(
                [
                    *("prompt", "messages", "token_ids", "sampling_params", "tokens", "tools"),
                    *("temperature", "top_p", "stop", "seed", "logit_bias", "stop_token_ids", "n"),
                    *("stream", "logprobs", "stream_options", "model", "tool_choice", "top_k"),
                    *("request_id", "min_tokens", "presence_penalty", "return_token_ids"),
                    *("method", "kwargs", "args", "new_version", "init_info", "update_info"),
                    *("repetition_penalty", "frequency_penalty", "min_p", "max_tokens"),
                ]
            ),
            VALUES,
            max_size=4,
        ),
    )
    def test_fields_of_any_shape_are_answered_or_refused(
        self, served: Served, path: str, fields: dict[str, Any]
    ) -> None:
        body = {**fields} if path in ("/tokenize", "/detokenize") else {"max_tokens": 1, **fields}
        connection = http.client.HTTPConnection(*address(served), timeout=60)
        headers = {"Authorization": f"Bearer {served.admin_token}"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        assert response.status in (200, 400, 404), content

    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            ("/v1/completions", {"logit_bias": {"5": 1e300}}),
            ("/v1/completions", {"repetition_penalty": 1e-300}),
            ("/v1/completions", {"presence_penalty": -1e300}),
            ("/v1/completions", {"temperature": 1e-40}),
            ("/detokenize", {"tokens": "text"}),
            ("/detokenize", {}),
            ("/inference/v1/generate", {"token_ids": [1], "request_id": {}}),
            ("/update_weight_version", {"new_version": "9" * 5000}),
            ("/update_weight_version", {"new_version": "\u0663"}),
            (
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": "a" * 5000}},
            ),
            ("/init_weight_transfer_engine", {"init_info": {"port": 70_000}}),
            ("/init_weight_transfer_engine", {"init_info": {"port": -1}}),
            ("/init_weight_transfer_engine", {"init_info": {"timeout_s": 1e300}}),
            ("/init_weight_transfer_engine", {"init_info": {"backend": "carrier pigeon"}}),
        ],
    )
    def test_values_that_nothing_can_be_done_with_are_refused(
        self, served: Served, path: str, fields: dict[str, Any]
    ) -> None:
        body = {"prompt": "a"} | fields if path == "/v1/completions" else fields
        if "init_info" in body:
            whole = {"address": "127.0.0.1", "port": 9, "token": "t", "world_size": 2}
            body = {"init_info": whole | {"backend": "gloo", "timeout_s": 0.1} | body["init_info"]}
        status, answer = ask(served, path, json.dumps(body).encode(), served.admin_token)
        assert status == 400, answer
        assert answer["error"]["type"] == "invalid_request_error"

    @pytest.mark.parametrize(
        "message",
        [
            {"role": "user", "content": [{"type": "text"}]},
            {"role": "user", "content": [{"type": "text", "text": None}]},
            {"role": "user", "content": ["a", {}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "custom"}]},
        ],
    )
    def test_messages_without_what_they_must_have_are_refused(
        self, served: Served, message: dict[str, Any]
    ) -> None:
        for path in ("/v1/chat/completions", "/tokenize"):
            body = json.dumps({"messages": [message]}).encode()
            status, answer = ask(served, path, body)
            assert status == 400, answer

    @pytest.mark.parametrize(
        "body",
        [
            b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"messages": [], "stop": ' + b"[" * 970 + b"]" * 970 + b"}",
            b'{"prompt": ' + b"9" * 5000 + b"}",
            b"\xff\xfe",
            b"[]",
            b"",
        ],
        ids=["too deep", "deep", "large number", "no text", "a list", "empty"],
    )
    def test_bodies_that_are_no_request_are_refused(self, served: Served, body: bytes) -> None:
        status, answer = ask(served, "/v1/chat/completions", body)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
