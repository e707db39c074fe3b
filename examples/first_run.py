"""An environment, its evaluation and two steps of training, on a tiny model, in seconds.

    python examples/first_run.py

The tiny model starts with random weights; `--num-steps 30 --lr 3e-3` lets the reward rise.
"""

from __future__ import annotations

import argparse

import rolltree as rt


def letters(state: rt.State) -> float:
    """Return the share of the answer's characters that are lower-case letters."""
    text = state["completion"][-1]["content"]
    return sum("a" <= character <= "z" for character in text) / max(1, len(text))


def load_environment() -> rt.Environment:
    """Return a one-turn environment with ten questions, two of them held out."""
    rows = [{"question": f"Write a word with {n} letters."} for n in range(3, 13)]
    rubric = rt.Rubric([letters])
    return rt.SingleTurnEnv(dataset=rows[:8], eval_dataset=rows[8:], rubric=rubric, env_id="words")


def main() -> None:
    """Evaluate, train, look at the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny", help="a model's name or folder")
    parser.add_argument("--num-steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--run-dir", default="runs/first")
    options = parser.parse_args()

    environment = load_environment()
    client = rt.local_client(*rt.load_model(options.model), name=options.model)
    before = rt.evaluate(environment, client, sampling={"max_tokens": 16})
    print(f"before training: {before.reward.mean:.3f}" if before.reward else "no reward")

    report = rt.train(
        environment=environment,
        model=options.model,
        num_steps=options.num_steps,
        lr=options.lr,
        group_size=4,
        groups_per_step=4,
        sampling_max_tokens=16,
        run_dir=options.run_dir,
    )
    print(report)
    with report.run as run:
        print(f"{run.num_rollouts(phase='train')} training rollouts are stored in {run.path}")


if __name__ == "__main__":
    main()
