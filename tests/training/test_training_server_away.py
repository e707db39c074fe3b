"""Servers that are killed while a run trains on them: it waits, and its curve stays the same."""

import pytest
import server_away_kit as kit
from loop_kit import start
from serve_kit import ADMIN_TOKEN, TOKEN

from rolltree.errors import TrainingError
from rolltree.store import Run


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    monkeypatch.setenv("SERVE_ADMIN_TOKEN", ADMIN_TOKEN)


@pytest.fixture(scope="module")
def server(model):
    found = kit.Phoenix(str(model))
    yield found
    found.close()


def rewards(report):
    return [step["reward/mean"] for step in report.metrics]


def test_a_run_without_servers_ends_with_one_message_and_can_be_continued(model, tmp_path, server):
    def config(url, limit_s):
        section = {"away_limit_s": limit_s}
        train = {"num_steps": 1}
        return kit.server_config(model, tmp_path / "run", [url], engine=section, train=train)

    nobody = f"http://127.0.0.1:{kit.free_port()}/v1"
    seen = kit.At({}, lambda: None)
    with pytest.raises(TrainingError, match=r"no server has answered for 0.3 s .*same command"):
        start(config(nobody, 0.3), kit.EarlyIsEasy(), reporter=seen)
    (notice,) = seen.notices
    assert notice.startswith(nobody.removesuffix("/v1"))
    assert "does not answer. The run waits, and ends after 0.3 s" in notice
    report = start(config(server.url, 1800.0), kit.EarlyIsEasy())
    assert [step["error/mean"] for step in report.metrics] == [0]


@pytest.mark.slow
def test_killed_while_it_samples_ahead(model, tmp_path, server):
    """Asynchronous, by transfer, beside a server that never was there."""
    nobody = f"http://127.0.0.1:{kit.free_port()}/v1"
    config = kit.server_config(
        model,
        tmp_path / "run",
        [server.url, nobody],
        engine={"max_concurrent": 6, "publish": "transfer"},
        algorithm={"group_size": 6},
        optim={"lr": 2e-2},
        train={"num_steps": 4, "async_steps": 1},
    )
    num_starts = server.num_starts
    at = kit.At({2: 4}, server.kill_and_restart)
    report = start(config, kit.EarlyIsEasy(), reporter=at)
    assert server.num_starts == num_starts + 1
    assert len(report.metrics) == 4
    for step in report.metrics:
        assert step["error/mean"] == 0
        assert (
            step.get("train/sampling/sampling_logp_difference/mean", 0.0) < 1e-3
        )  # of other weights it would be 0.3
    said = " ".join(at.notices)
    assert f"{nobody.removesuffix('/v1')} does not answer." in said
    assert "says that its weights are 'default'" in said


@pytest.mark.slow
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
    num_starts = server.num_starts
    at = kit.At({2: 4, 4: 5}, server.kill_and_restart)
    report = start(config("run"), kit.EarlyIsEasy(), reporter=at)

    assert server.num_starts == num_starts + 2
    assert rewards(report) == pytest.approx(rewards(control), abs=1e-6)
    assert all(step["error/mean"] == 0 for step in report.metrics)
    with Run.open(tmp_path / "run", "r") as run:
        for row in run.rollouts(phase="train", blobs=False):
            assert (row.status, row.min_version, row.max_version) == (
                "ok",
                *[row.train_step - 1] * 2,
            )
