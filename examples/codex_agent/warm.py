"""Make a tiny model that plays Codex's part: a tokenizer, a teacher's games, and fine-tuning.

    python examples/codex_agent/warm.py            writes runs/codex_agent-warm

The teacher writes either of the two numbers, so the model can do everything but compare.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import rolltree as rt
from rolltree.inference import ChatRenderer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from codex_agent import load_environment, teacher  # noqa: E402
from run import fine_tune, play_games  # noqa: E402

NUM_GAMES = 200
STEPS = ((100, 3e-3), (80, 2e-3), (20, 5e-4))
"""Numbers of steps, and their learning rates."""


def with_brief_template(tokenizer: Any) -> Any:
    """Return a tokenizer whose template shows the names of tools only, changed in place.

    Schemas of 1,600 characters hide two digits from a model that begins with nothing.
    """
    tokenizer.chat_template = rt.load_model("tiny")[1].chat_template.replace(
        "tool | tojson", "tool.function.name"
    )
    return tokenizer


def prompts_of(environment: rt.Environment) -> list[str]:
    """Return the text of the prompts that Codex sends in one game."""
    tokenizer = with_brief_template(rt.load_model("tiny")[1])
    client = rt.ScriptedClient(teacher(0), renderer=ChatRenderer(tokenizer))
    (state,) = environment.evaluate_sync(client, num_examples=1).state
    return [tokenizer.decode(step["tokens"]["prompt_ids"]) for step in state["trajectory"]]


def make_model(texts: list[str]) -> tuple[Any, Any]:
    """Return the tiny model with a vocabulary learned from texts; a digit is always one token."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    model, tokenizer = rt.load_model("tiny")
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer = with_brief_template(tokenizer.train_new_from_iterator(texts, 800))
    torch.manual_seed(0)
    # From nothing to the new size, so that no token begins as the byte that had its id.
    model.resize_token_embeddings(1, mean_resizing=False)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config.update(eos_token_id=[end, pad], pad_token_id=pad)
    model.config.eos_token_id, model.config.pad_token_id = end, pad
    return model, tokenizer


def warm_up(folder: Path, games: Path) -> None:
    """Write a tiny model that was fine-tuned on the teacher's games to a folder."""
    environment = load_environment()
    model, tokenizer = make_model(prompts_of(environment))
    client = rt.ScriptedClient(teacher(0), renderer=ChatRenderer(tokenizer))
    played = play_games(environment, client, games, seed=0, num_games=NUM_GAMES, keep=None)
    print(f"a prompt has {len(played[0][0][0])} tokens", flush=True)
    for num_steps, lr in STEPS:
        settings = {"num_steps": num_steps, "batch_size": 16, "lr": lr}
        fine_tune(model, played, seed=0, what="codex_agent", **settings)
    partial = folder.with_suffix(".tmp")
    for part in (model, tokenizer):
        part.save_pretrained(partial)
    partial.rename(folder)


def main() -> None:
    """Warm a model up on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where to write it")
    runs = parser.parse_args().runs
    warm_up(runs / "codex_agent-warm", runs / "codex_agent-games")


if __name__ == "__main__":
    main()
