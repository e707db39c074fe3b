"""What rolltree does with a model, and how far that is from float64: gradients and logprobs.

`python -m tests_models.check qwen3_next gpt_oss` prints it for tiny models of these architectures,
`python -m tests_models.check PATH` for a model's folder.
"""

from __future__ import annotations

import argparse
import gc
import math
import signal
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

from rolltree.errors import RolltreeError
from rolltree.inference.local.engine import LocalEngine
from rolltree.samples import build_samples
from rolltree.tokens import Trajectory
from rolltree.training import Trainer, load_train_config
from rolltree.training.batches import build_batch
from rolltree.types import FinishReason, GenerateRequest, ModelResponse, SamplingParams, State
from tests_models.reference import call_logprobs, double, in_double

TEMPERATURE = 0.8
SLACK, EPS = 8.0, 1e-5
"""Exact: at most `SLACK` times as far from float64 as the model's own float32 pass, and `EPS`."""
MARGIN = 3e-5
"""Choices (of experts, of keys) that are nearer than this depend on rounding: another seed."""
SCOPES = ("tree", "interleave", "turn", "step")


@dataclass
class Outcome:
    """One row: the widest training that is offered, errors, and the reasons of refusals.

    `trains` is `tree`, `rows` or `refused`; `gradient` the largest error by scope; `plain` the
    error of the model's own float32 pass; the same for the engine's logprobs. `wrong` lists what
    is neither exact nor refused with a typed error.
    """

    trains: str = "refused"
    gradient: dict[str, float] = field(default_factory=dict)
    plain: float = 0.0
    engine: float | None = None
    engine_plain: float = 0.0
    reasons: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seed: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        errors = " ".join(f"{name} {error:.1e}" for name, error in self.gradient.items())
        served = "refused" if self.engine is None else f"{self.engine:.1e}"
        lines = [
            f"{'WRONG' if self.wrong else 'ok'}: trains as {self.trains}; gradient {errors} "
            f"(own float32 {self.plain:.1e}); engine {served} (own float32 "
            f"{self.engine_plain:.1e}); seed {self.seed}, {self.seconds:.1f} s"
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
        name: parameter.grad.double()
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
    model: Any, calls: list[Call], scope: str, forward: str, **train: Any
) -> dict[str, torch.Tensor]:
    """Return the gradient of one training step of rolltree's trainer."""
    model.zero_grad(set_to_none=True)
    sections = {"model": train.pop("model", {})}
    config = load_train_config(
        algorithm={"name": "reinforce", "aggregation": "token", "ratio_cap": 1.0},
        train={"scope": scope, "forward": forward, "max_mismatch": 1e9, **train},
        **sections,
    )
    trainer = Trainer(model, config)
    options = {"group_key": lambda _: 0} if scope == "tree" else {}
    samples = build_samples(states_of(calls), scope, **options).samples
    batch = build_batch(samples, trainer.algorithm, config.train.max_tokens)
    trainer._gradients(batch)
    return take_gradient(model)


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
    limit = SLACK * out.plain + EPS
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


def check_engine(model: Any, exact_model: Any, vocab_size: int, out: Outcome) -> None:
    """Sample in a batch, twice with a shared history, and compare the logprobs with float64."""

    def run() -> float:
        engine = LocalEngine(model, max_batch=3, max_context=128, prefill_chunk=23)
        try:
            rng = np.random.default_rng(1)
            shared = rng.integers(3, vocab_size, 37).astype(np.int32)
            prompts = [shared[:n] for n in (37, 30, 5)] + [shared]
            asked = []
            for turn in range(2):
                futures = [
                    engine.submit(
                        GenerateRequest(
                            prompt,
                            SamplingParams(
                                temperature=TEMPERATURE, max_tokens=9, seed=n + 10 * turn
                            ),
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
        worst, plain = 0.0, 0.0
        for prompt, output in asked:
            with torch.no_grad(), in_double() as mode:
                exact = call_logprobs(exact_model, prompt, output.completion_ids, TEMPERATURE)
            if mode.margin < MARGIN:
                continue
            with torch.no_grad():
                own = call_logprobs(model, prompt, output.completion_ids, TEMPERATURE)
            plain = max(plain, float((own.double() - exact).abs().max()))
            away = np.abs(output.logprobs - exact.numpy()).max()
            worst = max(worst, float(away) if np.isfinite(away) else math.inf)
        out.engine_plain = plain
        if not worst <= SLACK * plain + 10 * EPS:
            out.wrong.append(
                f"the engine's logprobs are off by {worst:.1e} (own float32 {plain:.1e})"
            )
        return worst

    out.engine = attempt(out, "engine", run, math.inf)


def _embeddings(model: Any) -> list[Any]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def check_model(make: Callable[[int], Any], seeds: int = 8) -> Outcome:
    """Check the model that `make` returns for a seed; the first seed without near ties counts."""
    began = time.perf_counter()
    for seed in range(seeds):
        model = make(seed)
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
    out.seconds = time.perf_counter() - began
    return out


def too_long(*_: Any) -> None:
    """Give a check up."""
    raise TimeoutError("more than 60 s")


def main() -> None:
    """Print a row per architecture or folder."""
    from tests_models.architectures import ROWS, make_model, moved

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures, variants or folders; none: all")
    parser.add_argument("--traceback", action="store_true", help="show where a check crashes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, too_long)
    for name in asked.names or ROWS:

        def make(seed: int, name: str = name) -> Any:
            if name in ROWS:
                return make_model(name, seed)
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
            return moved(model.eval(), seed)

        signal.alarm(60)
        try:
            print(f"{name}: {check_model(make)}", flush=True)
        except Exception as error:
            print(f"{name}: NO REFERENCE: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if asked.traceback:
                traceback.print_exc()
        signal.alarm(0)
        gc.collect()


if __name__ == "__main__":
    main()
