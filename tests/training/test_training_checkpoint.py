import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_kit import tiny_model

from rolltree.training import (
    Checkpoints,
    TrainState,
    checkpoint_formats,
    export_model,
    load_train_config,
)
from rolltree.training.checkpoint_formats import put_in_place
from rolltree.training.checkpoint_reading import check_complete
from rolltree.training.models.lora import add_adapter
from rolltree.training.optim import Optimizer
from rolltree.values.errors import TrainingError

OPTIM = load_train_config({"optim": {"lr": 0.01, "weight_decay": 0.1}}).optim


def advance(model, optimizer, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(0.01)


def same(left, right):
    return all(
        torch.equal(one, two)
        for one, two in zip(left.parameters(), right.parameters(), strict=True)
    )


def made(kind="qwen3", steps=2):
    model = tiny_model(kind)
    optimizer = Optimizer(model, OPTIM)
    for seed in range(steps):
        advance(model, optimizer, seed)
    return model, optimizer


@pytest.mark.parametrize("content", ["full", "sharded"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])  # tied and untied embeddings
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, kind, content, monkeypatch):
    monkeypatch.setattr(checkpoint_formats, "MAX_SHARD_SIZE", "20KB")
    model, optimizer = made(kind)
    saved = Checkpoints(tmp_path, content=content)
    path = saved.save(model, optimizer, TrainState(2, 2))
    other = tiny_model(kind, seed=5)
    fresh = Optimizer(other, OPTIM)
    assert saved.latest() == path
    assert saved.load(path, other, fresh) == TrainState(2, 2)
    assert same(model, other)
    for seed in (7, 8, 9):
        advance(model, optimizer, seed)
        advance(other, fresh, seed)
        assert same(model, other)


def test_loading_keeps_the_modules_own_tensors(tmp_path):
    model, optimizer = made()
    saved = Checkpoints(tmp_path)
    path = saved.save(model, optimizer, TrainState(1, 1))
    addresses = [p.data_ptr() for p in model.parameters()]
    saved.load(path, model, optimizer)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_there_is_no_checkpoint_at_first_and_no_pickle_ever(tmp_path):
    saved = Checkpoints(tmp_path / "none")
    assert saved.latest() is None
    path = saved.save(*made(), TrainState(1, 1))
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
    ]
    sharded = Checkpoints(tmp_path / "sharded", content="sharded")
    path = sharded.save(*made(), TrainState(1, 1))
    assert sorted(file.name for file in path.iterdir()) == [
        "rng.safetensors",
        "shards",
        "state.json",
    ]
    assert {file.suffix for file in (path / "shards").iterdir()} == {".safetensors"}
    path = saved.save(*made(), TrainState(2, 2))
    assert "exp_avg/model.norm.weight" in load_file(path / "optimizer.safetensors")


def test_only_so_many_are_kept(tmp_path):
    saved = Checkpoints(tmp_path, keep=2)
    parts = made()
    for step in (1, 2, 3, 12):
        saved.save(*parts, TrainState(step, step))
    assert sorted(p.name for p in tmp_path.glob("*step*")) == ["step-000003", "step-000012"]
    assert saved.latest().name == "step-000012"


def test_a_save_after_going_back_removes_the_abandoned_future(tmp_path):
    saved = Checkpoints(tmp_path, keep=1)
    parts = made()
    for step in (2, 9):
        saved.save(*parts, TrainState(step, step))
    saved.save(*parts, TrainState(5, 5))
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000005"]
    assert saved.latest().name == "step-000005"


class TestTorn:
    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
    @pytest.mark.parametrize("how", ["missing", "short"])
    def test_torn_directories_are_refused_by_name(self, tmp_path, name, how):
        saved = Checkpoints(tmp_path)
        path = saved.save(*made(), TrainState(3, 3))
        file = path / name
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(TrainingError, match=r"step-000003 is torn or damaged"):
            saved.latest()

    @pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "9" * 5_000, "\xff"])
    def test_a_state_that_is_none_is_refused(self, tmp_path, text):
        saved = Checkpoints(tmp_path)
        path = saved.save(*made(), TrainState(3, 3))
        (path / "state.json").write_text(text, encoding="latin-1")
        with pytest.raises(TrainingError, match=r"step-000003 is torn or damaged"):
            saved.latest()

    def test_damaged_tensors_are_refused(self, tmp_path):
        saved = Checkpoints(tmp_path)
        model, optimizer = made()
        path = saved.save(model, optimizer, TrainState(3, 3))
        for name in ("rng.safetensors", "optimizer.safetensors", "model.safetensors"):
            file = path / name
            content = file.read_bytes()
            file.write_bytes(b"\xff" * 16 + content[16:])
            with pytest.raises(TrainingError, match=f"{name} differs from its checksum"):
                saved.load(path, model, optimizer)
            file.write_bytes(content)

    def test_a_missing_shard_of_a_rank_is_refused(self, tmp_path):
        saved = Checkpoints(tmp_path, content="sharded")
        path = saved.save(*made(), TrainState(3, 3))
        (shard,) = path.glob("shards/*")
        shard.unlink()
        with pytest.raises(
            TrainingError, match=f"step-000003 is torn or damaged: shards/{shard.name} is missing"
        ):
            saved.latest()

    def test_a_pointer_to_nothing_is_refused(self, tmp_path):
        saved = Checkpoints(tmp_path)
        saved.save(*made(), TrainState(3, 3)).rename(tmp_path / "moved")
        with pytest.raises(TrainingError, match="step-000003 is torn or damaged"):
            saved.latest()

    def test_another_format_is_refused(self, tmp_path):
        path = Checkpoints(tmp_path).save(*made(), TrainState(3, 3))
        data = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps({**data, "format": 99}))
        with pytest.raises(TrainingError, match="format 99"):
            check_complete(path)

    @pytest.mark.parametrize("content", ["full", "sharded"])
    def test_another_models_checkpoint_is_refused(self, tmp_path, content):
        saved = Checkpoints(tmp_path, content=content)
        path = saved.save(*made(), TrainState(3, 3))
        wide = tiny_model(hidden_size=64)
        with pytest.raises(TrainingError, match="another model"):
            saved.load(path, wide, Optimizer(wide, OPTIM))
        llama = tiny_model("llama")
        with pytest.raises(TrainingError, match="another model"):
            saved.load(path, llama, Optimizer(llama, OPTIM))


