import asyncio

import pytest
import torch
from loop_kit import make_config
from server_away_kit import At
from training_kit import LetterSource

import rolltree as rt
from rolltree.store import Run
from rolltree.training import build_parts, fork_run, load_train_config, open_run
from rolltree.training.config import REMOVED
from rolltree.values.errors import ConfigError, UnknownName
from rolltree.values.types import SamplingParams


def test_the_engine_serves_the_models_own_tensors(model, tmp_path):
    parts = build_parts(make_config(model, tmp_path / "run"))

    async def main():
        ask = {"sampling": SamplingParams(max_tokens=3, temperature=0.0)}
        messages = [{"role": "user", "content": "hello"}]
        before = await parts.client.chat(messages, **ask)
        with torch.no_grad():
            parts.model.lm_head.weight.mul_(-1)
        async with parts.engine.paused():
            parts.engine.publish(7)
        after = await parts.client.chat(messages, **ask)
        await parts.client.aclose()
        return before, after

    before, after = asyncio.run(main())
    assert before.versions.tolist() == [0] * len(before.completion_ids)
    assert after.versions.tolist() == [7] * len(after.completion_ids)
    assert before.completion_ids.tolist() != after.completion_ids.tolist()
    assert all(p.dtype == torch.float32 for p in parts.model.parameters())


def test_the_config_reaches_the_engine(model, tmp_path):
    parts = build_parts(make_config(model, tmp_path / "run", engine={"max_context": 96}))
    assert parts.engine.max_context == 96
    assert parts.client.model == str(model)
    asyncio.run(parts.client.aclose())


def test_unknown_models_are_named(tmp_path):
    with pytest.raises(UnknownName, match="Did you mean 'smollm2-135m'"):
        build_parts(make_config("smollm2-153m", tmp_path / "run"))


def test_the_same_directory_continues_and_another_config_is_refused(model, tmp_path):
    config = make_config(model, tmp_path / "run")
    with open_run(config) as run:
        run.add_event("mark")
        assert run.config["optim"]["lr"] == 5e-3
    with open_run(config) as run:
        assert len(run.events("mark")) == 1
    longer = make_config(model, tmp_path / "run", train={"num_steps": 99}, engine={"max_batch": 4})
    with open_run(longer) as run:
        assert len(run.events("mark")) == 1
        run.add_step(1, {})  # settings bind with the first rollout or step
    with pytest.raises(ConfigError, match=r"algorithm.name was 'grpo' and is now 'dapo'"):
        open_run(make_config(model, tmp_path / "run", algorithm={"name": "dapo"}))


OLD = {
    "engine.away_limit_s": 60.0,
    "optim.final_lr_share": 0.5,
    "checkpoint.max_shard_size": "5GB",
    "algorithm.baseline_decay": None,
    "train.chunk_rows": 512,
}


def test_a_run_with_settings_that_were_removed_continues_and_says_so(model, tmp_path):
    """Those that mean what holds now are not mentioned."""
    config = make_config(model, tmp_path / "run", train={"num_steps": 2}, checkpoint={"every": 1})
    rt.train(config, environment=LetterSource(), reporter=rt.Silent())
    with Run.open(tmp_path / "run") as run:
        stored = run.config
        for name, value in OLD.items():
            section, _, key = name.partition(".")
            stored[section][key] = value
        run.set_meta("config", stored)
    longer = load_train_config(config, num_steps=3)
    made = fork_run(tmp_path / "run", num_steps=3)
    assert (made.engine, made.optim, made.train) == (longer.engine, longer.optim, longer.train)
    assert fork_run(tmp_path / "run", num_steps=3) == made
    heard = At({}, lambda: None)
    assert len(rt.train(longer, environment=LetterSource(), reporter=heard).metrics) == 3
    expected = [
        f"the run was started with {name} = {OLD[name]}, a setting that was removed: "
        f"{REMOVED[name][1]}."
        for name in ("engine.away_limit_s", "optim.final_lr_share", "train.chunk_rows")
    ]
    assert heard.notices[:3] == expected
    for path in (tmp_path / "run", made.run.dir):
        with Run.open(path, "r") as run:
            assert [event.data["message"] for event in run.events("notice")][:3] == expected
            assert load_train_config(run.config)
    # Once: the run has the settings of this version now.
    heard = At({}, lambda: None)
    rt.train(load_train_config(longer, num_steps=4), environment=LetterSource(), reporter=heard)
    assert not [notice for notice in heard.notices if "was removed" in notice]
