"""A call that cannot be trained is masked and counted: the rest trains as if it were context."""

import math

import numpy as np
import pytest
from loop_kit import make_config, make_model, start
from training_kit import (
    FLOAT32,
    LetterSource,
    difference,
    flat,
    gradient_of,
    group,
    states,
    tiny_model,
    trainer,
    tree,
)

from rolltree.records import audit
from rolltree.samples import build_samples
from rolltree.store import Run
from rolltree.training import Silent, load_train_config
from rolltree.training.models.ranks import decode, encode, samples_from_data, samples_to_data
from rolltree.values.errors import ConfigError, NonFiniteStep, TrainingError

SCOPES = ("step", "turn", "interleave", "tree")
CASES = [
    {"name": "grpo"},
    {"name": "grpo", "aggregation": "token"},
    {"name": "gspo"},
    {"name": "gmpo"},
    {"name": "dr_grpo", "fixed_length": 7},
    {"name": "grpo", "correction": "sequence_mis"},
    {"name": "grpo", "kl_coef": 0.1},
    {"name": "reinforce", "kl": "reward", "kl_coef": 0.1},
]


def answer_of(tokens):
    return [tokens[f"completion_{name}"] for name in ("ids", "mask", "logprobs")]


def changed(rollouts, **sampling):
    """Let the second call of the second rollout say that it was sampled with other settings."""
    rollouts[1]["trajectory"][1]["extras"]["sampling"] = sampling
    return rollouts


def masked_by_hand(rollouts):
    step = rollouts[1]["trajectory"][1]
    step["tokens"]["completion_mask"] = [0] * len(step["tokens"]["completion_ids"])
    return rollouts


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scope", SCOPES)
def test_the_gradient_is_that_of_a_call_that_the_environment_masks(scope, case):
    model = tiny_model("llama")
    worker = trainer(model, algorithm=case)
    samples, masked = worker.trainable(
        build_samples(changed(states(model=model), top_k=5), scope).samples
    )
    assert masked.metrics()["masked/num_calls"] == masked.metrics()["masked/changed_sampling"] == 1
    wanted = build_samples(masked_by_hand(states(model=model)), scope).samples
    assert difference(gradient_of(worker, samples), gradient_of(worker, wanted)) < FLOAT32


@pytest.mark.parametrize("missing", [None, []])
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_call_whose_logprobs_an_environment_takes_away_is_masked(missing, is_plain):
    rollouts = states()
    step = rollouts[1]["trajectory"][1]
    tokens = dict(step["tokens"]) if is_plain else step["tokens"]
    tokens["completion_logprobs"] = missing
    step["tokens"] = tokens
    _, masked = trainer(tiny_model("llama")).trainable(build_samples(rollouts).samples)
    assert masked.metrics()["masked/num_calls"] == masked.metrics()["masked/logprob"] == 1
    assert "call 1 of rollout r1" in masked.sentences["logprob"]


@pytest.mark.parametrize("scope", SCOPES)
def test_a_step_says_how_many_calls_it_leaves_out(scope):
    worker = trainer(tiny_model("llama"))
    metrics = worker.step(build_samples(changed(states(), top_k=5), scope).samples, 1)
    assert metrics["masked/num_calls"] == 1
    assert metrics["masked/num_tokens"] > 0
    assert trainer(tiny_model("llama")).step([tree(group())], 1)["masked/num_calls"] == 0


def test_supervised_losses_read_tokens_sampled_in_any_way():
    rollouts = changed(states(), top_k=5)
    worker = trainer(tiny_model("llama"), algorithm={"name": "sft"})
    _, masked = worker.trainable(build_samples(rollouts).samples)
    assert not masked.num_calls


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_call_that_its_session_leaves_out_is_context_only(algorithm, scope):
    model = tiny_model("llama")
    rollouts = states(model=model)
    rollouts[1]["trajectory"][1]["extras"]["left_out"] = "beside the task"
    worker = trainer(model, algorithm={"name": algorithm})
    samples, masked = worker.trainable(
        samples_from_data(decode(encode(samples_to_data(build_samples(rollouts, scope).samples))))
    )
    assert masked.num_calls == {"left_out": 1}
    assert masked.sentences["left_out"].startswith(
        "call 1 of rollout r1 is left out: beside the task."
    )
    wanted = build_samples(masked_by_hand(states(model=model)), scope).samples
    if algorithm == "grpo":
        assert difference(gradient_of(worker, samples), gradient_of(worker, wanted)) < FLOAT32


