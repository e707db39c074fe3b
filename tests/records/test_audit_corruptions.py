"""Planted corruptions, below the checksums, are found with the right cause at the right place."""

import json
import shutil

import numpy as np
import pytest
from audit_kit import make_trained_run
from corrupt_kit import Corrupter

import rolltree as rt
from golden_kit import SCHEMAS, unpack
from rolltree.records.tokenizer import RunTokenizer
from rolltree.training import forward


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """A training run of three-turn rollouts, some failed, with a checkpoint and trained tokens."""
    return make_trained_run(tmp_path_factory.mktemp("audited"))


@pytest.fixture
def corrupter(trained_run, tmp_path):
    (tmp_path / "model").symlink_to(trained_run.parent / "model")
    return Corrupter(shutil.copytree(trained_run, tmp_path / "run"))


def change_of(name, function):
    """The corruption that puts one stream of a rollout's tree through a function."""
    return lambda c, victim: c.tree(victim, **{name: function})


def first_call(change):
    """Apply `change` to the values of call 0 alone."""
    return lambda call, values: change(values) if call == 0 else values


def other_answer(record):
    table = record["table"]["messages"]
    said = next(message for message in table if message["role"] == "assistant")
    said["content"] = "something else"


def other_question(record):
    table = record["table"]["messages"]
    next(m for m in table if m["role"] == "user")["content"] = "write nothing"


def other_reward(record):
    record["state"]["fields"]["reward"] += 0.25
    for step in record["state"]["steps"]:
        step["reward"] += 0.25


def no_reward_step(record):
    record["state"]["steps"][1]["reward"] += 0.5


def same_call(record):
    record["state"]["steps"][1]["call"] = 0


def same_answer(record):
    first, second, *_ = record["state"]["steps"]
    second["extras"]["call_id"] = first["extras"]["call_id"]


def other_temperature(record):
    record["state"]["steps"][0]["extras"]["temperature"] = 1.0


def count_in_words(record):
    record["state"]["steps"][0]["extras"]["num_completion_tokens"] = "many"


def time_in_words(record):
    record["state"]["fields"]["timing"] = {"generation_ms": "long"}


def replaced_ids(record):
    record["state"]["steps"][0]["assigned"] = {"completion_ids": [1, 2, 3]}


def long_mask(record):
    record["state"]["steps"][0]["assigned"] = {"completion_mask": [1] * 40}


def other_seed(record):
    record["request"]["sampling_seed"] += 1


def reward_in_both(c, victim):
    _, row = c.row(victim)
    c.record(victim, other_reward, reward=row.reward + 0.25)


def failure_with_reward(c, victim):
    failed = c.ids("phase = 'train' AND status = 'error'")[0]
    c.record(failed, lambda r: r["state"]["fields"].update(reward=0.0), reward=0.0)


def copied(c, victim):
    _, row = c.row(victim)
    c.copy(victim, f"{row.group_id}/9", index_in_group=9)


def end_inside(c, victim):
    end = min(RunTokenizer(c.path.parent / "model").end_ids)
    c.tree(victim, completion_ids=first_call(lambda ids: np.append([end], ids[1:])))


def not_trained(c, victim):
    with c.change() as change:
        c.db.execute("DELETE FROM trained WHERE request_id = ?", (victim,))
        change.counts.trained -= 1


def evaluated(c, victim):
    name = c.ids("phase = 'eval_before' AND status = 'ok'")[0]
    _, row = c.row(name)
    c.record(name, other_reward, reward=row.reward + 0.25)


def grown(c, victim):
    c.tree(victim, completion_ids=first_call(lambda ids: np.append(ids, [5, 6, 7, 8, 9, 10, 11])))


CORRUPTIONS = {
    "a flipped bit": (lambda c, v: c.flip(v), "storage", "damaged"),
    "sums of a phase": (lambda c, v: c.sums("train", sum_reward=99.0), "storage", "sums_differ"),
    "a reward in its column": (lambda c, v: c.edit(v, reward=9.0), "columns", "column_differs"),
    "a reward everywhere": (reward_in_both, "advantages", "advantage_differs"),
    "a reward everywhere, in the means": (reward_in_both, "steps", "metrics_differ"),
    "a step's reward": (lambda c, v: c.record(v, no_reward_step), "rewards", "step_rewards"),
    "a failure with reward 0": (failure_with_reward, "rewards", "reward_of_failure"),
    "a rollout gone": (lambda c, v: c.delete(v), "counted_once", "missing_rollout"),
    "a rollout copied": (copied, "counted_once", "duplicate_rollout"),
    "trained by two steps": (*(lambda c, v: c.train_again(v, 4), "counted_once", "trained_twice"),),
    "a call in two steps": (lambda c, v: c.record(v, same_call), "spans", "call_twice"),
    "an answer twice": (lambda c, v: c.record(v, same_answer), "spans", "duplicated_span"),
    "ids replaced later": (
        *(lambda c, v: c.record(v, replaced_ids), "spans", "changed_after_sampling"),
    ),
    "an invented span": (grown, "sampler", "too_long"),
    "an end token inside": (end_inside, "spans", "after_the_end"),
    "trained tokens gone": (not_trained, "counted_once", "not_trained"),
    "a reward of an evaluation": (evaluated, "rewards", "evaluation_differs"),
    "an id": (
        *(change_of("completion_ids", first_call(lambda ids: ids ^ 1)), "text", "answer_differs"),
    ),
    "an answer's text": (lambda c, v: c.record(v, other_answer), "text", "answer_differs"),
    "a prompt's text": (lambda c, v: c.record(v, other_question), "text", "prompt_differs"),
    "a mask too long": (lambda c, v: c.record(v, long_mask), "alignment", "length_differs"),
    "a masked prompt": (
        *(change_of("prompt_mask", lambda call, m: m + 1), "alignment", "prompt_marked"),
    ),
    "a mask over what was trained": (
        *(change_of("mask", lambda call, m: m * 0), "alignment", "masked_token_trained"),
    ),
    "a version": (*(change_of("versions", lambda call, v: v + 1), "versions", "wrong_version"),),
    "a temperature": (lambda c, v: c.record(v, other_temperature), "sampler", "temperature"),
    "a seed": (lambda c, v: c.record(v, other_seed), "sampler", "seed"),
    "engine logprobs": (
        *(change_of("logprobs", lambda call, p: p - 0.01), "logprobs", "engine_differs"),
    ),
    "an advantage": (
        *(lambda c, v: c.trained(v, advantage=lambda a: a + 0.5), "advantages"),
        "advantage_differs",
    ),
    "a count that is a word": (lambda c, v: c.record(v, count_in_words), "steps", "metrics_differ"),
    "a time that is a word": (lambda c, v: c.record(v, time_in_words), "steps", "metrics_differ"),
    "a step gone": (lambda c, v: c.step(2, None), "steps", "missing_step"),
    "a step's metric": (lambda c, v: c.step(2, {"reward/mean": 0.9}), "steps", "metrics_differ"),
}
"""Name -> (plant it in a rollout, check, cause)."""


