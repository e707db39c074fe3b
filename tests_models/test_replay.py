"""Every mixture of transformers: experts are recorded and replayed with the own scores, or refused.

A router returns its logits, its scores and its choice. With given experts the choice must be these,
and the scores, up to a factor per token, one of the functions by which routers weigh: softmax,
sigmoid and the like, of its own logits at these experts.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from rolltree.inference.local.engine import LocalEngine
from rolltree.inference.local.routing import (
    Router,
    find_routers,
    probe_ids,
    record_routing,
)
from rolltree.inference.local.shell import body_of, is_mixture, shell_of
from rolltree.training.models.routing import Replay
from rolltree.values.errors import TrainingError
from rolltree.values.types import GenerateRequest, SamplingParams
from tests_models.architectures import ROWS, VOCAB, by_family, make_config, make_model

REFUSED = {
    "doge": "no router",  # a product of two choices
    "jetmoe": "several routers",
    "phimoe": "no router",  # two choices of one, with sparse mixing
    "zaya": "no router",
    # settings of a tiny model under which no layer has experts
    "flint": "no router",
    "gemma4_text": "no router",
    "gemma4_text, keys are values": "no router",
    "gemma4_text, shared keys": "no router",
}
WEIGHTS = {
    "softmax": lambda logits: logits.softmax(-1),
    "exp": lambda logits: (logits - logits.amax(-1, keepdim=True)).exp(),
    "sigmoid": torch.sigmoid,
    "already weighed": lambda weights: weights,
    "sqrt softplus": lambda logits: functional.softplus(logits).sqrt(),
}


class _Mixture:
    """What `is_mixture` reads of a model."""

    def __init__(self, row: str) -> None:
        self.config = make_config(row)


MIXTURES = [row for row in ROWS if is_mixture(_Mixture(row))]


def given_experts(router: Router, num_tokens: int, rng: np.random.Generator) -> Any:
    """Return distinct experts `[_T, top_k]`, of as many groups as the router may take."""
    rows = []
    for _ in range(num_tokens):
        pool = np.arange(router.num_experts)
        if router.groups:
            chosen = rng.choice(router.groups, router.module.topk_group, replace=False)
            pool = pool[np.isin(pool // (router.num_experts // router.groups), chosen)]
        rows.append(rng.choice(pool, router.top_k, replace=False))
    return np.stack(rows)


@pytest.mark.parametrize("row", by_family(MIXTURES))
def test_given_experts_get_the_routers_own_scores(row: str) -> None:
    model = make_model(row)
    if row in REFUSED:
        with pytest.raises(TrainingError, match=REFUSED[row]):
            Replay(model)
        return
    replay, ids, seen = Replay(model), probe_ids(model), {}
    num_layers, top_k = replay.shape
    experts = np.zeros((ids.shape[1], num_layers, top_k), np.int64)
    rng = np.random.default_rng(0)
    for layer, router in replay.routers.items():
        experts[:, layer] = given_experts(router, len(experts), rng)

        def note(_module: Any, _args: Any, output: Any, layer: int = layer) -> None:
            seen[layer] = [part.detach() for part in output if isinstance(part, torch.Tensor)]

        router.module.register_forward_hook(note)
    with torch.no_grad(), replay.installed():
        body_of(model)(input_ids=ids, use_cache=False, routed_experts=torch.from_numpy(experts))
    for layer, router in replay.routers.items():
        wanted = torch.from_numpy(experts[:, layer])
        parts = seen[layer]
        if row == "llama4_text":  # scores of all experts, 0 for those not chosen, and logits
            choice = parts[0].topk(top_k, -1).indices
            parts = [parts[1], parts[0].gather(1, wanted), choice]
            wanted_set, choice = wanted.sort(-1).values, choice.sort(-1).values
        else:
            (choice,) = [part for part in parts if not part.is_floating_point()]
            wanted_set = wanted
        assert torch.equal(choice.long(), wanted_set)
        if top_k == 1:
            continue
        floats = [part.double() for part in parts if part.is_floating_point()]
        logits = next(part for part in floats if part.shape[-1] == router.num_experts)
        found = next(part for part in floats if part.shape[-1] == top_k)
        scale = getattr(router.module, "per_expert_scale", torch.ones(router.num_experts)).detach()
        spread = {}
        for name, weigh in WEIGHTS.items():
            ratio = found / (weigh(logits) * scale).gather(1, wanted)
            spread[name] = float((ratio.std(-1) / ratio.mean(-1).abs()).max())
        assert min(spread.values()) < 1e-4, spread


@pytest.mark.parametrize("row", by_family(row for row in MIXTURES if row not in REFUSED))
async def test_the_engine_records_what_a_plain_pass_chooses(row: str) -> None:
    """Of as many conversations as slots, whose prompts begin alike and come in pieces."""
    model = make_model(row)
    engine = LocalEngine(model, max_batch=3, max_context=128, prefill_chunk=11, record_experts=True)
    shell, rng = shell_of(model), np.random.default_rng(0)
    routers = find_routers(shell)

    async def talk(number: int) -> None:
        path = np.concatenate([np.arange(2, 8), rng.integers(2, VOCAB - 1, 1 + number)])
        for turn in range(3):
            size = int(rng.integers(1, 9))
            sampling = SamplingParams(max_tokens=size, seed=10 * number + turn)
            output = await engine.generate(GenerateRequest(path.astype(np.int32), sampling))
            path = np.concatenate([path, output.completion_ids])
            with torch.no_grad(), record_routing(routers) as recorder:
                shell(input_ids=torch.from_numpy(path[None, :-1]), use_cache=False)
            own = np.sort(recorder.take())
            assert (np.sort(output.routed_experts) == own).all((1, 2)).mean() > 0.9  # close calls
            path = np.concatenate([path, rng.integers(2, VOCAB - 1, 2)])

    try:
        await asyncio.gather(*map(talk, range(3)))
    finally:
        await engine.aclose()
