"""The readable loop and the engine give the same samples, the same loss and the same gradient."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from loop_kit import make_config, make_model, start
from training_kit import FLOAT32, difference

from rolltree.inference.models import load_model
from rolltree.rollouts.decode import decode_results
from rolltree.samples import build_samples
from rolltree.store import Run
from rolltree.training import LogprobModel, Trainer, assign_credit
from rolltree.training.batches import build_batch

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_loop.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("grpo_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_stays_readable():
    assert len(EXAMPLE.read_text().splitlines()) < 250


def test_both_doors_train_a_stored_run_the_same(example, tmp_path):
    folder = make_model(tmp_path / "model")
    config = make_config(
        folder, tmp_path / "run", train={"share_prefix_across": "step", "num_steps": 1}
    )
    report = start(config)

    def stored():
        with Run.open(tmp_path / "run", "r") as run:
            return sorted(
                decode_results(run.rollouts(phase="train")), key=lambda r: r.request.request_id
            )

    theirs = assign_credit(stored(), "grpo")
    ours = example.advantages(stored())
    assert [s["advantage"] for s in ours] == pytest.approx([a[0] for a in theirs.advantages])

    model, _ = load_model(str(folder))
    trainer = Trainer(model, config)
    built = build_samples(
        theirs.trained, "tree", advantages=theirs.advantages, group_key=lambda state: 0
    ).samples
    batch = build_batch(built, trainer.algorithm, 8192)
    samples = example.samples_of(ours)
    (item,), (sample,) = batch.packs, samples
    for name in ("ids", "positions", "subtree_end"):
        assert np.array_equal(getattr(sample, name), getattr(item.samples[0], name))
    for name in ("source", "target", "logprob", "advantage", "weight"):
        assert getattr(sample.records, name) == pytest.approx(getattr(batch.records, name))

    trainer._gradients(batch)
    wanted = [p.grad.clone() for p in trainer.optimizer.parameters]
    trainer.optimizer.zero_grad()
    loss = example.accumulate(LogprobModel(model), samples, 8192)
    assert loss == pytest.approx(report.metrics[0]["train/loss"], abs=1e-5)
    found = torch.cat([p.grad.flatten() for p in trainer.optimizer.parameters])
    assert difference(found, torch.cat([gradient.flatten() for gradient in wanted])) < FLOAT32


async def test_it_runs(example, tmp_path, capsys, monkeypatch):
    folder = make_model(tmp_path / "model")
    arguments = f"x --model {folder} --num-steps 2 --groups 2 --group-size 2 --max-context 256"
    monkeypatch.setattr("sys.argv", arguments.split())
    await example.main(example.arguments())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["step", "1"], ["step", "2"]]
