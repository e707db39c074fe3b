"""The audit computes losses without torch, by functions that are written for its tensors."""

import numpy as np
import pytest
import torch

from rolltree.insight.auditing.token_metrics import like_tensor
from rolltree.training.losses import KLS, LOSSES, LossInputs

RANDOM = np.random.default_rng(0)
LOGPROB, OLD, REFERENCE = (-RANDOM.exponential(1.0, 500).astype(np.float32) for _ in range(3))
ADVANTAGE = RANDOM.normal(size=500).astype(np.float32)
MEANS = RANDOM.normal(scale=1e-3, size=500).astype(np.float32)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_arrays_is_that_of_tensors(name):
    row = LOSSES[name]
    parameters = row.defaults | ({"dual_clip": 2.0} if "dual_clip" in row.defaults else {})
    found = []
    for make in (like_tensor, torch.from_numpy):
        columns = map(make, (LOGPROB, OLD, ADVANTAGE, MEANS))
        terms = row.fn(LossInputs(*columns), parameters)
        found.append((np.asarray(terms.loss), np.asarray(terms.clipped)))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    assert found[0][1].tolist() == found[1][1].tolist()
    if row.rollout_term is not None:
        mine, right = (
            np.asarray(row.rollout_term(make(LOGPROB - OLD), make(ADVANTAGE), parameters))
            for make in (like_tensor, torch.from_numpy)
        )
        assert mine.tolist() == right.tolist()


@pytest.mark.parametrize("name", [name for name, row in KLS.items() if row.fn is not None])
def test_a_kl_of_arrays_is_that_of_tensors(name):
    mine, right = (
        np.asarray(KLS[name].fn(make(LOGPROB), make(REFERENCE)))
        for make in (like_tensor, torch.from_numpy)
    )
    np.testing.assert_allclose(mine, right, rtol=1e-6, atol=3e-7)
