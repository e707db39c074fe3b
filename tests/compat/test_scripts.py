"""`vf-eval`, `vf-init` and `vf-install`, and what `rolltree env install` installs."""

import importlib.metadata
import json
import tomllib
from pathlib import Path

import pytest
from unchanged import write_module

from rolltree.testing import ScriptedServer
from rolltree.values.errors import ConfigError
from rolltree.verifiers import packages, uninstall
from rolltree.verifiers.scripts import eval as vf_eval
from rolltree.verifiers.scripts import init as vf_init
from rolltree.verifiers.scripts import install as vf_install
from rolltree.verifiers.scripts import vf_init as init_command

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def _taken_back():
    yield
    uninstall()


def run(monkeypatch, main, *words):
    monkeypatch.setattr("sys.argv", ["vf", *map(str, words)])
    main()


def test_the_extra_is_what_an_installation_brings():
    assert PROJECT["optional-dependencies"]["compat"] == list(packages.BROUGHT.values())


def test_an_environment_whose_import_fails_is_said_in_sentences(monkeypatch):
    def load(env_id, **args):
        raise ImportError("No module named 'numbers2'")

    monkeypatch.setattr(packages, "load", load)
    with pytest.raises(ValueError, match=r"No module named 'numbers2'\. Ensure the package for"):
        packages.load_environment("numbers")


def test_commands_have_the_names_of_the_real_package():
    names = {"vf-eval", "vf-init", "vf-install"}
    assert names <= set(PROJECT["scripts"])


def test_a_command_is_the_real_package_s_where_that_is_installed(monkeypatch):
    called = []
    point = importlib.metadata.EntryPoint(
        "vf-init", "verifiers.scripts.init:main", "console_scripts"
    )
    monkeypatch.setattr(
        importlib.metadata.EntryPoint, "load", lambda self: lambda: called.append(1)
    )
    monkeypatch.setattr("rolltree.verifiers.scripts.entry_points", lambda **which: [point])
    init_command()
    assert called == [1]


@pytest.mark.parametrize("multi_file", [False, True])
def test_init_writes_the_files_of_an_environment(tmp_path, monkeypatch, capsys, multi_file):
    words = ["my_env", "-p", tmp_path, *(["--multi-file"] if multi_file else [])]
    run(monkeypatch, vf_init.main, *words)
    folder = tmp_path / "my_env"
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-env"
    assert project["project"]["dependencies"] == ["verifiers>=0.1.8"]
    assert project["tool"]["verifiers"]["eval"] == {"num_examples": 5, "rollouts_per_example": 3}
    code = folder / "my_env" if multi_file else folder
    assert "import verifiers as vf" in (code / "my_env.py").read_text()
    assert (code / "__init__.py").exists() == multi_file
    (folder / "README.md").write_text("mine")
    run(monkeypatch, vf_init.main, *words)
    assert "stays" in capsys.readouterr().out
    assert (folder / "README.md").read_text() == "mine"
    run(monkeypatch, vf_init.main, *words, "--rewrite-readme")
    assert (folder / "README.md").read_text().startswith("# my-env")


def test_install_leaves_verifiers_out(tmp_path, monkeypatch):
    write_module(tmp_path)
    asked = []
    monkeypatch.setattr(packages, "pip_install", asked.append)
    wanted = ["verifiers>=0.1.8", "click", "tenacity>=9", 'x>1; extra == "docs"', "verifiers[rl]"]
    monkeypatch.setattr(packages, "distribution", lambda name: type("D", (), {"requires": wanted}))
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    run(monkeypatch, vf_install.main, "my-env", "-p", tmp_path)
    assert asked[0] == ["--no-deps", "--editable", str(tmp_path / "my_env")]
    assert asked[1][:2] == ["click", "tenacity>=9"]
    assert "datasets>=3" in asked[1]
    assert not [line for line in asked[1] if line.startswith(("verifiers", "x", "tenacity>=8"))]
    monkeypatch.setattr(packages, "find_spec", lambda module: module)
    run(monkeypatch, vf_install.main, "my-env", "-r", "-b", "v0.1.8")
    (url,) = [word for word in asked[2] if "git+" in word]
    assert url.startswith("my-env @ git+https://")
    assert url.endswith("@v0.1.8#subdirectory=environments/my_env")


@pytest.mark.parametrize(
    ("where", "said"),
    [("someone/my-env", "prime env pull"), ("nothing", "nothing to install"), (".", "pyproject")],
)
def test_what_cannot_be_installed_is_said(where, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        packages.install_package(where, install=lambda words: None)


ENDPOINTS = 'ENDPOINTS = {{"small": {{"model": "m", "url": "{url}", "key": "SOME_KEY"}}}}\n'


def test_eval_writes_the_results(tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets")
    pytest.importorskip("openai")
    write_module(tmp_path / "environments", "my-env-of-scripts")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_KEY", "a-secret-key")
    with ScriptedServer(lambda messages: "\\boxed{1}", model="m") as server:
        (tmp_path / "endpoints.py").write_text(ENDPOINTS.format(url=server.base_url))
        words = ("my-env-of-scripts", "-e", "endpoints.py", "-m", "small", "-s", "-t", 70)
        run(monkeypatch, vf_eval.main, *words, "--header", "X-Mine: yes", "-n", 2, "-C", "turn")
        headers = {key.lower(): value for key, value in server.requests[0].headers.items()}
    out = capsys.readouterr().out
    assert "Rollouts per example: 2" in out  # its pyproject's
    assert "a-secret-key" not in out
    assert headers["x-mine"] == "yes"
    assert headers["authorization"] == "Bearer a-secret-key"
    (saved,) = tmp_path.glob("**/evals/my-env-of-scripts--*/*/results.jsonl")
    assert json.loads(saved.with_name("metadata.json").read_text())["num_examples"] == 2
    rows = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [row["reward"] for row in rows] == pytest.approx([0.01, 0.01, 1.01, 1.01])
    assert "boxed" in rows[0]["completion"][0]["content"]


def test_sampling_arguments_win_over_flags():
    assert vf_eval._sampling({"max_tokens": 5}, 7, 0.5) == {"max_tokens": 5, "temperature": 0.5}
    assert vf_eval._sampling(None, None, None) == {"max_tokens": None}
    with pytest.raises(ConfigError, match="Name: Value"):
        vf_eval._headers(["nothing"])