class TestRefuse:
    def test_it_names_the_call_and_the_setting(self):
        worker = trainer(tiny_model("llama"), train={"changed_sampling": "refuse"})
        samples = build_samples(changed(states(), frequency_penalty=0.5)).samples
        with pytest.raises(TrainingError, match=r"call 1 of rollout r1 .* frequency_penalty = 0.5"):
            worker.step(samples, 1)

    def test_other_words_are_no_setting(self):
        with pytest.raises(ConfigError, match=r"train.changed_sampling.*Known: mask, refuse"):
            load_train_config({"train": {"changed_sampling": "msk"}})

    def test_other_reasons_still_mask(self):
        worker = trainer(tiny_model("llama"), train={"changed_sampling": "refuse"})
        samples = [flat(call) for call in group(3, turns=1)]
        samples[1].records.logprob[0] = math.nan
        assert worker.step(samples, 1)["masked/logprob"] == 1


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("logprob", math.nan, "logprob"),
        ("logprob", -math.inf, "logprob"),
        ("advantage", math.inf, "advantage"),
        ("weight", math.nan, "weight"),
        ("temperature", 0.0, "changed_sampling"),
        ("target", 61, "vocabulary"),
        ("target", -1, "vocabulary"),
    ],
)
@pytest.mark.parametrize("shape", ["flat", "tree"])
def test_unusable_numbers_mask_their_call(field, value, reason, shape):
    calls = group(4, turns=1)
    samples = [flat(call) for call in calls] if shape == "flat" else [tree(calls)]
    records = samples[min(1, len(samples) - 1)].records
    getattr(records, field)[(records.rollout == 1).argmax()] = value
    model = tiny_model("llama")
    worker = trainer(model)
    kept, masked = worker.trainable(samples)
    assert masked.num_calls == {reason: 1}
    assert "call 0 of rollout r" in masked.sentences[reason]
    others = [flat(call) for call in calls if call.rollout != 1]
    assert difference(gradient_of(worker, kept), gradient_of(worker, others)) < FLOAT32
    assert math.isfinite(worker.step(samples, 1)["train/loss"])


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("algorithm", [{"name": "grpo"}, {"name": "sft"}], ids=str)
def test_a_prompt_with_an_id_beyond_the_vocabulary_masks_what_sees_it(scope, algorithm):
    rollouts = states()
    step = rollouts[2]["trajectory"][1]
    step["tokens"]["prompt_ids"] = [*step["tokens"]["prompt_ids"][:-1], 61]
    worker = trainer(tiny_model("llama"), algorithm=algorithm)
    samples = build_samples(rollouts, scope).samples
    kept, masked = worker.trainable(samples)
    assert masked.num_calls == {"vocabulary": 1}
    assert "call 1 of rollout r2 has the token id 61." in masked.sentences["vocabulary"]
    assert max(sample.ids.max() for sample in kept) < 61
    assert math.isfinite(worker.step(samples, 1)["train/loss"])


@pytest.mark.parametrize("scope", SCOPES)
def test_a_path_that_no_pass_can_hold_masks_its_call(scope):
    samples = build_samples(states(rewrite=False), scope).samples
    length = max(int(sample.positions.max()) for sample in samples)
    worker = trainer(tiny_model("llama"), train={"max_tokens": length - 4})
    metrics = worker.step(samples, 1)
    assert metrics["masked/length"] == metrics["masked/num_calls"] >= 1
    assert metrics["train/num_records"] > 0


def test_a_logprob_that_was_never_sampled_is_no_error_where_nothing_is_trained():
    steps = [
        {
            "tokens": {
                "prompt_ids": [1, 2],
                "completion_ids": [3, 4, 5],
                "completion_logprobs": [-0.5, bad, -0.25],
                "completion_mask": [1, 0, 1],
            },
            "extras": {},
        }
        for bad in (-math.inf, math.nan, None, -9999.0)
    ]
    for scope in SCOPES:
        samples = build_samples([[step] for step in steps], scope).samples
        _, masked = trainer(tiny_model("llama")).trainable(samples)
        assert not masked.num_calls
        logprob = np.concatenate([sample.records.logprob for sample in samples])
        assert logprob[np.isfinite(logprob)].min() == -0.5


def test_missing_logprobs_of_one_call_leave_the_others():
    """In scope `turn` the logprobs of a turn are known or not; calls 0 and 1 are one turn."""
    rollouts = states()
    rollouts[0]["trajectory"][0]["tokens"]["completion_logprobs"] = []
    worker = trainer(tiny_model("llama"))
    for scope in SCOPES:
        _, masked = worker.trainable(build_samples(rollouts, scope).samples)
        assert masked.num_calls == {"logprob": 1 + (scope == "turn")}
    # Raw logprobs of such a call are dropped, and it is masked anyway.
    rollouts[0]["trajectory"][0]["extras"]["sampling"] = {"top_k": 5}
    for scope in SCOPES:
        _, masked = worker.trainable(build_samples(rollouts, scope).samples)
        assert masked.num_calls == {"changed_sampling": 1}


