"""What ranks compute, against one rank: run by `ranks_kit`."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from tests_models.architectures import make_model
from torch.distributed.tensor import DTensor, distribute_tensor
from training_kit import Call, flat, group, tiny_model, tree

from rolltree.samples import SampleStream
from rolltree.tokens import ROUTED_EXPERTS
from rolltree.training import Trainer, forward, load_train_config
from rolltree.training.batches import build_batch
from rolltree.training.checkpoint_formats import trained_tensors
from rolltree.training.layout import collate
from rolltree.training.logprobs import CHUNK_ROWS, gather_logprobs
from rolltree.training.models.lora import add_adapter
from rolltree.training.models.plain_weights import copy_weights, plain_tensors
from rolltree.training.models.shards import whole
from rolltree.values.errors import TrainingError

QUIET = {"max_mismatch": 1e37, "max_tokens": 64, "skip_zero_advantage": False}
CASES = {
    "grpo": {},
    "gspo, ratios of rollouts that span ranks": {"algorithm": {"name": "gspo"}},
    "kl": {"algorithm": {"kl_coef": 0.3}},
    "adapters, kl to the model below them": {
        "model": {"lora_rank": 2},
        "algorithm": {"kl_coef": 0.3},
    },
    "adapters of experts": {"kind": "mixture", "model": {"lora_rank": 2}},
    "replayed experts": {
        "kind": "mixture",
        "train": {"replay_experts": True, "gradient_checkpointing": True},
    },
    "gmpo, corrected per rollout, kl in the reward": {
        "algorithm": {
            "name": "gmpo",
            "correction": "sequence_tis",
            "kl_coef": 0.3,
            "kl": "reward",
        },
        "train": {"updates_per_step": 4, "minibatches": 2},
    },
    "tokens masked, whole kl, entropy": {
        "algorithm": {
            "correction": "icepop",
            "kl_coef": 0.3,
            "kl": "full",
            "entropy_coef": 0.1,
        },
    },
    "checkpointing": {"train": {"gradient_checkpointing": True}, "chunk_rows": 3},
    "one group, so that ranks have nothing": {
        "num_groups": 1,
        "algorithm": {"kl_coef": 0.3, "kl": "reward", "correction": "token_tis"},
    },
    "one group, and ratios and factors of rollouts": {
        "num_groups": 1,
        "algorithm": {"name": "gspo", "correction": "sequence_tis"},
    },
}
ARCHITECTURES = (
    "mamba",  # a layer inside a layer
    "zamba",  # layers that share their attention, around layers of their own
    "longcat_flash",  # experts that are identities: no gradient where no token is routed elsewhere
    "rwkv",  # the decay of one token has no gradient
    "deepseek_v4",  # nor have the compressors of one block
)
CASES |= {
    name: {
        "kind": name,
        "num_groups": 1,
        "train": {"scope": "interleave"},
        "algorithm": {"name": "reinforce", "ratio_cap": 1.0},
    }
    for name in ARCHITECTURES
}
CASES["zamba, adapters"] = {**CASES["zamba"], "model": {"lora_rank": 2}}
AT_THREE = ("grpo", "gspo, ratios of rollouts that span ranks", "kl")


def samples(num_groups=5):
    """Groups of different size: ranks have different numbers of tokens, records and packs."""
    made = []
    for number in range(num_groups):
        calls = group(num=3, prefix=8 + 6 * number, turns=1, seed=number, length=2 + number)
        made.append(tree([replace(call, rollout=call.rollout + 10 * number) for call in calls]))
    return made


def routed(sample):
    """The same with two of four experts per token in both layers, but for the last token."""
    rng = np.random.default_rng(len(sample.ids))
    positions = np.arange(len(sample.ids) - 1, dtype=np.int32)
    scores = rng.random((len(positions), 2, 4))
    stream = SampleStream(positions, scores.argsort(-1)[..., :2].astype(np.uint8))
    return replace(sample, info={**sample.info, "streams": {ROUTED_EXPERTS: stream}})


def made(case, ranks):
    sections = {k: v for k, v in case.items() if k not in ("num_groups", "kind", "chunk_rows")}
    sections["train"] = {**QUIET, **sections.get("train", {})}
    config = load_train_config({"optim": {"lr": 1e-2, "weight_decay": 0.1}, **sections})
    kind, teacher = case.get("kind", "qwen3"), None
    model = make_model(kind) if kind in ARCHITECTURES else tiny_model(kind)
    if config.model.lora_rank:
        add_adapter(model, config.model, 0)
    elif config.algorithm.kl_coef:
        teacher = tiny_model(kind, 1)
    trainer = Trainer(model, config, ranks, teacher)
    chunk_rows = case.get("chunk_rows", CHUNK_ROWS)
    forward.gather_logprobs = partial(gather_logprobs, chunk_rows=chunk_rows)
    torch.manual_seed(1)
    for name, parameter in trainer.model.named_parameters():
        if ".lora_B." in name:  # 0 at first: nothing would move away from the reference
            value = 0.3 * torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            with torch.no_grad():
                parameter.copy_(value)
    return trainer


def flatten(tensors):
    return torch.cat([whole(tensor).flatten() for tensor in tensors])


def gradient(trainer, data):
    rank, size = (trainer.ranks.rank, trainer.ranks.size) if trainer.ranks else (0, 1)
    batch = build_batch(
        data, trainer.algorithm, trainer.config.train.max_tokens, rank=rank, num_ranks=size
    )
    stats = trainer._gradients(batch)
    found = flatten(  # one rank alone has no gradient of what it did not use
        torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.optimizer.parameters
    )
    norm = trainer.optimizer.clip()
    trainer.optimizer.zero_grad()
    return found, norm, stats.metrics(batch.records), len(batch.packs)


def away(left, right):
    return float((left - right).norm() / right.norm())


def gradients(ranks, folder):
    """Per case: relative errors of the gradient, its norm, and the weights after two steps."""
    results = {}
    for name, case in CASES.items():
        if ranks.size == 3 and name not in AT_THREE:
            continue
        data = samples(case.get("num_groups", 5))
        if name == "replayed experts":
            data = [routed(sample) for sample in data]
        if case.get("kind") in ARCHITECTURES:  # one row, so that one rank has none
            data = [flat(Call([*range(3, 40)], [*range(40, 60)], advantage=0.5))]
        alone, together = made(case, None), made(case, ranks)
        expected, found = gradient(alone, data), gradient(together, data)
        for step in (1, 2):
            wanted, metrics = alone.step(data, step), together.step(data, step)
        weights = [flatten(p for p in t.model.parameters()) for t in (together, alone)]
        results[name] = {
            "gradient": away(found[0], expected[0]),
            "norm": abs(found[1] / expected[1] - 1),
            "packs": [found[3], expected[3]],
            "metrics": max(abs(found[2][k] - expected[2][k]) for k in expected[2]),
            "weights": away(*weights),
            "step_metrics": max(
                abs(metrics[k] - wanted[k]) / max(1, abs(wanted[k]))
                for k in wanted
                if k.split("/")[0] in ("mismatch", "ratio")
                or k in ("train/loss", "train/entropy", "train/grad_norm", "train/num_records")
            ),
            "local": sum(p.to_local().numel() for p in together.model.parameters()),
            "all": sum(p.numel() for p in together.model.parameters()),
        }
    return results


def bfloat16(ranks, folder):
    """Errors against one rank in float32: of one rank in bfloat16, and of several."""
    exact = made({}, None)
    data = []
    for sample in samples():  # on policy: ratios of 1 do not blow rounding up
        with torch.no_grad(), exact.logprobs.context():
            own = exact.logprobs(collate([sample])).logprob.numpy()
        data.append(replace(sample, records=replace(sample.records, logprob=own)))
    half = {"model": {"compute_dtype": "bfloat16"}}
    wanted = gradient(exact, data)[0]
    together = made(half, ranks)
    return {
        "alone": away(gradient(made(half, None), data)[0], wanted),
        "together": away(gradient(together, data)[0], wanted),
        "master": sorted({str(p.dtype) for p in together.model.parameters()}),
    }


def failures(ranks, folder):
    """Errors reach every rank alike and leave the weights alone."""
    trainer = made({}, ranks)
    before = flatten(trainer.model.parameters())
    bad = Call([1, 2, 3], [4, 5], rollout=77, advantage=1e38, logprob=[-1e30, -1e30])
    messages = []
    try:
        trainer.step([*samples(), flat(bad)], 1)
    except TrainingError as error:
        messages.append(str(error))
    unchanged = torch.equal(before, flatten(trainer.model.parameters()))
    counted = ranks.total(np.array([len(messages)]), np.array([int(unchanged)]))
    (good,) = ranks.total(np.array([made({}, ranks).step(samples(), 1)["train/loss"]]))
    return {
        "messages": messages,
        "raised": int(counted[0][0]),
        "unchanged": int(counted[1][0]),
        "loss": float(good[0]) / ranks.size,
    }


def masked(ranks, folder):
    """A step of which one rank has only calls that cannot be trained, with and without ranks."""
    nothing_known = [np.nan] * 3
    lost = [flat(Call([1, 2, 3], [4, 5, 6], rollout=n, logprob=nothing_known)) for n in range(4)]
    data = [flat(Call([*range(3, 20)], [*range(20, 30)], rollout=7, advantage=0.5)), *lost]
    alone, together = made({}, None), made({}, ranks)
    wanted, found = alone.step(data, 1), together.step(data, 1)
    weights = [flatten(each.model.parameters()) for each in (together, alone)]
    names = ("masked/num_calls", "train/num_records", "train/grad_norm")
    return {"away": away(*weights), "found": [[each[n] for n in names] for each in (found, wanted)]}


def looked(ranks, folder):
    """Weights as a checkpoint and as a publish see them, after a pass without a backward one."""
    trainer = made({}, ranks)
    with torch.no_grad(), trainer.logprobs.context():
        trainer.logprobs(collate(samples()[:1]))
    wanted = dict(tiny_model().named_parameters())
    found = {name: whole(value) for name, value in trained_tensors(trainer.model).items()}
    with torch.no_grad(), trainer.logprobs.context():
        trainer.logprobs(collate(samples()[:1]))
    plain = dict(plain_tensors(trainer.model))
    assert all(value.shape == wanted[name].shape for name, value in found.items())
    return [
        max(float((value - wanted[name]).detach().abs().max()) for name, value in tensors.items())
        for tensors in (found, plain)
    ]


def merged(ranks, folder):
    """Logits of a copy of an adapted and sharded mixture, and of that mixture whole."""
    case = CASES["adapters of experts"]
    served, trainer = tiny_model("mixture", seed=3), made(case, ranks)
    copy_weights(trainer.model, served)
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        wanted, found = (m(input_ids=ids).logits for m in (made(case, None).model, served))
        plain = tiny_model("mixture")(input_ids=ids).logits
    return [float((each - wanted).abs().max()) for each in (found, plain)]


def commands(ranks, folder):
    """Rank 0 tells, the others hear the same: numbers, text and arrays, also much of it."""
    data = {"step": 3, "text": "ä", "array": np.arange(6, dtype=np.int32).reshape(2, 3)}
    big = {"array": np.arange(10**6, dtype=np.float32)}
    heard = []
    for number, wanted in enumerate((data, big, {})):
        if ranks.leads:
            time.sleep(0.05 * number)
            ranks.send("command", wanted)
            heard.append(True)
        else:
            got = ranks.receive()
            same = [np.array_equal(got.data[key], wanted[key]) for key in wanted]
            heard.append(got.name == "command" and got.data.keys() == wanted.keys() and all(same))
    (total,) = ranks.total(np.array(heard, np.int64))
    ranks.barrier()
    return total.tolist()


def nothing(ranks, folder):
    """A world of one never sets torch.distributed up."""
    return [ranks is None, torch.distributed.is_initialized()]


WORLDS = [
    (1, nothing),
    (2, commands),
    (2, looked),
    (2, masked),
    (2, merged),
    (2, gradients),
    (3, gradients),
    (2, bfloat16),
    (2, failures),
]
