"""Trackers: what arrives in each package's own files, read back from there."""

import asyncio
import importlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing

import numpy as np
import pytest
from loop_kit import make_config, start

import rolltree as rt
from rolltree._helpers.redact import redact
from rolltree.rollouts.decode import decode_results
from rolltree.scale.cluster.driver import run_cluster
from rolltree.store import Run
from rolltree.store.metric_names import numbers
from rolltree.training import Silent, tracking
from rolltree.training.advantages import CreditReport
from rolltree.training.config import TrainConfig, load_train_config
from rolltree.training.trackers import TRACKERS, Sink, TrackedRun
from rolltree.training.tracking import Trackers
from rolltree.training.transcripts import COLUMNS, Transcript, transcripts
from rolltree.values.errors import ConfigError, UnknownName
from rolltree.values.types import ErrorRecord, RolloutRequest, RolloutResult, State
from wait_kit import wait_until

# As the loop gives it, with every section; without a cluster its section is None.
SETTINGS = redact(TrainConfig().as_dict())


def tracked(path, first_step=1, name="addition"):
    return TrackedRun(path, "rolltree", name, SETTINGS, first_step)


def read_events(path):
    """Return {name: {step: value}} of the event files below `path`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def read_texts(path):
    """Return {name: {step: text}} of the event files below `path`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"tensors": 0})
    events.Reload()
    ending = "/text_summary"
    return {
        tag.removesuffix(ending): {
            event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)
        }
        for tag in events.Tags()["tensors"]
    }


HARD = Transcript(
    *(1, "train", "train/000001/g00/0", ""),
    prompt="user: ![x](http://a/b.png)\x1b",
    completion="assistant: <img src=x>",
    reward=0.5,
    advantage=None,
    error="",
)


class TestTensorBoard:
    def test_a_run_arrives_whole_also_after_a_stop_between_checkpoints(
        self, model, tmp_path, monkeypatch
    ):
        """Steps 3 and 4 are trained again; the event files hold each step once, as stored."""
        monkeypatch.setattr(tracking, "TRANSCRIPTS_EVERY", 2)
        track = {"to": ["tensorboard"], "transcripts": 2}
        options = {"track": track, "checkpoint": {"every": 2}}

        class Stop(Silent):
            def on_step(self, step, metrics):
                if step == 3:
                    raise KeyboardInterrupt

        async def evaluate(phase, step):
            return {"reward": {"mean": 0.25 * step}, "unit": "share"}

        config = make_config(
            model,
            tmp_path / "run",
            eval={"before": True, "every": 2, "after": True},
            **options,
        )
        with pytest.raises(KeyboardInterrupt):
            start(config, reporter=Stop(), evaluate=evaluate)
        start(config, evaluate=evaluate)
        found = read_events(tmp_path / "run" / "tensorboard")
        with Run.open(tmp_path / "run", "r") as run:
            steps = {row.step: row.metrics for row in run.steps()}
        assert set(found["reward/mean"]) == {1, 2, 3, 4}
        for name in steps[4]:
            shown = found[name]
            assert shown[4] == pytest.approx(steps[4][name], rel=1e-5, abs=1e-6), name
        assert found["eval/reward"] == {0: 0.0, 2: 0.5, 4: 1.0}  # one curve
        assert "eval/unit" not in found
        texts = read_texts(tmp_path / "run" / "tensorboard")
        assert set(texts["completions"]) == {1, 3}
        with Run.open(tmp_path / "run", "r") as run:
            first = next(run.rollouts(phase="train", train_step=1, request_id="train/000001/g00/0"))
        ((state,),) = [each.states for each in decode_results([first], tokens=False)]
        ((last,),) = [step["completion"] for step in state["trajectory"][-1:]]
        assert f"    assistant: {last['content']}".splitlines()[0] in texts["completions"][1]
        assert texts["completions"][1].count("advantage") == 2


def seen_in(files):
    data = b"".join(file.read_bytes() for file in files)
    return {text for text in (b"reward/mean", b"0.5") if text in data}


