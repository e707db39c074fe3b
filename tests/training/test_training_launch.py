"""`rolltree.train`: whole runs from one call."""

import asyncio
import subprocess
import sys
import threading

import pytest
import torch
from loop_kit import make_config

import rolltree as rt
from rolltree.store import Run
from rolltree.values.errors import ConfigError, UnknownName

FILE = """
import rolltree as rt

def load_environment(reward=1.0):
    rubric = rt.Rubric([lambda completion: reward / (1 + len(completion[-1]["content"]))])
    rows = [{"question": f"say {i}"} for i in range(6)]
    return rt.SingleTurnEnv(dataset=rows[:4], eval_dataset=rows[4:], rubric=rubric)
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "short.py"
    file.write_text(FILE)
    return file


def settings(model, tmp_path, **sections):
    data = make_config(model, tmp_path / "run", train={"num_steps": 2}, **sections).as_dict()
    return data | {"eval": {"before": True, "after": True}}


class Note(rt.Reporter):
    def __init__(self):
        self.seen = []

    def on_step(self, step, metrics):
        self.seen.append(step)

    def on_eval_progress(self, phase, num_done, num_total):
        self.seen.append((phase, num_done, num_total))


def test_an_environment_object_is_trained_evaluated_and_stored(model, tmp_path, path):
    environment, note = rt.load_environment(path), Note()
    report = rt.train(settings(model, tmp_path), environment=environment, reporter=note)
    assert len(report.metrics) == len(report.rows()) == 2
    assert report.rows()[1]["step"] == 2
    assert set(report.evaluations) == {"eval_before", "eval_after"}
    assert {1, 2, ("eval_before", 2, 2), ("eval_after", 2, 2)} <= set(note.seen)
    assert report.run_path == tmp_path / "run"
    with report.run as run:
        assert run.config["env"]["id"] == "short"
        assert run.num_rollouts(phase="train") == 12
        kept = run.kept_report("train")  # `show --phase train` would read every rollout
        assert (kept["num_rollouts"], kept["num_examples"]) == (12, 4)
    shown = repr(report)
    assert shown.startswith(f"TrainReport(2 steps, run {tmp_path / 'run'})")
    assert "eval_after: held-out reward 0." in shown

    longer = rt.train(
        settings(model, tmp_path), environment=environment, num_steps=3, reporter=note
    )
    assert [row["step"] for row in longer.rows()] == [1, 2, 3]
    assert longer.metrics[:2] == report.metrics
    assert note.seen.count(1) == 1


async def test_it_works_in_a_running_event_loop(model, tmp_path, path):
    data = settings(model, tmp_path)
    silent = {"environment": path, "reporter": rt.Silent()}
    first = await rt.train_async(data, num_steps=1, **silent)
    again = rt.train(data, num_steps=2, **silent)
    assert (len(first.metrics), len(again.metrics)) == (1, 2)
    assert threading.current_thread() is threading.main_thread()


def test_parts_can_be_passed(model, tmp_path, path):
    module, tokenizer = rt.load_model(str(model))
    before = [p.detach().clone() for p in module.parameters()]
    client = rt.local_client(module, tokenizer, max_context=128)
    phases = []

    async def evaluate(phase, step):
        phases.append((phase, step, client.engine.version))
        return {"reward": float(step)}

    async def main():
        with Run.create(tmp_path / "mine", config={}) as run:
            report = await rt.train_async(
                settings(model, tmp_path),
                environment=rt.load_environment(path),
                model=module,
                tokenizer=tokenizer,
                client=client,
                engine=client.engine,
                evaluate=evaluate,
                reporter=rt.Silent(),
                run=run,
            )
        answer = await client.chat([{"role": "user", "content": "still open"}])
        await client.aclose()
        return report, answer

    report, answer = asyncio.run(main())
    assert phases == [("eval_before", 0, 0), ("eval_after", 2, 2)]
    assert report.run_path == tmp_path / "mine"
    assert not (tmp_path / "run").exists()
    assert set(answer.versions) == {2}
    after = list(module.parameters())
    assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_model_object_gets_an_engine(model, tmp_path, path):
    module, tokenizer = rt.load_model(str(model))
    report = rt.train(
        settings(model, tmp_path),
        environment=path,
        model=module,
        tokenizer=tokenizer,
        reporter=rt.Silent(),
    )
    with report.run as run:
        assert run.config["model"]["name"] == str(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ConfigError, "pass environment="),
        ({"environment": "nothing-like-this"}, UnknownName, "no environment"),
        ({"environment": "x", "num_stesp": 2}, ConfigError, "Did you mean 'num_steps'"),
        ({"environment": "x"}, UnknownName, "no environment 'x'"),
        ({"environment": "x", "model": object()}, ConfigError, "it takes a name, a folder"),
        ({"environment": "x", "model": torch.nn.Linear(1, 1)}, ConfigError, "without its tok"),
        ({"environment": "x", "tokenizer": print}, ConfigError, "Leave tokenizer out"),
        ({"environment": "x", "client": object()}, ConfigError, "client is of type object"),
        ({"environment": "x", "engine": object()}, ConfigError, "engine section as a mapping"),
        ({"environment": "x", "run": object()}, ConfigError, "run_dir='runs/x'"),
        ({"environment": "x", "reporter": {}}, ConfigError, "reporter is of type dict"),
        ({"environment": "x", "evaluate": {"every": 1}}, ConfigError, "eval={...}"),
        ({"environment": "x", "engine": {"max_bach": 3}}, ConfigError, "Did you mean 'max_batch'"),
        ({"environment": rt.load_environment}, ConfigError, "Call it"),
        ({"environment": "x", "model": "qwen3-4b"}, UnknownName, "no model .qwen3-4b"),
        ({"environment": "x", "model_device": "gpu"}, ConfigError, "device 'gpu' is not one that"),
        ({"environment": "x", "learning_rate": 1}, ConfigError, "Did you mean 'optim.lr' .*lr="),
    ],
)
def test_mistakes_are_named_before_anything_is_stored(model, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        rt.train(settings(model, tmp_path), **options)
    assert not (tmp_path / "run").exists()


def test_sections_are_taken_where_objects_are(model, tmp_path, path):
    """`engine` and `run` are arguments for objects, and names of sections as well."""
    data = settings(model, tmp_path) | {"run": {}, "engine": {"max_batch": 3}}
    report = rt.train(
        data,
        environment={"id": str(path), "args": {"reward": 2.0}},
        engine={"max_context": 128},
        run={"dir": str(tmp_path / "here"), "seed": 3},
        reporter=rt.Silent(),
    )
    with report.run as run:
        assert run.path == tmp_path / "here"
        assert run.config["run"]["seed"] == 3
        assert run.config["engine"]["max_batch"] == 3
        assert run.config["engine"]["max_context"] == 128
        assert run.config["env"]["args"] == {"reward": 2.0}


def test_an_environment_may_come_first(model, tmp_path, path):
    report = rt.train(rt.load_environment(path), reporter=rt.Silent(), **settings(model, tmp_path))
    assert len(report.metrics) == 2
    with pytest.raises(ConfigError, match="Pass an environment as environment="):
        rt.train(rt.load_environment)


WITHOUT_TORCH = """
import sys