class Constrained(LetterSource):
    """The second turn of some rollouts is sampled with a setting of the agent's own."""

    def __init__(self, wanted=lambda request: request.request_id.endswith("/0")):
        super().__init__()
        self.wanted = wanted

    async def run_request(self, request, client):
        found = await super().run_request(request, client)
        for state in found if self.wanted(request) else ():
            state["trajectory"][1]["extras"]["sampling"] = {"top_k": 5}
        return found


class Beside(Constrained):
    async def run_request(self, request, client):
        found = await super().run_request(request, client)
        for state in found if self.wanted(request) else ():
            state["trajectory"][1]["extras"] |= {"sampling": {}, "left_out": "beside the task"}
        return found


class Everywhere(LetterSource):
    async def run_request(self, request, client):
        found = await super().run_request(request, client)
        for state in found:
            for step in state["trajectory"]:
                step["extras"]["sampling"] = {"response_format": "{'type': 'json_object'}"}
        return found


class Overflowing(LetterSource):
    """The rewards of some steps are finite, but not what follows from them in float32."""

    def __init__(self, *steps):
        super().__init__()
        self.steps = steps

    async def run_request(self, request, client):
        (state,) = await super().run_request(request, client)
        if request.train_step in self.steps:
            state["reward"] = 3e38
        return [state]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("untrainable") / "model")


class Notices(Silent):
    def __init__(self):
        self.texts = []

    def on_notice(self, text):
        self.texts.append(text)


