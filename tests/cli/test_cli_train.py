"""`rolltree train` end to end on the tiny model: report, evaluation, SIGKILL and again."""

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from click.testing import CliRunner

import rolltree as rt
from rolltree.cli import app
from rolltree.store import Run
from rolltree.training import load_train_config
from rolltree.values.errors import ConfigError, StoreError
from wait_kit import wait_until

ENVIRONMENT = textwrap.dedent(
    """
    import rolltree as rt

    def load_environment(num=6):
        rows = [{"question": f"say {i}", "answer": str(i)} for i in range(num)]

        def short(completion):
            return 1.0 / (1 + len(completion[-1]["content"]))

        return rt.SingleTurnEnv(
            dataset=rows, eval_dataset=rows[:3], rubric=rt.Rubric([short])
        )
    """
)
CONFIG = textwrap.dedent(
    """
    [run]
    dir = "{run}"
    [model]
    name = "tiny"
    [env]
    id = "{env}"
    [env.args]
    num = 4
    [sampling]
    max_tokens = 6
    [algorithm]
    group_size = 2
    groups_per_step = 2
    [train]
    num_steps = 3
    num_threads = 1
    [engine]
    max_batch = 8
    max_context = 128
    [checkpoint]
    every = 1
    """
)


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "short"
    folder.mkdir()
    (folder / "short.py").write_text(ENVIRONMENT)
    path = tmp_path / "short.toml"
    path.write_text(CONFIG.format(run=tmp_path / "run", env=folder))
    return path


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_train_report_and_going_on(config, tmp_path, monkeypatch):
    result = invoke("train", config, "optim.lr=1e-4", "--transcripts", 1)
    assert result.exit_code == 0, result.output
    assert "held out, eval_before (step 0)" in result.stderr
    assert "step 3/3" in result.stderr
    assert "mean reward, short" in result.stdout
    assert "Held-out examples" in result.stdout
    assert "example 0, step 0 (eval_before)" in result.stdout
    assert (tmp_path / "run" / "reward_curve.png").read_bytes()[:4] == b"\x89PNG"
    further = result.stdout.splitlines()[-1].split()
    assert further[-1] == "train.num_steps=6"
    with Run.open(tmp_path / "run", mode="r") as run:
        assert run.config["optim"]["lr"] == 1e-4
        assert len(run.steps()) == 3
        assert run.num_rollouts(phase="train") == 12
        assert run.num_rollouts(phase="eval_before") == 3
        assert run.num_rollouts(status="error") == 0
        assert (
            max(
                step.metrics["train/sampling/sampling_logp_difference/mean"] for step in run.steps()
            )
            < 1e-4
        )

    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    again = invoke("train", config, "optim.lr=1e-4", "train.num_steps=4", "--transcripts", 0)
    assert again.exit_code == 0, again.output
    assert "the package matplotlib, which is not installed" in again.stdout
    assert "continued at step 4" in again.stderr
    assert "step 3/4" not in again.stderr
    with Run.open(tmp_path / "run", mode="r") as run:
        assert [step.step for step in run.steps()] == [1, 2, 3, 4]

    measured = invoke(
        "eval", tmp_path / "short", "-m", tmp_path / "run" / "model", "-n", 2, "-r", 1,
        "-t", 6, "--run", tmp_path / "eval",
    )  # fmt: skip
    assert measured.exit_code == 0, measured.output

    other = invoke("train", config, "optim.lr=2e-4", "train.num_steps=4")
    assert other.exit_code == 2
    assert "optim.lr was 0.0001 and is now 0.0002" in other.stderr


def test_python_prints_what_the_command_prints(config, tmp_path, capsys):
    """The same lines on the same streams, but for times, names and how to go on.

    The command also says that it loads a model, before it imports torch.
    """

    def told(text, run):
        lines = text.replace(str(run), "RUN").splitlines()
        return [re.sub(r" +(\|Δ|rollout s|eta).*", "", line).rstrip() for line in lines]

    one, two = tmp_path / "one", tmp_path / "two"
    few = ["train.num_steps=2", "engine.batch_invariant=true"]
    result = invoke("train", config, *few, f"run.dir={one}")
    assert result.exit_code == 0, result.output
    capsys.readouterr()
    settings = load_train_config(config, [*few, f"run.dir={two}"])
    rt.train(settings)
    seen = capsys.readouterr()
    assert ["loading tiny", *told(seen.err, two)] == told(result.stderr, one)
    command, python = told(result.stdout, one), told(seen.out, two)
    assert python[:-1] == command[:-1]
    assert command[-1].endswith("train.num_steps=4")
    assert python[-1] == "  the same call with num_steps=4"
    assert (two / "reward_curve.png").exists()

    rt.train(settings, quiet=True, run_dir=str(tmp_path / "three"))
    assert capsys.readouterr() == ("", "")


def test_a_silenced_run_still_says_why_it_fails(config, tmp_path):
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        rt.train(config, quiet=True, run_dir=str(tmp_path / "x"), lr=-1.0)


