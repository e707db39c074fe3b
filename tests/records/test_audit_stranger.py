"""Corruptions that somebody makes who has not read the audit: each found with its cause."""

import shutil
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from audit_kit import make_trained_run
from corrupt_kit import OF_TOKENS, Corrupter

import rolltree as rt
from golden.pack import ROOT
from golden_kit import unpack
from rolltree.rollouts.decode import decode_rollout
from rolltree.rollouts.record import encode_result


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    return make_trained_run(tmp_path_factory.mktemp("audited"))


@pytest.fixture
def corrupter(trained_run, tmp_path):
    (tmp_path / "model").symlink_to(trained_run.parent / "model")
    return Corrupter(shutil.copytree(trained_run, tmp_path / "run"))


def trained(**edits):
    """The corruption that changes what training knew of a rollout's tokens."""
    return lambda c, victim: c.trained(victim, **edits)


def fields(column=None, **values):
    """The corruption that changes fields of the state, and a column of the same name with them."""

    def plant(c, victim):
        columns = {name: values[name] for name in column or ()}
        c.record(victim, lambda r: r["state"]["fields"].update(values), **columns)

    return plant


def timing(**values):
    """The corruption that changes times of a rollout, in its columns too."""

    def plant(c, victim):
        def edit(record):
            record["state"]["fields"]["timing"] |= values

        names = {"start_time": "started_at"}
        c.record(victim, edit, **{names.get(name, name): v for name, v in values.items()})

    return plant


def request(**values):
    """The corruption that changes what was requested."""
    return lambda c, victim: c.record(victim, lambda r: r["request"].update(values))


def sampling(**values):
    return lambda c, victim: c.record(victim, lambda r: r["request"]["sampling"].update(values))


def metric(step=2, **edit):
    """The corruption that changes metrics of a step."""
    return lambda c, victim: c.step(step, {k.replace("__", "/"): v for k, v in edit.items()})


def first_answer(**values):
    """The corruption that changes what is stored of the first call's answer."""
    return lambda c, victim: c.record(
        victim, lambda record: record["state"]["steps"][0]["answer"].update(values)
    )


def of_evaluation(plant):
    """The corruption of a rollout of the evaluation before training."""

    def planted(c, victim):
        plant(c, c.ids("phase = 'eval_before' AND status = 'ok'")[1])

    return planted


def other_answer(c, victim):
    """Another answer in the dataset row, everywhere it is stored."""
    _, row = c.row(victim)

    def edit(record):
        record["request"]["input"]["fields"]["answer"] = "z"

    c.record(victim, edit, input={**row.input, "answer": "z"})


def other_function(c, victim):
    """Another value of the reward function, with the reward as it was."""
    _, row = c.row(victim)
    metrics = {**row.metrics, "letters": row.metrics["letters"] + 0.5}
    c.record(victim, lambda r: r["state"]["fields"].update(metrics=metrics), metrics=metrics)


def whole_step(c, victim):
    """All loss weights of a step times 10."""
    _, row = c.row(victim)
    for name in c.ids(f"phase = 'train' AND status = 'ok' AND train_step = {row.train_step}"):
        c.trained(name, weight=lambda w: w * 10)


def whole_group(c, victim):
    """All advantages of a group moved by the same amount."""
    _, row = c.row(victim)
    for name in c.ids(f"phase = 'train' AND status = 'ok' AND group_id = '{row.group_id}'"):
        c.trained(name, advantage=lambda a: a + 0.1)


