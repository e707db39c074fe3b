"""`rolltree doctor`, on this machine and on machines that are made up."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from rolltree._helpers.machine import Gpu, Host, describe, look, suggested_config, toml_sections
from rolltree.cli import app, doctor
from rolltree.training import load_train_config

BARE = Host(
    python="3.12.1",
    num_cores=4,
    memory_bytes=16 * 1024**3,
    free_disk_bytes=100 * 1024**3,
    missing={"train": ("torch",)},
)
GPU = replace(
    BARE, gpus=(Gpu("NVIDIA H100", 80 * 1024**3),), torch="2.13.0", torch_cuda="13.0", missing={}
)


def test_this_machine():
    done = CliRunner().invoke(app, ["doctor", "--json", "--no-measure"])
    found = json.loads(done.stdout)
    assert found["num_cores"] == look().num_cores >= 1
    assert found["torch"].startswith("2.")
    assert found["speed"] is None
    load_train_config(found["config"])
    text = CliRunner().invoke(app, ["doctor", "--no-measure"]).stdout
    assert "torch" in text
    assert "[optim]\nlr = 1e-05" in text


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (BARE, "pip install torch --index-url https://download.pytorch.org/whl/cpu"),
        (GPU, None),
        (replace(GPU, torch_cuda=None), "torch is a CPU build"),
        (replace(GPU, gpus=()), "torch is built for CUDA, and there is no GPU"),
        (replace(GPU, free_disk_bytes=1024**3), "less than 5 GiB"),
    ],
)
def test_what_to_type_first(machine, said, monkeypatch):
    monkeypatch.setattr("rolltree._helpers.machine.look", lambda: machine)
    text = CliRunner().invoke(app, ["doctor", "--no-measure"], catch_exceptions=False).stdout
    assert ("! " in text) == (said is not None)
    assert (said or "") in text


def test_a_config_fits_its_machine_and_is_toml():
    import tomllib

    for machine, device in ((BARE, "cpu"), (GPU, "cuda"), (replace(GPU, torch_cuda=None), "cpu")):
        config = suggested_config(machine)
        assert tomllib.loads(toml_sections(config)) == config
        assert load_train_config(config).model.device == device
    assert describe(BARE) == "4 CPU cores, 16 GB, no GPU"
    assert describe(GPU) == "4 CPU cores, 16 GB, NVIDIA H100 (80 GB)"


@pytest.mark.parametrize("error", [OSError("the disk is full"), ValueError("a broken config")])
def test_a_failed_measurement_is_told(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(doctor, "_measure", fail)
    done = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert done.exit_code == 0
    assert f"not measured: {error}" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failures", "said"),
    [({}, "every answer was empty"), ({"EngineError": "out of memory"}, "out of memory")],
)
def test_a_model_that_samples_nothing_is_told(monkeypatch, failures, said):
    results = {"usage": {"num_completion_tokens": 0}, "failure_messages": failures}
    report = SimpleNamespace(results=results)
    monkeypatch.setattr("rolltree.evaluate", lambda *_, **__: report)
    monkeypatch.setattr("rolltree.local_client", lambda *_, **__: None)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=2))
    monkeypatch.setattr("rolltree.inference.models.load_model", lambda *_, **__: (model, None))
    monkeypatch.setattr(doctor, "MEASURE_S", 0.01)
    done = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert done.exit_code == 0
    assert f"not measured: the model sampled no token: {said}" in done.stdout


@pytest.mark.slow
def test_the_measurement(monkeypatch):
    monkeypatch.setattr(doctor, "MEASURE_S", 0.2)
    speed = doctor._measure("tiny", "cpu")
    assert speed["sampled_per_s"] > 0
    assert speed["trained_per_s"] > 0
    monkeypatch.setattr(doctor, "_measure", lambda *_: speed)
    text = CliRunner().invoke(app, ["doctor"], catch_exceptions=False).stdout
    assert "tiny on the cpu" in text
    assert "64 answers of 32 tokens" in text
