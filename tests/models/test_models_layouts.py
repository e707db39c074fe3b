"""The four layouts of saved weights, what is wrong with them, and models loaded from each."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolltree.inference.models import TinyConfig, load_model, make_tiny
from rolltree.inference.models.layouts import open_weights, weights_layout
from rolltree.values.errors import ConfigError

SMALL = TinyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, SMALL)
    return path


def split(tensors):
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[first::3]} for first in range(3)]


def write_index(folder, prefix, suffix, parts, save):
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"{prefix}-{number:05d}-of-{len(parts):05d}.{suffix}"
        save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / f"{prefix}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


LAYOUTS = {
    "safetensors": lambda t, f: save_file(t, f / "model.safetensors", {"format": "pt"}),
    "sharded safetensors": lambda t, f: write_index(
        f, "model", "safetensors", split(t), lambda part, path: save_file(part, path)
    ),
    "bin": lambda t, f: torch.save(t, f / "pytorch_model.bin"),
    "pt": lambda t, f: torch.save(t, f / "pytorch_model.pt"),
    "legacy bin": lambda t, f: torch.save(
        t, f / "pytorch_model.bin", _use_new_zipfile_serialization=False
    ),
    "sharded bin": lambda t, f: write_index(f, "pytorch_model", "bin", split(t), torch.save),
}


@pytest.fixture
def folder(made, tmp_path):
    """Make a function: layout -> a folder with the tiny model in it."""

    def build(layout):
        target = tmp_path / layout.replace(" ", "-")
        target.mkdir()
        for path in made.iterdir():
            if path.name != "model.safetensors":
                (target / path.name).write_bytes(path.read_bytes())
        LAYOUTS[layout](load_file(made / "model.safetensors"), target)
        return target

    return build


class TestGood:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_tensors_are_read_whole_and_in_part(self, made, folder, layout):
        wanted = load_file(made / "model.safetensors")
        weights = open_weights(folder(layout))
        assert weights.names == set(wanted)
        for name, tensor in wanted.items():
            assert weights.shape(name) == tuple(tensor.shape)
            assert torch.equal(weights.read(name), tensor)
            spans = tuple(slice(1, 3) for _ in tensor.shape)
            assert torch.equal(weights.read(name, spans), tensor[spans])

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_models_are_loaded(self, made, folder, layout):
        wanted, _ = load_model(str(made))
        model, tokenizer = load_model(str(folder(layout)))
        ids = torch.tensor([[72, 101, 108]])
        assert torch.equal(model(ids).logits, wanted(ids).logits)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.generation_config.eos_token_id == wanted.generation_config.eos_token_id
        assert not model.training
        assert tokenizer.encode("H") == [72]

    def test_one_safetensors_file_is_preferred(self, folder):
        path = folder("safetensors")
        torch.save({"a": torch.ones(1)}, path / "pytorch_model.bin")
        assert weights_layout(path) == "model.safetensors"
        assert "a" not in open_weights(path).names


class Evil:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


class TestBad:
    @pytest.mark.parametrize("zipped", [True, False])
    @pytest.mark.parametrize("layout", ["bin", "pt", "sharded bin"])
    def test_a_pickle_that_runs_code_is_refused_and_not_run(self, folder, layout, zipped, tmp_path):
        path, trace = folder(layout), tmp_path / "was_here"
        (victim,) = [*path.glob("*.bin"), *path.glob("*.pt")][:1]
        torch.save(
            {"a": torch.ones(1), "b": Evil(trace)}, victim, _use_new_zipfile_serialization=zipped
        )
        for load in (open_weights, lambda p: load_model(str(p))):
            with pytest.raises(ConfigError, match=rf"{victim.name} holds more than tensors"):
                load(path)
        assert not trace.exists()

    def test_a_bare_pickle_is_refused(self, folder, tmp_path):
        path, trace = folder("bin"), tmp_path / "was_here"
        (path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(trace)))
        with pytest.raises(ConfigError, match=r"pytorch_model.bin"):
            open_weights(path)
        assert not trace.exists()

    @pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 1}, {1: torch.ones(1)}])
    def test_other_contents_are_refused(self, folder, content):
        path = folder("bin")
        torch.save(content, path / "pytorch_model.bin")
        with pytest.raises(ConfigError, match=r"pytorch_model.bin .*not a state dict"):
            open_weights(path)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_torn_file_is_refused_by_name(self, folder, layout):
        path = folder(layout)
        victim = [*path.glob("*.safetensors"), *path.glob("*.bin"), *path.glob("*.pt")][-1]
        content = victim.read_bytes()
        for torn in (content[: len(content) // 2], content[:5], b""):
            victim.write_bytes(torn)
            with pytest.raises(ConfigError, match=victim.name):
                load_model(str(path))

    @pytest.mark.parametrize("layout", ["sharded safetensors", "sharded bin"])
    def test_a_missing_shard_is_refused_by_name(self, folder, layout):
        path = folder(layout)
        victim = next(path.glob("*-00002-of-00003.*"))
        victim.unlink()
        with pytest.raises(ConfigError, match=rf"{victim.name} is missing"):
            load_model(str(path))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda m: m.pop("model.norm.weight"), r"also holds 'model.norm.weight'"),
            (lambda m: m.update(x=m["model.norm.weight"]), r"misses 'x'"),
            (lambda m: m.update(x="../elsewhere.safetensors"), r"not a file of its folder"),
            (lambda m: m.clear(), r"is empty"),
        ],
    )
    def test_an_index_that_lies_is_refused(self, folder, change, message):
        path = folder("sharded safetensors")
        index = path / "model.safetensors.index.json"
        data = json.loads(index.read_text())
        change(data["weight_map"])
        index.write_text(json.dumps(data))
        with pytest.raises(ConfigError, match=message):
            open_weights(path)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
    def test_an_index_that_is_none_is_refused(self, folder, text):
        path = folder("sharded safetensors")
        (path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ConfigError, match=r"index.json"):
            open_weights(path)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_missing_and_unknown_names_are_refused(self, made, tmp_path, layout, folder):
        path = folder(layout)
        tensors = load_file(made / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        without = {key: value for key, value in tensors.items() if key != name}
        with_more = {**tensors, "model.extra": torch.ones(2)}
        for changed, message in ((without, rf"{name} is not in its"), (with_more, "model.extra")):
            LAYOUTS[layout](changed, path)
            with pytest.raises(ConfigError, match=message):
                load_model(str(path))

    def test_no_weights_at_all(self, made, tmp_path):
        (tmp_path / "config.json").write_bytes((made / "config.json").read_bytes())
        assert weights_layout(tmp_path) is None
        with pytest.raises(ConfigError, match=r"none of model.safetensors, "):
            load_model(str(tmp_path))
