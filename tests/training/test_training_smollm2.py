"""The loop over the real model: its engine and its trainer agree, its trees are exact."""

import re

import pytest
import torch
from loop_kit import make_config, start
from test_training_tree_attention import gradient
from training_kit import LetterSource, check_exact, flat, group, tree

from rolltree.inference.models import load_model
from rolltree.training import why_not_tree

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class ShortWords(LetterSource):
    """Byte ids mean nothing to the real tokenizer; reward short answers instead."""

    async def run_request(self, request, client):
        (state,) = await super().run_request(request, client)
        state["reward"] = 1.0 / state["metrics"]["num_bytes"] + request.index_in_group
        return [state]


@pytest.mark.long
def test_a_step_on_smollm2_agrees_with_its_engine(tmp_path):
    config = make_config(
        "smollm2-135m",
        tmp_path / "run",
        algorithm={"group_size": 2, "groups_per_step": 2},
        optim={"lr": 1e-5},
        train={"num_steps": 2, "share_prefix_across": "step", "num_threads": 2},
    )
    report = start(config, ShortWords())
    for step in report.metrics:
        assert step["train/sampling/sampling_logp_difference/mean"] < 1e-4
        assert step["train/sampling/sampling_logp_difference/max"] < 1e-3
        assert step["train/grad_norm"] > 0
        assert step["samples/reuse_factor"] > 2


def test_trees_of_smollm2_are_exact():
    """Two float32 gradients differ by what rounding the CPU does; the law is against float64."""
    model, _ = load_model("smollm2-135m")
    assert why_not_tree(model) is None
    for name, parameter in model.named_parameters():  # the others would take gigabytes in float64
        parameter.requires_grad_(re.search(r"embed_tokens|layers\.(0|14|29)\.", name) is not None)
    calls = group(3, 12, 2)
    _, loss = gradient(model, [[flat(call)] for call in calls], "rows")
    ours, tree_loss = gradient(model, [[tree(calls)]])
    assert tree_loss == pytest.approx(loss, rel=1e-4)
    exact, _ = gradient(model.double(), [[flat(call)] for call in calls], "rows")
    check_exact(ours, exact)
