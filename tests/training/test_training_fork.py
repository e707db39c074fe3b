"""`fork_run`: a new run from a checkpoint, with other settings."""

import pytest
import torch
from loop_kit import make_config
from safetensors.torch import load_file
from training_kit import LetterSource

import rolltree as rt
from rolltree.store import Run
from rolltree.training import fork_run, load_train_config
from rolltree.values.errors import ConfigError, TrainingError


def train(config, source=None):
    return rt.train(config, environment=source or LetterSource(), reporter=rt.Silent())


@pytest.fixture
def parent(model, tmp_path):
    sections = {"checkpoint": {"every": 1, "keep": 3}, "eval": {"before": True, "after": True}}
    train(make_config(model, tmp_path / "run", **sections))
    return tmp_path / "run"


def weights(path, step):
    return load_file(path / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def test_it_begins_with_the_weights_the_step_and_the_history_of_the_checkpoint(parent):
    source = LetterSource()
    config = fork_run(parent, ["optim.lr=1e-12"], step=3, num_steps=6)
    assert config.run.dir == f"{parent}-fork"
    assert config.optim.lr == 1e-12
    with Run.open(parent, "r") as run, Run.open(config.run.dir, "r") as made:
        assert [row.metrics for row in made.steps()] == [row.metrics for row in run.steps()][:3]
        assert made.num_rollouts() == 0
        changed = {name: made.config[name] for name in ("run", "optim", "train")}
        assert made.config == {**run.config, **changed}
        assert made.config["optim"]["lr"] == 1e-12
        assert made.meta["forked_from"] == {"run": str(parent.resolve()), "step": 3}
    report = train(config, source)
    assert len(report.metrics) == 6
    assert {name.split("/")[1] for name in source.played if name.startswith("train/")} == {
        "000004", "000005", "000006",
    }  # fmt: skip
    first, last = weights(parent, 3), weights(report.run_path, 6)
    assert all(torch.allclose(first[name], last[name], atol=1e-9) for name in first)
    with report.run as run:  # its own beginning is measured, with its own settings
        assert {e.data["phase"]: e.step for e in run.events("evaluation")} == {
            "eval_before": 3,
            "eval_after": 6,
        }
        assert run.events("evaluation_skipped") == []


def test_with_equal_settings_it_goes_on_as_the_parent_did(parent):
    config = fork_run(parent, step=2, run_dir=parent.with_name("again"))
    train(config)
    with Run.open(parent, "r") as run, Run.open(config.run.dir, "r") as made:
        for old, new in zip(run.steps(), made.steps(), strict=True):
            for name in ("train/loss", "reward/mean", "train/grad_norm"):
                assert new.metrics[name] == pytest.approx(old.metrics[name], rel=1e-3, abs=1e-5)


def test_the_same_call_continues_and_other_settings_are_another_run(parent):
    first = fork_run(parent, num_steps=6, lr=1e-3)
    train(first)
    assert fork_run(parent, num_steps=6, lr=1e-3) == first
    assert fork_run(parent, num_steps=6, lr=2e-3).run.dir == f"{parent}-fork-2"
    assert fork_run(parent, num_steps=6, lr=1e-3, step=3).run.dir == f"{parent}-fork-3"
    with pytest.raises(ConfigError, match="holds another run, or a fork with other settings"):
        fork_run(parent, num_steps=6, lr=3e-3, run_dir=first.run.dir)
    with pytest.raises(ConfigError, match="holds another run"):
        fork_run(parent, num_steps=6, run_dir=parent)


def test_runs_from_before_a_setting_are_continued_and_forked(parent):
    first = fork_run(parent, num_steps=5)
    train(first)
    for path in (parent, first.run.dir):
        with Run.open(path) as run:
            config = run.config
            del config["track"], config["optim"]["eps"], config["model"]["lora_targets"]
            run.set_meta("config", config)
    assert fork_run(parent, num_steps=5) == first
    with pytest.raises(ConfigError, match=r"optim\.eps was 1e-08 and is now 1e-06"):
        train(load_train_config(first, eps=1e-6))
    assert len(train(first).metrics) == 5
    with Run.open(first.run.dir, "r") as run:
        assert load_train_config(run.config) == first
        assert run.config["optim"]["eps"] == 1e-8


def test_another_horizon_and_an_asynchronous_fork_of_a_synchronous_run(parent):
    source = LetterSource()
    config = fork_run(
        parent,
        num_steps=6,
        schedule="linear",
        async_steps=1,
        group_size=2,
        groups_per_step=3,
    )
    report = train(config, source)
    assert [row["train/learning_rate"] for row in report.metrics[4:]] == pytest.approx(
        [5e-3 / 3, 5e-3 / 6]
    )
    planned = [name.split("/") for name in source.played if name.startswith("train/")]
    assert min(parts[1] for parts in planned) == "000005"
    with report.run as run:
        assert [len(e.data["groups"]) for e in run.events("batch")] == [3, 3]


def test_what_cannot_be_forked_says_why(parent, tmp_path):
    with pytest.raises(ConfigError, match=r"is at step 4 and train.num_steps is 4.*num_steps=8"):
        fork_run(parent)
    with pytest.raises(TrainingError, match=r"no checkpoint step-000001. It has step-000002, "):
        fork_run(parent, step=1)
    with pytest.raises(ConfigError, match="no key optim"):
        fork_run(parent, ["optim.lrr=1"])
    assert not parent.with_name("run-fork").exists()
    Run.create(tmp_path / "eval", kind="eval").close()
    with pytest.raises(ConfigError, match="only training runs"):
        fork_run(tmp_path / "eval")


def test_a_secret_that_was_not_stored_is_asked_for(model, tmp_path):
    data = make_config(model, tmp_path / "run").as_dict()
    data["env"] = {"id": "x", "args": {"judge_api_key": "a-long-secret"}}
    Run.create(tmp_path / "run", config=data, kind="train").close()
    with pytest.raises(ConfigError, match=r"--set env.args.judge_api_key=\.\.\."):
        fork_run(tmp_path / "run")
    with pytest.raises(TrainingError, match="no checkpoint to fork"):
        fork_run(tmp_path / "run", ["env.args.judge_api_key=another-secret"])
