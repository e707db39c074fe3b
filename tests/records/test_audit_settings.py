"""A run that nobody changed passes the audit, whatever its settings and its environment did."""

import json
import shutil

import pytest
from corrupt_kit import Corrupter

import rolltree as rt
from golden import make_runs
from rolltree.agents import Agent
from rolltree.agents.protocols import SingleAgentProtocol
from rolltree.environments import ProtocolEnvironment
from rolltree.insight.auditing import run
from rolltree.training.losses import LOSSES, Loss, LossTerms
from rolltree.training.optim import Optimizer
from rolltree.values.steps import StepOutcome

MODEL = make_runs.TinyConfig(
    hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, max_context=512
)


class Turns(rt.MultiTurnEnv):
    """Ask for more; `changes` edit the first call of rollouts of the tasks that they name."""

    def __init__(self, changes=()):
        rows = [{"question": f"write {name}", "answer": name} for name in changes or "abcdefgh"]
        rubric = rt.Rubric([rt.run_inline(code_of_first)])
        super().__init__(dataset=rows, rubric=rubric, max_turns=2, env_id="turns")
        self.changes = changes

    async def env_response(self, messages, state):
        if state["answer"] in self.changes:
            change, _ = self.changes[state["answer"]]
            change(state["trajectory"][-1])
        return [{"role": "user", "content": "more"}]


def code_of_first(completion):
    """A number that follows from the first answer's first letter."""
    said = next(message["content"] for message in completion if message["role"] == "assistant")
    return ord(said[0]) % 10 / 10 if said else 0.0


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    model = tmp_path_factory.mktemp("settings") / "model"
    model.mkdir()
    make_runs.make_tiny(model, MODEL)

    def run_training(path, environment=None, **settings):
        sections = {
            "run": {"dir": str(path), "seed": 4},
            "model": {"name": str(model)},
            "sampling": {"max_tokens": 5},
            "algorithm": {"group_size": 3, "groups_per_step": 3},
            "optim": {"lr": 0.01},
            "train": {"num_steps": 2, "num_threads": 1},
            "eval": {"before": False, "after": False},
            "checkpoint": {"every": 1, "export": False},
        }
        merged = {name: sections.get(name, {}) | settings.get(name, {}) for name in sections}
        return rt.train(merged, environment=environment or Turns(), reporter=rt.Silent()).metrics

    return run_training


def assert_nothing_is_wrong(path):
    assert [str(item) for item in rt.audit(path).findings] == []


HALVES = {"minibatches": 2, "updates_per_step": 2}
# Steps so large that the next one's tokens come from a rather different policy.
FAR, FAST = {"async_steps": 1, "num_steps": 3}, {"lr": 0.1}
SETTINGS = {
    "a moving average": {"algorithm": {"name": "reinforce", "baseline": "ema"}},
    "two parts": {"train": HALVES},
    "two parts of everything": {"train": HALVES | {"skip_zero_advantage": False}},
    "two parts, corrected": {"train": HALVES, "algorithm": {"correction": "token_tis"}},
    "two parts, asynchronous": {"train": HALVES | {"async_steps": 1}},
    "three parts of cut paths": {
        "train": {"minibatches": 3, "updates_per_step": 3, "max_seq_len": 40}
    },
    "masked by length": {"train": {"max_tokens": 40}},
    "replaced groups": {"algorithm": {"dynamic_sampling_max": 2}, "train": HALVES},
    "ratios of rollouts": {"algorithm": {"name": "gspo"}, "train": HALVES},
    "ratios far from 1": {"train": FAR, "optim": FAST},
    "means of rollouts, far from 1": {
        "algorithm": {"name": "gmpo", "kl_coef": 0.1, "kl": "full"},
        "train": FAR,
        "optim": FAST,
    },
    "a bonus for entropy": {"algorithm": {"name": "cispo", "kl_coef": 0.1, "entropy_coef": 0.1}},
    "a KL and a correction": {
        "algorithm": {"name": "rloo", "correction": "sequence_tis", "kl_coef": 0.1, "kl": "k2"}
    },
    "a KL in the reward": {
        "algorithm": {"kl_coef": 0.1, "kl": "reward"},
        "train": HALVES,
        "optim": FAST,
    },
}


RATES = {
    "a rate that falls": {"schedule": "linear", "lr": 0.01},
    "a rate that rises and falls": {"schedule": "cosine", "warmup_steps": 2, "lr": 0.01},
}
SETTINGS |= {name: {"train": HALVES | {"num_steps": 3}, "optim": RATES[name]} for name in RATES}

SAID = ("train/loss", "train/clip_ratio/region_mean", "ratio/ess", "ratio/max", "ratio/mean")


