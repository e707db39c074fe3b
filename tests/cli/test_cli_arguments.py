"""Text from the command line to values."""

import pytest
from click.testing import CliRunner

from rolltree._helpers.redact import shown
from rolltree.cli import app
from rolltree.cli.arguments import default_run_dir, json_object, secret
from rolltree.values.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("eval e", "--temperature", "nan"),
        ("eval e", "--deadline", "nan"),
        ("eval e", "--deadline", "0"),
        ("eval e", "--time-limit", "-1"),
        ("eval e", "--pass-threshold", "nan"),
        ("export r t", "--min-reward", "nan"),
        ("compare r", "--price", "nan 1"),
        ("env check e", "--reward-range", "0 inf"),
        ("serve tiny", "--read-timeout", "inf"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_loaded(command, flag, value):
    result = CliRunner().invoke(app, [*command.split(), flag, *value.split()])
    assert result.exit_code == 2
    assert f"{flag}'" in result.output


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


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "arithmetic", "-m", ""],
        ["eval", "arithmetic", "-b", "http://127.0.0.1:9/v1", "-m", " "],
        ["gateway", ""],
        ["gateway", "http://127.0.0.1:9/v1", "-m", ""],
        ["serve", ""],
        ["serve", "smollm2-135m", "--served-model-name", ""],
    ],
)
def test_an_empty_model_name_is_refused_before_anything_is_made(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 2
    assert "it is empty. Name a model" in told.output
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_cannot_be_sampled_with_are_refused_before_anything_is_made(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["eval", "arithmetic", "-S", '{"top_k": -5}'])
    assert told.exit_code == 2
    assert "top_k" in told.output
    assert "use 0 or -1 to turn it off" in told.output
    assert list(tmp_path.iterdir()) == []
