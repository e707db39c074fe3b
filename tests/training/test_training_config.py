import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rolltree.training as room
from golden import keywords
from rolltree.evaluation import evaluate_async
from rolltree.evaluation.keywords import EvalKeywords
from rolltree.samples import TruncationPolicy
from rolltree.scale.cluster import beat, broker, driver
from rolltree.scale.cluster.roster import Roster
from rolltree.scale.weights import publish
from rolltree.training import (
    MAY_CHANGE,
    TrainConfig,
    advantages,
    checkpoint_formats,
    config,
    load_train_config,
    logprobs,
    plan,
    sections,
    tracking,
)
from rolltree.training.launch import train_async
from rolltree.values.errors import ConfigError, RolltreeError, UnknownName

SECTIONS = config.SECTIONS


def test_the_defaults_are_a_valid_config_and_round_trip():
    config = load_train_config({})
    assert config == TrainConfig()
    assert load_train_config(config.as_dict()) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rnu": {}}, "no section 'rnu'. Did you mean 'run'"),
        ({"run": {"sead": 1}}, "no key run.sead. Did you mean 'seed'"),
        ({"optim": {"lr": "fast"}}, "optim.lr is 'fast': expected `float`"),
        ({"optim": {"lr": 0.0}}, "optim.lr is 0.0: expected `float` > 0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr is nan"),
        ({"optim": {"beta2": 1.0}}, "optim.beta2"),
        ({"optim": {"schedule": "cubic"}}, "optim.schedule is 'cubic': invalid enum value"),
        ({"train": 3}, "train is 3: expected `object`"),
        ({"sampling": {"stop": ["a", 7]}}, "sampling.stop[1] is 7: expected `str`"),
        ({"train": {"num_steps": 0}}, "train.num_steps is 0"),
        ({"engine": {"max_context": 0}}, "engine.max_context is 0"),
        ({"engine": {"kv_budget_bytes": -1}}, "engine.kv_budget_bytes is -1"),
        ({"engine": {"time_limit_s": 0}}, "engine.time_limit_s is 0"),
        ({"engine": {"deadline_s": float("nan")}}, "engine.deadline_s is nan"),
        ({"train": {"max_seq_len": 1}}, "train.max_seq_len"),
        (
            {"train": {"scope": "step", "share_prefix_across": "step"}},
            "shares nothing between rollouts",
        ),
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature is 0.0"),
        ({"sampling": {"top_p": 0.9}}, "no key sampling.top_p"),
        ({"algorithm": {"group_size": 1}}, "every advantage would be 0"),
        ({"algorithm": {"discount": 0.9}}, "monte_carlo"),
        ({"algorithm": {"truncation": "penalise"}}, "penalty 0.0"),
        ({"algorithm": {"truncation_penalty": 0.5}}, "does not read 'penalty'"),
        (
            {"algorithm": {"truncation": "bootstrap"}},
            "algorithm.truncation is 'bootstrap': invalid enum value",
        ),
        ({"algorithm": {"name": "reinforce", "clip_low": 0.1}}, "does not read clip_low"),
        ({"algorithm": {"kl_coef": -1.0}}, "algorithm.kl_coef"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep"),
        ({"eval": {"num_examples": 0}}, "eval.num_examples"),
        ({"engine": {"max_batch": 0}}, "engine.max_batch"),
        ({"run": {"dir": ""}}, "run.dir"),
    ],
)
def test_mistakes_name_their_key(data, message):
    with pytest.raises(ConfigError) as caught:
        load_train_config(data)
    assert message in str(caught.value)


def test_unknown_parts_of_an_algorithm_are_named():
    with pytest.raises(UnknownName, match="Did you mean 'gspo'"):
        load_train_config({"algorithm": {"name": "gsop"}})


def test_sections_become_what_they_configure():
    config = load_train_config(
        {
            "sampling": {"temperature": 0.8, "max_tokens": 4, "stop": ["\n"]},
            "algorithm": {"truncation": "penalise", "truncation_penalty": 0.5, "on_error": "zero"},
            "train": {"max_seq_len": 64},
        }
    )
    assert config.sampling.as_args() == {"temperature": 0.8, "max_tokens": 4, "stop": ["\n"]}
    assert TrainConfig().sampling.as_args() == {}
    policy = config.algorithm.policy(config.train.max_seq_len)
    assert policy.truncation == TruncationPolicy("penalise", penalty=0.5)
    assert (policy.on_error, policy.max_seq_len) == ("zero", 64)


@given(st.sampled_from(sorted(SECTIONS)), st.text(min_size=1, max_size=8), st.integers())
def test_no_unknown_key_is_ever_accepted(section, key, value):
    if key not in SECTIONS[section].__struct_fields__:
        with pytest.raises(RolltreeError):
            load_train_config({section: {key: value}})


