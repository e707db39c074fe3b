"""TOML with dotted overrides: typed values, later ones win, nonsense is named."""

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.cli.arguments import default_run_dir, json_object, secret
from rolltree.cli.overrides import apply_override, parse_value, read_config
from rolltree.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[optim]\nlr = 1.0\n[env]\nid = "add"\n[env.args]\nlevel = 2\n')
    return path


def test_overrides(config):
    data = read_config(
        config,
        ["optim.lr=1e-5", "env.args.level=3", "train.num_steps=4", "optim.lr=2e-5", "env.id=gsm8k"],
    )
    assert data == {
        "optim": {"lr": 2e-5},
        "env": {"id": "gsm8k", "args": {"level": 3}},
        "train": {"num_steps": 4},
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("1.0", 1.0), ("1e-5", 1e-5), ("true", True), ('"1"', "1"), ("'a b'", "a b"),
        ("[1, 2]", [1, 2]), ('{a = 1, b = "x"}', {"a": 1, "b": "x"}), ("tiny", "tiny"), ("", ""),
        ("inf", float("inf")), ("runs/a b", "runs/a b"), ("None", "None"), ("1 = 2", "1 = 2"),
        ("2020-01-01", datetime.date(2020, 1, 1)),
    ],
)  # fmt: skip
def test_values_are_typed(text, value):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@given(st.text(st.characters(exclude_characters="\r\n"), max_size=20))
def test_any_text_is_a_value(text):
    data = {}
    apply_override(data, f"a.b={text}")
    assert list(data["a"]) == ["b"]


@pytest.mark.parametrize("override", ["optim.lr", "=1", ".lr=1", "optim.=1", "optim..lr=1", ""])
def test_what_is_no_override(override):
    with pytest.raises(ConfigError, match="is no override"):
        apply_override({}, override)


def test_a_key_inside_a_value():
    with pytest.raises(ConfigError, match=r"inside optim\.lr, which is a value"):
        apply_override({"optim": {"lr": 1.0}}, "optim.lr.base=2")


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_config(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_config(tmp_path / "binary.toml")


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


def test_default_run_dirs_are_safe_names():
    path = default_run_dir("eval", "environments/reverse_text", "org/model:v1 x")
    assert path.parts[0] == "runs"
    assert len(path.parts) == 2
    assert path.name.startswith("eval--environments-reverse_text--org-model-v1-x--2")
