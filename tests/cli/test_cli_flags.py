"""The command line's surface: flags frozen, fast, silent about torch, errors as messages."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from rolltree import __version__
from rolltree.cli import app

FLAGS = {
    "eval": {
        "-m", "--model", "-b", "--base-url", "-k", "--api-key-var", "-n", "--num-examples", "-r",
        "--rollouts-per-example", "-c", "--max-concurrent", "-t", "--max-tokens", "-T",
        "--temperature", "-S", "--sampling-args", "-a", "--env-args", "-s", "--save-results",
        "--seed", "--split", "--json", "--run", "--transcripts", "--retries", "--retry-failed",
        "--time-limit", "--deadline", "--pass-threshold", "--compat", "env",
    },
    "train": {"config", "overrides", "--transcripts"},
    "demo": {"overrides", "--transcripts"},
    "cluster status": {"--json", "run"},
    "cluster scale": {"run", "settings"},
    "fork": {"run", "--set", "--step", "--run", "--transcripts"},
    "serve": {
        "model", "--host", "--port", "--allow-remote", "--api-key-env", "--served-model-name",
        "--admin-key-env",
        "--batch-invariant", "--dtype", "--device", "--max-batch", "--max-context",
        "--logprobs-mode", "--record-experts", "--seed", "--num-threads", "--read-timeout",
        "--control-in-messages",
    },
    "gateway": {
        *("--device", "--dtype"),
        "model", "-m", "--model-name", "--tokenizer", "-k", "--api-key-var", "--run", "--host",
        "--port", "--allow-remote", "--allowed-host", "--unix-socket", "--admin-key-env",
        "--max-calls", "--max-tokens", "--time-limit", "--seed", "--train-calls",
    },
    "runs": {"root", "--json"},
    "view": {
        *("path", "--port", "--no-browser", "--export", "--tokenizer"),
        *("--where", "--sort", "-n", "--limit"),
    },
    "show": {
        "run", "--phase", "--step", "--failed", "--where", "--sort", "--last", "--transcripts",
        "--limit", "--json",
    },
    "audit": {"run", "--recompute", "--tokenizer", "--limit", "--json"},
    "replay": {
        "run", "rollout", "--env", "-a", "--env-args", "--compat", "--phase", "-n",
        "--num-rollouts", "--ignore", "--no-score", "--until", "--json",
    },
    "compare": {
        "arms", "--confidence", "--pass-threshold", "--price", "--examples", "--markdown", "--json",
    },
    "data": {
        "run", "table", "--phase", "--where", "--sort", "-n", "--limit", "-c", "--columns",
        "--full", "--format", "--json", "-o", "--output",
    },
    "export": {
        "run", "target", "--as", "--phase", "--where", "--min-reward", "--best-of-group", "--json",
    },
    "rescore": {
        "run", "--env", "-a", "--env-args", "--compat", "--rubric", "--run", "--phase", "-c",
        "--max-concurrent", "--deadline", "--retries", "--top", "--json",
    },
    "models": {"prepare"},
    "doctor": {"model", "--json", "--no-measure"},
    "docs": {"page"},
    "init": {"name", "--kind", "--path"},
    "env list": set(),
    "env install": {"where", "-e", "--editable"},
    "env check": {
        "env", "-a", "--env-args", "-n", "--num-examples", "--reward-range", "--allow", "--compat",
        "--json",
    },
}  # fmt: skip


def test_flags_are_frozen():
    """Removing or renaming one breaks somebody's script: change this test on purpose only."""
    commands = dict(app.commands)
    for group in ("env", "cluster"):
        commands |= {f"{group} {name}": each for name, each in commands.pop(group).commands.items()}
    found = {
        name: {flag for parameter in command.params for flag in parameter.opts} - {"--help"}
        for name, command in commands.items()
    }
    assert found == FLAGS


def test_help_is_fast_and_imports_nothing_heavy():
    program = (
        "import sys, time; sys.argv = ['rolltree', '--help']\n"
        "began = time.process_time(); import asyncio, json, numpy\n"
        "yardstick_s = time.process_time() - began\n"
        "began = time.process_time(); from rolltree.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'aiohttp', 'matplotlib'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))\n"
        "print((time.process_time() - began) / yardstick_s)"
    )
    least = float("inf")
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        least = min(least, float(done.stdout.split()[-1]))
    assert "HEAVY []" in done.stdout
    assert "eval" in done.stdout
    assert least < 2  # times the CPU time of importing numpy; 0.5 here


def invoke(*words, env=None):
    return CliRunner().invoke(app, list(words), env=env)


def test_version():
    assert invoke("--version").stdout.strip() == f"rolltree {__version__}"


