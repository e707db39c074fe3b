"""What goes wrong around a command is one message that says what to do, never a traceback."""

import contextlib
import logging
import os
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

import rolltree as rt
from golden_kit import unpack
from rolltree.cli import app
from rolltree.evaluation import evaluate_async
from rolltree.inference.client import sampling_from_args
from rolltree.store import Run
from rolltree.testing import HttpFault, ScriptedClient, ScriptedServer
from rolltree.values.errors import ConfigError

SUM = """
import rolltree as rt

def load_environment():
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(4)]
    return rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric(funcs=[right]))

def right(completion, answer) -> float:
    return float(answer in completion[-1]["content"])
"""


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def env(tmp_path):
    path = tmp_path / "sums.py"
    path.write_text(SUM)
    return path


def test_a_file_without_an_environment_is_named(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    result = invoke("eval", tmp_path / "empty.py", "-m", "tiny")
    assert result.exit_code == 2
    assert "empty.py has no function load_environment" in result.stderr


def test_an_evaluation_prints_the_first_message_of_each_kind_of_failure(env, tmp_path):
    faults = [HttpFault(status=404), HttpFault(status=404), None]
    with ScriptedServer(lambda messages: "1", faults=faults) as server:
        words = ("-b", server.base_url, "-m", "scripted", "-n", 3, "-r", 1, "-c", 1)
        result = invoke("eval", env, *words, "--run", tmp_path / "run")
    said = " ".join(result.stdout.split())
    assert "2 x ServerError, the first:" in said
    assert "answered 404" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.device=tpu"], "tpu"),
        (["model.device=cuda"], "CUDA"),
        (["engine.kind=serverz"], "servers"),
        (["model.compute_dtype=float8"], "bfloat16"),
    ],
)
def test_a_wrong_setting_lists_what_there_is(env, tmp_path, words, said):
    config = tmp_path / "run.toml"
    config.write_text(f'[model]\nname = "tiny"\n[env]\nid = "{env}"\n[train]\nnum_steps = 1\n')
    result = invoke("train", config, f"run.dir={tmp_path / 'run'}", *words)
    assert result.exit_code in (1, 2), result.output
    assert said in result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_run_directory_that_is_a_file(env, tmp_path):
    (tmp_path / "taken").write_text("mine")
    result = invoke("eval", env, "-m", "tiny", "-n", 1, "-r", 1, "--run", tmp_path / "taken")
    assert result.exit_code in (1, 2)
    assert "taken" in result.stderr
    assert isinstance(result.exception, SystemExit)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_read_only_file_system():
    """/proc takes no files, from nobody."""
    result = invoke("eval", "nothing", "-m", "tiny", "--run", "/proc/here")
    assert isinstance(result.exception, SystemExit)
    result = invoke("init", "my-env", "--path", "/proc")
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert "/proc" in result.stderr


def test_an_export_into_a_missing_folder(env, tmp_path):
    with ScriptedServer(lambda messages: "1") as server:
        words = ("-b", server.base_url, "-m", "scripted", "-n", 1, "-r", 1)
        assert invoke("eval", env, *words, "--run", tmp_path / "run").exit_code == 0
    result = invoke("export", tmp_path / "run", tmp_path / "no" / "where" / "x.jsonl")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


def test_training_without_torch_says_what_to_install(env, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(f'[model]\nname = "tiny"\n[env]\nid = "{env}"\n')
    code = "import sys; sys.modules['torch'] = None\nfrom rolltree.cli import app; app()"
    for words in (["train", config], ["eval", env, "-m", "tiny"], ["serve", "tiny"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, words)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=240,
        )
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert "pip install 'rolltree[" in done.stderr


IGNORES_TOOLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
)


async def test_tools_that_the_template_ignores_are_an_error_at_the_start():
    from rolltree.inference import EndpointPool
    from rolltree.inference.chat import ChatRenderer
    from rolltree.testing import FaultyClient
    from rolltree.testing.tokenizer import ByteTokenizer

    def look_up(word: str) -> str:
        """Look a word up."""
        return word

    env = rt.ToolEnv(tools=[look_up], dataset=[{"question": "?"}], rubric=rt.Rubric(funcs=[]))
    client = ScriptedClient(["a"])
    client.renderer = ChatRenderer(ByteTokenizer(), IGNORES_TOOLS)
    (schema,) = env.oai_tools
    rows = [{"question": "?", "info": {"oai_tools": [schema]}}]
    per_row = rt.SingleTurnEnv(dataset=[{"question": "?"}, *rows], rubric=rt.Rubric(funcs=[]))
    plain = rt.SingleTurnEnv(dataset=[{"question": "?"}], rubric=rt.Rubric(funcs=[]))
    for source in (env, per_row, rt.EnvGroup([plain, env]), rt.EnvGroup([plain, per_row])):
        for behind in (client, EndpointPool([client]), FaultyClient(client, ())):
            with pytest.raises(ConfigError, match=r"ignores tools.*'look_up'.*ReActAgent"):
                await evaluate_async(source, behind)
    await evaluate_async(plain, EndpointPool([client]))


def test_unknown_sampling_arguments_are_said_once(caplog):
    from rolltree.inference.client import _warn_unknown

    _warn_unknown.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found = sampling_from_args({"temprature": 0.5, "min_p": 0.1})
    assert dict(found.extra) == {"temprature": 0.5, "min_p": 0.1}
    (record,) = caplog.records
    assert "'temprature'" in record.getMessage()
    assert "Did you mean 'temperature'?" in record.getMessage()


