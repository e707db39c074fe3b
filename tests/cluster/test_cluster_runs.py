"""Whole runs on several processes: what is stored and learned, whoever is killed."""

import pytest
from cluster_kit import Names, make_config

from rolltree.launch import train
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run
from rolltree.training import load_train_config

pytestmark = pytest.mark.long
GRADIENT = ("train/grad_norm", "train/loss", "reward/mean", "train/num_records")


def run_all(config, during=lambda names: None):
    names = Names(config)
    try:
        names.start_all()
        during(names)
        names.wait()
    finally:
        names.close()
    return read(config)


def read(config):
    """Return per request its seeds and sampled tokens, the steps, and the events' kinds."""
    with Run.open(config.run.dir, "r") as run:
        found = {}
        for result in decode_results(run.rollouts(blobs=True)):
            request = result.request
            assert request.request_id not in found
            ids = [
                list(step["tokens"]["completion_ids"])
                for state in result.states
                for step in state.trajectory
            ]
            found[request.request_id] = (request.seed, request.sampling_seed, ids)
        return found, [[step.metrics[name] for name in GRADIENT] for step in run.steps()]


def alone(config, path):
    """Return what one process does with the same settings."""
    data = config.as_dict()
    del data["cluster"]
    data["run"]["dir"] = str(path)
    once = load_train_config(data)
    train(once, quiet=True)
    return read(once)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def undisturbed(folder):
    return alone(make_config(folder, folder / "none"), folder / "alone")


def test_two_ranks_and_two_workers_take_the_steps_of_one_process(folder, undisturbed):
    config = make_config(folder, folder / "two", cluster={"trainer": {"ranks": 2}})
    rollouts, steps = run_all(config)
    assert rollouts == undisturbed[0]
    for step, expected in zip(steps, undisturbed[1], strict=True):
        assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_killed_worker_and_a_killed_trainer_lose_nothing_and_repeat_nothing(folder, undisturbed):
    config = make_config(folder, folder / "killed", env={"args": {"pause_s": 0.3}})

    def kill(names):
        names.until_stored(3)
        names.kill("worker-0")
        names.start("worker-0")
        names.until_stored(18)
        names.kill("trainer")
        names.start("trainer")

    rollouts, steps = run_all(config, kill)
    # The same requests with the same seeds gave the same tokens, so lengths are those of a run
    # that nobody disturbed, too.
    assert rollouts == undisturbed[0]
    for step, expected in zip(steps, undisturbed[1], strict=True):
        assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_evaluation_is_played_by_workers_while_training_runs_ahead(folder):
    config = make_config(
        folder,
        folder / "eval",
        train={"num_steps": 1, "async_steps": 1},
        eval={"before": True, "after": True},
        cluster={"rollout_workers": 1},
    )
    rollouts, steps = run_all(config)
    phases = {name.partition("/")[0] for name in rollouts}
    assert phases == {"train", "eval_before", "eval_after"}
    assert len(steps) == 1
    with Run.open(config.run.dir, "r") as run:
        assert [event.phase for event in run.evaluations()] == ["eval_before", "eval_after"]
        assert run.num_rollouts(phase="eval_after") == 4
