"""Servers that are killed while a run trains on them: it waits, and its curve stays the same."""

import asyncio

import pytest
import server_away_kit as kit
from loop_kit import start
from serve_kit import ADMIN_TOKEN, TOKEN
from training_kit import LetterSource

from rolltree.inference import OpenAIClient
from rolltree.inference.models import load_model
from rolltree.scale import servers as servers_room
from rolltree.scale.servers import Servers, weight_way
from rolltree.store import Run
from rolltree.training import TrainParts, build_parts, open_run, run_training
from rolltree.values.errors import TrainingError
from wait_kit import until


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


def test_a_run_without_servers_ends_with_one_message_and_can_be_continued(
    model, tmp_path, server, monkeypatch
):
    def config(url):
        return kit.server_config(model, tmp_path / "run", [url], train={"num_steps": 1})

    nobody = f"http://127.0.0.1:{kit.free_port()}/v1"
    seen = kit.At({}, lambda: None)
    said = r"no server has answered for 0.3 s: .*same command"
    with monkeypatch.context() as patch:
        patch.setattr(servers_room, "AWAY_LIMIT_S", 0.3)
        with pytest.raises(TrainingError, match=said):
            start(config(nobody), kit.EarlyIsEasy(), reporter=seen)
    (notice,) = seen.notices
    assert notice.startswith(nobody.removesuffix("/v1"))
    assert "does not answer. The run waits, and ends after 0.3 s" in notice
    report = start(config(server.url), kit.EarlyIsEasy())
    assert [step["error/mean"] for step in report.metrics] == [0]


def test_servers_that_were_never_there_are_waited_for_a_few_seconds(model, tmp_path):
    nobody = f"http://127.0.0.1:{kit.free_port()}/v1"
    config = kit.server_config(model, tmp_path / "run", [nobody], train={"num_steps": 1})
    seen = kit.At({}, lambda: None)
    with pytest.raises(TrainingError, match=r"for 5 s \(none answered at the start\)"):
        start(config, kit.EarlyIsEasy(), reporter=seen)
    (notice,) = seen.notices
    assert "ends after 5 s (none answered at the start)" in notice


async def test_a_server_that_something_starts_again_is_waited_for_from_the_beginning(
    model, tmp_path
):
    address = f"http://127.0.0.1:{kit.free_port()}/v1"
    parts = build_parts(kit.server_config(model, tmp_path / "run", [address]))
    servers = parts.engine
    servers.are_restarted = True
    heard = []
    servers.notify = heard.append
    starting = asyncio.create_task(servers.guard(servers.start()))
    try:
        await until(lambda: heard)
        assert "ends after 1800 s." in heard[0]
        assert not starting.done()
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await parts.aclose()


def test_a_run_says_at_its_end_what_servers_keep(model, tmp_path, server):
    config = kit.server_config(model, tmp_path / "run", [server.url], train={"num_steps": 1})
    seen = kit.At({}, lambda: None)
    start(config, kit.EarlyIsEasy(), reporter=seen)
    said = seen.notices[-1]
    assert "keep the weights of version 1 under the name 'm'" in said
    with Run.open(config.run.dir, "r") as run:
        assert [event.data["message"] for event in run.events("notice")][-1] == said


async def test_parts_may_be_closed_after_the_run(model, tmp_path, server):
    config = kit.server_config(model, tmp_path / "run", [server.url], train={"num_steps": 1})
    parts = build_parts(config)
    with open_run(config) as run:
        await run_training(config, parts, source=kit.EarlyIsEasy(), run=run)
    await parts.aclose()


class Swapping(OpenAIClient):
    """Its server renders prompts; after the weights were probed, the ids of a call are swapped."""

    num_calls, swaps = 0, False

    async def ask(self, *args):
        outcome = await super().ask(*args)
        self.num_calls += 1
        ids = outcome.value.choices[0].token_ids
        if self.swaps and self.num_calls > 20 and len(set(ids)) > 1:
            ids.reverse()
            self.swaps = False
        return outcome


@pytest.mark.parametrize("swaps", [False, True])
def test_ids_that_a_server_swaps_are_not_trained(model, tmp_path, server, swaps):
    config = kit.server_config(model, tmp_path / "run", [server.url], train={"num_steps": 2})
    trained, tokenizer = load_model(str(model))
    client = Swapping(
        server.url, "m", api_key=ADMIN_TOKEN, token_ids="vllm", logprobs_mode="processed"
    )
    client.swaps = swaps
    target = Servers([client], weight_way(trained, tmp_path / "weights"))
    parts = TrainParts(trained, tokenizer, target, client, trained)
    report = start(config, LetterSource(), parts=parts)
    assert [row.get("masked/misspelled", 0) for row in report.metrics] == [float(swaps), 0]


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


@pytest.mark.long
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