@pytest.fixture(scope="module")
def far_run(train, tmp_path_factory):
    """The metrics and the path of a run whose ratios are far from 1."""
    path = tmp_path_factory.mktemp("far") / "run"
    return train(path, train=FAR, optim=FAST), path


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_is_accused(name, train, tmp_path):
    train(tmp_path / "run", **SETTINGS[name])
    assert_nothing_is_wrong(tmp_path / "run")


@pytest.mark.parametrize("kl", ["k2", "k3", "full", "reward"])
def test_the_kl_to_the_reference_is_computed_again(kl, train, tmp_path):
    metrics = train(tmp_path / "run", algorithm={"kl_coef": 0.1, "kl": kl}, optim=FAST)
    stored = metrics[1]["train/kl"]
    for changed in (stored, 1.01 * stored, stored + 1e-5):
        Corrupter(tmp_path / "run").step(2, {"train/kl": changed})
        found = rt.audit(tmp_path / "run").findings
        assert [item.cause for item in found] == ["metrics_differ"] * (changed != stored)
        assert all("train/kl of step 2" in item.message for item in found)


@pytest.mark.parametrize("name", SAID)
def test_what_asynchronous_tokens_give_is_computed_again(name, train, far_run, tmp_path):
    metrics, corrupter = far_run[0], Corrupter(shutil.copytree(far_run[1], tmp_path / "run"))
    corrupter.step(3, {name: metrics[2][name] + 0.01})
    (found,) = rt.audit(tmp_path / "run").findings
    assert (found.check, found.cause) == ("steps", "metrics_differ")
    assert f"{name} of step 3" in found.message


@pytest.mark.parametrize("parts", [{}, HALVES])
def test_a_skipped_step_is_not_accused(parts, train, monkeypatch, tmp_path):
    real, norms = Optimizer.clip, [float("inf")]
    monkeypatch.setattr(Optimizer, "clip", lambda self: norms.pop() if norms else real(self))
    first, second = train(tmp_path / "run", train=parts)
    assert first["train/skipped_step"] == 1
    assert "train/loss" in second
    assert_nothing_is_wrong(tmp_path / "run")


def test_a_loss_that_only_takes_tensors_is_not_compared(train, monkeypatch, tmp_path):
    def squashed(x, p):
        return LossTerms(-x.advantage * x.logprob.sigmoid(), x.logprob > 0)

    monkeypatch.setitem(LOSSES, "squashed", Loss(squashed, {}))
    metrics = train(tmp_path / "run", algorithm={"loss": "squashed"})
    assert_nothing_is_wrong(tmp_path / "run")
    Corrupter(tmp_path / "run").step(2, {"train/loss": metrics[1]["train/loss"] + 1})
    assert_nothing_is_wrong(tmp_path / "run")


def test_agents_with_and_without_a_name_have_averages_of_their_own(train, tmp_path):
    class Echo:
        in_thread = False

        def reset(self, *, seed=None):
            return "go", {}

        def step(self, action):
            return StepOutcome("no", reward=float(len(action) % 3), terminated=True)

        def close(self):
            pass

    named = ProtocolEnvironment(
        SingleAgentProtocol(lambda: Agent(name="agent", reject_incomplete_completions=False)),
        world=lambda row: Echo(),
        num_train=4,
        env_id="echo",
    )
    metrics = train(
        tmp_path / "run",
        rt.EnvGroup([Turns(), named]),
        algorithm={"name": "reinforce", "baseline": "ema", "groups_per_step": 6},
        train={"num_steps": 3},
    )
    assert {"credit/average/agent", "credit/average/(unnamed)"} <= metrics[-1].keys()
    assert_nothing_is_wrong(tmp_path / "run")


CHANGED = {
    "max_tokens": (40, 8192),
    "record_tokens": (True, False),
    "changed_sampling": ("refuse", "mask"),
    "max_mismatch": (0.2, 0.1),
}


def test_checkpoints_at_other_steps_than_before_are_not_accused(train, tmp_path):
    train(tmp_path / "run", train={"num_steps": 3}, checkpoint={"every": 3})
    train(tmp_path / "run", train={"num_steps": 3}, checkpoint={"every": 2})
    assert_nothing_is_wrong(tmp_path / "run")


def test_a_run_that_goes_on_during_its_audit_is_not_accused(train, monkeypatch, tmp_path):
    train(tmp_path / "run", train={"num_steps": 1})
    check_run, num_steps = run._Audit.check_run, []

    def later(audited):
        num_steps.append(len(train(tmp_path / "run", train={"num_steps": 3})))
        check_run(audited)

    monkeypatch.setattr(run._Audit, "check_run", later)
    (found,) = rt.audit(tmp_path / "run").findings
    # The file beside the database has the new number of steps.
    assert (found.cause, num_steps) == ("settings_file_differs", [3])


