import importlib.metadata
import sys
import textwrap

import pytest
from env_scripts import ScriptedModel

from rolltree.environments import (
    eval_defaults,
    find_environment,
    known_environments,
    load_environment,
    own_max_tokens,
    train_config_file,
)
from rolltree.environments.registry import READY_MADE, environment_file
from rolltree.training.launch import environment_config
from rolltree.values.errors import ConfigError, UnknownName

SOURCE = """
    import rolltree as rt
    {imports}

    def load_environment(num: int = 2, word: str = "hi"{more}):
        rows = [{{"question": word, "answer": word}}] * num
        return rt.SingleTurnEnv(dataset=rows)
"""


def write(path, imports="", more=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(SOURCE).format(imports=imports, more=more))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_of_the_working_directory(here):
    write(here / "environments" / "my_words" / "my_words.py")
    for name in ("my_words", "my-words"):
        env = load_environment(name, num=3)
        assert env.env_id == name
        assert env.env_args == {"num": 3}
        assert env.num_examples("train") == 3
        assert env.example("train", 0)["task"] == name


def test_a_package_folder(here):
    write(here / "environments" / "words" / "__init__.py")
    assert load_environment("words").num_examples("train") == 2


@pytest.mark.parametrize(
    "path", ["elsewhere/words", "elsewhere/words/words.py", "./elsewhere/words"]
)
def test_a_path(here, path):
    write(here / "elsewhere" / "words" / "words.py")
    env = load_environment(path, word="yes")
    assert env.env_id == "words"
    assert env.example("train", 0)["answer"] == "yes"


def test_a_pathlib_path(here):
    write(here / "words.py")
    assert load_environment(here / "words.py").env_id == "words"


def test_neighbours_are_imported_relatively(here):
    folder = here / "environments" / "words"
    write(folder / "words.py", imports="from .data import SIZE")
    (folder / "data.py").write_text("SIZE = 5\n")
    assert load_environment("words").num_examples("train") == 2


def test_a_folder_does_not_hide_a_module_of_the_same_name(here):
    import json

    write(here / "environments" / "json" / "json.py")
    assert load_environment("json").env_id == "json"
    assert sys.modules["json"] is json


def test_an_installed_module(here, monkeypatch):
    write(here / "site" / "installed_words.py")
    monkeypatch.syspath_prepend(str(here / "site"))
    assert load_environment("installed-words").env_id == "installed-words"


def test_an_entry_point_comes_first(here, monkeypatch):
    write(here / "site" / "pointed_words.py")
    write(here / "environments" / "words" / "words.py", more=", other=1")
    monkeypatch.syspath_prepend(str(here / "site"))
    for value in ("pointed_words:load_environment", "pointed_words"):
        point = importlib.metadata.EntryPoint("words", value, "rolltree.environments")
        monkeypatch.setattr(
            "rolltree.environments.registry.entry_points", lambda group, p=point: [p]
        )
        assert find_environment("words").__module__ == "pointed_words"
        assert "words" in known_environments()


def test_an_unknown_name_lists_the_nearest(here):
    write(here / "environments" / "my_words" / "my_words.py")
    with pytest.raises(UnknownName, match="Did you mean 'my_words'"):
        load_environment("my-word")
    with pytest.raises(UnknownName, match=r"Known: .*my_words"):
        load_environment("zzz")


@pytest.mark.parametrize("name", ["json", "no such name", "missing/folder", "missing.py", "1x"])
def test_what_is_no_environment(here, name):
    with pytest.raises(UnknownName, match="no environment"):
        load_environment(name)


def test_unknown_arguments_are_errors(here):
    write(here / "environments" / "words" / "words.py")
    with pytest.raises(ConfigError, match="Did you mean 'num'"):
        load_environment("words", nmu=3)


def test_missing_arguments_are_errors(here):
    write(here / "environments" / "words" / "words.py", more=", *, level")
    with pytest.raises(ConfigError, match="'level'"):
        load_environment("words")
    assert load_environment("words", level=1).env_args == {"level": 1}


