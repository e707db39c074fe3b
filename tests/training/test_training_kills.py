"""A killed run ends like one that nobody killed: evaluations included, bit for bit.

`ROLLTREE_KILLS` is the number of kills of each kind by each signal; `benchmarks/kills.py` does 50.
"""

import os

import pytest
from kills_kit import KINDS, SIGNALS, kill_all
from loop_kit import make_config
from training_kit import LetterSource

import rolltree as rt
from rolltree.values.errors import ConfigError

NUM_KILLS = int(os.environ.get("ROLLTREE_KILLS", "2"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return kill_all(tmp_path_factory.mktemp("kills"), NUM_KILLS)


@pytest.mark.long
@pytest.mark.timeout(60 + 60 * NUM_KILLS)
@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_it_ends_like_a_run_that_nobody_killed(outcomes, kind, name):
    found = outcomes[f"{kind} {name}"]
    assert found["kills"] >= NUM_KILLS
    assert found["compared"] > 20
    assert found["wrong"] == []
    assert found["differ"] == []


class Stop(rt.Silent):
    """Ctrl-C after the first rollout of one evaluation, of every start."""

    def __init__(self, phase):
        self.phase, self.notices = phase, []

    def on_eval_progress(self, phase, num_done, num_total):
        if phase == self.phase and 0 < num_done < num_total:
            raise KeyboardInterrupt

    def on_notice(self, message):
        self.notices.append(message)


def play(config, phase=""):
    reporter = Stop(phase)
    if phase:
        with pytest.raises(KeyboardInterrupt):
            rt.train(config, environment=LetterSource(), reporter=reporter)
    else:
        rt.train(config, environment=LetterSource(), reporter=reporter)
    return reporter


def config_of(model, folder, num_steps=4, **evaluation):
    return make_config(
        model,
        folder,
        engine={"max_concurrent": 1},
        train={"num_steps": num_steps},
        eval={"before": True, "after": True, "every": 2, **evaluation},
    )


def phases(config):
    with rt.Run.open(config.run.dir, "r") as run:
        done = {event.data["phase"]: event.step for event in run.events("evaluation")}
        rows = {phase: run.num_rollouts(phase=phase) for phase in done}
    return done, rows


@pytest.mark.parametrize("phase", ["eval_before", "eval/000002", "eval_after"])
def test_an_evaluation_that_was_interrupted_after_the_checkpoint_is_owed(model, tmp_path, phase):
    config = config_of(model, tmp_path / "run")
    play(config, phase)
    reporter = play(config)
    done, rows = phases(config)
    assert done == {"eval_before": 0, "eval/000002": 2, "eval_after": 4}
    assert set(rows.values()) == {3}
    assert reporter.notices == []


def test_the_end_of_an_earlier_start_is_evaluated_before_training_goes_on(model, tmp_path):
    play(config_of(model, tmp_path / "run"), "eval_after")
    play(config_of(model, tmp_path / "run", num_steps=6))
    done, rows = phases(config_of(model, tmp_path / "run"))
    assert done == {"eval_before": 0, "eval/000002": 2, "eval_after": 4, "eval_after/000006": 6}
    assert set(rows.values()) == {3}


def test_an_evaluation_whose_weights_are_gone_is_named_once(model, tmp_path):
    play(config_of(model, tmp_path / "run", num_steps=3, every=0))
    config = config_of(model, tmp_path / "run", num_steps=6, every=1)
    first = play(config, "eval/000004")
    assert len(first.notices) == 1
    assert "asks for an evaluation after step 1, 2, which no earlier start made" in first.notices[0]
    assert play(config).notices == []
    done, _ = phases(config)
    assert sorted(done.values()) == [0, 3, 4, 5, 6]


def test_a_schedule_that_falls_keeps_its_horizon(model, tmp_path):
    def config(num_steps):
        falling = {"lr": 5e-3, "schedule": "linear"}
        data = make_config(model, tmp_path / "run", train={"num_steps": num_steps}).as_dict()
        return rt.load_train_config(data, optim=falling)

    report = rt.train(config(2), environment=LetterSource(), reporter=rt.Silent())
    assert report.metrics[-1]["train/learning_rate"] == pytest.approx(2.5e-3)
    with pytest.raises(ConfigError, match=r"train.num_steps was 2 and is now 4.*'linear' falls"):
        rt.train(config(4), environment=LetterSource(), reporter=rt.Silent())


def test_only_the_embedded_engine_reads_batch_invariant():
    with pytest.raises(ConfigError, match=r"engine\.batch_invariant is set"):
        rt.load_train_config(engine={"kind": "vllm", "batch_invariant": True})
