"""Steps and CPU time to learn one task: rolltree (tree and interleave) against TRL's GRPOTrainer.

    python benchmarks/learning.py              table, figures, docs/images/learning.png
    python benchmarks/learning.py --check      exit 1 when a bar is missed
    python benchmarks/learning.py --json       one JSON object instead of the table
    python benchmarks/learning.py --seeds 1    fewer seeds
    python benchmarks/learning.py --seeds 55   enough seeds to compare steps and rewards (hours)

The task is one-digit addition, single turn, reward 1 for the right sum. The model has 0.8M
parameters and was taught sums by supervised training on answers of which 60 % are wrong;
reinforcement learning must find out which. All start from the same weights with the same rows,
prompt, group size, number of groups, learning rate, AdamW, clipping, loss (GRPO, per-sequence
means, no KL), temperature and answer length. Every run is a process of one thread; its clock starts
when training starts, models loaded. CPU time is the process's. TRL lives in `.venv-trl`, which the
script makes (torch 2.13.0, trl).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from verdict import Bar, conclude, make_parser

ROOT = Path(__file__).resolve().parents[1]
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
IMAGE = ROOT / "docs" / "images" / "learning.png"

NUM_STEPS, THRESHOLD, WINDOW = 60, 0.8, 5
GROUPS, GROUP_SIZE, MAX_TOKENS, LR = 8, 8, 4, 3e-4
WRONG_SHARE, WARM_STEPS = 0.6, 300
PAIRS = [(a, b) for a in range(1, 10) for b in range(1, 10)]
RUNS = ("tree", "interleave", "trl")


def messages(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a} + {b} ="}]


# -- the model both start from -------------------------------------------------------------------


def warm_up(folder: Path) -> float:
    """Teach a tiny model sums, most of them wrong, into `folder`; return the last loss."""
    import torch

    from rolltree.inference.models import load_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    model, tokenizer = load_model("tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    loss = torch.zeros(())
    for _ in range(WARM_STEPS):
        rows, labels = [], []
        for a, b in rng.sample(PAIRS, 24):
            said = rng.randint(2, 18) if rng.random() < WRONG_SHARE else a + b
            prompt = tokenizer.apply_chat_template(
                messages(a, b), add_generation_prompt=True, return_dict=False
            )
            answer = [*tokenizer.encode(str(said)), tokenizer.eos_token_id]
            row, padding = [*prompt, *answer], 3 - len(answer)
            rows.append(row + [tokenizer.pad_token_id] * padding)
            labels.append([-100] * len(prompt) + answer + [-100] * padding)
        length = max(map(len, rows))
        ids = [row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows]
        wanted = [row + [-100] * (length - len(row)) for row in labels]
        loss = model(input_ids=torch.tensor(ids), labels=torch.tensor(wanted)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return float(loss.detach())


# -- one run, in its own process ------------------------------------------------------------


class Clock:
    """Reward, CPU and wall time of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def start(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def note(self, reward: float) -> None:
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        self.steps.append({"reward": reward, "cpu_s": cpu, "wall_s": wall})


def run_rolltree(folder: Path, seed: int, scope: str) -> list[dict[str, float]]:
    import rolltree as rt
    from rolltree.training import Silent, build_parts, load_train_config, open_run, run_training

    def correct(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"].strip() == answer)

    rows = [
        {"prompt": messages(a, b), "answer": str(a + b), "example_id": at}
        for at, (a, b) in enumerate(PAIRS)
    ]
    config = load_train_config(
        {
            "run": {"dir": str(folder / f"run-{scope}-{seed}"), "seed": seed},
            "model": {"name": str(folder / "model")},
            "engine": {"max_batch": 64, "max_context": 256},
            "sampling": {"max_tokens": MAX_TOKENS, "temperature": 1.0},
            "algorithm": {"name": "grpo", "groups_per_step": GROUPS, "group_size": GROUP_SIZE},
            "optim": {"lr": LR, "beta1": 0.9, "beta2": 0.95},
            "train": {"num_steps": NUM_STEPS, "scope": scope, "num_threads": 1},
            "eval": {"before": False, "after": False},
            "checkpoint": {"every": NUM_STEPS, "export": False},
        }
    )
    clock = Clock()

    class Note(Silent):
        def on_step(self, step: int, metrics: Any) -> None:
            clock.note(metrics["reward/mean"])

    parts = build_parts(config)
    environment = rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric([rt.run_inline(correct)]))
    clock.start()
    with open_run(config) as run:
        asyncio.run(run_training(config, parts, source=environment, run=run, reporter=Note()))
    return clock.steps


def run_trl(folder: Path, seed: int) -> list[dict[str, float]]:
    import datasets
    import torch
    import transformers
    import trl

    torch.set_num_threads(1)
    clock = Clock()
    rewards: list[float] = []

    def correct(completions: Any, answer: list[str], **_: Any) -> list[float]:
        found = [
            float(said[-1]["content"].strip() == right)
            for said, right in zip(completions, answer, strict=True)
        ]
        rewards[:] = found
        return found

    class Note(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **options: Any) -> None:
            clock.start()

        def on_step_end(self, *args: Any, **options: Any) -> None:
            clock.note(fmean(rewards))

    rows = [{"prompt": messages(a, b), "answer": str(a + b)} for a, b in PAIRS]
    config = trl.GRPOConfig(
        output_dir=str(folder / f"trl-{seed}"),
        per_device_train_batch_size=GROUPS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        max_steps=NUM_STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        num_iterations=1,
        loss_type="grpo",
        scale_rewards="group",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_num_workers=0,
        report_to="none",
        save_strategy="no",
        logging_steps=NUM_STEPS,
        disable_tqdm=True,
        seed=seed,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=correct,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Note()],
    )
    trainer.train()
    return clock.steps


