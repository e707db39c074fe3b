"""Parent and child learn together: a warm start, GRPO over the delegation graph, who got what.

    python examples/delegation/run.py                      a few minutes on two cores
    python examples/delegation/run.py --flow own           children learn from their own reward only

A tiny model (0.8M parameters) plays both roles of `code_book.py`. It is first fine-tuned on games
of a half-competent player, then trained by reinforcement on the embedded engine. Kill it and start
the same command: it continues.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from code_book import expert, load_environment

import rolltree as rt
from rolltree.inference import ChatRenderer
from rolltree.rollouts import Split
from rolltree.rollouts.decode import decode_results
from rolltree.training import build_parts, run_training

NOISE = {"ask": 0.2, "book": 0.5, "tell": 0.2}


def warm_start(folder: Path, options: argparse.Namespace) -> Path:
    """Fine-tune the tiny model on the games of a half-competent player; return its folder."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # a model this small has nothing for a second thread to do
    model, tokenizer = rt.load_model("tiny")
    environment = load_environment()
    client = rt.ScriptedClient(expert(NOISE, options.seed), renderer=ChatRenderer(tokenizer))
    played = environment.generate_sync(
        environment.get_dataset(), client, score_rollouts=False, rollouts_per_example=options.games
    )
    games = [
        [
            (step["tokens"]["prompt_ids"], step["tokens"]["completion_ids"])
            for step in s["trajectory"]
        ]
        for result in played.results
        for s in result.states
    ]
    random.Random(options.seed).shuffle(games)
    config = rt.load_train_config(
        {"algorithm": {"name": "sft"}, "optim": {"lr": 2e-3}, "train": {"num_threads": 1}}
    )
    trainer = rt.Trainer(model, config)
    size = len(games) // options.warm_steps
    for step in range(1, options.warm_steps + 1):
        batch = games[(step - 1) * size : step * size]
        samples = rt.build_samples(
            rt.supervised_states(batch), "tree", group_key=lambda s: 0
        ).samples
        loss = trainer.step(samples, step)["train/loss"]
        if step % 20 == 0 or step == 1:
            print(f"warm start {step:3}: loss {loss:.3f}", flush=True)
    partial = folder.with_suffix(".tmp")
    partial.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder


class Lines(rt.Reporter):
    """One line every ten steps."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % 10 == 0 or step == 1:
            print(
                f"step {step:3}: success {metrics['reward/mean']:.2f}  "
                f"child {metrics.get('reward/child/mean', float('nan')):.2f}  "
                f"{metrics['time/step']:.1f} s",
                flush=True,
            )


def credit_table(results: list[rt.RolloutResult], advantages: dict[int, float]) -> str:
    """Return one group as a table: who was asked what, earned what, and is credited with what.

    `advantages` has those of the states that train, by `id`.
    """
    lines = [f"{'rollout':10} {'agent':7} {'asked':20} {'said':12} {'earned':>6} {'advantage':>9}"]
    for result in results:
        for state in result.states:
            asked = state.get("subtask") or state["prompt"][-1]["content"]
            said = (
                state["trajectory"][-1]["completion"][-1]["content"] if state["trajectory"] else ""
            )
            advantage = advantages.get(id(state))
            shown = "-" if advantage is None else f"{advantage:+.2f}"
            name = str(result.request.index_in_group) if state["depth"] == 0 else "  child"
            lines.append(
                f"{name:10} {state['agent']:7} {asked!r:20} {said!r:12} "
                f"{state['reward'] or 0.0:6.1f} {shown:>9}"
            )
    return "\n".join(lines)


async def main(options: argparse.Namespace) -> None:
    """Warm up, train, and report."""
    started, cpu = time.perf_counter(), time.process_time()
    folder = Path(options.dir)
    model_folder = await asyncio.to_thread(warm_start, folder / "warm", options)
    print(f"warm start done after {time.perf_counter() - started:.0f} s", flush=True)
    algorithm: dict[str, Any] = {"name": options.algorithm, "group_size": 8, "groups_per_step": 8}
    config = rt.load_train_config(
        {
            "run": {"dir": str(folder / "run"), "seed": options.seed},
            "model": {"name": str(model_folder)},
            "engine": {"max_batch": 128, "max_context": 192, "max_concurrent": 128},
            "sampling": {"max_tokens": 10},
            "algorithm": algorithm | {"flow": options.flow},
            "optim": {"lr": options.lr},
            "train": {
                "num_steps": options.num_steps,
                "share_prefix_across": "group",
                "num_threads": 1,
            },
            "checkpoint": {"every": 20, "export": False},
        }
    )
    environment = load_environment()
    parts = build_parts(config)
    with rt.open_run(config) as run:

        async def success(phase: str, split: Split) -> float:
            report = await rt.evaluate_async(
                environment,
                parts.client,
                sampling={"max_tokens": 10, "temperature": 1.0},
                run=run,
                phase=phase,
                split=split,
                seed=options.seed,
                num_examples=60,
                rollouts_per_example=4,
                max_concurrent=128,
            )
            return report.reward.mean if report.reward else 0.0

        async def measure(phase: str, step: int) -> Mapping[str, Any]:
            return {
                "success": await success(phase, "train"),
                "held_out": await success(f"{phase}/held_out", "eval"),
            }

        report = await run_training(
            config, parts, source=environment, run=run, evaluate=measure, reporter=Lines()
        )
        rows = list(run.rollouts(phase="train", train_step=1))
        print("\nThe first group of the first step:\n")
        results = [r for r in decode_results(rows) if r.request.group_id.endswith("/g00")]
        section = config.algorithm
        credit = rt.assign_credit(results, section.resolve().credit, section.policy(None))
        first = {id(s): float(a[0]) for s, a in zip(credit.trained, credit.advantages, strict=True)}
        print(credit_table(sorted(results, key=lambda r: r.request.index_in_group), first))
    await parts.aclose()
    print()
    for phase, metrics in report.evaluations.items():
        print(
            f"{phase}: success {metrics['success']:.3f} on 60 training questions, played again; "
            f"{metrics['held_out']:.3f} on 60 held-out ones"
        )
    print(
        f"{time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} s of CPU",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", default="runs/delegation", help="where the run is kept")
    parser.add_argument("--flow", default="own", help="own, shared, discounted or team")
    parser.add_argument("--algorithm", default="grpo", help="such as grpo, see docs/training.md")
    parser.add_argument("--num-steps", type=int, default=60)
    parser.add_argument("--games", type=int, default=8, help="of the warm start, per question")
    parser.add_argument("--warm-steps", type=int, default=240)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(arguments()))