import rolltree as rt

for call in (
    lambda: rt.train(environment="x", model="smolm2-135m"),
    lambda: sys.modules.update(torch=None),
    lambda: rt.load_model("tiny"),
    lambda: rt.train(environment="x", model="tiny"),
    lambda: rt.Trainer,
):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
    assert sys.modules.get("torch") is None
"""


def test_mistakes_are_told_before_torch_is_imported_and_its_absence_by_name():
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True
    )
    said = ran.stdout.splitlines()
    assert len(said) == 4
    assert "Did you mean 'smollm2-135m'" in said[0]
    assert all("pip install 'rolltree[train]'" in each for each in said[1:])
    assert said[1].startswith("ConfigError the package torch is not installed")
    assert said[3].startswith(
        "ModuleNotFoundError rolltree.training.Trainer needs the package torch"
    )


def test_arguments_for_an_environment_that_exists_already_are_refused(model, tmp_path, path):
    data = settings(model, tmp_path, env={"args": {"reward": 2.0}})
    with pytest.raises(ConfigError, match="given as an object"):
        rt.train(data, environment=rt.load_environment(path))
    report = rt.train(data, environment=path, reporter=rt.Silent())
    assert max(step["reward/max"] for step in report.metrics) <= 2.0


def test_an_engine_that_cannot_serve_adapters_is_refused(model, tmp_path, path):
    module, tokenizer = rt.load_model(str(model))
    client = rt.local_client(module, tokenizer)
    parts = {"model": module, "tokenizer": tokenizer, "client": client, "engine": client.engine}
    with pytest.raises(ConfigError, match="lora_rank is set"):
        rt.train(settings(model, tmp_path), environment=path, lora_rank=2, **parts)
    asyncio.run(client.aclose())


def test_the_flag_for_environments_of_verifiers_is_passed_on(monkeypatch):
    seen = {}

    def load(env_id, **args):
        seen.update(args, id=env_id)
        raise KeyError("far enough")

    monkeypatch.setattr("rolltree.environments.load_environment", load)
    settings = {"id": "my-env", "args": {"num": 2}, "compat": True}
    with pytest.raises(KeyError, match="far enough"):
        rt.train(env=settings)
    assert seen == {"id": "my-env", "compat": True, "num": 2}
    environment = rt.SingleTurnEnv(dataset=[{"question": "a", "answer": "b"}])
    with pytest.raises(ConfigError, match=r"env\.compat is true, but"):
        rt.train(environment=environment, env={"compat": True})
