"""Redaction: secrets go, settings stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree._helpers.redact import REDACTED, is_secret_key, redact, redact_text, shown_start
from rolltree.store import Run


@pytest.mark.parametrize(
    "key",
    [
        "api_key", "apiKey", "API_KEY", "OPENAI_API_KEY", "api-key", "apikey", "x-api-key",
        "hf_token", "HF_TOKEN", "access_token", "token", "secret", "client_secret", "password",
        "db_passwd", "Authorization", "aws_secret_access_key", "private_key", "session_token",
        "Cookie", "credentials", "session", "aws_session", "session_key", "PHPSESSID",
    ],
)  # fmt: skip
def test_secret_keys(key):
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key",
    [
        "max_tokens", "num_tokens", "tokenizer", "token_ids", "eos_token", "pad_token",
        "key", "keys", "monkey", "api_key_var", "api_key_env", "base_url", "author", "keyword",
        "num_keys", "token_budget", "", "stop_token_ids", "secret_name", "stop_token", "session_id",
        "num_sessions", "DESKTOP_SESSION", "calls_per_session",
    ],
)  # fmt: skip
def test_ordinary_keys(key):
    assert not is_secret_key(key)


def test_nested_config():
    config = {
        "client": {"api_key": "abc", "base_url": "http://u:pw123@host/v1", "api_key_var": "X"},
        "servers": [{"headers": {"Authorization": ["Bearer abc"], "Accept": "json"}}],
        "token": 504,
        "password": "",
        "secret": None,
        "pair": ("sk-" + "a" * 20, 1),
    }
    assert redact(config) == {
        "client": {
            "api_key": REDACTED,
            "base_url": f"http://{REDACTED}@host/v1",
            "api_key_var": "X",
        },
        "servers": [{"headers": {"Authorization": REDACTED, "Accept": "json"}}],
        "token": 504,
        "password": "",
        "secret": None,
        "pair": (REDACTED, 1),
    }
    assert config["client"]["api_key"] == "abc"  # the caller's own is left alone


def test_error_texts():
    text = "401: Incorrect API key provided: sk-proj-abcdefghijklmnop1234; Bearer abcdefghij rest"
    clean = redact_text(text)
    assert "sk-proj" not in clean
    assert "abcdefghij" not in clean
    assert clean.startswith("401: Incorrect API key provided: ")
    assert clean.endswith(" rest")
    assert redact_text("GET http://h/v1?api_key=hunter2&x=1") == (
        f"GET http://h/v1?api_key={REDACTED}&x=1"
    )


@given(st.text(), st.text(min_size=8), st.text())
def test_a_known_secret_never_survives(before, secret, after):
    assert secret not in redact_text(before + secret + after, (secret,)) or secret in REDACTED


def test_protected_secret_reaches_no_file_of_the_run(tmp_path):
    secret = "a plain looking passphrase"
    from rolltree.store import StoredRollout

    with Run.create(tmp_path / "run", config={"note": f"x {secret}"}, secrets=[secret]) as run:
        run.protect("short")  # too short to cut out of real data
        run.set_meta("note", {"deep": [secret]})
        run.add_event("start", {"command": f"run with {secret}"})
        run.add_step(1, {"note": secret})
        run.add_rollouts(
            [
                StoredRollout(
                    request_id="a",
                    status="error",
                    metrics={"m": secret},
                    input={"answer": secret},
                    errors=({"type": "E", "message": f"bad {secret}", "traceback": "short"},),
                    record=f'{{"x":"{secret}"}}'.encode(),
                )
            ]
        )
        row = next(run.rollouts())
        assert secret not in str(row)
        assert row.errors[0]["traceback"] == "short"
        for file in (tmp_path / "run").iterdir():
            assert secret.encode() not in file.read_bytes(), file.name


@pytest.mark.parametrize("at", range(1, 40))
def test_a_secret_across_a_cut_is_redacted(at, monkeypatch):
    key = "correct-horse-battery-staple-9381"
    monkeypatch.setenv("MY_API_KEY", key)
    start, more = shown_start("x" * (40 - at) + key + "y" * 100, 40)
    assert not any(key[:size] in start for size in range(4, len(key)))
    assert len(start) == 40
    assert "more)" in more
