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
from training_kit import LetterSource, flat, group, tiny_model

from rolltree.inference.local import local_client
from rolltree.inference.models import load_model
from rolltree.inference.reachable import call
from rolltree.scale.servers import weight_way
from rolltree.training import Trainer, build_parts, load_train_config, open_run, run_training
from rolltree.training.models.lora import add_adapter
from rolltree.training.models.plain_weights import plain_tensors
from rolltree.training.publishing import Publisher
from rolltree.training.weight_probe import next_logprobs
from rolltree.values.errors import ConfigError, TrainingError

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


class Served:
    """A tiny model that is trained, and an engine with a copy of it."""

    def __init__(self, model, kind="qwen3", lr=1e-5, tolerance=0.01, **section):
        _, tokenizer = load_model(str(model))
        self.trained = tiny_model(kind, vocab_size=len(tokenizer))
        self.copied = copy.deepcopy(self.trained)
        config = load_train_config(
            {
                "model": section,
                "optim": {"lr": lr},
                "train": {"max_mismatch": 1e9, "max_tokens": 64},
            }
        )
        if section:
            add_adapter(self.trained, config.model, 0)
        self.trainer = Trainer(self.trained, config)
        self.client = local_client(self.copied, tokenizer, max_batch=8, max_context=64)
        self.publisher = Publisher(
            self.trained, self.client.engine, self.client, tolerance=tolerance
        )
        self.version = 0

    async def step(self, keep=(), change=lambda tensor: tensor):
        """Take a step, and publish all but the tensors whose names have one of `keep`."""
        self.version += 1
        samples = [flat(call) for call in group(seed=self.version)]
        self.publisher.expect(samples)
        self.trainer.step(samples, self.version)
        await self.give(keep, change)
        return await self.publisher.verify(self.version)

    async def give(self, keep=(), change=lambda tensor: tensor):
        async with self.client.engine.paused():
            with torch.no_grad():
                targets = dict(self.copied.named_parameters())
                for name, tensor in plain_tensors(self.trained):
                    if not any(part in name for part in keep):
                        targets[name].copy_(change(tensor))
            self.client.engine.publish(self.version)


def rounded(tensor):
    """Return what a server in bfloat16 has of a weight."""
    return tensor.bfloat16().float()


class TestProbe:
    """Every part that keeps its old weights is found, at a learning rate of 1e-5."""

    @pytest.mark.parametrize(
        ("kind", "keep"),
        [
            ("qwen3", "embed_tokens"),  # tied to the head
            ("llama", "embed_tokens"),
            ("llama", "lm_head"),
            ("qwen3", "layers.0."),
            ("qwen3", "layers.1."),
            ("qwen3", "layers.1.mlp.down_proj"),
            ("llama", "layers.0.self_attn.v_proj"),
            ("llama", "model."),
            ("llama", ""),
        ],
    )
    async def test_a_part_that_stays_as_it_was_is_found(self, model, kind, keep):
        served = Served(model, kind)
        await served.publisher.verify(0)
        found = await served.step()
        assert found["publish/probe_error"] < 1e-5 < found["publish/probe_step"]
        with pytest.raises(TrainingError, match=r"with the first weights it was"):
            await served.step(keep=[keep])
        await served.client.aclose()

    @pytest.mark.parametrize("lr", [1e-5, 1e-3])
    async def test_an_honest_server_in_16_bits_passes(self, model, lr):
        served = Served(model, lr=lr, tolerance=0.5)
        await served.give(change=rounded)
        assert (await served.publisher.verify(0))["publish/probe_error"] > 1e-4
        for _ in range(4):
            await served.step(change=rounded)
        await served.client.aclose()

    async def test_one_in_16_bits_that_stays_where_it_was_is_found(self, model):
        served = Served(model, lr=3e-3, tolerance=10.0)
        await served.give(change=rounded)
        await served.publisher.verify(0)
        with pytest.raises(TrainingError, match=r"serves other weights: "):
            await served.step(keep=[""])
        await served.client.aclose()

    async def test_a_copy_is_compared_with_the_adapters(self, model):
        served = Served(model, lr=1e-3, lora_rank=2)
        await served.publisher.verify(0)
        assert (await served.step())["publish/probe_error"] < 1e-5
        with pytest.raises(TrainingError, match="serves other weights"):
            await served.step(keep=["layers.1.mlp.up_proj"])
        await served.client.aclose()

    async def test_other_weights_are_found_at_the_start(self, model):
        served = Served(model)
        with torch.no_grad():
            served.copied.model.layers[1].mlp.down_proj.weight.add_(0.05)
        with pytest.raises(TrainingError, match=r"engine.probe_tolerance is 0.01"):
            await served.publisher.verify(0)
        await served.client.aclose()

    async def test_another_version_is_found(self, model):
        served = Served(model)
        with pytest.raises(TrainingError, match="sampled with version 0 after version 4"):
            await served.publisher.verify(4)
        await served.client.aclose()

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

    def adapted(self, model, path):
        data = make_config(model, path).as_dict()
        return load_train_config({**data, "model": {**data["model"], "lora_rank": 2}})

    def test_a_corrupted_copy_stops_the_run(self, model, tmp_path, monkeypatch):
        import rolltree.training.loop as loop

        def renew(trained, served, ranks, wanted=loop.renew_copy):
            before = served.model.layers[0].mlp.up_proj.weight.clone()
            wanted(trained, served, ranks)
            with torch.no_grad():
                served.model.layers[0].mlp.up_proj.weight.copy_(before)

        config = self.adapted(model, tmp_path / "run")
        assert start(config).metrics[0]["publish/probe_error"] < 1e-4
        monkeypatch.setattr(loop, "renew_copy", renew)
        config = self.adapted(model, tmp_path / "bad")
        with pytest.raises(TrainingError, match=r"version 1 .* it serves other weights"):
            start(config)