class TestOthers:
    @pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb is not installed")
    def test_wandb_offline(self, tmp_path, monkeypatch):
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        sink = TRACKERS["wandb"](tracked(tmp_path))
        sink.log({"reward/mean": 0.5}, 1)
        sink.show("completions", [HARD], 1)
        sink.close()
        (file,) = (tmp_path / "wandb").rglob("completions*.table.json")
        table = json.loads(file.read_text())
        assert (table["columns"], table["data"]) == (list(COLUMNS), [HARD.row()])
        # wandb's own process makes the file and writes it, and says nothing when it has
        written = (tmp_path / "wandb").glob
        wanted = {b"reward/mean", b"0.5"}
        wait_until(lambda: wanted <= seen_in(written("offline-run-*/run-*.wandb")), "writing")

    @pytest.mark.skipif(not importlib.util.find_spec("mlflow"), reason="mlflow is not installed")
    def test_mlflow_goes_on_in_the_same_run(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
        for step, value in ((1, 0.25), (2, 0.75)):
            sink = TRACKERS["mlflow"](tracked(tmp_path, step))
            sink.log({"reward/mean": value, "mismatch/at_1024+": 0.5, "eval/pass@4": 1.0}, step)
            sink.show("completions", [HARD], step)
            sink.close()
        import mlflow

        client = mlflow.MlflowClient()
        identity = (tmp_path / "mlflow-run-id").read_text().strip()
        history = client.get_metric_history(identity, "reward/mean")
        assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.75)]
        run = client.get_run(identity)
        assert run.data.metrics == {
            "reward/mean": 0.75,
            "mismatch/at_1024_": 0.5,
            "eval/pass_4": 1.0,
        }
        (text,) = (tmp_path / "mlruns").rglob("completions/step-000002.txt")
        assert text.read_text() == str(HARD)
        told = {name: values for name, values in SETTINGS.items() if values is not None}
        assert SETTINGS.keys() - told.keys() == {"cluster"}
        assert run.data.params == {
            f"{name}.{key}": str(value) for name in told for key, value in told[name].items()
        }
        assert run.info.status == "FINISHED"

    @pytest.mark.skipif(not importlib.util.find_spec("trackio"), reason="trackio is not installed")
    def test_trackio_in_its_local_store(self, tmp_path):
        """In a process of its own: trackio reads where its store is when it is imported."""
        script = f"""
            from pathlib import Path
            from rolltree.training.trackers import TRACKERS, TrackedRun
            from rolltree.training.transcripts import Transcript
            for step, value in ((1, 0.25), (2, 0.75)):
                path, settings = Path({str(tmp_path)!r}), {SETTINGS!r}
                sink = TRACKERS["trackio"](TrackedRun(path, "rolltree", "addition", settings, step))
                sink.log({{"reward/mean": value}}, step)
                shown = Transcript(step, "train", "r", "", "*p*", "c", 1.0, None, "")
                sink.show("completions", [shown], step)
                sink.close()
        """
        environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
        words = [sys.executable, "-c", textwrap.dedent(script)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        with closing(sqlite3.connect(tmp_path / "trackio" / "rolltree.db")) as store:
            rows = list(store.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step"))
        logged = [(name, step, json.loads(data)) for name, step, data in rows]
        found = [(name, step, data.get("reward/mean")) for name, step, data in logged]
        assert [each for each in found if each[2] is not None] == [
            ("addition", 1, 0.25),
            ("addition", 2, 0.75),
        ]
        tables = [data["completions"] for _, _, data in logged if "completions" in data]
        assert len(tables) == 2
        assert "    *p*" in json.dumps(tables)  # a block of code: shown as it was written


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_missing_package_is_an_error_that_names_the_extra(name, tmp_path, monkeypatch):
    original = importlib.import_module

    def missing(module, *args):
        if module == name:
            raise ImportError(f"No module named {module!r}")
        return original(module, *args)

    monkeypatch.setattr("rolltree.values.errors.import_module", missing)
    with pytest.raises(ConfigError, match=rf"track.to = '{name}' needs .*'rolltree\[track\]'"):
        TRACKERS[name](tracked(tmp_path))


def test_names_are_checked_before_anything_starts(model, tmp_path):
    config = make_config(model, tmp_path / "run", track={"to": ["tensorbord"]})
    with pytest.raises(UnknownName, match="tensorboard"):
        Trackers(config, print)
    # Before the model and the environment are looked for, which takes longer.
    data = {"model": {"name": "nowhere"}, "env": {"id": "nowhere"}, "track": {"to": ["wandbb"]}}
    with pytest.raises(UnknownName, match="wandbb"):
        rt.train(data, quiet=True)
    clustered = load_train_config({**data, "cluster": {}})
    with pytest.raises(UnknownName, match="wandbb"):
        asyncio.run(run_cluster(clustered, reporter=Silent()))
    with pytest.raises(ConfigError, match="Name each tracker once"):
        make_config(model, tmp_path / "run", track={"to": ["wandb", "wandb"]})


def test_transcripts_that_cannot_be_read_are_not_a_failure_of_a_tracker(tmp_path, monkeypatch):
    shown, said = [], []
    for name in ("one", "two"):
        sink = Sink(lambda *_: None, lambda *a, name=name: shown.append((name, *a)), lambda: None)
        monkeypatch.setitem(TRACKERS, name, lambda run, sink=sink: sink)
    trackers = Trackers(load_train_config(to=["one", "two"]), said.append)
    trackers.open(tmp_path, 1)

    def broken():
        raise OSError("the disk is gone")

    trackers.show("completions", broken, 1)
    (message,) = said
    assert message.startswith("the transcripts 'completions' of step 1 could not be read")
    assert "OSError: the disk is gone" in message
    trackers.show("completions", lambda: [HARD], 2)
    assert shown == [("one", "completions", [HARD], 2), ("two", "completions", [HARD], 2)]


def test_a_failing_run_closes_its_trackers(model, tmp_path, monkeypatch):
    closed = []

    class Sink:
        def __init__(self, run):
            assert run.first_step == 1

        def show(self, name, rollouts, step):
            assert name == "completions"
            assert len(rollouts) == 4

        def log(self, values, step):
            assert all(type(value) is float for value in values.values())

        def close(self):
            closed.append(True)

    monkeypatch.setitem(TRACKERS, "tensorboard", Sink)

    class Stop(Silent):
        def on_step(self, step, metrics):
            raise RuntimeError("stop")

    config = make_config(model, tmp_path / "run", track={"to": ["tensorboard"]})
    with pytest.raises(RuntimeError, match="stop"):
        start(config, reporter=Stop())
    assert closed == [True]


def test_a_continued_run_keeps_its_key_and_others_have_another(tmp_path):
    assert tracked(tmp_path).key == tracked(tmp_path, 7).key != tracked(tmp_path / "x").key


def test_numbers_are_flat_and_finite():
    nested = {"a": {"b": 1, "c": "x", "d": {"e": True}}, "f": float("nan"), "g": 2.5, "h": None}
    assert numbers(nested) == {"a/b": 1.0, "a/d/e": 1.0, "g": 2.5}
    assert numbers({"x": 1}, "eval") == {"eval/x": 1.0}


def test_transcripts_have_no_secrets_and_nothing_hidden():
    request = RolloutRequest("r0", "env", {"prompt": "p", "example_id": 0}, 0, 0, "g", 0)
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    state = State(
        prompt=[{"role": "user", "content": "key sk-abcdefghijklmnopqrstuvwx\u202e"}],
        completion=[{"role": "assistant", "content": "a" * 30_000, "tool_calls": [call]}],
        reward=1.0,
        agent="white",
    )
    error = ErrorRecord("ServerError", "500", "", "model")
    results = [RolloutResult(request, (state, state), None), RolloutResult(request, (), error)]
    credit = CreditReport((state,), (np.array([-0.5, 0.25]),), places=((0, 0),))
    advantages = credit.first_advantages(results)
    first, second, failed = transcripts(results, 9, step=3, phase="train", advantages=advantages)
    assert len(transcripts(results, 2, step=3, phase="train")) == 2
    assert first.prompt == "user: key [redacted]�"
    assert len(first.completion) < 20_100
    assert first.completion.endswith(" more)")
    assert (first.reward, first.advantage, first.agent) == (1.0, -0.5, "white")
    assert second.advantage is None
    assert (failed.prompt, failed.completion, failed.error) == ("user: p", "", "ServerError: 500")
