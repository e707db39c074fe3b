"""Servers that are killed while a run trains on them: it waits, and its curve stays the same."""

import pytest
import server_away_kit as kit
from loop_kit import start
from serve_kit import ADMIN_TOKEN, TOKEN

from rolltree.store import Run


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    monkeypatch.setenv("SERVE_ADMIN_TOKEN", ADMIN_TOKEN)


@pytest.fixture
def server(model):
    found = kit.Phoenix(str(model))
    yield found
    found.close()


def rewards(report):
    return [step["reward/mean"] for step in report.metrics]


def test_killed_twice_the_curve_is_that_of_an_undisturbed_run(model, tmp_path, server):
    def config(name):
        return kit.server_config(
            model,
            tmp_path / name,
            [server.url],
            engine={"max_concurrent": 3},
            algorithm={"group_size": 6},
            optim={"lr": 2e-2},
            train={"num_steps": 5},
        )

    control = start(config("control"), kit.EarlyIsEasy())
    at = kit.At({2: 4, 4: 5}, server.kill_and_restart)
    report = start(config("run"), kit.EarlyIsEasy(), reporter=at)

    assert server.num_starts == 3
    assert rewards(report) == pytest.approx(rewards(control), abs=1e-6)
    assert all(step["error/share"] == 0 for step in report.metrics)
    with Run.open(tmp_path / "run", "r") as run:
        for row in run.rollouts(phase="train", blobs=False):
            assert (row.status, row.min_version, row.max_version) == (
                "ok",
                *[row.train_step - 1] * 2,
            )
