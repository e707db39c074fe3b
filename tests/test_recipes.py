"""The recipes of `examples/run.py` are whole, and the pages have the stored figures."""

import json
import re
from importlib import util
from pathlib import Path

import pytest

import rolltree as rt
from rolltree.training import load_train_config

EXAMPLES = Path(__file__).parents[1] / "examples"
spec = util.spec_from_file_location("recipes", EXAMPLES / "run.py")
recipes = util.module_from_spec(spec)
spec.loader.exec_module(recipes)


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_recipe_is_whole_and_its_page_has_its_figures(recipe):
    folder = EXAMPLES / recipe
    stored = json.loads((folder / "figures.json").read_text())
    assert recipes.complaints(stored, stored) == []
    page = (folder / "README.md").read_text()
    for run in ("trained", "control"):
        for figure in stored[run].values():
            assert recipes.shown(figure).replace("-0.00 ", "0.00 ") in page
    assert "(curve.png)" in page
    assert (folder / "curve.png").stat().st_size > 5_000
    config = load_train_config(folder / "train.toml")
    assert config.run.dir == f"runs/{recipe}"
    assert f"({recipe}/README.md)" in (EXAMPLES / "README.md").read_text()


def test_a_figure_that_contradicts_the_stored_one_is_said():
    stored = json.loads((EXAMPLES / "sql_agent" / "figures.json").read_text())
    flat = {**stored, "trained": stored["control"]}
    assert recipes.complaints(flat, stored) == [
        "the reward did not rise: the interval of the difference has 0 in it",
        "the trained model is not clearly better than the control",
        "after: [0.28, 0.41] does not overlap with the stored [0.73, 0.85]",
    ]


def test_only_games_with_a_high_reward_are_kept(tmp_path):
    all_games = recipes.stored_games("distillation", tmp_path / "all", 0, 12, None)
    good = recipes.stored_games("distillation", tmp_path / "good", 0, 12, 1.0)
    assert 0 < len(good) < len(all_games) == 12
    _, tokenizer = rt.load_model("tiny")
    for ((prompt, completion),) in good:
        (question,) = re.findall(r"\b[a-j]{4}\b", tokenizer.decode(prompt))
        assert tokenizer.decode(completion)[:4] == "".join(sorted(question))