class TestServers:
    @pytest.mark.parametrize(
        ("engine", "message"),
        [
            ({"kind": "servers"}, "Servers need URLs"),
            ({"urls": ["http://a"]}, "Servers need URLs"),
            ({"kind": "servers", "urls": ["http://a"], "max_batch": 8}, "engine.max_batch is set"),
            ({"publish": "transfer"}, "engine.publish is set, and engine.kind = 'local'"),
            ({"publish": "fax"}, "engine.publish"),
            ({"transfer_address": "10.0.0.1"}, "engine.transfer_address is set"),
            (
                {
                    "kind": "servers",
                    "urls": ["http://a"],
                    "publish": "disk",
                    "transfer_address": "10.0.0.1",
                },
                "engine.transfer_address is set, and engine.publish = 'disk'",
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
        with pytest.raises(ConfigError, match="'SERVE_TOKEN', but that variable is not set"):
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

    @pytest.mark.long
    def test_two_real_servers_sample_while_the_trainer_steps(self, model, tmp_path, monkeypatch):
        """Both get every version; a rollout may span versions; a server left behind is found."""
        monkeypatch.setenv("SERVE_TOKEN", serve_kit.TOKEN)
        monkeypatch.setenv("SERVE_ADMIN_TOKEN", serve_kit.ADMIN_TOKEN)
        servers = [serve_kit.start(str(model), name="m") for _ in range(2)]
        try:
            urls = [server.url for server in servers]
            section = {"num_steps": 3, "async_steps": 1}
            config = self.config(
                model, tmp_path / "run", urls, train=section, engine={"publish": "disk"}
            )
            report = start(config)
            assert len(report.metrics) == 3
            assert all(step["publish/probe_error"] < 1e-3 for step in report.metrics)
            assert all(
                step.get("train/sampling/sampling_logp_difference/mean", 0.0) < 1e-3
                for step in report.metrics
            )
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

    def test_renamed_tensors_go_by_disk(self, model, tmp_path):
        trained, _ = load_model(str(model))
        trained._weight_conversions = ["experts were fused"]
        with pytest.raises(ConfigError, match=r"renamed or fused.*engine\.publish = 'disk'"):
            weight_way(trained, tmp_path, publish="transfer")

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


def test_the_trainers_own_logprobs_are_those_of_what_follows():
    trained = tiny_model()
    prompts = np.arange(12, dtype=np.int32).reshape(3, 4)
    with torch.no_grad():
        logits = trained(input_ids=torch.from_numpy(prompts).long()).logits[:, -1]
    assert next_logprobs(trained, prompts) == pytest.approx(
        logits.log_softmax(-1).numpy(), abs=1e-5
    )