def test_the_run_is_clean_before(trained_run):
    report = rt.audit(trained_run)
    assert report.findings == ()
    checked = {check.name: check.num_checked for check in report.checks}
    assert min(checked.values()) > 0  # every check was made, with text and trained tokens
    assert [check.skipped for check in report.checks if check.skipped] == []


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_it_is_found_with_its_cause(name, corrupter):
    plant, check, cause = CORRUPTIONS[name]
    victim = corrupter.ids()[5]
    plant(corrupter, victim)
    report = rt.audit(corrupter.path)
    assert not report.ok
    found = [item for item in report.findings if (item.check, item.cause) == (check, cause)]
    assert found, [str(item) for item in report.findings]


def test_a_recomputation_probes_each_model_once(trained_run, monkeypatch):
    probed = []
    probe = forward.logprob_reader
    monkeypatch.setattr(forward, "logprob_reader", lambda m: probed.append(m) or probe(m))
    report = rt.audit(trained_run, recompute=20)
    assert report.ok
    assert report.recomputed["num_rollouts"] == 20
    assert report.recomputed["abs_max"] < 1e-4
    assert len(probed) == 1  # the model of version 0 takes the weights of the other versions


def test_a_recomputation_finds_logprobs_that_no_step_has_seen(corrupter):
    """Of an evaluation, so that the trained tokens cannot contradict them."""
    victim = corrupter.ids("phase = 'eval_before' AND status = 'ok'")[0]
    corrupter.tree(victim, logprobs=lambda call, p: p - 0.5)
    assert rt.audit(corrupter.path).ok
    (finding,) = rt.audit(corrupter.path, recompute=1000).findings
    assert (finding.cause, finding.request_id) == ("engine_differs", victim)


@pytest.mark.parametrize("version", SCHEMAS)
def test_sums_are_compared_as_they_are_stored(version, tmp_path):
    path = unpack(f"{version}/agents", tmp_path / "it")
    Corrupter(path).sums("eval", sum_reward=5.0)
    (finding,) = rt.audit(path).findings
    assert finding.cause == "sums_differ"


def test_a_group_numbered_in_superscript_is_not_one_that_was_planned(tmp_path):
    path = unpack("4/train", tmp_path / "run")
    corrupter = Corrupter(path)
    trained, evaluated = corrupter.ids()[0], corrupter.ids("phase = 'eval_before'")[0]
    for victim, group in ((trained, "train/000001/g²"), (evaluated, "eval_before/letters/²")):
        corrupter.copy(victim, f"{group}/0", group_id=group)
    said = " ".join(str(each) for each in rt.audit(path).findings)
    assert "g²" in said
    assert "invalid literal" not in said


def test_a_prompt_may_be_written_as_the_tokenizer_normalizes_it(corrupter, tmp_path):
    """Qwen's tokenizers compose characters, and none has ids for a lone surrogate."""

    def unusual(record):
        for message in record["table"]["messages"]:
            if message["role"] == "user":
                message["content"] = message["content"].upper() + "\ud800"

    victim = corrupter.ids()[5]
    corrupter.record(victim, unusual)
    (tmp_path / "lower").mkdir()
    tokenizer = json.loads((corrupter.path.parent / "model" / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "lower" / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = rt.audit(corrupter.path, tokenizer=tmp_path / "lower").findings
    assert [item for item in found if item.check == "text"] == []


def test_the_step_with_another_reward_is_named(corrupter):
    victim = corrupter.ids()[5]
    corrupter.record(victim, no_reward_step)
    _, row = corrupter.row(victim)
    found = rt.audit(corrupter.path).findings
    (said,) = [str(item) for item in found if item.cause == "step_rewards"]
    assert f"its reward is {row.reward:g}, but its step 1 has {row.reward + 0.5:g}" in said