def in_process(name: str, folder: Path, seed: int) -> list[dict[str, float]]:
    """Run one worker and return its steps."""
    out = folder / f"{name}-{seed}.json"
    python = str(TRL_PYTHON) if name == "trl" else sys.executable
    words = [python, __file__, "--worker", name, "--folder", str(folder), "--seed", str(seed)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*words, "--out", str(out)], capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}, failed:\n{done.stderr[-3000:]}")
    found: list[dict[str, float]] = json.loads(out.read_text())
    return found


def make_trl() -> None:
    """Make `.venv-trl` if it is missing."""
    if TRL_PYTHON.exists():
        return
    print(f"making {TRL_PYTHON.parents[1]} with TRL (a few minutes) ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", TRL_PYTHON.parents[1]], check=True)
    pip = [TRL_PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    subprocess.run([*pip, "trl"], check=True)


# -- the comparison ------------------------------------------------------------------------------


def to_threshold(steps: list[dict[str, float]]) -> dict[str, float | None]:
    """Return steps, CPU and wall seconds until the mean of the last rewards is at the threshold."""
    rewards = [step["reward"] for step in steps]
    for end in range(WINDOW, len(rewards) + 1):
        if fmean(rewards[end - WINDOW : end]) >= THRESHOLD:
            at = steps[end - 1]
            return {"steps": end, "cpu_s": at["cpu_s"], "wall_s": at["wall_s"]}
    return {"steps": None, "cpu_s": None, "wall_s": None}


def summary(curves: dict[str, list[list[dict[str, float]]]]) -> dict[str, dict[str, Any]]:
    table = {}
    for name, runs in curves.items():
        reached = [to_threshold(run) for run in runs]
        last = [fmean(step["reward"] for step in run[-WINDOW:]) for run in runs]
        table[name] = {
            "first_reward": fmean(run[0]["reward"] for run in runs),
            "last_reward": fmean(last),
            "last_rewards": last,
            "steps": [item["steps"] for item in reached],
            "cpu_s": [item["cpu_s"] for item in reached],
            "wall_s": [item["wall_s"] for item in reached],
            "cpu_s_per_step": fmean(run[-1]["cpu_s"] / len(run) for run in runs),
        }
    return table


def bars(table: dict[str, dict[str, Any]]) -> list[Bar]:
    """Steps: rolltree's mean may exceed TRL's by their largest spread over seeds, or 10 %.

    CPU time to the threshold: `tree`, the default, must beat TRL; `interleave` computes the same
    rows as TRL and must not cost more than a fifth over it.
    """
    found = []
    trl = table["trl"]
    complete = None not in trl["steps"]
    for name in RUNS[:2]:
        own = table[name]
        if None in own["steps"]:
            found.append(Bar(f"{name}: runs that reach {THRESHOLD}", 0.0, "all", False))
            continue
        if not complete:
            found.append(Bar(f"{name}: reached, TRL did not within the steps", 1.0, "1", True))
            continue
        noise = max(
            max(own["steps"]) - min(own["steps"]),
            max(trl["steps"]) - min(trl["steps"]),
            0.1 * fmean(trl["steps"]),
        )
        extra = fmean(own["steps"]) - fmean(trl["steps"])
        found.append(Bar.at_most(f"{name}: steps more than TRL", extra, noise))
        ratio = fmean(trl["cpu_s"]) / fmean(own["cpu_s"])
        bar = 1.0 if name == "tree" else 1 / 1.2
        what = f"{name}: CPU time of TRL / own, to {THRESHOLD}"
        found.append(Bar.above(what, ratio, bar))
    return found


def draw(curves: dict[str, list[list[dict[str, float]]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    names = {"tree": "rolltree, tree", "interleave": "rolltree, interleave", "trl": "TRL"}
    for color, (name, runs) in zip(("C0", "C2", "C1"), curves.items(), strict=True):
        for index, run in enumerate(runs):
            rewards = [step["reward"] for step in run]
            smooth = [
                fmean(rewards[max(0, at - WINDOW + 1) : at + 1]) for at in range(len(rewards))
            ]
            label = names[name] if index == 0 else None
            axes[0].plot(range(1, len(run) + 1), smooth, color=color, alpha=0.8, label=label)
            axes[1].plot([step["cpu_s"] for step in run], smooth, color=color, alpha=0.8)
    for axis, label in zip(axes, ("optimizer step", "CPU time, s"), strict=True):
        axis.axhline(THRESHOLD, color="gray", linewidth=0.8, linestyle="--")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"mean reward of {WINDOW} steps")
    axes[0].legend()
    figure.suptitle("One-digit addition, 0.8M parameters, one line per seed")
    figure.tight_layout()
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE, dpi=110)


def show(values: list[float | None], digits: int = 0) -> str:
    return " ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


def paired(own: dict[str, Any], other: dict[str, Any], name: str) -> str:
    """Return the mean difference of a value over the seeds that have it in both, and its error."""
    pairs = zip(own[name], other[name], strict=True)
    gains = [mine - theirs for mine, theirs in pairs if None not in (mine, theirs)]
    if len(gains) < 2:
        return "-"
    return f"{fmean(gains):+.3f} (standard error {stdev(gains) / len(gains) ** 0.5:.3f})"


def print_table(table: dict[str, dict[str, Any]]) -> None:
    print(
        f"{'row':11} {'first':>6} {'last':>6} {'CPU s/step':>10}  steps to {THRESHOLD}, "
        "per seed; CPU s; wall s"
    )
    for name, row in table.items():
        print(
            f"{name:11} {row['first_reward']:6.3f} {row['last_reward']:6.3f} "
            f"{row['cpu_s_per_step']:10.3f}  {show(row['steps'])}; {show(row['cpu_s'], 1)}; "
            f"{show(row['wall_s'], 1)}"
        )
    for name in RUNS[:2]:
        own, trl = table[name], table["trl"]
        ratio = own["cpu_s_per_step"] / trl["cpu_s_per_step"]
        print(
            f"{name} against TRL, paired by seed: steps {paired(own, trl, 'steps')}, last rewards "
            f"{paired(own, trl, 'last_rewards')}, CPU time of a step {ratio:.2f} times"
        )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs per row")
    parser.add_argument("--worker", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        if options.worker == "trl":
            steps = run_trl(options.folder, options.seed)
        else:
            steps = run_rolltree(options.folder, options.seed, options.worker)
        options.out.write_text(json.dumps(steps))
        return 0
    make_trl()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        warm_up(folder / "model")
        curves: dict[str, list[list[dict[str, float]]]] = {name: [] for name in RUNS}
        for seed in range(options.seeds):  # in turn, so that a noisy minute hits every row
            for name in RUNS:
                curves[name].append(in_process(name, folder, seed))
                at = to_threshold(curves[name][-1])
                said = f"{name:10} seed {seed}: {at['steps']} steps, {at['cpu_s']} CPU s"
                print(said, file=sys.stderr)
    # More lines than that hide each other.
    draw({name: runs[:3] for name, runs in curves.items()})
    table = summary(curves)
    return conclude(options, bars(table), table, lambda: print_table(table))


if __name__ == "__main__":
    sys.exit(main())
