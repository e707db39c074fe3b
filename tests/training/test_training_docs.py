"""The examples of docs/training.md and docs/settings.md run; their settings are accepted."""

import tomllib

import pytest

import docs_kit
import rolltree as rt


def test_the_examples_of_the_training_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = docs_kit.run("training.md")
    assert [row["step"] for row in names["report"].rows()] == [1, 2]
    assert (tmp_path / "runs" / "sums" / "model" / "config.json").exists()
    losses = [float(line) for line in capsys.readouterr().out.splitlines()[-3:]]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("page", ["training.md", "settings.md", "metrics.md"])
def test_the_toml_is_accepted(page):
    blocks = docs_kit.blocks(page, language="toml")
    assert blocks
    for block in blocks:
        rt.load_train_config(tomllib.loads(block))
