"""The narrator on runs that really train: an engine that is wrong from one step on, and one not."""

from dataclasses import replace

import pytest

import rolltree as rt
from rolltree.inference.local.client import LocalClient

NUM_STEPS, WRONG_FROM = 6, 4
DRIFT = "train/sampling/sampling_logp_difference/mean"


def share(completion, answer):
    text = completion[-1]["content"]
    return sum(letter == answer for letter in text) / 3


def trained(folder, **settings):
    env = rt.SingleTurnEnv(
        dataset=[{"question": f"write {letter}", "answer": letter} for letter in "abcd"],
        rubric=rt.Rubric([share]),
    )
    return rt.train(
        environment=env,
        model="tiny",
        num_steps=NUM_STEPS,
        sampling={"max_tokens": 3},
        algorithm={"group_size": 4, "groups_per_step": 2},
        eval={"before": False, "after": False},
        run_dir=str(folder),
        quiet=True,
        **settings,
    )


@pytest.fixture
def wrong_engine(monkeypatch):
    """Let the engine return other logprobs for what the weights of some steps on sample."""
    sample = LocalClient._sample

    async def wrong(self, *call):
        output = await sample(self, *call)
        is_wrong = output.versions >= WRONG_FROM - 1
        return replace(output, logprobs=output.logprobs - 0.3 * is_wrong.astype("float32"))

    monkeypatch.setattr(LocalClient, "_sample", wrong)


def story_of(folder):
    with rt.read_run(folder) as stored:
        told = {each["kind"]: each for each in stored.story()}
        return told, [row[DRIFT] for row in stored.steps().rows()]


def test_a_healthy_run_has_no_drift(tmp_path):
    trained(tmp_path / "run")
    told, sizes = story_of(tmp_path / "run")
    assert max(sizes) < 1e-4
    assert not {"drift", "kl", "entropy", "staleness", "ended"} & told.keys()


def test_the_step_from_which_on_the_engine_is_wrong_is_named(tmp_path, wrong_engine):
    trained(tmp_path / "run", train={"max_mismatch": 1.0})
    told, sizes = story_of(tmp_path / "run")
    assert max(sizes[: WRONG_FROM - 1]) < 1e-4
    assert sizes[WRONG_FROM - 1 :] == pytest.approx([0.3] * 3, abs=1e-3)
    drift = told["drift"]
    assert f"since step {WRONG_FROM}: they differ by 0.3 nats" in drift["text"]
    assert drift["severity"] == "error"
    assert drift["evidence"]["steps"] == [WRONG_FROM, NUM_STEPS]
    assert not {"kl", "entropy", "ended"} & told.keys()


def test_a_run_that_stops_for_it_says_so(tmp_path, wrong_engine):
    with pytest.raises(rt.RolltreeError, match="max_mismatch"):
        trained(tmp_path / "run")
    told, sizes = story_of(tmp_path / "run")
    assert len(sizes) == WRONG_FROM - 1
    assert "max_mismatch" in told["ended"]["text"]