def test_every_field_is_documented():
    for name, section in SECTIONS.items():
        text = inspect.getdoc(section)
        for field in section.__struct_fields__:
            assert f"`{field}`" in text, f"{name}.{field}"


def test_every_field_is_used():
    """Each field's name is read as an attribute somewhere in the package."""
    package = Path(room.__file__).parents[1]
    read = {
        node.attr
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    fields = {field for section in SECTIONS.values() for field in section.__struct_fields__}
    assert fields - read - {"temperature"} == set()


def test_what_may_change_exists():
    for key in MAY_CHANGE:
        section, _, field = key.partition(".")
        assert section in SECTIONS
        assert not field or field in SECTIONS[section].__struct_fields__


def test_the_number_of_steps_may_change_where_the_learning_rate_does_not_fall_until_it():
    assert load_train_config(schedule="constant", warmup_steps=9).may_change() == MAY_CHANGE
    for schedule in ("linear", "cosine"):
        kept = set(MAY_CHANGE) - set(load_train_config(schedule=schedule).may_change())
        assert kept == {"train.num_steps"}


@pytest.mark.parametrize("place", config.REMOVED)
def test_a_setting_that_was_removed_says_what_holds_now(place):
    value, now = config.REMOVED[place]
    section, _, key = place.partition(".")
    said = f"It was removed: {re.escape(now)}. Leave it out."
    with pytest.raises(ConfigError, match=f"the config has no key {place}. {said}"):
        load_train_config({section: {key: value}})
    with pytest.raises(ConfigError, match=said):
        load_train_config(overrides=[f"{place}={value}"])
    for name in (key, f"{section}_{key}"):
        with pytest.raises(ConfigError, match=f"there is no setting '{name}'. {said}"):
            load_train_config(**{name: value})


def test_what_is_said_of_removed_settings_is_what_holds():
    now = {
        "engine.reload_method": publish.RELOAD_METHOD,
        "engine.away_limit_s": plan.AWAY_LIMIT_S,
        "checkpoint.max_shard_size": checkpoint_formats.MAX_SHARD_SIZE,
        "track.transcripts_every": tracking.TRANSCRIPTS_EVERY,
        "optim.final_lr_share": sections.SCHEDULES["cosine"](1.0),
        "algorithm.baseline_decay": advantages.BASELINE_DECAY,
        "cluster.orphan_s": beat.ORPHAN_S,
        "cluster.max_restarts": driver.MAX_RESTARTS,
        "cluster.queue_bytes": broker.QUEUE_BYTES,
        "cluster.stall_s": Roster(float).stall_s,
        "train.chunk_rows": logprobs.CHUNK_ROWS,
    }
    assert {place: value for place, (value, _) in config.REMOVED.items()} == now


class TestCreditSettings:
    def load(self, **algorithm):
        return load_train_config({"algorithm": algorithm}).algorithm.policy(None)

    def test_they_reach_the_policy(self):
        policy = self.load(
            name="reinforce",
            flow="discounted",
            edge_discount=0.25,
            baseline="ema",
            on_error="drop_group",
        )
        assert (policy.flow.down, policy.flow.up) == (0.25, 0.0)
        assert (policy.baseline, policy.baseline_decay) == ("ema", 0.9)
        assert policy.on_error == "drop_group"

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"edge_discount": 0.5}, "does not read it"),
            ({"baseline": "ema"}, "leave the baseline out"),
            ({"flow": "teem"}, "flow"),
        ],
    )
    def test_what_would_be_ignored_or_is_out_of_range(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            self.load(**settings)


def test_settings_and_credit_are_read_without_torch():
    """Commands on stored runs recompute advantages; they start without torch."""
    program = (
        "import sys; from rolltree.training import TrainConfig, assign_credit\n"
        "TrainConfig().algorithm.policy(None); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_cluster_refuses_the_number_of_rollouts_that_it_does_not_read():
    workers = {"slots_per_worker": 32, "rollout_workers": 8}
    load_train_config({"cluster": workers})
    with pytest.raises(ConfigError, match=r"engine\.max_concurrent.*cluster\.slots_per_worker"):
        load_train_config({"cluster": workers, "engine": {"max_concurrent": 256}})


def test_the_keywords_that_editors_complete_are_the_settings():
    assert keywords.FILE.read_text(encoding="utf-8") == keywords.text()
    names = re.findall(r"^    (\w+): ", keywords.text(), re.MULTILINE)
    taken = {*inspect.signature(train_async).parameters, *SECTIONS}
    for name in names:
        if name not in taken:
            with pytest.raises(ConfigError, match="is "):  # of a type that no setting has
                load_train_config(**{name: object()})
    assert set(names) >= {"num_steps", "lr", "run_dir", "sampling_max_tokens", "quiet", "tokenizer"}


def test_the_keywords_of_evaluate_are_those_of_evaluate_async():
    taken = inspect.signature(evaluate_async).parameters
    assert [*EvalKeywords.__annotations__] == [*taken][2:-1]