def test_arguments_of_an_environment_that_takes_any(here):
    write(here / "environments" / "words" / "words.py", more=", **rest")
    assert load_environment("words", anything=1).env_args == {"anything": 1}


def test_what_it_returns_must_be_an_environment(here):
    (here / "bad.py").write_text("def load_environment():\n    return 7\n")
    with pytest.raises(ConfigError, match="returned a int"):
        load_environment("bad.py")


def test_an_error_in_the_file_is_shown_as_it_is(here):
    (here / "bad.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        load_environment("bad.py")
    assert "rolltree_environment_bad" not in sys.modules


def test_an_environment_keeps_a_name_of_its_own(here):
    (here / "named.py").write_text(
        "import rolltree as rt\n"
        "def load_environment():\n"
        "    return rt.SingleTurnEnv(dataset=[{'question': 'q'}], env_id='own')\n"
    )
    env = load_environment("named.py")
    assert env.env_id == "own"
    assert env.example("train", 0)["task"] == "own"


async def test_a_loaded_environment_runs(here):
    write(here / "environments" / "words" / "words.py")
    env = load_environment("words")
    results = await env.evaluate(ScriptedModel("hi"), "m")
    assert results.metadata.env_id == "words"
    assert results.task == ["words", "words"]


def test_a_ready_made_environment_is_found_in_any_folder(here):
    assert load_environment("arithmetic").num_examples("eval") == 100
    assert "arithmetic" in known_environments()
    assert environment_file("arithmetic").parent == READY_MADE / "arithmetic"
    write(here / "environments" / "arithmetic" / "arithmetic.py")
    assert load_environment("arithmetic").num_examples("train") == 2  # the user's own comes first
    assert environment_file("arithmetic").resolve().parent == here / "environments" / "arithmetic"


def test_an_environment_may_bring_its_training_config(here):
    assert train_config_file("arithmetic") == READY_MADE / "arithmetic" / "train.toml"
    write(here / "environments" / "my_words" / "my_words.py")
    assert train_config_file("my-words") is None
    file = here / "environments" / "my_words" / "train.toml"
    file.write_text("[optim]\nlr = 2e-3\n[run]\ndir = 'runs/other'\n")
    config = environment_config("my-words")
    assert config["optim"]["lr"] == 2e-3
    assert (config["env"]["id"], config["run"]["dir"]) == ("my-words", "runs/my-words")
    with pytest.raises(UnknownName, match="there is no environment 'zzz'"):
        train_config_file("zzz")


def test_the_environments_own_max_tokens(here):
    write(here / "environments" / "my_words" / "my_words.py")
    file = here / "environments" / "my_words" / "train.toml"
    assert own_max_tokens("my-words") is None
    file.write_text("[sampling]\nmax_tokens = 7\n")
    found = own_max_tokens("my-words")
    assert (found[0], found[1].resolve()) == (7, file)
    file.write_text("sampling = 3")
    with pytest.raises(ConfigError, match=r"sampling in .*train\.toml is 3, not a table"):
        own_max_tokens("my-words")
    file.write_text("[sampling\nmax_tokens = 7\n")
    with pytest.raises(ConfigError, match=r"train\.toml cannot be read .*line 1"):
        own_max_tokens("my-words")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tool = 5", "tool in the pyproject.toml of environment 'my-words' is 5, not a table"),
        ("[tool]\nrolltree = 'x'", "tool.rolltree in .* is 'x', not a table"),
        ("[tool.rolltree]\neval = 5", "tool.rolltree.eval in .* is 5, not a table"),
        ("[tool.verifiers.eval]\nnum_examples = 'x'", "num_examples in .* not a whole number"),
        ("project = 3", "project in .* is 3, not a table"),
    ],
)
def test_evaluation_defaults_of_the_wrong_kind(here, text, said):
    write(here / "environments" / "my_words" / "my_words.py")
    (here / "environments" / "my_words" / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        eval_defaults("my-words")


def test_an_environment_that_ends_the_program_while_it_is_loaded_is_refused(here):
    (here / "quits.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(ConfigError, match=r"'quits.py' called exit\(0\)"):
        load_environment("quits.py")
