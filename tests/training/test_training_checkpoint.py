import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file
from training_kit import tiny_model

from rolltree.errors import TrainingError
from rolltree.training import Checkpoints, TrainState, export_model, load_train_config
from rolltree.training.checkpoint import check_complete
from rolltree.training.optim import Optimizer

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


@pytest.mark.parametrize("kind", ["qwen3", "llama"])  # tied and untied embeddings
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, kind):
    model, optimizer = made(kind)
    saved = Checkpoints(tmp_path)
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
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
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
        with pytest.raises(TrainingError, match=r"step-000003 is torn"):
            saved.latest()

    def test_damaged_tensors_are_refused(self, tmp_path):
        saved = Checkpoints(tmp_path)
        model, optimizer = made()
        path = saved.save(model, optimizer, TrainState(3, 3))
        for name in ("optimizer.safetensors", "model.safetensors"):
            file = path / name
            content = file.read_bytes()
            file.write_bytes(b"\xff" * 16 + content[16:])
            with pytest.raises(TrainingError, match=f"{name} cannot be read"):
                saved.load(path, model, optimizer)

    def test_a_pointer_to_nothing_is_refused(self, tmp_path):
        saved = Checkpoints(tmp_path)
        saved.save(*made(), TrainState(3, 3)).rename(tmp_path / "moved")
        with pytest.raises(TrainingError, match="step-000003 is torn"):
            saved.latest()

    def test_another_format_is_refused(self, tmp_path):
        path = Checkpoints(tmp_path).save(*made(), TrainState(3, 3))
        data = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps({**data, "format": 99}))
        with pytest.raises(TrainingError, match="format 99"):
            check_complete(path)

    def test_another_models_checkpoint_is_refused(self, tmp_path):
        saved = Checkpoints(tmp_path)
        path = saved.save(*made(), TrainState(3, 3))
        wide = tiny_model(hidden_size=64)
        with pytest.raises(TrainingError, match="another model"):
            saved.load(path, wide, Optimizer(wide, OPTIM))
        llama = tiny_model("llama")
        with pytest.raises(TrainingError, match="another model"):
            saved.load(path, llama, Optimizer(llama, OPTIM))


KILLED_SAVES = """
    import os, pathlib, shutil, sys, warnings
    warnings.filterwarnings("ignore")
    sys.path.insert(0, {kit!r})
    import torch
    torch.set_num_threads(1)
    import rolltree.training.checkpoint as room
    from test_training_checkpoint import made

    def counted(function):
        def call(*args, **kwargs):
            global remaining
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), 9)
            return function(*args, **kwargs)
        return call

    for calls in range(60):
        child = os.fork()
        if child == 0:
            saved = room.Checkpoints({root!r} + "/" + str(calls), keep=1)
            model, optimizer = made()
            saved.save(model, optimizer, room.TrainState(1, 1))
            remaining = calls
            for name in ("mkdir", "rename", "replace", "write_text", "unlink"):
                setattr(pathlib.Path, name, counted(getattr(pathlib.Path, name)))
            room.save_file = counted(room.save_file)
            os.fsync, shutil.rmtree = counted(os.fsync), counted(shutil.rmtree)
            saved.save(model, optimizer, room.TrainState(2, 2))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
        if status == 0:
            break
"""


def test_a_kill_at_any_call_of_a_save_leaves_a_complete_checkpoint(tmp_path):
    kit = os.path.dirname(__file__)
    script = textwrap.dedent(KILLED_SAVES.format(kit=kit, root=str(tmp_path)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    codes = [int(line) for line in done.stdout.split()]
    assert len(codes) > 10, done.stderr
    assert codes == [-9] * (len(codes) - 1) + [0]
    wanted, _ = made()
    steps = []
    for calls in range(len(codes)):
        root = tmp_path / str(calls)
        saved = Checkpoints(root, keep=1)
        model = tiny_model(seed=3)
        optimizer = Optimizer(model, OPTIM)
        steps.append(saved.load(saved.latest(), model, optimizer).step)
        assert same(model, wanted)
        # the next save cleans up after the killed one
        saved.save(model, optimizer, TrainState(3, 3))
        assert sorted(p.name for p in root.iterdir()) == ["latest", "step-000003"]
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


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