def cut(weight):
    weight[len(weight) // 2 :] = 0
    return weight


def no_evaluation(c, victim):
    c.event("evaluation", 2, None)
    for name in c.ids("phase = 'eval/000002'"):
        c.delete(name)


def of_other_group(c, victim):
    """A member that fits its group: same step, another task."""
    _, row = c.row(victim)
    where = f"phase = 'train' AND status = 'ok' AND group_id != '{row.group_id}'"
    return next(
        name for name in c.ids(where) if c.row(name)[1].input["answer"] != row.input["answer"]
    )


def foreign_answer(c, victim):
    """What another group's rollout played, under this one's request."""
    result, (_, other) = decode_rollout(c.row(victim)[1]), c.row(of_other_group(c, victim))
    mixed = replace(result, states=decode_rollout(other).states)
    (row,) = encode_result(mixed)
    c.edit(victim, **{name: getattr(row, name) for name in ("record", "tokens", *OF_TOKENS)})


def swapped_members(c, victim):
    """Two members of a group, of one length, change places: tokens, messages and rewards."""
    rows = [c.row(name)[1] for name in c.ids()]
    one, other = next(
        (a.request_id, b.request_id)
        for a, b in combinations(rows, 2)
        if (a.group_id, a.num_completion_tokens) == (b.group_id, b.num_completion_tokens)
    )
    c.swap(one, other, ("state", "table"))


def swapped_rows(c, victim):
    """Two rollouts change places with their whole records."""
    c.swap(victim, of_other_group(c, victim), ("state", "table", "request", "error"))


def other_environment(c, victim):
    c.record(victim, lambda r: r["request"].update(env_id="digits"), env_id="digits")


def moved_to_test(c, victim):
    """The trained tokens are those of an evaluation's rollout."""
    c.retarget(victim, c.ids("phase = 'eval_before' AND status = 'ok'")[0])


def other_run(c, victim):
    """A rollout of another run in its place: the same task, other seeds."""
    c.record(victim, lambda r: r["request"].update(seed=77, sampling_seed=78))


def event_mean(c, victim):
    c.event("evaluation", 2, lambda data: data["metrics"]["reward"].update(mean=0.9))


def event_metric(c, victim):
    c.event("evaluation", 2, lambda data: data["metrics"]["metrics"]["length"].update(mean=1.0))


def event_count(c, victim):
    c.event("evaluation", 2, lambda data: data["metrics"].update(num_failed=0))


def kept_mean(c, victim):
    def edit(report):
        report["results"]["reward"][0] = 0.9

    c.meta("report.eval/000002", edit)


def other_agent(c, victim):
    def edit(record):
        record["state"]["steps"][0]["extras"]["agent"] = "nobody"

    c.record(victim, edit)


def future(c, victim):
    c.tree(victim, versions=lambda call, v: v + 90)
    c.edit(victim, min_version=c.row(victim)[1].min_version, max_version=99)


def extras(**values):
    """The corruption that changes what the record says of the first call."""
    return lambda c, victim: c.record(
        victim, lambda r: r["state"]["steps"][0]["extras"].update(values)
    )


def setting(section, **values):
    """The corruption that changes the run's settings."""
    return lambda c, victim: c.meta("config", lambda config: config[section].update(values))


def reported(name, **values):
    """The corruption that changes what an evaluation reported."""
    return lambda c, victim: c.event(
        "evaluation", 2, lambda data: data["metrics"][name].update(values)
    )


def stopped(c, victim):
    """Calls that were cut by length say that they ended by themselves."""

    def edit(record):
        for step in record["state"]["steps"]:
            step["extras"]["finish_reason"] = "stop"

    c.record(victim, edit, finish_reason="stop")


def last_word(c, victim):
    """The completion ends with another message than the last call's."""

    def edit(record):
        messages, nodes = record["table"]["messages"], record["table"]["nodes"]
        messages.append({"role": "assistant", "content": "a better answer"})
        nodes.append([nodes[record["state"]["completion"]][0], len(messages) - 1])
        record["state"]["completion"] = len(nodes) - 1

    c.record(victim, edit)


def call_gone(c, victim):
    """The second call is in neither record nor columns, and its tokens are in the tree."""
    c.record(victim, lambda record: record["state"]["steps"].pop(1))
    (again,) = encode_result(decode_rollout(c.row(victim)[1]), blobs=False)
    c.edit(victim, **{name: getattr(again, name) for name in OF_TOKENS})


def no_length(c, victim):
    metrics = {"letters": c.row(victim)[1].metrics["letters"]}
    c.record(victim, lambda r: r["state"]["fields"].update(metrics=metrics), metrics=metrics)


def shifted_start(c, victim, seconds):
    timing(start_time=c.row(victim)[1].started_at + seconds)(c, victim)


def for_people(c, victim):
    file = c.path / "config.json"
    file.write_text(file.read_text().replace('"lr": 0.005', '"lr": 0.5'))


STRANGER = {
    # what was trained
    "a loss weight of 0": (trained(weight=lambda w: w * 0), "alignment", "weight_differs"),
    "a loss weight times 10": (trained(weight=lambda w: w * 10), "alignment", "weight_differs"),
    "loss weights cut": (trained(weight=cut), "alignment", "weight_differs"),
    "the loss weights of a step": (whole_step, "alignment", "weight_differs"),
    "a negative loss weight": (trained(weight=lambda w: -w), "logprobs", "impossible"),
    "an entropy above the vocabulary's": (
        *(trained(entropy=lambda e: e * 3), "logprobs"),
        "impossible",
    ),
    "a little entropy": (trained(entropy=lambda e: e * 0.5), "steps", "metrics_differ"),
    "a probability above 1": (trained(logprob=lambda p: -p), "logprobs", "impossible"),
    "trained tokens of a test": (moved_to_test, "counted_once", "trained_on_test"),
    "the advantages of a group": (whole_group, "advantages", "advantage_differs"),
    # rewards
    "a function's value": (other_function, "rewards", "not_the_sum"),
    "a function's value, in the means": (other_function, "steps", "metrics_differ"),
    "an evaluation's mean": (event_mean, "rewards", "evaluation_differs"),
    "an evaluation's metric": (event_metric, "rewards", "evaluation_differs"),
    "an evaluation's failures": (event_count, "rewards", "evaluation_differs"),
    "a kept report": (kept_mean, "rewards", "report_differs"),
    # settings that nobody could have trained with
    "an unknown setting": (setting("optim", nonsense=1), "steps", "settings_unreadable"),
    "a size in words": (setting("algorithm", group_size="four"), "steps", "settings_unreadable"),
    # counts and metrics of steps
    "a count of records": (metric(train__num_records=9.0), "steps", "metrics_differ"),
    "a count of skipped records": (
        *(metric(train__num_skipped_records=9.0), "steps"),
        "metrics_differ",
    ),
    "a mean length": (metric(train__completions__mean_length=1.0), "steps", "metrics_differ"),
    "a share of failures": (metric(error__mean=0.9), "steps", "metrics_differ"),
    "a kind of failure": (metric(error__Invented=1.0), "steps", "metrics_differ"),
    "a metric's mean": (metric(metrics__letters=1.0), "steps", "metrics_differ"),
    "a mean entropy": (metric(train__entropy=1.0), "steps", "metrics_differ"),
    "an evaluation gone": (no_evaluation, "counted_once", "missing_evaluation"),
    "a rollout of a test gone": (
        *(of_evaluation(lambda c, victim: c.delete(victim)), "counted_once"),
        "missing_rollout",
    ),
    "an evaluation's result gone": (
        *(lambda c, v: c.event("evaluation", 2, None), "counted_once"),
        "missing_evaluation",
    ),
    # groups
    "a foreign answer": (foreign_answer, "groups", "foreign_answer"),
    "another dataset answer": (other_answer, "groups", "mixed_group"),
    "another dataset answer of a test": (
        *(of_evaluation(other_answer), "groups"),
        "changed_example",
    ),
    "an answer in its column": (
        *(lambda c, v: c.edit(v, input={**c.row(v)[1].input, "answer": "z"}), "columns"),
        "column_differs",
    ),
    "another environment": (other_environment, "groups", "foreign_environment"),
    "another environment in a test": (
        *(of_evaluation(other_environment), "groups"),
        "foreign_environment",
    ),
    "members that changed places": (swapped_members, "logprobs", "engine_differs"),
    "rows that changed places": (swapped_rows, "columns", "column_differs"),
    "another run's rollout": (other_run, "sampler", "seed"),
    "another run's rollout in a test": (of_evaluation(other_run), "sampler", "seed"),
    # times and versions
    "a negative time": (timing(generation_ms=-5.0), "times", "negative_time"),
    "a negative wait": (first_answer(wait_s=-3.0), "times", "negative_time"),
    "an endless call": (first_answer(time_s=float("inf")), "times", "negative_time"),
    "more cached than prompt tokens": (
        *(first_answer(info={"num_cached_tokens": 9999}), "alignment"),
        "more_cached_than_prompt",
    ),
    "a start after the end": (timing(start_time=4e9), "times", "backward_time"),
    "a time in its column": (lambda c, v: c.edit(v, total_ms=1.0), "columns", "column_differs"),
    "a step before its rollouts": (lambda c, v: c.step_time(3, -9e5), "times", "backward_step"),
    "stored before the run": (lambda c, v: c.edit(v, created_at=1e9), "times", "before_the_run"),
    "a version of the future": (future, "versions", "future_version"),
    # requests and labels
    "another limit": (sampling(max_tokens=99), "sampler", "other_settings"),
    "another temperature of a test": (
        *(of_evaluation(sampling(temperature=0.1)), "sampler"),
        "other_settings",
    ),
    "an unknown agent": (other_agent, "tokens", "label_differs"),
    "a turn": (of_evaluation(extras(turn=5)), "tokens", "label_differs"),
    "a version in a call's record": (
        *(of_evaluation(extras(policy_version_min=3)), "tokens"),
        "label_differs",
    ),
    # what ended a call, and what was said at the end
    "an ending": (of_evaluation(stopped), "sampler", "finish_reason"),
    "a last word": (of_evaluation(last_word), "spans", "completion_differs"),
    "a call gone": (of_evaluation(call_gone), "rewards", "evaluation_differs"),
    "a failure's message": (
        lambda c, v: c.edit(
            c.ids("phase = 'train' AND status = 'error'")[0],
            errors=({"type": "RuntimeError", "message": "all is well", "phase": "environment"},),
        ),
        *("columns", "column_differs"),
    ),
    # what an evaluation reported beside its means
    "an evaluation's interval": (reported("reward", low=0.29), "rewards", "evaluation_differs"),
    "the interval of pass@1": (
        lambda c, v: c.event(
            "evaluation", 2, lambda data: data["metrics"]["pass_at"]["1"].update(high=0.29)
        ),
        *("rewards", "evaluation_differs"),
    ),
    "an evaluation's tokens": (
        *(reported("usage", num_completion_tokens=1), "rewards"),
        "evaluation_differs",
    ),
    "an evaluation's kinds of failure": (
        *(reported("failures", Other=1, ConnectionError=0), "rewards"),
        "evaluation_differs",
    ),
    "a metric of a test gone": (of_evaluation(no_length), "rewards", "evaluation_differs"),
    "a kept interval": (
        lambda c, v: c.meta(
            "report.eval/000002", lambda report: report["results"]["reward"].__setitem__(1, 0.29)
        ),
        *("rewards", "report_differs"),
    ),
    # settings and plans
    "a learning rate in the settings": (setting("optim", lr=1e-4), "steps", "settings_differ"),
    "a learning rate": (metric(train__learning_rate=0.05), "steps", "settings_differ"),
    "a number of groups": (
        *(setting("algorithm", groups_per_step=1), "steps"),
        "settings_differ",
    ),
    "a number of steps": (setting("train", num_steps=3), "steps", "settings_differ"),
    "planned steps": (
        *(lambda c, v: c.meta("planned", lambda plan: plan.update(steps=9)), "steps"),
        "settings_differ",
    ),
    "held-out examples": (setting("eval", num_examples=5), "steps", "settings_differ"),
    "settings for people": (for_people, "storage", "settings_file_differs"),
    "a checkpoint's note": (
        *(lambda c, v: c.event("checkpoint", 2, None), "steps"),
        "missing_checkpoint",
    ),
    # metrics that no rollouts give, and those that nothing had compared
    "a negative duration": (metric(time__step=-4.0), "steps", "impossible_metric"),
    "a step shorter than its parts": (metric(time__step=1e-9), "steps", "impossible_metric"),
    "a metric that nothing stores": (metric(reward__median=0.5), "steps", "impossible_metric"),
    "a negative count of groups": (
        *(metric(credit__num_dropped_groups=-1.0), "steps"),
        "impossible_metric",
    ),
    "a share above 1": (
        *(metric(train__clip_ratio__region_mean=1.7), "steps"),
        "impossible_metric",
    ),
    "an effective sample size above 1": (metric(ratio__ess=1.5), "steps", "impossible_metric"),
    "a negative norm": (metric(train__grad_norm=-1.0), "steps", "impossible_metric"),
    "the interval of a step": (metric(2, reward__high=0.99), "steps", "metrics_differ"),
    "a time of a step": (metric(rollout__generation_ms=5.0), "steps", "metrics_differ"),
    "a mismatch": (
        *(metric(train__sampling__sampling_logp_difference__mean=0.5), "steps"),
        "metrics_differ",
    ),
    "a lag": (metric(train__lag_mean=3.0), "steps", "metrics_differ"),
    # what the trained tokens give
    "a loss": (metric(train__loss=1e-3), "steps", "metrics_differ"),
    "a share of clipped tokens": (
        *(metric(train__clip_ratio__region_mean=0.02), "steps"),
        "metrics_differ",
    ),
    "a ratio": (metric(ratio__mean=1.01), "steps", "metrics_differ"),
    "a largest ratio": (metric(ratio__max=1.01), "steps", "metrics_differ"),
    "a smallest ratio": (metric(ratio__min=0.99), "steps", "metrics_differ"),
    "a share of large ratios": (metric(ratio__outside_share=0.02), "steps", "metrics_differ"),
    "an effective sample size": (metric(ratio__ess=0.99), "steps", "metrics_differ"),
    "the sign of a mismatch": (metric(mismatch__mean=1e-4), "steps", "metrics_differ"),
    "a largest mismatch": (
        *(metric(train__sampling__sampling_logp_difference__max=1e-4), "steps"),
        "metrics_differ",
    ),
    "the KL of engine and trainer": (metric(mismatch_kl__mean=1e-6), "steps", "metrics_differ"),
    # speeds
    "a speed of sampling": (metric(rollout__tokens_per_s=1e6), "steps", "metrics_differ"),
    "a speed of training": (metric(train__tokens_per_s=1e6), "steps", "metrics_differ"),
    # times that do not fit each other
    "a start before the run": (
        *(lambda c, v: shifted_start(c, v, -86_400.0), "times"),
        "before_the_run",
    ),
    "a rollout of a test, a day later": (
        of_evaluation(lambda c, v: c.edit(v, created_at=c.row(v)[1].created_at + 86_400.0)),
        *("times", "late_rollout"),
    ),
    "a total below its parts": (timing(total_ms=1.0), "times", "longer_than_its_whole"),
    "hours in the engine": (
        *(timing(generation_ms=4e6, total_ms=4e6), "times"),
        "longer_than_its_whole",
    ),
    "a cause of failure": (
        lambda c, v: c.edit(
            c.ids("phase = 'train' AND status = 'error'")[0], error_type="TimeLimit"
        ),
        *("columns", "column_differs"),
    ),
}
"""Name -> (plant it in a rollout, check, cause)."""


@pytest.mark.parametrize("name", STRANGER)
def test_it_is_found_with_its_cause(name, corrupter):
    plant, check, cause = STRANGER[name]
    plant(corrupter, corrupter.ids()[5])
    report = rt.audit(corrupter.path)
    assert not report.ok
    found = [item for item in report.findings if (item.check, item.cause) == (check, cause)]
    assert found, [str(item) for item in report.findings]


def test_a_loss_weight_names_its_call_after_one_that_sampled_nothing(corrupter):
    victim = corrupter.ids()[5]
    said = {}
    for name, edit in {"all": lambda n: n, "none first": lambda n: np.insert(n, 0, 0)}.items():
        corrupter.trained(victim, num_sampled=edit, weight=cut)
        found = rt.audit(corrupter.path).findings
        said[name] = [str(item) for item in found if item.cause == "weight_differs"]
    assert len(said["all"]) == 1
    assert "a token of call 1 was" in said["all"][0]
    assert "a token of call 2 was" in said["none first"][0]


@pytest.mark.parametrize("edit", [{"depth": 3}, {"parent_step": 7}])
def test_a_delegation_fits_its_parent(edit, tmp_path):
    corrupter = Corrupter(unpack("4/agents", tmp_path / "run"))
    corrupter.delegated(lambda record: record["state"]["fields"].update(edit), **edit)
    report = rt.audit(corrupter.path)
    assert "wrong_parent" in {item.cause for item in report.findings}


def test_rules_are_documented_and_planted():
    """Every rule has its planted corruption here, and its row in the docs."""
    from rolltree.insight.auditing.rules import ROLLOUT_RULES, RUN_RULES
    from rolltree.insight.auditing.step_rules import STEP_RULES

    rules = (*ROLLOUT_RULES, *RUN_RULES, *STEP_RULES)
    planted = {(check, cause) for _, check, cause in STRANGER.values()}
    named = {(rule.check, rule.cause) for rule in rules}
    assert named - planted == {("groups", "wrong_parent")}
    docs = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    assert [rule.cause for rule in rules if f"`{rule.cause}`" not in docs] == []
