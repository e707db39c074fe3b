import numpy as np
import pytest
import torch
from training_kit import FLOAT32, group, tiny_model, trainer, tree

from rolltree.samples import build_samples
from rolltree.training import supervised_states
from rolltree.values.errors import TrainingError

PROMPT = [5, 6, 7, 8]
DATA = [
    [(PROMPT, [9, 10, 11]), ([*PROMPT, 9, 10, 11, 12], [13, 14])],
    [(PROMPT, [15, 16])],
    [([1, 2], [3, 4, 5, 6])],
]


def samples(scope="tree", **options):
    if scope == "tree":
        options.setdefault("group_key", lambda state: 0)
    return build_samples(supervised_states(DATA), scope, **options).samples


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("scope", ["step", "turn", "interleave", "tree"])
def test_the_gradient_is_that_of_the_models_own_loss(scope):
    """transformers' cross entropy with masked labels, every sampled token counting the same."""
    model = tiny_model("llama")
    worker = trainer(model, algorithm={"name": "sft"}, optim={"max_grad_norm": 1e9})
    model.zero_grad()
    count = sum(len(completion) for rollout in DATA for _, completion in rollout)
    total = 0.0
    for rollout in DATA:
        for prompt, completion in rollout:
            ids = torch.tensor([prompt + completion])
            labels = torch.tensor([[-100] * len(prompt) + completion])
            loss = model(ids, labels=labels).loss * len(completion) / count
            loss.backward()
            total += float(loss.detach())
    wanted = gradients(model)
    model.zero_grad()
    seen = {}
    step = worker.optimizer.step
    worker.optimizer.step = lambda lr: seen.update(gradient=gradients(model)) or step(lr)
    metrics = worker.step(samples(scope), 1)
    assert metrics["train/loss"] == pytest.approx(total, rel=FLOAT32)
    assert float((seen["gradient"] - wanted).norm() / wanted.norm()) < FLOAT32
    assert metrics["train/num_records"] == count
    assert not [name for name in metrics if name.startswith(("mismatch", "ratio"))]


def test_a_warm_start_makes_the_tokens_likely():
    model = tiny_model()
    worker = trainer(model, algorithm={"name": "sft"}, optim={"lr": 1e-2})
    losses = [worker.step(samples(), step)["train/loss"] for step in range(1, 31)]
    assert losses[-1] < 0.5 < 2 < losses[0]
    ids = torch.tensor([[*PROMPT, 9, 10, 11, 12]])
    assert int(model(ids).logits[0, -1].argmax()) == 13


def test_what_conversations_share_is_computed_once():
    assert sum(s.num_tokens for s in samples("tree")) < sum(s.num_tokens for s in samples("step"))


def test_data_without_a_policy_is_refused_by_policy_losses():
    worker = trainer(tiny_model(), algorithm={"name": "reinforce"})
    with pytest.raises(TrainingError, match=r"call 0 of rollout data/0 .* is nan"):
        worker.step(samples(), 1)


def test_stored_rollouts_are_data_too():
    """Sampled tokens with advantages of any sign: only the tokens are read."""
    calls = group(3)
    worker = trainer(tiny_model(), algorithm={"name": "sft"})
    first = worker.step([tree(calls)], 1)["train/loss"]
    for call in calls:
        call.advantage = -call.advantage
    again = trainer(tiny_model(), algorithm={"name": "sft"}).step([tree(calls)], 1)
    assert again["train/loss"] == first > 0
    assert again["train/num_skipped_records"] == 0
    assert np.isfinite(again["train/sampling/sampling_logp_difference/mean"])