class TestRuns:
    @pytest.mark.parametrize("async_steps", [0, 1])
    def test_a_run_goes_on_and_says_so_once(self, model, tmp_path, async_steps):
        said = Notices()
        config = make_config(model, tmp_path / "run", train={"async_steps": async_steps})
        report = start(config, Constrained(), reporter=said)
        assert [step["masked/changed_sampling"] for step in report.metrics] == [2.0] * 4
        (notice,) = [text for text in said.texts if "cannot be trained" in text]
        assert "was sampled with top_k = 5" in notice
        assert audit(tmp_path / "run").findings == ()

    def test_a_run_leaves_out_what_sessions_leave_out(self, model, tmp_path):
        said = Notices()
        report = start(make_config(model, tmp_path / "run"), Beside(), reporter=said)
        assert [step["masked/left_out"] for step in report.metrics] == [2.0] * 4
        (notice,) = [text for text in said.texts if "masked/left_out" in text]
        assert "is left out: beside the task" in notice
        assert audit(tmp_path / "run").findings == ()

    def test_a_step_of_such_calls_only_leaves_the_weights(self, model, tmp_path):
        report = start(make_config(model, tmp_path / "run"), Everywhere())
        assert [step["train/num_records"] for step in report.metrics] == [0.0] * 4
        assert [step["masked/num_calls"] for step in report.metrics] == [12.0] * 4

    def test_a_run_that_was_refused_continues_with_a_mended_setting(self, model, tmp_path):
        strict = make_config(model, tmp_path / "run", train={"changed_sampling": "refuse"})
        with pytest.raises(TrainingError, match="was sampled with top_k = 5"):
            start(strict, Constrained())
        # The rollouts are stored, so the agent's repair alone does not help.
        with pytest.raises(TrainingError, match="was sampled with top_k = 5"):
            start(strict)
        report = start(make_config(model, tmp_path / "run"))
        assert [step["masked/num_calls"] for step in report.metrics] == [2.0, 0.0, 0.0, 0.0]

    @pytest.mark.parametrize(
        ("key", "edit"),
        [
            ("completion_mask", lambda values: values[:-1]),
            ("completion_mask", lambda values: [-1.0 for _ in values]),
            ("completion_logprobs", lambda values: values[:-1]),
            ("completion_logprobs", lambda values: [math.nan for _ in values]),
            ("completion_ids", lambda values: [*values, 3]),
            ("prompt_ids", lambda values: [-1, *values[1:]]),
        ],
    )
    def test_tokens_that_an_environment_broke_end_nothing(self, model, tmp_path, key, edit):
        class Odd(LetterSource):
            async def run_request(self, request, client):
                found = await super().run_request(request, client)
                if request.request_id.endswith("/0"):
                    tokens = found[0]["trajectory"][1]["tokens"]
                    tokens[key] = edit(tokens[key])
                return found

        said = Notices()
        config = make_config(model, tmp_path / "run", train={"num_steps": 1})
        (step,) = start(config, Odd(), reporter=said).metrics
        assert step["masked/invalid_tokens"] == step["masked/num_calls"] == 2
        assert step["train/num_records"] > 0
        (notice,) = [text for text in said.texts if "cannot be trained" in text]
        assert "call 1 of rollout train/000001/g00/0: " in notice
        audit(tmp_path / "run")

    @pytest.mark.parametrize("async_steps", [0, 1])
    @pytest.mark.parametrize(
        ("edit", "num_masked"),
        [
            (lambda tokens: [values.clear() for values in answer_of(tokens)], 0),
            (lambda tokens: tokens["completion_mask"].append(1), 12),
        ],
        ids=["empty", "invalid"],
    )
    def test_a_step_without_a_token_leaves_the_weights(
        self, model, tmp_path, edit, num_masked, async_steps
    ):
        class Odd(LetterSource):
            async def run_request(self, request, client):
                found = await super().run_request(request, client)
                for step in found[0]["trajectory"]:
                    edit(step["tokens"])
                return found

        said = Notices()
        train = {"num_steps": 2, "async_steps": async_steps}
        report = start(make_config(model, tmp_path / "run", train=train), Odd(), reporter=said)
        for step in report.metrics:
            assert (step["train/num_records"], step["train/grad_norm"]) == (0.0, 0.0)
            assert step["masked/num_calls"] == num_masked
        assert any("has no token to train" in text for text in said.texts)

    def test_calls_without_ids_are_counted(self, model, tmp_path):
        class Blind(LetterSource):
            async def run_request(self, request, client):
                found = await super().run_request(request, client)
                if request.request_id.endswith("/0"):
                    found[0]["trajectory"][1]["tokens"] = None
                return found

        said = Notices()
        config = make_config(model, tmp_path / "run", train={"num_steps": 1})
        (step,) = start(config, Blind(), reporter=said).metrics
        assert step["masked/no_tokens"] == step["masked/num_calls"] == 2
        assert step["train/num_records"] > 0
        (notice,) = [text for text in said.texts if "cannot be trained" in text]
        assert "call 1 of rollout train/000001/g00/0: it came without token ids" in notice

    def test_what_raised_and_was_scored_is_told_once(self, model, tmp_path):
        class Raises(LetterSource):
            async def run_request(self, request, client):
                found = await super().run_request(request, client)
                error = {"type": "KeyError", "message": "'b'"}
                found[0]["scoring_errors"] = {"exact": error}
                found[0]["environment_errors"] = {"environment": error}
                return found

        said = Notices()
        start(make_config(model, tmp_path / "run", train={"num_steps": 2}), Raises(), reporter=said)
        told = sorted(text for text in said.texts if "first time in step 1 (KeyError: 'b')" in text)
        assert [text.partition(" raised")[0] for text in told] == [
            "The environment",
            "The reward function exact",
        ]
        assert not any("in step 2" in text for text in said.texts)

    @pytest.mark.parametrize("async_steps", [0, 1])
    def test_a_step_whose_gradient_is_not_finite_is_skipped(self, model, tmp_path, async_steps):
        said = Notices()
        config = make_config(
            model,
            tmp_path / "run",
            algorithm={"name": "reinforce"},
            train={"async_steps": async_steps},
        )
        report = start(config, Overflowing(2), reporter=said)
        skipped = [step.get("train/skipped_step") for step in report.metrics]
        # An asynchronous step takes the groups that are complete, which another one had asked for.
        assert skipped == [None, 1, None, None] or (async_steps and 1 in skipped[:3])
        assert [step["policy/version"] for step in report.metrics] == [1, 2, 3, 4]
        notices = [text for text in said.texts if "is skipped" in text]
        assert len(notices) == skipped.count(1)
        assert "the sample of rollouts train/000002/" in notices[0]

    def test_three_such_steps_in_a_row_end_the_run(self, model, tmp_path):
        config = make_config(model, tmp_path / "run", algorithm={"name": "reinforce"})
        with pytest.raises(NonFiniteStep, match="train/000004/"):
            start(config, Overflowing(2, 3, 4))

    def test_rewards_of_masked_calls_count(self, model, tmp_path):
        start(make_config(model, tmp_path / "run"), Constrained())
        with Run.open(tmp_path / "run") as run:
            rows = {row.request_id: row for row in run.trained(step=1)}
            rewards = {row.request_id: row.reward for row in run.rollouts(train_step=1)}
        group_of = [name for name in rows if "/g00/" in name]
        mean = np.mean([rewards[name] for name in group_of])
        for name in group_of:
            assert np.sign(rows[name].advantage[0]) == np.sign(rewards[name] - mean)