def test_models():
    assert invoke("models").stdout.split() == ["smollm2-135m", "tiny"]
    result = invoke("models", "smolm2-135m")
    assert result.exit_code == 2
    assert "Did you mean 'smollm2-135m'?" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "no_such_env_here"], "there is no environment 'no_such_env_here'"),
        (["eval", "e", "-a", "{"], "-a is not JSON"),
        (["eval", "e", "-a", "[" * 100_000], "-a is not JSON"),
        (["eval", "e", "-a", "9" * 5_000], "-a is not JSON"),
        (["eval", "e", "-S", "[1]"], "-S is JSON, but not an object"),
        (["eval", "e", "-S", '{"temprature": 3}'], "Did you mean 'temperature'?"),
        (["eval", "e", "-b", "http://x/v1", "-S", '{"mnp": 1}'], "put it into extra_body"),
        (["eval", "nope", "-S", '{"min_p": 0, "extra_body": {"any": 1}}'], "no environment 'nope'"),
        (["eval", "e", "-k", "sk-abc123"], "takes the name of an environment variable"),
        (["eval", "e", "-k", "ROLLTREE_UNSET_KEY"], "ROLLTREE_UNSET_KEY, which is not set"),
        (["eval", "e", "--split", "test"], "--split is 'test'"),
        (["serve", "tiny", "--host", "0.0.0.0"], "add --allow-remote"),
        (["serve", "tiny", "--host", "::", "--allow-remote"], "needs a token of your own"),
        (["serve", "tiny", "--api-key-env", "sk-abc123"], "takes the name of an environment"),
        (["serve", "tiny", "--logprobs-mode", "raw_logprob"], "Did you mean 'raw_logprobs'"),
        (["serve", "no-such-model"], "there is no model 'no-such-model'"),
        (["serve", "tiny", "--device", "gpu"], "the device 'gpu' is not one that torch has"),
        (["serve", "tiny", "--device", "cpu:a"], "the device 'cpu:a' is not one"),
        (["serve", "tiny", "--dtype", "float8"], "unknown dtype 'float8'"),
        (["gateway", "no-such-model"], "there is no model 'no-such-model'"),
        (["gateway", "tiny", "--host", "0.0.0.0"], "add --allow-remote"),
        (["gateway", "tiny", "--host", "::", "--allow-remote"], "needs a token of your own"),
        (["gateway", "tiny", "--admin-key-env", "sk-abc123"], "takes the name of an environment"),
        (["gateway", "tiny", "-m", "other"], "-m is for the server at a URL"),
        (["gateway", "http://127.0.0.1:1/v1"], "-m is missing"),
        (["gateway", "http://127.0.0.1:nine/v1", "-m", "x"], "127.0.0.1:nine"),
        (["eval", "e", "-k", "MY_API_KEY"], "Set MY_API_KEY in this shell"),
        (["train", "missing.toml"], "missing.toml cannot be read"),
        (["train", "arithmetik"], "Did you mean 'arithmetic'?"),
        (["train", "env.id=sums", "model.name=tiny"], "CONFIG.toml env.id=..."),
        (["show", "missing"], "is not a run directory"),
    ],
)
def test_mistakes_are_messages_without_tracebacks(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code in (1, 2)
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert "sk-abc123" not in result.output
    assert list(tmp_path.iterdir()) == []  # a refused command leaves nothing behind


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "e", "-r", "0"],
        ["eval", "e", "-n", "-5"],
        ["eval", "e", "-n", "0"],
        ["eval", "e", "--nope"],
        ["eval"],
    ],
)
def test_flags_that_the_parser_refuses(words):
    result = invoke(*words)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "arithmetic", "-m", "no-such-model"],
        ["eval", "arithmetic", "-m", "./no-such-folder"],
        ["train", "arithmetic", "model.name=./no-such-folder"],
        ["serve", "no-such-model"],
        ["gateway", "no-such-model"],
        ["serve", "tiny", "--device", "gpu"],
        ["serve", "tiny", "--dtype", "float8"],
    ],
)
def test_a_wrong_model_or_device_is_said_before_torch_is_imported(words, tmp_path):
    """Importing torch takes seconds, minutes on a cold disk."""
    code = (
        "import sys, rolltree.cli\n"
        f"status = rolltree.cli.app({words}, standalone_mode=False)\n"
        "print(status, 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert result.stdout == "2 False\n", result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "no environment 'nowhere'"),
        ("./empty", "has no function load_environment"),
        ("./missing", "no data set at gone.jsonl"),
    ],
)
@pytest.mark.parametrize("command", ["eval", "train"])
def test_a_wrong_environment_is_said_before_torch_is_imported(command, name, said, tmp_path):
    for folder, text in {
        "empty": "",
        "missing": "import rolltree as rt\n"
        "def load_environment():\n    return rt.SingleTurnEnv(dataset='gone.jsonl')\n",
    }.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.py").write_text(text)
    words = [command, name, "-m" if command == "eval" else "model.name=tiny"]
    words += ["tiny"] if command == "eval" else []
    code = f"import sys, rolltree.cli\nrolltree.cli.app({words}, standalone_mode=False)\n"
    code += "print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-Bc", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert said in result.stderr
    assert result.stdout == "False\n"
    assert not (tmp_path / "runs").exists()


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    import importlib.util

    import rolltree as rt
    from rolltree.inference.models import load
    from rolltree.values.errors import ConfigError

    found = importlib.util.find_spec
    monkeypatch.setattr(load, "find_spec", lambda name: None if name == "torch" else found(name))
    with pytest.raises(ConfigError, match=r"torch is not installed.*rolltree\[train\]"):
        rt.load_model("tiny")
