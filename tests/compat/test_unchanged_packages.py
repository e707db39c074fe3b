"""Environments that import `verifiers` are found, and get rolltree's, with nothing installed first.

Each test is a process of its own: what a process has imported stays imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from unchanged import write_module, write_package

from rolltree.testing import ScriptedServer

REAL = """\
__version__ = "0.1.8.post2"


class Environment:
    pass


class SingleTurnEnv(Environment):
    def __init__(self, **kwargs):
        if kwargs.get("level"):
            raise TypeError("no level here")


Rubric = Parser = SingleTurnEnv
"""


def python(code, cwd, **env):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd, capture_output=True, text=True, timeout=120, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def rolltree_command(*words, cwd, **env):
    return subprocess.run(
        [sys.executable, "-m", "rolltree", *map(str, words)],
        cwd=cwd, capture_output=True, text=True, timeout=120, env={**os.environ, **env},
    )  # fmt: skip


@pytest.fixture
def server():
    with ScriptedServer(lambda messages: "\\boxed{1}", model="m") as running:
        yield running


@pytest.fixture
def real(tmp_path):
    """A package in the place of the real one."""
    (tmp_path / "site" / "verifiers" / "utils").mkdir(parents=True)
    (tmp_path / "site" / "verifiers" / "__init__.py").write_text(REAL)
    (tmp_path / "site" / "verifiers" / "types.py").write_text("Messages = list\n")
    utils = tmp_path / "site" / "verifiers" / "utils"
    (utils / "data_utils.py").write_text("extract_boxed_answer = str\n")
    (utils / "async_utils.py").write_text("maybe_await = None\n")
    return str(tmp_path / "site")


LOAD = """
    import sys, rolltree as rt
    assert not [name for name in sys.modules if "rolltree.verifiers" in name]
    env = rt.load_environment({name!r})
    print(type(env).__module__.split(".")[0], isinstance(env, rt.Environment), env.env_id)
    env.get_eval_dataset(1)
"""
DEFAULTS = "from rolltree.environments import eval_defaults; print(eval_defaults('my-env'))"


@pytest.mark.parametrize(
    ("name", "write"),
    [("my-env", write_module), ("my_env", write_package), ("someone/my-env", write_package)],
)
def test_an_installed_one_is_loaded(tmp_path, write, name):
    package = write(tmp_path / "src")
    said = python(LOAD.format(name=name), tmp_path, PYTHONPATH=str(package))
    assert said == f"rolltree True {name}"


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("my-env", write_package),
        ("environments/my_env", write_module),
        ("./environments/my_env/", write_package),
    ],
)
def test_a_folder_is_loaded(tmp_path, write, name):
    write(tmp_path / "environments")
    said = python(LOAD.format(name=name), tmp_path)
    assert said.startswith("rolltree True my")


def test_an_owner_that_is_not_installed_is_told_so(tmp_path):
    done = rolltree_command("eval", "someone/no-such", cwd=tmp_path)
    assert done.returncode == 2
    assert "no_such" in done.stderr
    assert "rolltree env install" in done.stderr


def test_eval_uses_the_defaults_of_its_pyproject(tmp_path, server):
    package = write_package(tmp_path / "src")
    words = ("eval", "my-env", "-m", "m", "-b", server.base_url, "--json")
    done = rolltree_command(*words, "--run", "r", cwd=tmp_path, PYTHONPATH=str(package))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_rollouts"] == 6
    assert "3 examples" in done.stderr
    assert "pyproject.toml" in done.stderr
    flags = ("-n", "1", "-r", "1")
    done = rolltree_command(*words, *flags, "--run", "s", cwd=tmp_path, PYTHONPATH=str(package))
    assert json.loads(done.stdout)["num_rollouts"] == 1


def test_the_defaults_of_another_package_are_not_taken(tmp_path):
    """Wheels of one module put their pyproject.toml beside those of others: the last one stays."""
    package = write_module(tmp_path / "src").rename(tmp_path / "site-packages")
    assert python(DEFAULTS, tmp_path, PYTHONPATH=str(package)).startswith("{'num_examples': 3")
    text = (package / "pyproject.toml").read_text().replace("my-env", "another")
    (package / "pyproject.toml").write_text(text)
    assert python(DEFAULTS, tmp_path, PYTHONPATH=str(package)) == "{}"


def test_check_plays_it(tmp_path):
    write_package(tmp_path / "environments")
    done = rolltree_command("env", "check", "my-env", "-n", "2", "--json", cwd=tmp_path)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout)["env_id"] == "my-env"


def test_beside_the_real_package_it_asks_for_the_flag(tmp_path, real, server):
    package = write_package(tmp_path / "src")
    path = os.pathsep.join([str(package), real])
    words = ("eval", "my-env", "-m", "m", "-b", server.base_url, "-n", "1", "-r", "1")
    refused = rolltree_command(*words, cwd=tmp_path, PYTHONPATH=path)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "--compat" in refused.stderr
    assert "0.1.8.post2" in refused.stderr
    level = ("-a", '{"level": 3}')
    refused = rolltree_command(*words, *level, cwd=tmp_path, PYTHONPATH=path)
    assert refused.returncode == 2
    assert "no level here" in refused.stderr
    assert "--compat" in refused.stderr
    done = rolltree_command(*words, "--compat", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


def test_compat_after_the_real_package_was_imported_is_refused(tmp_path, real):
    package = write_package(tmp_path / "src")
    code = """
        import verifiers, rolltree as rt
        try:
            rt.load_environment("my-env", compat=True)
        except rt.ConfigError as error:
            print(error)
    """
    said = python(code, tmp_path, PYTHONPATH=os.pathsep.join([str(package), real]))
    assert "has been imported already" in said


def test_a_folder_named_verifiers_is_not_the_real_package(tmp_path):
    write_package(tmp_path / "environments")
    (tmp_path / "verifiers" / "docs").mkdir(parents=True)
    said = python(LOAD.format(name="my-env"), tmp_path)
    assert said.startswith("rolltree True")


def test_threads_load_at_once(tmp_path):
    package = write_package(tmp_path / "src")
    code = """
        from concurrent.futures import ThreadPoolExecutor
        import rolltree as rt, sys
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: rt.load_environment("my-env"), range(16)))
        import verifiers as vf
        assert all(isinstance(env, vf.SingleTurnEnv) for env in found)
        import verifiers.envs.singleturn_env as module
        assert module.SingleTurnEnv is vf.SingleTurnEnv
        assert vf.envs.singleturn_env is module
        print(sum(type(finder).__name__ == "VerifiersFinder" for finder in sys.meta_path))
    """
    assert python(code, tmp_path, PYTHONPATH=str(package)) == "1"


def test_its_trainer_is_refused_by_name(tmp_path):
    code = """
        import rolltree.verifiers
        rolltree.verifiers.install()
        try:
            from verifiers.rl.trainer import RLTrainer
        except ModuleNotFoundError as error:
            print(error.name, error)
    """
    said = python(code, tmp_path)
    assert said.startswith("verifiers.rl")
    assert "rolltree train" in said


def test_a_package_that_an_environment_needs_is_named(tmp_path):
    package = write_module(tmp_path / "environments")
    text = (package / "my_env.py").read_text()
    (package / "my_env.py").write_text(f"import no_such_package.part\n{text}")
    done = rolltree_command("eval", "my-env", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no_such_package" in done.stderr
    assert "rolltree env install" in done.stderr
