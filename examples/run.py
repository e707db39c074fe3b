"""Run recipes: warm a tiny model up, train it, run the control, and compare with stored figures.

    python examples/run.py sql_agent           one recipe: a few minutes on one core
    python examples/run.py --check             all of them, compared with their figures.json
    python examples/run.py sql_agent --store   write its figures.json and picture again

A recipe is a folder with a module of its own name (`load_environment`, and `teacher`, whose games
the model is warmed up on) and `train.toml`. The warm-up plays the teacher's games into a run, and
fine-tunes the tiny model on what is stored: on all games, or on those that earned `keep` of its
`WARM_UP`. The control trains with all advantages zero, or, if it has `CONTROL`, without a warm-up.
Kill it and start the same command: it continues.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import rolltree as rt
from rolltree.evaluation import compare_reports, stored_report
from rolltree.inference import ChatRenderer
from rolltree.reports.curves import reward_curve, save_curve
from rolltree.rollouts.decode import decode_results

HERE = Path(__file__).resolve().parent
RECIPES = (
    "reasoning",
    "sql_agent",
    "guess_game",
    "tic_tac_toe_duel",
    "distillation",
    "code_agent",
    "delegation",
)


def module_of(recipe: str) -> Any:
    """Return a recipe's module."""
    spec = util.spec_from_file_location(recipe, HERE / recipe / f"{recipe}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[recipe] = module
    spec.loader.exec_module(module)
    return module


def stored_games(
    recipe: str, path: Path, seed: int, num_games: int, keep: float | None
) -> list[list[Any]]:
    """Play the games of a recipe's teacher, as `play_games` does."""
    module, (_, tokenizer) = module_of(recipe), rt.load_model("tiny")
    client = rt.ScriptedClient(module.teacher(seed), renderer=ChatRenderer(tokenizer))
    return play_games(
        module.load_environment(),
        client,
        path,
        seed=seed,
        num_games=num_games,
        keep=keep,
        recipe=recipe,
    )


def play_games(
    environment: rt.Environment,
    client: rt.ModelClient,
    path: Path,
    *,
    seed: int,
    num_games: int,
    keep: float | None,
    **config: Any,
) -> list[list[Any]]:
    """Play a teacher's games into a run; return the token ids of each agent's calls.

    `keep`: the lowest reward of a game that is returned. `config` is stored with the run.
    """
    # The teacher has one stream of random numbers: concurrent games would draw from it in an order
    # that timing decides, and the data would differ from run to run.
    play = {"split": "train", "num_examples": num_games, "seed": seed, "max_concurrent": 1}
    with rt.Run.open_or_create(path, config={**config, **play}) as run:
        rt.evaluate(environment, client, run=run, phase="games", **play)
        results = decode_results(list(run.rollouts(phase="games")))
    return [
        [(s["tokens"]["prompt_ids"], s["tokens"]["completion_ids"]) for s in state["trajectory"]]
        for result in results
        for state in result.states
        if state["trajectory"] and state["error"] is None
        if keep is None or (state["reward"] or 0.0) >= keep
    ]


def fine_tune(
    model: Any,
    games: Sequence[list[Any]],
    *,
    seed: int,
    num_steps: int,
    batch_size: int,
    lr: float,
    what: str,
) -> None:
    """Fine-tune a model in place on `batch_size` stored games a step."""
    import torch

    rng = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # a model this small has nothing for a second thread to do
    config = rt.load_train_config(algorithm="sft", lr=lr, num_threads=1)
    trainer = rt.Trainer(model, config)
    for step in range(1, num_steps + 1):
        states = rt.supervised_states(rng.sample(games, batch_size))
        samples = rt.build_samples(states, "tree", group_key=lambda state: 0).samples
        loss = trainer.step(samples, step)["train/loss"]
        if step % 50 == 0 or step == 1:
            print(f"{what}: warm-up step {step}: loss {loss:.3f}", flush=True)


def warm_up(recipe: str, runs: Path, seed: int) -> Path:
    """Fine-tune the tiny model on stored games of the recipe's teacher; return its folder."""
    folder = runs / f"{recipe}-warm-{seed}"
    if folder.is_dir():
        return folder
    model, tokenizer = rt.load_model("tiny")
    settings = dict(module_of(recipe).WARM_UP)
    num_games, keep = settings.pop("num_games"), settings.pop("keep", None)
    games = stored_games(recipe, runs / f"{recipe}-games-{seed}", seed, num_games, keep)
    print(f"{recipe}: {len(games)} stored games to learn from", flush=True)
    fine_tune(model, games, seed=seed, what=recipe, **settings)
    partial = folder.with_suffix(".tmp")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder


def train(recipe: str, runs: Path, seed: int, *, warm: bool = True, **settings: Any) -> Path:
    """Train the warm model and return the run's folder; `settings` are changes to train.toml."""
    model = warm_up(recipe, runs, seed) if warm else "tiny"
    report = rt.train(
        HERE / recipe / "train.toml",
        environment=module_of(recipe).load_environment(),
        model=str(model),
        run_seed=seed,
        quiet=True,
        **settings,
    )
    return report.run_path


def figures_of(path: Path) -> dict[str, Any]:
    """Return the effect of a run: mean and interval before, after, and of the difference."""
    with rt.Run.open(path, "r") as run:
        before, after = (stored_report(run, f"eval_{when}") for when in ("before", "after"))
    found = compare_reports(before, after)
    parts = {"before": found.before, "after": found.after, "difference": found.difference}
    return {name: [each.mean, each.low, each.high] for name, each in parts.items()}


def run(recipe: str, runs: Path, seed: int) -> dict[str, Any]:
    """Train a recipe and its control, and return their figures."""
    path = train(recipe, runs, seed, run_dir=str(runs / f"{recipe}-{seed}"))
    changes = getattr(module_of(recipe), "CONTROL", {"algorithm": "zero"})
    control = train(recipe, runs, seed, run_dir=str(runs / f"{recipe}-control-{seed}"), **changes)
    with rt.Run.open(path, "r") as opened:
        curve = reward_curve(opened)
    assert curve is not None
    save_curve(curve, runs / f"{recipe}-{seed}" / "curve.png")
    return {
        "seed": seed,
        "trained": figures_of(path),
        "control": figures_of(control),
    }


def complaints(found: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Return where a run's figures contradict the stored ones.

    Timing decides which calls share a batch, and so the last bits: runs differ, and intervals must
    overlap rather than means agree.
    """
    problems = []
    if found["trained"]["difference"][1] <= 0:
        problems.append("the reward did not rise: the interval of the difference has 0 in it")
    if not found["control"]["difference"][1] <= 0 <= found["control"]["difference"][2]:
        problems.append("the control changed the reward, although it has nothing to learn from")
    if found["trained"]["after"][1] <= found["control"]["after"][2]:
        problems.append("the trained model is not clearly better than the control")
    for part in ("before", "after"):
        (_, low, high), (_, at_least, at_most) = found["trained"][part], stored["trained"][part]
        if high < at_least or low > at_most:
            problems.append(
                f"{part}: [{low:.2f}, {high:.2f}] does not overlap with the stored "
                f"[{at_least:.2f}, {at_most:.2f}]"
            )
    return problems


def shown(figure: list[float]) -> str:
    """Return a mean and its interval as text."""
    mean, low, high = figure
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def main() -> int:
    """Run the recipes on the command line; return 1 if a figure contradicts a stored one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipes", nargs="*", choices=[*RECIPES, []], help="default: all")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare with figures.json")
    parser.add_argument("--store", action="store_true", help="write figures.json and curve.png")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    failed = False
    for recipe in options.recipes or RECIPES:
        found = run(recipe, options.runs, options.seed)
        for name in ("trained", "control"):
            parts = "  ".join(f"{part} {shown(value)}" for part, value in found[name].items())
            print(f"{recipe:18} {name:8} {parts}", flush=True)
        target = HERE / recipe / "figures.json"
        if options.store:
            target.write_text(json.dumps(found, indent=1) + "\n")
            picture = options.runs / f"{recipe}-{options.seed}" / "curve.png"
            (HERE / recipe / "curve.png").write_bytes(picture.read_bytes())
        elif options.check:
            problems = complaints(found, json.loads(target.read_text()))
            failed |= bool(problems)
            print(f"{recipe:18} {'FAILED: ' + '; '.join(problems) if problems else 'passed'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
