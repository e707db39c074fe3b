"""Algorithms in the real loop: embedded engine, stored rollouts, published weights."""

import pytest
import torch
from loop_kit import make_config, make_model, start

from rolltree.training import ALGORITHMS, CORRECTIONS
from rolltree.values.errors import ConfigError


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """The same architecture with other weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_model(tmp_path_factory.mktemp("teacher") / "tiny")
    network = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"sft", "distill", "dr_grpo", "zero"}))
def test_every_algorithm_takes_steps(model, tmp_path, name):
    """With another correction each, two mini-batches and a KL; the engine's logprobs are real."""
    correction = sorted(CORRECTIONS)[sorted(ALGORITHMS).index(name) % len(CORRECTIONS)]
    config = make_config(
        model,
        tmp_path / "run",
        train={"num_steps": 2, "updates_per_step": 4, "minibatches": 2},
        algorithm={"name": name, "correction": correction, "kl": "reward", "kl_coef": 0.01},
        optim={"lr": 1e-3},
    )
    report = start(config)
    for step in report.metrics:
        assert step["correction/mean"] == pytest.approx(1.0, abs=1e-3)  # the engine agrees
        assert step["correction/masked_share"] == 0.0
    assert report.metrics[0]["train/kl"] == pytest.approx(0, abs=1e-5)
    assert abs(report.metrics[1]["train/kl"]) > 1e-6  # the weights have moved


def test_distillation_comes_near_its_teacher(model, teacher, tmp_path):
    config = make_config(
        model,
        tmp_path / "run",
        train={"num_steps": 6},
        algorithm={"name": "distill", "kl": "full", "reference": str(teacher)},
        optim={"lr": 1e-2},
    )
    steps = start(config).metrics
    assert steps[-1]["train/kl"] < 0.7 * steps[0]["train/kl"]


def test_a_loss_that_reads_no_reward_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="supervised_states"):
        start(make_config(model, tmp_path / "run", algorithm={"name": "sft"}))
