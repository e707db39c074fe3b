"""Text from the command line to values."""

import pytest

from rolltree.cli.arguments import default_run_dir, json_object, secret
from rolltree.errors import ConfigError
from rolltree.redact import shown


def test_json_objects():
    assert json_object(None, "-a") == {}
    assert json_object('{"level": 2}', "-a") == {"level": 2}


def test_secrets_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", "hunter2")
    assert secret("MY_KEY", "-k") == "hunter2"
    assert secret(None, "-k") is None
    monkeypatch.setenv("MY_KEY", "")
    with pytest.raises(ConfigError, match="not set"):
        secret("MY_KEY", "-k")


def test_values_of_flags_that_are_secrets_are_never_shown(monkeypatch):
    monkeypatch.setenv("MY_VALUE", "plain-value-of-a-flag")
    secret("MY_VALUE", "-k")
    json_object('{"judge_api_key": "plain-value-in-json", "level": "advanced-level"}', "-a")
    said = shown("plain-value-of-a-flag, plain-value-in-json, advanced-level")
    assert said == "[redacted], [redacted], advanced-level"


def test_default_run_dirs_are_safe_names():
    path = default_run_dir("eval", "environments/reverse_text", "org/model:v1 x")
    assert path.parts[0] == "runs"
    assert len(path.parts) == 2
    assert path.name.startswith("eval--environments-reverse_text--org-model-v1-x--2")