def test_what_was_drawn_goes_on_after_a_resume(tmp_path):
    def draw():
        mine = [random.random(), random.gauss(), np.random.rand(), np.random.normal()]
        return [*mine, *torch.rand(2).tolist()]

    random.gauss(), np.random.normal()  # each keeps a second one
    saved, parts = Checkpoints(tmp_path), made()
    path = saved.save(*parts, TrainState(1, 1))
    wanted = draw()
    saved.load(path, *parts)
    assert draw() == wanted


def test_everything_in_the_state_comes_back(tmp_path):
    saved, parts = Checkpoints(tmp_path), made()
    state = TrainState(3, 4, {"solver": 0.25})
    assert saved.load(saved.save(*parts, state), *parts) == state


def test_a_full_checkpoint_is_a_model_folder(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(checkpoint_formats, "MAX_SHARD_SIZE", "20KB")
    model, optimizer = made()
    saved = Checkpoints(tmp_path)
    path = saved.save(model, optimizer, TrainState(1, 1))
    assert len(list(path.glob("model-*-of-*.safetensors"))) > 2
    assert (path / "model.safetensors.index.json").is_file()
    again = AutoModelForCausalLM.from_pretrained(path)
    assert same(model, again)
    next(path.glob("model-00002-*")).unlink()
    with pytest.raises(TrainingError, match=r"damaged: model-00002-of-\d+.safetensors is missing"):
        saved.latest()


def test_adapters_larger_than_a_shard_are_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_formats, "MAX_SHARD_SIZE", "1KB")
    config = load_train_config({"model": {"lora_rank": 8}})
    model, other = tiny_model(), tiny_model()
    for each, seed in ((model, 0), (other, 1)):
        add_adapter(each, config.model, seed)
    saved = Checkpoints(tmp_path)
    path = saved.save(model, Optimizer(model, OPTIM), TrainState(1, 1))
    saved.load(path, other, Optimizer(other, OPTIM))
    assert same(model, other)


def test_the_export_loads_as_a_model(tmp_path, capfd):
    from transformers import AutoModelForCausalLM

    model, _ = made()
    path = export_model(model, None, tmp_path / "model")
    assert capfd.readouterr() == ("", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    again = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(ids).logits, model(ids).logits)
    export_model(tiny_model(seed=4), None, path)  # replaces the older one
    other = AutoModelForCausalLM.from_pretrained(path)
    assert not torch.equal(other(ids).logits, model(ids).logits)


class Killed(BaseException):
    pass


@pytest.fixture
def export(tmp_path):
    """A folder with `kept` in it, and a function that replaces it by one with `new`."""

    def replace():
        working = tmp_path / ".model.tmp"
        working.mkdir(exist_ok=True)
        (working / "new").touch()
        put_in_place(working, tmp_path / "model")

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "kept").touch()
    return replace


def breaking(monkeypatch, error):
    """Let the rename of a new folder to its name fail."""
    rename = Path.rename

    def broken(path, target):
        if path.name.endswith(".tmp"):
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", broken)


def files_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_the_older_export_stays_if_the_new_one_cannot_be_renamed(tmp_path, export, monkeypatch):
    with monkeypatch.context() as patch:
        breaking(patch, OSError("no"))
        with pytest.raises(OSError, match="no"):
            export()
    assert files_in(tmp_path / "model") == ["kept"]
    export()
    assert files_in(tmp_path) == ["model/new"]


def test_a_kill_between_the_renames_loses_no_export(tmp_path, export, monkeypatch):
    with monkeypatch.context() as patch:
        breaking(patch, Killed())
        with pytest.raises(Killed):
            export()
    assert files_in(tmp_path) == [".model.old/kept", ".model.tmp/new"]
    with monkeypatch.context() as patch:
        breaking(patch, OSError("no"))
        with pytest.raises(OSError, match="no"):
            export()
    assert files_in(tmp_path / "model") == ["kept"]
    export()
    assert files_in(tmp_path) == ["model/new"]
