"""Publishing: what is served is what is trained, or the run stops and says so."""

import asyncio
import copy
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from loop_kit import make_config, start
from training_kit import LetterSource, tiny_model

from rolltree.errors import ConfigError, TrainingError
from rolltree.inference.local import local_client
from rolltree.inference.publish import call
from rolltree.models import load_model
from rolltree.training import build_parts, load_train_config, open_run, run_training
from rolltree.training.publishing import Publisher
from rolltree.training.servers import TransferTarget

sys.path.insert(0, str(Path(__file__).parents[1] / "inference" / "server"))
import serve_kit


class TestMemory:
    @pytest.mark.parametrize("kind", ["qwen3", "llama"])
    @pytest.mark.parametrize("lean", [True, False])
    async def test_the_embedded_engine_reads_the_trainers_tensors(self, model, kind, lean):
        trained, tokenizer = load_model(str(model))
        client = local_client(trained, tokenizer, max_batch=2, max_context=64)
        runner = client.engine._decoder.runner
        assert runner.lean
        if not lean:
            runner.lean = False
            runner._read_model()
        publisher = Publisher(trained, client.engine, client, tolerance=0.01)
        assert publisher.shares_memory()
        assert await publisher.verify(0) == {}
        other = copy.deepcopy(trained)
        assert not Publisher(other, client.engine, client, tolerance=0.01).shares_memory()
        await client.aclose()

    def test_tied_and_untied_heads(self):
        from rolltree.inference.local.lean import LeanForward

        for kind in ("qwen3", "llama"):
            trained = tiny_model(kind)
            addresses = {tensor.data_ptr() for tensor in LeanForward(trained).tensors()}
            assert addresses == {p.data_ptr() for p in trained.parameters()}


class TestProbe:
    async def served(self, model, change=0.0):
        """Return a publisher over an engine with a copy of the weights, `change` away."""
        trained, tokenizer = load_model(str(model))
        copied = copy.deepcopy(trained)
        client = local_client(copied, tokenizer, max_batch=2, max_context=64)
        async with client.engine.paused():
            with torch.no_grad():
                copied.model.layers[1].mlp.down_proj.weight.add_(change)
            client.engine.publish(3)
        return Publisher(trained, client.engine, client, tolerance=0.01), client

    async def test_a_copy_that_is_equal_passes(self, model):
        publisher, client = await self.served(model)
        assert (await publisher.verify(3))["publish/probe_error"] < 1e-4
        await client.aclose()

    async def test_one_changed_matrix_is_found(self, model):
        publisher, client = await self.served(model, change=0.05)
        with pytest.raises(TrainingError, match=r"serves other weights: the logprobs of a probe"):
            await publisher.verify(3)
        await client.aclose()

    async def test_another_version_is_found(self, model):
        publisher, client = await self.served(model)
        with pytest.raises(TrainingError, match="sampled with version 3 after version 4"):
            await publisher.verify(4)
        await client.aclose()

    async def test_an_engine_that_keeps_its_version_is_found(self, model):
        trained, _ = load_model(str(model))

        class Stuck:
            version = 5

            def publish(self, version):
                pass

        with pytest.raises(TrainingError, match="reports version 5"):
            await Publisher(trained, Stuck(), None, tolerance=0.01).publish(6)

    async def test_no_logprobs_no_training(self, model):
        trained, _ = load_model(str(model))

        class Mute:
            async def generate(self, request):
                class Answer:
                    completion_ids = logprobs = versions = None

                return Answer()

        with pytest.raises(TrainingError, match="returns no token ids or no logprobs"):
            await Publisher(trained, object(), Mute(), tolerance=0.01).verify(0)