def test_a_rate_that_is_not_the_schedules_is_found(train, tmp_path):
    train(tmp_path / "run", train={"num_steps": 3}, optim={"schedule": "linear"})
    Corrupter(tmp_path / "run").step(2, {"train/learning_rate": 0.01})
    (found,) = rt.audit(tmp_path / "run").findings
    assert (found.cause, found.step) == ("settings_differ", 2)


def test_a_file_that_was_never_written_to_is_no_run(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.db").touch()
    assert len(train(tmp_path / "run", train={"num_steps": 1})) == 1


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_that_may_change_is_not_accused(name, train, tmp_path):
    first, second = CHANGED[name]
    train(tmp_path / "run", train={"num_steps": 1, name: first})
    train(tmp_path / "run", train={"num_steps": 2, name: second})
    assert_nothing_is_wrong(tmp_path / "run")


def tokens(**edits):
    """The change of token lists of a call: each a function of how many tokens it sampled."""

    def change(step):
        count = len(step["tokens"]["completion_ids"])
        step["tokens"].update({name: edit(count) for name, edit in edits.items()})

    return change


ODD = {
    "a mask of text": (tokens(completion_mask=lambda n: "x"), set()),
    "a mask that is a number": (tokens(completion_mask=lambda n: 0), set()),
    "a mask of nan": (tokens(completion_mask=lambda n: [float("nan")] * n), set()),
    "a mask below 0": (tokens(completion_mask=lambda n: [-1] * n), set()),
    "a mask of one token": (tokens(completion_mask=lambda n: [1]), {"length_differs"}),
    "no mask": (tokens(completion_mask=lambda n: None), set()),
    "no logprobs": (tokens(completion_logprobs=lambda n: None), set()),
    "logprobs of nan": (
        tokens(completion_logprobs=lambda n: [float("nan")] * n),
        {"changed_after_sampling"},
    ),
    "logprobs of text": (
        tokens(completion_logprobs=lambda n: ["a"] * n),
        {"changed_after_sampling"},
    ),
    "ids below 0": (tokens(completion_ids=lambda n: [-1] * n), {"changed_after_sampling"}),
    "no tokens": (lambda step: step.update(tokens=None), set()),
    "other tokens": (lambda step: step.update(tokens={"a": 1}), {"contradiction"}),
    "tokens of text": (lambda step: step.update(tokens="x"), {"contradiction"}),
    "an advantage of text": (lambda step: step.update(advantage="x"), set()),
    "a reward of text": (lambda step: step.update(reward="x"), set()),
    "a reward of nan": (lambda step: step.update(reward=float("nan")), set()),
    "a temperature of text": (lambda step: step["extras"].update(temperature="x"), set()),
    "a temperature below 0": (lambda step: step["extras"].update(temperature=-1), {"temperature"}),
    "settings of text": (lambda step: step["extras"].update(sampling="x"), set()),
}
"""Name -> what an environment does to a call, and what the audit says about that call."""


@pytest.fixture(scope="module")
def odd_run(train, tmp_path_factory):
    """A run with a group of rollouts for each of these changes."""
    path = tmp_path_factory.mktemp("odd") / "run"
    sections = {"group_size": 2, "groups_per_step": len(ODD)}
    train(path, Turns(ODD), algorithm=sections, train={"num_steps": 1, "max_mismatch": 5.0})
    return path


@pytest.fixture(scope="module")
def said_of(odd_run):
    """Name -> the causes that the audit of that run has found in rollouts with this change."""
    found = {name: set() for name in ODD}
    with rt.read_run(odd_run) as data:
        tasks = {
            row["request_id"]: json.loads(row["input"])["answer"] for row in data.rollouts().rows()
        }
    for item in rt.audit(odd_run).findings:
        found.setdefault(tasks.get(item.request_id, str(item)), set()).add(item.cause)
    return found


def test_of_calls_that_are_not_trained_only_the_reason_is_found(said_of):
    assert said_of == {name: said for name, (_, said) in ODD.items()}


def test_the_run_is_read_and_exported_without_them(odd_run, tmp_path, caplog):
    assert rt.export_run(odd_run, tmp_path / "sft.jsonl", "sft") > 0
    assert "18 calls are left out, because their tokens cannot be read" in caplog.text
    assert rt.export_run(odd_run, tmp_path / "all.jsonl") == 2 * len(ODD)
    with rt.read_run(odd_run) as data:
        assert sum(1 for _ in data.calls().rows()) == 4 * len(ODD)
        assert list(data.tokens().rows())


def test_nan_replays_as_nan(odd_run):
    with rt.read_run(odd_run) as data:
        tasks = {
            row["request_id"]: json.loads(row["input"])["answer"] for row in data.rollouts().rows()
        }
    chosen = [name for name, task in tasks.items() if task == "a reward of nan"]
    reports = rt.replay_many(odd_run, Turns(ODD), where={"request_id": chosen})
    assert [report.difference for report in reports] == [None, None]