@pytest.fixture(scope="module")
def notices(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hints")
    rows = [{"question": f"{n} + 1 =", "answer": "no"} for n in range(4)]

    async def nothing(completion) -> float:
        return 0.0

    env = rt.SingleTurnEnv(
        dataset=rows, eval_dataset=rows[:2], rubric=rt.Rubric(funcs=[nothing]), env_id="zero"
    )
    told = []

    class Told(rt.Silent):
        def on_notice(self, message):
            told.append(message)

    class Broken:
        def __init__(self, *args, **kwargs):
            self.args = args

        def show(self, name, rollouts, step):
            self.log({}, step)

        def log(self, values, step):
            raise RuntimeError("the tracker is away, key sk-abcdefghijklmnopqrstuvwx")

        def close(self):
            raise RuntimeError("still away")

    from rolltree.training import trackers

    patch = pytest.MonkeyPatch()
    patch.setitem(trackers.TRACKERS, "tensorboard", Broken)
    try:
        report = rt.train(
            environment=env,
            model="tiny",
            run_dir=str(folder / "run"),
            num_steps=11,
            algorithm={"groups_per_step": 1, "group_size": 2},
            sampling={"max_tokens": 2},
            eval={"before": False, "after": False},
            checkpoint={"export": False},
            track={"to": ["tensorboard"]},
            reporter=Told(),
        )
    finally:
        patch.undo()
    assert len(report.metrics) == 11
    return told


class TestTraining:
    """One short run of the tiny model, with everything that deserves a hint."""

    def test_equal_rewards(self, notices):
        (said,) = [text for text in notices if "No group had reward variance" in text]
        assert "in steps 1 to 10, so nothing was learned: all" in said
        assert "rewards were 0. Look at a few (rolltree show" in said

    def test_shared_questions(self, notices):
        assert any("2 of 2 evaluation questions are also training questions" in n for n in notices)

    def test_a_tracker_that_fails_never_ends_a_run(self, notices):
        (said,) = [text for text in notices if "tensorboard failed" in text]
        assert "the tracker is away" in said
        assert "sk-abc" not in said


def test_mlflow_works_with_what_the_extra_installs(tmp_path, monkeypatch):
    from rolltree.training.trackers import TRACKERS, TrackedRun

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    run = TrackedRun(tmp_path, "project", "name", {"train": {"num_steps": 1}}, 1)
    for step in (1, 2):  # the second start goes on in the same run
        sink = TRACKERS["mlflow"](run)
        sink.log({"reward/mean": 0.5}, step)
        sink.close()
    (written,) = (tmp_path / "mlruns").glob("*/*/metrics/reward/mean")
    assert [line.split()[1:] for line in written.read_text().splitlines()] == [
        ["0.5", "1"],
        ["0.5", "2"],
    ]


COMMAND = [sys.executable, "-c", "from rolltree.cli import main; main()"]


@pytest.mark.parametrize("words", [["show"], ["show", "--json"]])
def test_nobody_reads_what_a_command_prints(tmp_path, words):
    with Run.create(tmp_path / "run", config={}, kind="train") as run:
        run.add_step(1, {"reward/mean": 0.5})
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [*COMMAND, *words, str(tmp_path / "run")],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("words", [[], *(["steps", "--format", f] for f in ("jsonl", "csv"))])
def test_nobody_reads_a_table(tmp_path, words):
    with Run.create(tmp_path / "run", config={}, kind="train") as run:
        for step in range(1, 31):  # more than Python's buffer
            run.add_step(step, {f"reward/{n}": 1 / 3 for n in range(40)})
    read, write = os.pipe()
    os.close(read)
    out = os.fdopen(write, "w")
    with contextlib.redirect_stdout(out):
        status = app.main(
            ["data", str(tmp_path / "run"), *(words or ["--json"])], standalone_mode=False
        )
    with contextlib.suppress(BrokenPipeError):
        out.close()
    assert status is None


def test_a_result_that_cannot_be_printed_is_an_error():
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [*COMMAND, "models"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ran.returncode == 1
    assert "free some space" in ran.stderr


@pytest.mark.parametrize("words", [("show", "RUN"), ("docs",), ("runs", "RUN"), ("--help",)])
def test_a_closed_stdout_is_one_message(words, tmp_path):
    run = unpack("4/train", tmp_path / "run")
    given = [str(run) if word == "RUN" else word for word in words]
    command = f"exec {shlex.join([sys.executable, '-m', 'rolltree', *given])} >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "stdout is closed" in done.stderr or "nothing more is printed" in done.stderr


@pytest.mark.parametrize(("closed", "status"), [("", 0), ("2>&-", 0), (">&-", 1), (">&- 2>&-", 1)])
def test_an_evaluation_that_cannot_show_its_result_stores_it_and_fails(closed, status, tmp_path):
    with ScriptedServer(lambda _: "4") as server:
        words = [
            "eval",
            "arithmetic",
            "-n",
            "1",
            "-r",
            "1",
            "-m",
            "scripted",
            "-b",
            server.base_url,
        ]
        given = [sys.executable, "-m", "rolltree", *words, "--run", str(tmp_path / "run")]
        done = subprocess.run(
            f"exec {shlex.join(given)} {closed}", shell=True, capture_output=True, check=False
        )
    assert done.returncode == status
    with Run.open(tmp_path / "run", "r") as run:
        assert run.num_rollouts() == 1


def test_a_message_for_a_closed_stderr_is_not_printed_elsewhere(tmp_path):
    command = f"exec {shlex.join([sys.executable, '-m', 'rolltree', 'show', str(tmp_path)])} 2>&-"
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
