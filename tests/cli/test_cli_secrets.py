"""Secrets planted where people put them, looked for in everything that a run leaves or prints."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest

from rolltree._helpers.redact import REDACTED, secrets_in, shown_command
from rolltree.testing import ScriptedServer

KEY, HEADER, WORD = "plain-judge-key-4711", "plain-header-4712", "plain-command-line-4713"
PASSWORD, PROVIDER = "plain-pass-4714", "sk-" + "p1ain" * 6
SECRETS = [KEY, HEADER, WORD, PASSWORD, PROVIDER]
ENVIRONMENT = textwrap.dedent(
    """
    import logging
    import rolltree as rt

    def load_environment(judge_api_key="", headers=None, url="", cookie="", fails=False, note=""):
        said = f"{judge_api_key} {headers} {url} {cookie} {note}"
        logging.getLogger("rolltree.environments").error("loaded with %s", said)
        if fails:
            raise rt.ConfigError(f"cannot load with {said}")
        rows = [{"question": f"say {i}", "answer": str(i)} for i in range(4)]

        def right(completion, answer):
            if answer == "1":
                raise ValueError(f"the judge refused {said}")
            return float(len(completion[-1]["content"]) % 2)

        return rt.SingleTurnEnv(
            dataset=rows, eval_dataset=rows, rubric=rt.Rubric([right]), env_id="leaky",
            system_prompt=f"Ask the judge with {judge_api_key}.",
        )
    """
)
CONFIG = textwrap.dedent(
    f"""
    [run]
    dir = "run"
    [model]
    name = "tiny"
    [env]
    id = "./leaky"
    [env.args]
    judge_api_key = "{KEY}"
    url = "http://user:{PASSWORD}@localhost/"
    note = "with {PROVIDER}"
    headers = {{ Authorization = "Bearer {HEADER}" }}
    [sampling]
    max_tokens = 6
    [algorithm]
    group_size = 2
    groups_per_step = 2
    [train]
    num_steps = 1
    max_failed_share = 1.0
    num_threads = 1
    [engine]
    max_batch = 8
    max_context = 256
    """
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "leaky").mkdir()
    (tmp_path / "leaky" / "leaky.py").write_text(ENVIRONMENT)
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def run(folder, *words, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "rolltree", *map(str, words)],
        cwd=folder,
        capture_output=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    return done.returncode, (done.stdout + done.stderr).decode()


def leaks(folder, out=""):
    """Return which secret is in which file that the run wrote, or in its output."""
    found = [f"{secret} in the output" for secret in SECRETS if secret in out]
    given = {folder / "config.toml"}
    for file in folder.rglob("*"):
        if file.is_file() and file not in given:
            data = file.read_bytes()
            found += [f"{secret} in {file}" for secret in SECRETS if secret.encode() in data]
    return found


@pytest.mark.long
def test_training_with_every_tracker(folder):
    """Config, store, checkpoints, tracker files, logs and the commands that are suggested."""
    wanted = ["tensorboard", "wandb", "mlflow", "trackio"]
    trackers = [name for name in wanted if importlib.util.find_spec(name)]
    code, out = run(
        folder,
        *("train", "config.toml", f"env.args.cookie={WORD}", f"track.to={json.dumps(trackers)}"),
        WANDB_MODE="offline",
        MLFLOW_ALLOW_FILE_STORE="true",
        MLFLOW_TRACKING_URI=(folder / "mlruns").as_uri(),
        TRACKIO_DIR=str(folder / "trackio"),
    )
    assert code == 0, out
    assert "env.args.cookie=[redacted]" in out  # the suggested command
    assert "loaded with" in out
    assert (folder / "run" / "run.db").is_file()
    for name in trackers:
        assert list(folder.rglob(f"*{name}*" if name != "mlflow" else "mlruns/*")), name
    assert leaks(folder, out) == []
    code, shown = run(folder, "show", "run", "--phase", "train", "--transcripts", 9, "--failed")
    assert code == 0, shown
    assert "the judge refused" in shown
    assert leaks(folder, shown) == []


def test_evaluation_over_http_with_its_report_and_its_errors(folder):
    args = {
        "judge_api_key": KEY,
        "headers": {"Authorization": f"Bearer {HEADER}"},
        "url": f"http://user:{PASSWORD}@localhost/",
        "note": PROVIDER,
    }
    with ScriptedServer(lambda messages: "ok") as server:
        words = ["eval", "./leaky", "-m", "scripted", "-b", server.base_url, "-n", 4, "-r", 1]
        words += ["--run", "run", "--save-results", "--json", "--transcripts", 4]
        headers = {"extra_headers": {"Authorization": f"Bearer {WORD}"}}
        words += ["-S", json.dumps(headers)]
        code, out = run(folder, *words, "-a", json.dumps(args))
        assert code == 0, out
        code, failed = run(folder, *words, "-a", json.dumps({**args, "fails": True}))
        assert code == 2, failed
        assert "cannot load with" in failed
    run(folder, "export", "run", "all.jsonl")
    assert (folder / "all.jsonl").is_file()
    assert leaks(folder, out + failed) == []


def test_printed_commands():
    given = ["rolltree", "train", "a b.toml", "env.args.key=abc", "env.args.api_key=12345678"]
    given += ['env.args={judge_api_key = "x", n = 1}', "run.seed=1", f"env.args.note={PROVIDER}"]
    given += ["-a", '{"password": "x", "n": [1]}']
    assert shown_command(given) == (
        "rolltree train 'a b.toml' env.args.key=abc 'env.args.api_key=[redacted]' "
        """'env.args={"judge_api_key": "[redacted]", "n": 1}' run.seed=1 """
        """'env.args.note=[redacted]' -a '{"password": "[redacted]", "n": [1]}'"""
    )
    assert shown_command(["a=1", "b"]) == "a=1 b"
    assert shown_command(["--set=env.args.api_key=abc", "--api-key=abc", "--set=a=1"]) == (
        "'--set=env.args.api_key=[redacted]' '--api-key=[redacted]' --set=a=1"
    )


def test_secrets_of_a_config():
    config = {"a": [{"headers": {"Authorization": f"Bearer {HEADER}"}}], "token": 504, "x": KEY}
    assert secrets_in(config) == (f"Bearer {HEADER}", HEADER)
    assert secrets_in({"credentials": {"user": "long enough", "n": 1}}) == ("long enough",)
    assert REDACTED not in secrets_in(config)