class TestServers:
    @pytest.mark.parametrize(
        ("engine", "message"),
        [
            ({"kind": "servers"}, "Servers need URLs"),
            ({"urls": ["http://a"]}, "Servers need URLs"),
            ({"kind": "servers", "urls": ["http://a"], "max_batch": 8}, "engine.max_batch is set"),
            ({"reload_method": "x"}, "engine.reload_method is set"),
            ({"publish": "transfer"}, "engine.publish is set, and engine.kind = 'local'"),
            ({"publish": "fax"}, "engine.publish"),
            ({"transfer_address": "10.0.0.1"}, "engine.transfer_address is set"),
            (
                {"kind": "servers", "urls": ["http://a"], "transfer_address": "10.0.0.1"},
                "engine.transfer_address is set, and engine.publish = 'disk'",
            ),
            (
                {
                    "kind": "servers",
                    "urls": ["http://a"],
                    "publish": "transfer",
                    "reload_method": "x",
                },
                "engine.reload_method is set, and engine.publish = 'transfer'",
            ),
            ({"probe_tolerance": 0}, "engine.probe_tolerance"),
        ],
    )
    def test_settings_that_would_do_nothing(self, engine, message):
        with pytest.raises(ConfigError, match=message):
            load_train_config({"engine": engine})

    def test_a_token_that_is_missing_is_named(self, model, tmp_path, monkeypatch):
        monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
        config = self.config(model, tmp_path / "run", ["http://127.0.0.1:9/v1"])
        monkeypatch.delenv("SERVE_TOKEN", raising=False)
        with pytest.raises(ConfigError, match="'SERVE_TOKEN' and that variable is not set"):
            build_parts(config)

    def config(self, folder, path, urls, *, engine=(), **sections):
        data = make_config(folder, path).as_dict()
        kept = {"max_concurrent": 64}
        data["engine"] = {
            **kept,
            "kind": "servers",
            "urls": urls,
            "served_model": "m",
            "api_key_env": "SERVE_TOKEN",
            "admin_key_env": "SERVE_ADMIN_TOKEN",
            **dict(engine),
        }
        for section, values in sections.items():
            data[section] = {**data[section], **values}
        return load_train_config(data)

    def test_two_real_servers_sample_while_the_trainer_steps(self, model, tmp_path, monkeypatch):
        """Both get every version; a rollout may span versions; a server left behind is found."""
        monkeypatch.setenv("SERVE_TOKEN", serve_kit.TOKEN)
        monkeypatch.setenv("SERVE_ADMIN_TOKEN", serve_kit.ADMIN_TOKEN)
        servers = [serve_kit.start(str(model), name="m") for _ in range(2)]
        try:
            urls = [server.url for server in servers]
            section = {"num_steps": 3, "async_steps": 1}
            config = self.config(model, tmp_path / "run", urls, train=section)
            report = start(config)
            assert len(report.metrics) == 3
            assert all(step["publish/probe_error"] < 1e-3 for step in report.metrics)
            assert all(step.get("mismatch/abs_mean", 0.0) < 1e-3 for step in report.metrics)
            weights = tmp_path / "run" / "weights"
            assert [path.name for path in weights.iterdir()] == ["version-000003"]
            self.check_one_left_behind(config, tmp_path, urls)
            self.check_transfers(model, tmp_path, urls)
        finally:
            for server in servers:
                serve_kit.stop(server)

    def check_transfers(self, model, tmp_path, urls):
        """The same without a disk, and merged where adapters are trained."""
        for name, more in (("plain", {}), ("lora", {"lora_rank": 2})):
            config = self.config(
                model,
                tmp_path / name,
                urls,
                engine={"publish": "transfer"},
                train={"num_steps": 2, "async_steps": 1},
                model=more,
            )
            report = start(config)
            assert len(report.metrics) == 2
            assert all(step["publish/probe_error"] < 1e-3 for step in report.metrics)
            assert not (tmp_path / name / "weights").exists()
            for url in urls:
                answer = httpx.get(
                    url.removesuffix("/v1") + "/weight_info",
                    headers={"Authorization": f"Bearer {serve_kit.TOKEN}"},
                )
                assert answer.json() == {"weight_version": "2"}

    def test_renamed_tensors_go_by_disk(self, model):
        trained, _ = load_model(str(model))
        trained._weight_conversions = ["experts were fused"]
        with pytest.raises(ConfigError, match=r"renamed or fused.*engine\.publish = 'disk'"):
            TransferTarget(trained, [], address="127.0.0.1")

    def check_one_left_behind(self, config, tmp_path, urls):
        """The second server takes the version number and keeps its weights."""

        async def main(run):
            parts = build_parts(config)
            target = parts.engine
            publish = target.publish

            async def only_the_first(version):
                clients, target._clients = target._clients, target._clients[:1]
                await publish(version)
                target._clients = clients
                body = {"new_version": str(version)}
                await call(clients[1].server, "/update_weight_version", body)

            target.publish = only_the_first
            try:
                await run_training(config, parts, source=LetterSource(), run=run)
            finally:
                await parts.client.aclose()

        data = config.as_dict()
        data["run"] = {**data["run"], "dir": str(tmp_path / "behind")}
        config = load_train_config(data)
        with open_run(config) as run, pytest.raises(TrainingError, match=urls[1]):
            asyncio.run(main(run))


def test_the_trainers_own_logprobs_are_those_of_teacher_forcing():
    trained = tiny_model()
    publisher = Publisher(trained, object(), None, tolerance=1)

    class Answer:
        completion_ids = np.array([3, 1], np.int32)

    path = [*publisher._prompt.tolist(), 3, 1]
    with torch.no_grad():
        logits = trained(input_ids=torch.tensor([path])).logits[0]
    expected = [float(logits[at].log_softmax(-1)[path[at + 1]]) for at in (-3, -2)]
    assert publisher._own_logprobs(Answer()) == pytest.approx(expected, abs=1e-4)
