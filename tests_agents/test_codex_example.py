"""`examples/codex_agent`: Codex CLI plays the teacher's games, and a step of training."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path

import pytest

import rolltree as rt
from rolltree.inference import ChatRenderer
from rolltree.rollouts.decode import decode_results

EXAMPLE = Path(__file__).parents[1] / "examples" / "codex_agent"


@pytest.fixture
def warm(monkeypatch):
    """The module that warms the model up."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = util.spec_from_file_location("warm", EXAMPLE / "warm.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def environment(from_npm):
    return rt.load_environment(EXAMPLE, codex=str(from_npm / ".bin" / "codex"))


def test_codex_is_scored_by_its_file_and_trained(warm, environment, tmp_path):
    texts = warm.prompts_of(environment)
    model, tokenizer = warm.make_model(texts)
    client = rt.ScriptedClient(warm.teacher(1), renderer=ChatRenderer(tokenizer))
    states = environment.evaluate_sync(client, num_examples=2, rollouts_per_example=2).state
    for state in states:
        call, answer = state["trajectory"]
        said = tokenizer.decode(call["tokens"]["completion_ids"])
        (written,) = (word for word in said.split() if word.isdigit())
        assert state["program"]["files"] == {"out.txt": f"{written}\n"}
        assert state["reward"] == float(written == state["answer"])
        assert state["metrics"]["wrote"] == 1
        assert len(call["tokens"]["prompt_ids"]) < 128
        # Nothing of it is left out of training, and the second call continues the first.
        path = [*call["tokens"]["prompt_ids"], *call["tokens"]["completion_ids"]]
        assert answer["tokens"]["prompt_ids"][: len(path)] == path
        assert "left_out" not in {**call["extras"], **answer["extras"]}
    assert {state["reward"] for state in states} == {0.0, 1.0}

    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    report = rt.train(
        EXAMPLE / "codex_agent.toml",
        environment=environment,
        model=str(tmp_path / "model"),
        run_dir=str(tmp_path / "run"),
        algorithm={"groups_per_step": 1, "group_size": 2},
        train={"num_steps": 1},
        eval={"before": False, "after": False},
        quiet=True,
    )
    (metrics,) = report.metrics
    with report.run as run:
        results = decode_results(list(run.rollouts(phase="train")))
    steps = [step for result in results for state in result.states for step in state["trajectory"]]
    sampled = sum(len(step["tokens"]["completion_ids"]) for step in steps)
    assert sampled > 0
    assert metrics["train/num_records"] + metrics["train/num_skipped_records"] == sampled
    assert metrics["masked/num_tokens"] == metrics["error/mean"] == 0
