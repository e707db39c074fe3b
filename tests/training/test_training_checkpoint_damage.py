"""Checkpoints on bad disks: flipped bits, a full disk, a read-only one. Real files, real disks."""

import os
import random
import shutil

import pytest
import torch
from test_training_checkpoint import OPTIM, made, same
from training_kit import tiny_model

from disk_kit import read_only, resize, small_disk
from rolltree.training import Checkpoints, TrainState
from rolltree.training.checkpoint_reading import check_content
from rolltree.training.optim import Optimizer
from rolltree.values.errors import TrainingError

NUM_FLIPS = int(os.environ.get("ROLLTREE_FLIPS", "40"))


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


@pytest.mark.parametrize("content", ["full", "sharded"])
def test_a_flipped_bit_is_said_and_never_loaded(tmp_path, content):
    saved = Checkpoints(tmp_path / "saved", content=content)
    saved.save(*made(), TrainState(3, 3, {"solver": 0.25}))
    draw = random.Random(1)
    files = sorted(p for p in saved.root.rglob("*") if p.is_file() and p.name != "latest")
    fresh = tiny_model(seed=5)
    before = [p.detach().clone() for p in fresh.parameters()]
    for trial in range(NUM_FLIPS):
        root = tmp_path / "copy"
        shutil.copytree(saved.root, root)
        file = root / files[trial % len(files)].relative_to(saved.root)
        bit = draw.randrange(8 * file.stat().st_size)
        flip(file, bit)
        with pytest.raises(TrainingError, match=r"step-000003"):
            Checkpoints(root).latest()
        with pytest.raises(TrainingError, match=r"step-000003"):
            Checkpoints(root).load(root / "step-000003", fresh, Optimizer(fresh, OPTIM))
        assert all(map(torch.equal, before, fresh.parameters())), (file.name, bit)
        shutil.rmtree(root)


def test_the_one_before_a_damaged_checkpoint_is_used_and_that_is_said(tmp_path):
    saved = Checkpoints(tmp_path)
    parts = made()
    saved.save(*parts, TrainState(3, 3))
    saved.save(*made(steps=4), TrainState(6, 6))
    flip(tmp_path / "step-000006" / "model.safetensors", 8 * 5000)
    said = []
    path = saved.latest(said.append)
    assert path.name == "step-000003"
    (sentence,) = said
    assert "step-000006 is torn or damaged: model.safetensors differs" in sentence
    assert "continues from step-000003" in sentence
    other = tiny_model(seed=5)
    assert saved.load(path, other, Optimizer(other, OPTIM)) == TrainState(3, 3)
    assert same(other, parts[0])
    flip(tmp_path / "step-000003" / "optimizer.safetensors", 8 * 5000)
    with pytest.raises(TrainingError, match=r"step-000006 is torn or damaged.*latest"):
        saved.latest(said.append)
    assert len(said) == 1


def test_a_damaged_pointer_leads_to_the_newest_checkpoint(tmp_path):
    saved = Checkpoints(tmp_path)
    for step in (3, 6):
        saved.save(*made(), TrainState(step, step))
    for text in ("step-000008\n", "", "\x00tep-000006\n"):
        (tmp_path / "latest").write_text(text)
        assert saved.latest().name == "step-000006"


@pytest.mark.parametrize("content", ["full", "sharded"])
def test_a_full_disk_is_said_and_the_last_checkpoint_stays(tmp_path, content):
    with small_disk(tmp_path / "disk", "2m") as disk:
        saved = Checkpoints(disk / "checkpoints", keep=9, content=content)
        parts = made()
        first = saved.save(*parts, TrainState(1, 1))
        free = shutil.disk_usage(disk).free
        (disk / "ballast").write_bytes(bytes(max(0, free - 24_000)))
        with pytest.raises(TrainingError, match=r"step 2 could not be written.*[Nn]o space"):
            saved.save(*parts, TrainState(2, 2))
        names = sorted(path.name for path in saved.root.iterdir())
        assert names == ["latest", "step-000001"]
        check_content(first)
        resize(disk, "9m")
        assert saved.save(*parts, TrainState(2, 2)).name == "step-000002"
        assert saved.latest().name == "step-000002"


def test_a_read_only_disk_is_said(tmp_path):
    with small_disk(tmp_path / "disk", "4m") as disk:
        saved = Checkpoints(disk / "checkpoints")
        parts = made()
        path = saved.save(*parts, TrainState(1, 1))
        with read_only(disk):
            with pytest.raises(TrainingError, match=r"step 2 could not be written.*Read-only"):
                saved.save(*parts, TrainState(2, 2))
            assert saved.load(saved.latest(), *parts) == TrainState(1, 1)
        assert saved.latest() == path
