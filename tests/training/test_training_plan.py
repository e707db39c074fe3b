import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_kit import LetterSource

import rolltree as rt
from rolltree.rollouts import RolloutEngine
from rolltree.testing import ScriptedClient
from rolltree.training import load_train_config, step_requests, task_indices
from rolltree.values.errors import ConfigError

CONFIG = load_train_config(
    {"algorithm": {"group_size": 3, "groups_per_step": 4}, "sampling": {"max_tokens": 5}}
)


@given(st.integers(0, 99), st.integers(1, 12), st.integers(1, 20), st.integers(1, 8))
def test_every_example_comes_once_per_epoch(seed, num_groups, num_examples, num_steps):
    drawn = [
        index
        for step in range(1, num_steps + 1)
        for index in task_indices(seed, step, num_groups, num_examples)
    ]
    for first in range(0, len(drawn) - num_examples + 1, num_examples):
        assert sorted(drawn[first : first + num_examples]) == list(range(num_examples))
    rest = drawn[len(drawn) - len(drawn) % num_examples :]
    assert len(set(rest)) == len(rest)


def test_the_order_depends_on_the_seed_and_the_epoch():
    orders = {tuple(task_indices(seed, step, 9, 9)) for seed in range(4) for step in (1, 2, 3)}
    assert len(orders) == 12


def test_requests_are_groups_with_readable_ids_and_their_own_seeds():
    requests = step_requests(CONFIG, LetterSource(), 12)
    assert [r.request_id for r in requests[:4]] == [
        "train/000012/g00/0",
        "train/000012/g00/1",
        "train/000012/g00/2",
        "train/000012/g01/0",
    ]
    assert {r.group_id for r in requests} == {f"train/000012/g0{g}" for g in range(4)}
    assert len({r.sampling_seed for r in requests}) == 12
    assert len({r.seed for r in requests}) == 4
    for group in range(4):
        members = requests[3 * group : 3 * group + 3]
        assert len({(r.seed, r.input["example_id"]) for r in members}) == 1
        assert [r.index_in_group for r in members] == [0, 1, 2]
    assert all(r.phase == "train" and r.train_step == 12 for r in requests)
    assert all(r.sampling.max_tokens == 5 and r.sampling.temperature == 1.0 for r in requests)


def test_the_same_step_is_the_same_requests_and_another_is_not():
    assert step_requests(CONFIG, LetterSource(), 3) == step_requests(CONFIG, LetterSource(), 3)
    first = {r.sampling_seed for r in step_requests(CONFIG, LetterSource(), 3)}
    assert not first & {r.sampling_seed for r in step_requests(CONFIG, LetterSource(), 4)}
    other = load_train_config({**CONFIG.as_dict(), "run": {"seed": 1}})
    assert not first & {r.sampling_seed for r in step_requests(other, LetterSource(), 3)}


def test_more_groups_than_examples_repeat_examples_with_other_worlds():
    requests = step_requests(CONFIG, LetterSource(num_train=1), 1)
    assert {r.input["example_id"] for r in requests} == {0}
    assert len({r.seed for r in requests}) == 4


def test_no_training_data_is_an_error():
    with pytest.raises(ConfigError, match="no training examples"):
        step_requests(CONFIG, LetterSource(num_train=0), 1)


@pytest.mark.parametrize(
    "args",
    [
        {"top_p": 0.9},
        {"temperature": 0},
        {"top_k": 5},
        {"min_p": 0.1},
        {"extra_body": {"repetition_penalty": 1.1}},
        {"presence_penalty": 0.5},
        {"logit_bias": {"3": -100}},
        {"min_tokens": 4},
        {"extra_body": {"temperature": 0.5}},
        {"extra_body": {"top_n_sigma": 1.0}},
    ],
)
def test_a_source_with_a_truncated_distribution_is_refused(args):
    source = LetterSource()
    source.sampling_args = args
    with pytest.raises(ConfigError, match="full distribution"):
        step_requests(CONFIG, source, 1)


def test_the_config_wins_over_the_source():
    source = LetterSource()
    source.sampling_args = {"temperature": 0.5, "max_tokens": 99}
    (request, *_) = step_requests(CONFIG, source, 1)
    assert request.sampling.max_tokens == 5
    assert request.sampling.temperature == 0.5


async def test_an_environments_sampling_args_reach_the_model():
    """From a real environment, through the plan, to what the client is asked."""
    environment = rt.SingleTurnEnv(
        dataset=[{"question": "2 + 2 =", "answer": "4"}],
        rubric=rt.Rubric([lambda completion, answer: 1.0]),
        sampling_args={"temperature": 0.7, "max_tokens": 9, "stop": [";"]},
    )
    config = load_train_config({"algorithm": {"group_size": 2, "groups_per_step": 1}})
    requests = step_requests(config, environment, 1)
    client = ScriptedClient(["4"])
    async with environment:
        await RolloutEngine(environment, client).run_all(requests)
    assert len(client.calls) == 2
    for call in client.calls:
        assert call.sampling.temperature == 0.7
        assert call.sampling.max_tokens == 9
        assert list(call.sampling.stop) == [";"]
    over = load_train_config({**config.as_dict(), "sampling": {"temperature": 1.0}})
    (request, *_) = step_requests(over, environment, 1)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (1.0, 9)


def test_a_loss_that_reads_no_rewards_is_refused_in_the_loop():
    config = load_train_config({"algorithm": {"name": "sft"}})
    with pytest.raises(ConfigError, match="supervised_states"):
        step_requests(config, LetterSource(), 1)
