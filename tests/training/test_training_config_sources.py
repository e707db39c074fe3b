"""Where a config comes from: a TOML file, dotted overrides, keywords."""

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.training import load_train_config
from rolltree.training.config_input import apply_override, parse_value
from rolltree.values.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[optim]\nlr = 1.0\n[env]\nid = "add"\n[env.args]\nlevel = 2\n')
    return path


def test_overrides(config):
    words = ["optim.lr=1e-5", "env.args.level=3", "train.num_steps=4", "optim.lr=2e-5"]
    assert load_train_config(config, [*words, "env.id=gsm8k"]) == load_train_config(
        {
            "optim": {"lr": 2e-5},
            "env": {"id": "gsm8k", "args": {"level": 3}},
            "train": {"num_steps": 4},
        }
    )


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
    with pytest.raises(ConfigError, match="is not an override"):
        apply_override({}, override)


def test_overrides_have_the_names_of_keywords():
    overrides = ["num_steps=3", "model=tiny", "sampling_max_tokens=8", "optim={lr = 1e-5}"]
    config = load_train_config({"optim": {"beta1": 0.5}}, overrides)
    assert (config.train.num_steps, config.model.name) == (3, "tiny")
    assert (config.sampling.max_tokens, config.optim.lr, config.optim.beta1) == (8, 1e-5, 0.5)
    with pytest.raises(ConfigError, match="there is no setting 'num_stepz'"):
        load_train_config(overrides=["num_stepz=3"])
    with pytest.raises(ConfigError, match="is a key of several sections"):
        load_train_config(overrides=["max_tokens=3"])


def test_all_unknown_names_are_told_at_once():
    data = {
        "train": {"num_stepz": 3, "seed": 1, "num_steps": 2},
        "optimizer": {},
        "optim": {"l": 1},
    }
    with pytest.raises(ConfigError) as caught:
        load_train_config(data)
    first, *lines = str(caught.value).splitlines()
    assert first == "the config has 4 names that are not known:"
    assert [line.split()[2].strip(".'") for line in lines] == [
        *("train.num_stepz", "train.seed", "optimizer", "optim.l"),
    ]
    assert "Did you mean 'num_steps'?" in lines[0]


def test_a_key_inside_a_value():
    with pytest.raises(ConfigError, match=r"inside optim\.lr, which is a value"):
        apply_override({"optim": {"lr": 1.0}}, "optim.lr.base=2")


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_train_config(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_train_config(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_train_config(tmp_path / "binary.toml")


def test_keywords_are_sections_keys_of_one_section_or_section_and_key(config):
    found = load_train_config(
        config,
        model="tiny",
        optim={"eps": 1e-6},
        num_steps=3,
        group_size=4,
        sampling_max_tokens=8,
        run_dir="runs/x",
        algorithm="dapo",
    )
    assert found == load_train_config(
        {
            "model": {"name": "tiny"},
            "optim": {"lr": 1.0, "eps": 1e-6},
            "env": {"id": "add", "args": {"level": 2}},
            "train": {"num_steps": 3},
            "algorithm": {"name": "dapo", "group_size": 4},
            "sampling": {"max_tokens": 8},
            "run": {"dir": "runs/x"},
        }
    )
    assert load_train_config(found) is found
    assert load_train_config(found, lr=2.0).optim.lr == 2.0
    assert found.optim.lr == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 4}, "sampling_max_tokens, train_max_tokens, eval_max_tokens"),
        ({"num_stesp": 4}, "no setting 'num_stesp'. Did you mean 'num_steps'"),
        ({"learning_rate": 1e-5}, "no setting 'learning_rate'"),
        ({"optim": {"lrr": 1.0}}, "no key optim.lrr. Did you mean 'lr'"),
        ({"optim": 3}, "optim is 3"),
        ({"num_steps": "many"}, "train.num_steps is 'many'"),
    ],
)
def test_mistakes_in_keywords(settings, message):
    with pytest.raises(ConfigError) as caught:
        load_train_config(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        ({"model": "tiny"}, {"lora_rank": 8}),
        ({"model": "tiny"}, {"model": {"lora_rank": 8}}),
        ({"optim": 3}, {"lr": 1.0}),
        ({}, {"optim": 3, "lr": 1.0}),
    ],
)
def test_a_key_of_what_is_not_a_section(data, settings):
    with pytest.raises(ConfigError, match="is not a section, so its keys cannot be set"):
        load_train_config(data, **settings)


def test_plain_data_is_not_changed():
    data = {"optim": {"lr": 1e-5}}
    load_train_config(data, ["optim.lr=1e-4"], eps=1e-6)
    assert data == {"optim": {"lr": 1e-5}}


def test_nested_data_is_not_changed():
    data = {"env": {"id": "add", "args": {"level": {"low": 1}}}, "cluster": {"engines": {}}}
    words = ["env.args.level.low=2", "env.args.x=1", "cluster.engines.kind=vllm"]
    config = load_train_config(data, words)
    assert config.env.args == {"level": {"low": 2}, "x": 1}
    assert data == {
        "env": {"id": "add", "args": {"level": {"low": 1}}},
        "cluster": {"engines": {}},
    }


def test_paths_are_taken_as_text():
    config = load_train_config(
        {"model": {"name": Path("models/tiny")}},
        run_dir=Path("runs/first"),
        env_id=Path("my_env.py"),
    )
    found = (config.model.name, config.run.dir, config.env.id)
    assert found == ("models/tiny", "runs/first", "my_env.py")
