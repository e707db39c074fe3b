"""Checkpoints of a run that somebody else made: nothing waits, or leads out of the run."""

import os

import pytest

from rolltree.training.checkpoint import Checkpoints
from rolltree.training.checkpoint_reading import check_complete
from rolltree.values.errors import TrainingError


@pytest.fixture
def saved(tmp_path):
    """Return checkpoints with one empty, complete one."""
    import json

    from rolltree.training.checkpoint import FORMAT, own_checksum

    step = tmp_path / "run" / "checkpoints" / "step-000002"
    step.mkdir(parents=True)
    data = {"format": FORMAT, "content": "full", "state": {"step": 2, "version": 2}, "files": {}}
    data["checksum"] = own_checksum(data)
    (step / "state.json").write_text(json.dumps(data))
    (step.parent / "latest").write_text("step-000002\n")
    assert Checkpoints(step.parent).latest() == step
    return step


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["state.json", "rng.safetensors", "model.safetensors", "x/y"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_files_are_regular(saved, name, kind):
    file = saved / name
    file.parent.mkdir(exist_ok=True)
    outside = saved.parent / "outside"
    outside.write_bytes(file.read_bytes() if file.exists() else b"")
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(outside)
    with pytest.raises(TrainingError, match="torn or damaged"):
        check_complete(saved)


@pytest.mark.timeout(60)
def test_the_pointer_names_a_checkpoint_of_this_run(saved, tmp_path):
    other = tmp_path / "other" / "step-000002"
    saved.rename(saved.with_name("step-000001"))
    other.parent.mkdir()
    saved.with_name("step-000001").rename(other)
    pointer = saved.parent / "latest"
    pointer.write_text("../../other/step-000002\n")
    with pytest.raises(TrainingError, match="torn or damaged"):
        Checkpoints(saved.parent).latest()
    pointer.unlink()
    os.mkfifo(pointer)
    with pytest.raises(TrainingError, match="named pipe"):
        Checkpoints(saved.parent).latest()


def test_a_linked_folder_is_refused(saved, tmp_path):
    (tmp_path / "linked").symlink_to(saved.parent)
    with pytest.raises(TrainingError, match="is a link"):
        Checkpoints(tmp_path / "linked")
    (saved.parent / "step-000003").symlink_to(saved)
    with pytest.raises(TrainingError, match="is a link"):
        check_complete(saved.parent / "step-000003")


def test_the_pointer_is_written_over_nothing_else(saved, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in ("latest", ".latest.tmp"):
        (saved.parent / name).unlink(missing_ok=True)
        (saved.parent / name).symlink_to(precious)
    Checkpoints(saved.parent)._point_to(saved)
    assert precious.read_text() == "precious"
    assert Checkpoints(saved.parent).latest() == saved
