"""The scripts of `make bench-gpu` run on a CPU, with tiny models: nothing is measured here."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    spec = importlib.util.spec_from_file_location(f"bench_gpu_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_every_script_takes_check_and_json(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        load(name, monkeypatch).main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--check" in said
    assert "--json" in said


def test_a_tree_beside_its_calls(monkeypatch, capsys):
    script = load("tree_step", monkeypatch)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=script.VOCABULARY, num_attention_heads=4, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    monkeypatch.setattr(script, "make_model", lambda layers, device: model)
    options = {"device": "cpu", "dtype": "float32", "layers": 1, "turns": [3], "rounds": 1}
    results = script.measure(SimpleNamespace(budget=4096, **options))
    rows = results[0]["rows"]
    assert rows["tree"]["tokens"] < rows["step"]["tokens"]
    share, error = script.bars(results)
    assert share.value > 0
    assert error.met
    script.show(results)
    assert "tree" in capsys.readouterr().out


def test_tokens_per_second_of_both_sides(monkeypatch, tmp_path, capsys):
    script = load("engine_rate", monkeypatch)
    monkeypatch.setattr(script, "VLLM", tmp_path / "no vLLM here")
    options = {"model": "tiny", "device": "cpu", "dtype": "float32", "sizes": [2]}
    rows = script.measure(SimpleNamespace(tokens=4, repeats=1, **options))
    assert rows[0]["engine"] > 0
    assert rows[0]["generate"] > 0
    assert len(script.bars(rows)) == 1
    script.show(rows)
    assert "not there" in capsys.readouterr().out