def test_edited_environment_code_is_said(config, tmp_path):
    few = ["train.num_steps=1", "eval.after=false", "eval.before=false", "--transcripts", 0]
    code = tmp_path / "short" / "short.py"
    said = "the environment's code has changed since the last start (short/short.py)"
    assert said not in invoke("train", config, *few).stderr
    assert said not in invoke("train", config, *few).stderr
    code.write_text(code.read_text() + "# edited\n")
    (tmp_path / "short" / "notes.log").write_text("no code")
    edited = invoke("train", config, *few)
    assert edited.exit_code == 0, edited.output
    assert said in " ".join(edited.stderr.split())
    assert said not in invoke("train", config, *few).stderr

    measure = ["eval", tmp_path / "short", "-m", "tiny", "-n", 1, "-r", 1, "-t", 2, "--run"]
    assert invoke(*measure, tmp_path / "eval").exit_code == 0
    (tmp_path / "short" / "rows.json").write_text("[]")
    again = invoke(*measure, tmp_path / "eval")
    assert "(short/rows.json)" in " ".join(again.stderr.split())


def test_fork_trains_another_run_from_a_checkpoint(config, tmp_path):
    few = ["train.num_steps=1", "eval.after=false", "eval.before=false"]
    assert invoke("train", config, *few).exit_code == 0
    words = ["fork", tmp_path / "run", "--set", "optim.lr=1e-4", "--set", "train.num_steps=2"]
    for _ in range(2):
        result = invoke(*words)
        assert result.exit_code == 0, result.output
        assert "continued at step" in result.stderr
    further = result.stdout.splitlines()[-1].split()
    assert further[:2] == ["rolltree", "fork"]
    assert further[-3:] == ["--run", f"{tmp_path / 'run'}-fork", "--set=train.num_steps=4"]
    with Run.open(f"{tmp_path / 'run'}-fork", mode="r") as run:
        assert len(run.steps()) == 2
        assert run.config["optim"]["lr"] == 1e-4
    assert invoke(*words, "--step", 7).exit_code == 1
    assert invoke(*further[1:-1], "train.nun_steps=4").exit_code == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lrr=1", "no key optim.lrr. Did you mean 'lr'?"),
        ("optimm.lr=1", "no section 'optimm'. Did you mean 'optim'?"),
        ("optim.lr=fast", "optim.lr"),
        ("env.id=nothing_like_this", "there is no environment"),
        ('env.id=""', "no env.id"),
        ("env.args.nmu=1", "Did you mean 'num'?"),
    ],
)
def test_mistakes(config, tmp_path, override, said):
    result = invoke("train", config, override)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("processes", [[], ["cluster.rollout_workers=1"]])
def test_a_run_directory_that_cannot_be_made_is_said_before_slow_work(tmp_path, processes):
    (tmp_path / "file").touch()
    program = (
        "import sys; from rolltree.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: print('STATUS', ended.code)\n"
        "print('TORCH', 'torch' in sys.modules)"
    )
    words = ["train", "arithmetic", "model.name=tiny", f"run.dir={tmp_path / 'file' / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words, *processes], capture_output=True, text=True
    )
    assert done.stdout.split() == ["STATUS", "1", "TORCH", "False"]
    assert "cannot be written (Not a directory)" in done.stderr


def test_a_typo_does_not_bind_the_run_directory(config, tmp_path):
    """Settings bind when the first rollout is stored."""
    few = ["train.num_steps=1", "eval.before=false", "eval.after=false"]
    wrong = invoke("train", config, "model.name=tinyy", "optim.lr=1", *few)
    assert wrong.exit_code == 2
    assert "there is no model 'tinyy'" in wrong.stderr
    right = invoke("train", config, *few)
    assert right.exit_code == 0, right.output
    with Run.open(tmp_path / "run", mode="r") as run:
        assert run.config["model"]["name"] == "tiny"
        assert run.config["optim"]["lr"] != 1
    assert '"name": "tiny"' in (tmp_path / "run" / "config.json").read_text()
    other = invoke("train", config, "optim.lr=1", *few)
    assert other.exit_code == 2
    assert "optim.lr was 1e-05 and is now 1" in other.stderr
    assert f"rolltree fork {tmp_path / 'run'} --set section.key=value" in other.stderr


@pytest.mark.long
def test_killed_and_started_again(config, tmp_path):
    """The same losses, rewards and rollouts as a run that nobody killed."""
    whole = invoke("train", config, f"run.dir={tmp_path / 'whole'}", "train.num_steps=6")
    assert whole.exit_code == 0, whole.output
    command = [sys.executable, "-m", "rolltree", "train", str(config), "train.num_steps=6"]
    for enough in (lambda run: run.num_rollouts(phase="train") >= 2, lambda run: run.steps()):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_for(tmp_path / "run", enough)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (rows, steps), (rows_again, steps_again) = (
        what_it_holds(path) for path in (tmp_path / "whole", tmp_path / "run")
    )
    assert rows == rows_again
    assert len(steps) == len(steps_again) == 6
    for step, again in zip(steps, steps_again, strict=True):
        # requests that are batched differently round differently, on some CPUs more than on others
        assert step == pytest.approx(again, rel=1e-3, abs=1e-4)


def what_it_holds(path):
    kept = ("reward/mean", "train/loss", "train/entropy", "rollout/total_sampled_tokens")
    with Run.open(path, mode="r") as run:
        rows = run.query("SELECT request_id, reward FROM rollouts ORDER BY request_id")
        return rows, [{name: step.metrics[name] for name in kept} for step in run.steps()]


def wait_for(path, condition):
    def is_so():
        try:
            with Run.open(path, mode="r") as run:
                return condition(run)
        except StoreError:
            return False

    wait_until(is_so)
