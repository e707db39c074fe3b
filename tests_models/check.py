"""What rolltree does with a model, and how far that is from float64: gradients and logprobs.

Gradients of one process, of two ranks and of adapters; logprobs of the embedded engine.

`python -m tests_models.check qwen3_next gpt_oss` prints it for tiny models of these architectures,
`python -m tests_models.check PATH` for a model's folder.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from rolltree.inference.local.engine import LocalEngine
from rolltree.samples import build_samples
from rolltree.tokens import Trajectory
from rolltree.training import Trainer, export_model, load_train_config
from rolltree.training.batches import build_batch
from rolltree.training.models.lora import (
    ADAPTER,
    adapted_modules,
    add_adapter,
    check_copy,
    copy_weights,
)
from rolltree.training.models.ranks import Ranks
from rolltree.training.models.shards import whole
from rolltree.values.errors import RolltreeError
from rolltree.values.types import (
    FinishReason,
    GenerateRequest,
    ModelResponse,
    SamplingParams,
    State,
)
from tests_models.architectures import ROWS, make_model, moved
from tests_models.ranks import Pair
from tests_models.reference import (
    ROUNDED,
    call_logprobs,
    double,
    float32_allows,
    in_double,
)

TEMPERATURE = 0.8
MARGIN = 3e-5
"""Choices (of experts, of keys) that are nearer than this depend on rounding: another seed."""
SCOPES = ("tree", "interleave", "turn", "step")
PAIR = Pair()


@dataclass
class Outcome:
    """One row: the widest training that is offered, errors, and the reasons of refusals.

    `trains` is `tree`, `rows` or `refused`; `gradient` the largest error by scope; `plain` the
    error of the model's own float32 pass; the same for the engine's logprobs. `ranks` and
    `adapters` are the errors of the gradient of two ranks and of adapters; `in_peft` says whether
    peft reads these. `wrong` lists what is neither exact nor refused with a typed error.
    """

    trains: str = "refused"
    gradient: dict[str, float] = field(default_factory=dict)
    plain: float = 0.0
    ranks: float | None = None
    adapters: float | None = None
    adapters_plain: float = 0.0
    in_peft: bool = False
    engine: float | None = None
    engine_plain: float = 0.0
    reasons: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seed: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        errors = " ".join(f"{name} {error:.1e}" for name, error in self.gradient.items())
        served, ranks, adapters = (
            "refused" if error is None else f"{error:.1e}"
            for error in (self.engine, self.ranks, self.adapters)
        )
        lines = [
            f"{'WRONG' if self.wrong else 'ok'}: trains as {self.trains}; gradient {errors}, two "
            f"ranks {ranks} (own float32 {self.plain:.1e}); adapters {adapters} (own float32 "
            f"{self.adapters_plain:.1e}); engine {served} (own float32 {self.engine_plain:.1e}); "
            f"seed {self.seed}, {self.seconds:.1f} s"
        ]
        lines += [f"  wrong: {text}" for text in self.wrong]
        lines += [f"  {name}: {text}" for name, text in self.reasons.items()]
        return "\n".join(lines)


@dataclass
class Call:
    """One model call of a rollout."""

    rollout: int
    turn: int
    prompt: np.ndarray[Any, Any]
    completion: np.ndarray[Any, Any]
    advantage: float


def make_calls(vocab_size: int, seed: int = 0, num_rollouts: int = 3) -> list[Call]:
    """Return a group of rollouts of three calls over one prompt of 40 tokens.

    The second call goes on from the first; before the third the history is rewritten after a prefix
    that is longer than any window here.
    """
    rng = np.random.default_rng(seed)

    def draw(count: int) -> np.ndarray[Any, Any]:
        return rng.integers(3, vocab_size, count).astype(np.int32)

    prompt, calls = draw(40), []
    for rollout in range(num_rollouts):
        advantage = float(np.float32((-1) ** rollout * (1 + rng.random())))
        context = prompt
        for turn in range(3):
            answer = draw(int(rng.integers(3, 14)))
            calls.append(Call(rollout, turn, context, answer, advantage))
            kept = context[:29] if turn == 1 else context
            context = np.concatenate([kept, answer, draw(5)])
    return calls


def states_of(calls: list[Call]) -> list[State]:
    """Return calls as finished rollouts; their logprobs make every loss weight 1."""
    states = []
    for rollout in sorted({call.rollout for call in calls}):
        trajectory = Trajectory()
        mine = [call for call in calls if call.rollout == rollout]
        for call in mine:
            count = len(call.completion)
            trajectory.append_call(
                prompt=[],
                completion=[],
                turn=call.turn // 2,
                response=ModelResponse(
                    message={},
                    text="",
                    finish_reason=FinishReason.STOP,
                    prompt_ids=call.prompt,
                    completion_ids=call.completion,
                    logprobs=np.full(count, -60, np.float32),
                    versions=np.zeros(count, np.int32),
                    temperature=TEMPERATURE,
                    call_id=1000 * rollout + call.turn,
                ),
            )
        state = State(trajectory=trajectory, reward=1.0, request_id=f"r{rollout}")
        state["advantage"] = mine[0].advantage
        for step in trajectory:
            step["advantage"] = mine[0].advantage
        states.append(state)
    return states


def naive(model: Any, calls: list[Call]) -> dict[str, torch.Tensor]:
    """Return the gradient of each call on its own: the definition."""
    num_tokens = sum(len(call.completion) for call in calls)
    for call in calls:
        logprobs = call_logprobs(model, call.prompt, call.completion, TEMPERATURE)
        (-call.advantage / num_tokens * logprobs.sum()).backward()
    return take_gradient(model)


def take_gradient(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients in float64, by name, and clear them."""
    found = {
        name: whole(parameter.grad).double()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def error_of(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Return the largest relative error of one parameter's gradient.

    What is small is measured against a hundredth of the whole gradient's norm, as in the trainer's
    own probe: decays of recurrent layers sum up what nearly cancels.
    """
    whole = math.sqrt(sum(float(value.square().sum()) for value in exact.values()))
    worst = 0.0
    for name, value in exact.items():
        away = value if name not in found else found[name] - value
        ratio = float(away.norm()) / max(float(value.norm()), 0.01 * whole)
        worst = max(worst, ratio if math.isfinite(ratio) else math.inf)
    return worst


def gradient(
    model: Any,
    calls: list[Call],
    scope: str,
    forward: str,
    ranks: Ranks | None = None,
    **train: Any,
) -> dict[str, torch.Tensor]:
    """Return the gradient of one training step of rolltree's trainer.

    Ranks get a pack per sample, of an odd number of samples, so that one of them ends with a
    filler.
    """
    model.zero_grad(set_to_none=True)
    sections = {"model": train.pop("model", {})}
    config = load_train_config(
        algorithm={"name": "reinforce", "aggregation": "token", "ratio_cap": 1.0},
        train={"scope": scope, "forward": forward, "max_mismatch": 1e9, **train},
        **sections,
    )
    trainer = Trainer(model, config, ranks)
    options = {"group_key": lambda _: 0} if scope == "tree" and ranks is None else {}
    samples = build_samples(states_of(calls), scope, **options).samples
    if ranks is None:
        batch = build_batch(samples, trainer.algorithm, config.train.max_tokens)
    else:
        longest = max(sample.num_tokens for sample in samples)
        batch = build_batch(
            samples, trainer.algorithm, longest, rank=ranks.rank, num_ranks=ranks.size
        )
        fillers = sum(pack.is_filler for pack in batch.packs)
        assert ranks.total(np.array(fillers))[0] == 1, "the step is even"
    trainer._gradients(batch)
    return take_gradient(model)


def ranks_gradient(
    ranks: Ranks, name: str, seed: int, vocab_size: int, scope: str
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the gradient that two ranks compute together."""
    model = make(name, seed)
    found = gradient(model, make_calls(vocab_size, seed), scope, "auto", ranks)
    gc.collect()
    return {key: value.numpy() for key, value in found.items()}


def attempt(outcome: Outcome, name: str, run: Callable[[], float], limit: float) -> float | None:
    """Run one check: rolltree's own errors are refusals, others and large numbers are wrong."""
    try:
        error = run()
    except RolltreeError as refusal:
        outcome.reasons[name] = str(refusal)
        return None
    except Exception as crash:
        where = traceback.extract_tb(crash.__traceback__)[-1]
        outcome.wrong.append(
            f"{name} crashes: {type(crash).__name__}: {str(crash)[:300]} "
            f"({Path(where.filename).name}:{where.lineno})"
        )
        return None
    if not error <= limit:
        outcome.wrong.append(f"{name} is off by {error:.1e}, more than {limit:.1e}")
    return error


def check_training(model: Any, calls: list[Call], exact: dict[str, torch.Tensor], out: Outcome):
    """Compare the gradient of every scope that is offered with `exact`."""
    out.plain = error_of(naive(model, calls), exact)
    limit = 8 * out.plain + ROUNDED
    found: dict[str, float] = {}

    def measure(name: str, scope: str, forward: str) -> bool:
        error = attempt(
            out, name, lambda: error_of(gradient(model, calls, scope, forward), exact), limit
        )
        if error is not None:
            found[name] = error
        return error is not None

    if measure("tree", "tree", "auto"):
        out.trains = "tree"
    for scope in SCOPES[1:]:
        ok = measure(scope, scope, "auto")
        if ok and out.trains == "refused":
            out.trains = "rows"
    if out.trains == "tree":
        measure("rows", "step", "rows")
    out.gradient = found


def check_ranks(name: str, vocab_size: int, exact: dict[str, torch.Tensor], out: Outcome) -> None:
    """Compare the gradient of two ranks, of which one ends with a filler, with `exact`."""

    def run() -> float:
        scope = "tree" if out.trains == "tree" else "step"
        found = PAIR.call(ranks_gradient, name, out.seed, vocab_size, scope)
        return error_of({key: torch.from_numpy(value) for key, value in found.items()}, exact)

    out.ranks = attempt(out, "two ranks", run, 8 * out.plain + ROUNDED)


def check_adapters(name: str, calls: list[Call], vocab_size: int, out: Outcome) -> None:
    """Compare adapters with the merged weights that they amount to.

    The exact gradient is the chain rule's: that of the merged weights in float64, through B A. The
    engine serves the merged weights, and peft reads the exported adapter, if there is one.
    """
    section = load_train_config({"model": {"lora_rank": 2}}).model
    calls = [call for call in calls if call.rollout == 0]

    def run() -> float:
        plain = make(name, out.seed)
        for seed in range(8):
            model, served = copy.deepcopy(plain), copy.deepcopy(plain)
            add_adapter(model, section, seed)
            check_copy(model, served)
            modules = adapted_modules(model)
            move_adapters(modules, seed)
            copy_weights(model, served)
            exact_model = double(served)
            with in_double() as mode:
                merged = naive(exact_model, calls)
            if mode.margin > MARGIN:
                break
        through = copy.deepcopy(model).double()
        for weight, module in adapted_modules(through).items():
            key = weight.replace(".base_layer", "")
            if key in merged:
                (merged[key] * module.get_delta_weight(ADAPTER)).sum().backward()
        exact = take_gradient(through)
        out.adapters_plain = error_of(naive(model, calls), exact)
        limit = 8 * out.adapters_plain + ROUNDED
        scope = "tree" if out.trains == "tree" else "step"
        error = error_of(gradient(model, calls, scope, "auto"), exact)
        if not error <= limit:
            raise AssertionError(f"the gradient of adapters is off by {error:.1e} > {limit:.1e}")
        if out.engine is not None:
            away, share, _ = engine_error(served, exact_model, vocab_size, size=2, turns=1)
            if not share <= 1:
                raise AssertionError(f"the logprobs of merged adapters are off by {away:.1e}")
        out.in_peft = read_by_peft(model, plain)
        return error

    out.adapters = attempt(out, "adapters", run, math.inf)


@torch.no_grad()
def move_adapters(modules: dict[str, Any], seed: int) -> None:
    """Let every adapter change its weight by a tenth."""
    rng = torch.Generator().manual_seed(seed)
    for module in modules.values():
        up = module.lora_B[ADAPTER].weight
        up.copy_(torch.randn(up.shape, generator=rng))
        weight = getattr(module.get_base_layer(), getattr(module, "parameter_name", "weight"))
        up.mul_(0.1 * weight.norm() / module.get_delta_weight(ADAPTER).norm())


@torch.no_grad()
def read_by_peft(model: Any, plain: Any) -> bool:
    """Export adapters, and return whether there is a folder for peft; it must compute the same."""
    from peft import PeftModel

    with tempfile.TemporaryDirectory() as folder:
        export_model(model, None, Path(folder) / "model")
        if not (Path(folder) / "adapter").is_dir():
            return False
        read = PeftModel.from_pretrained(copy.deepcopy(plain), Path(folder) / "adapter").eval()
    ids = torch.arange(3, 40)[None]
    found, wanted = (each(input_ids=ids, use_cache=False).logits for each in (read, model))
    away = float((found - wanted).abs().max())
    if not away <= 1e-4 * float(wanted.abs().max()):
        raise AssertionError(f"peft reads other adapters: logits differ by {away:.1e}")
    return True


def engine_error(
    model: Any, exact_model: Any, vocab_size: int, size: int = 4, turns: int = 2
) -> tuple[float, float, float]:
    """Sample in a batch, with a shared history, and compare the logprobs with float64.

    Returns the largest error, the largest share of what float32 allows, and the largest error of
    the model's own float32 pass.
    """
    engine = LocalEngine(model, max_batch=3, max_context=128, prefill_chunk=23)
    try:
        rng = np.random.default_rng(1)
        shared = rng.integers(3, vocab_size, 37).astype(np.int32)
        prompts = [shared[:n] for n in (37, 30, 5)[: size - 1]] + [shared]
        asked = []
        for turn in range(turns):
            futures = [
                engine.submit(
                    GenerateRequest(
                        prompt,
                        SamplingParams(temperature=TEMPERATURE, max_tokens=9, seed=n + 10 * turn),
                    )
                )
                for n, prompt in enumerate(prompts)
            ]
            outputs = [future.result(60) for future in futures]
            asked += list(zip(prompts, outputs, strict=True))
            prompts = [
                np.concatenate([prompt, output.completion_ids, shared[:4]])
                for prompt, output in asked[-len(prompts) :]
            ]
    finally:
        engine.close()
    worst = share = plain = 0.0
    calls = [(prompt, output.completion_ids) for prompt, output in asked]
    with in_double():
        bounds = float32_allows(exact_model, calls, TEMPERATURE)
    for call, bound, (_, output) in zip(calls, bounds, asked, strict=True):
        with torch.no_grad(), in_double() as mode:
            exact = call_logprobs(exact_model, *call, TEMPERATURE)
        if mode.margin < MARGIN:
            continue
        with torch.no_grad():
            own = call_logprobs(model, *call, TEMPERATURE)
        plain = max(plain, float((own.double() - exact).abs().max()))
        away = np.nan_to_num(np.abs(output.logprobs - exact.numpy()), nan=math.inf)
        worst, share = max(worst, away.max()), max(share, (away / bound.numpy()).max())
    return float(worst), float(share), plain


def check_engine(model: Any, exact_model: Any, vocab_size: int, out: Outcome) -> None:
    """Compare what the engine samples, twice with a shared history, with float64."""

    def run() -> float:
        worst, share, out.engine_plain = engine_error(model, exact_model, vocab_size)
        if not share <= 1:
            out.wrong.append(
                f"engine is off by {worst:.1e}, {share:.1f} times what float32 allows (own float32 "
                f"{out.engine_plain:.1e})"
            )
        return worst

    out.engine = attempt(out, "engine", run, math.inf)


def _embeddings(model: Any) -> list[Any]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def make(name: str, seed: int) -> Any:
    """Return the tiny model of a row, or a folder's model, its weights moved."""
    if name in ROWS:
        return make_model(name, seed)
    from transformers import AutoModelForCausalLM

    return moved(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval(), seed)


def quiet() -> None:
    """Silence what building tiny models warns of, and use one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()


def check_model(name: str, seeds: int = 8) -> Outcome:
    """Check a row's or a folder's model; the first seed without near ties counts."""
    began = time.perf_counter()
    for seed in range(seeds):
        model = make(name, seed)
        vocab_size = min(len(m.weight) for m in _embeddings(model))
        calls = make_calls(vocab_size, seed)
        exact_model = double(model)
        with in_double() as mode:
            exact = naive(exact_model, calls)
        if mode.margin > MARGIN:
            break
    out = Outcome(seed=seed)
    check_training(model, calls, exact, out)
    check_engine(model, exact_model, vocab_size, out)
    if out.trains != "refused":
        check_ranks(name, vocab_size, exact, out)
        check_adapters(name, calls, vocab_size, out)
    out.seconds = time.perf_counter() - began
    return out


def too_long(*_: Any) -> None:
    """Give a check up."""
    raise TimeoutError("more than 300 s")


def main() -> None:
    """Print a row per architecture or folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures, variants or folders; none: all")
    parser.add_argument("--traceback", action="store_true", help="show where a check crashes")
    asked = parser.parse_args()
    quiet()
    signal.signal(signal.SIGALRM, too_long)
    for name in asked.names or ROWS:
        signal.alarm(300)
        try:
            print(f"{name}: {check_model(name)}", flush=True)
        except Exception as error:
            print(f"{name}: NO REFERENCE: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if asked.traceback:
                traceback.print_exc()
        signal.alarm(0)
        gc.collect()


if __name__ == "__main__":
    main()
