import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_source import Source, a_request

from rolltree.rollouts import (
    GroupStrategy,
    build_requests,
    derive_seed,
    merge_args,
    repeat,
    resolve_sampling,
)
from rolltree.values.errors import ConfigError
from rolltree.values.types import SamplingParams

PARTS = st.lists(st.one_of(st.text(max_size=5), st.integers(-9, 9)), max_size=4)


@given(st.integers(), PARTS)
def test_seeds_are_small_and_repeatable(run_seed, parts):
    seed = derive_seed(run_seed, *parts)
    assert 0 <= seed < 2**31
    assert seed == derive_seed(run_seed, *parts)


@given(PARTS, PARTS)
def test_different_parts_give_different_seeds(first, second):
    same = [(type(p), p) for p in first] == [(type(p), p) for p in second]
    assert (derive_seed(0, *first) == derive_seed(0, *second)) == same


def test_order_type_and_grouping_of_parts_matter():
    seeds = {
        derive_seed(0, 1, 2),
        derive_seed(0, 2, 1),
        derive_seed(0, 12),
        derive_seed(0, "1", 2),
        derive_seed(1, 1, 2),
        derive_seed(0),
    }
    assert len(seeds) == 6


def test_a_seed_is_a_constant_of_the_project():
    # Runs resume across versions: these numbers must never change.
    assert derive_seed(0, "train", 3) == 1049853464
    assert derive_seed(7) == 1442145559


@given(st.integers(1, 6), st.integers(1, 4))
def test_groups_share_the_world_and_differ_in_sampling(size, num):
    requests = [a_request(i, group=f"g{i}", seed=100 + i) for i in range(num)]
    expanded = GroupStrategy(size).expand(requests)
    assert len(expanded) == size * num
    assert len({request.request_id for request in expanded}) == size * num
    assert len({request.sampling_seed for request in expanded}) == size * num
    for index, request in enumerate(requests):
        members = expanded[index * size : (index + 1) * size]
        assert {member.seed for member in members} == {request.seed}
        assert {member.group_id for member in members} == {request.group_id}
        assert [member.index_in_group for member in members] == list(range(size))
        assert all(member.input == request.input for member in members)


@pytest.mark.parametrize("size", [0, -1])
def test_a_group_has_members(size):
    with pytest.raises(ConfigError, match="group_size"):
        GroupStrategy(size)


def test_repeats_are_independent_worlds():
    repeated = repeat(a_request(3), 4)
    assert len({request.seed for request in repeated}) == 4
    assert len({request.sampling_seed for request in repeated}) == 4
    assert [request.request_id for request in repeated] == ["r3/0", "r3/1", "r3/2", "r3/3"]
    assert {request.group_id for request in repeated} == {"g"}
    assert repeated == repeat(a_request(3), 4)


def test_build_requests_covers_the_split():
    requests = build_requests(Source(num=3), "eval", group_size=2)
    assert [r.input["example_id"] for r in requests] == [0, 0, 1, 1, 2, 2]
    assert [r.request_id for r in requests][:2] == ["eval/scripted/0/0", "eval/scripted/0/1"]
    assert requests[0].group_id == requests[1].group_id != requests[2].group_id
    assert requests[0].seed == requests[1].seed != requests[2].seed
    assert requests[0].input["prompt"][0]["content"] == "eval 0"


def test_build_requests_takes_the_first_or_the_named():
    source = Source(num=5)
    assert [r.input["example_id"] for r in build_requests(source, "eval", num_examples=2)] == [0, 1]
    named = build_requests(source, "train", indices=[4, 1])
    assert [r.input["example_id"] for r in named] == [4, 1]
    assert len(build_requests(source, "eval", num_examples=99)) == 5


def test_two_evaluations_face_the_same_worlds():
    source = Source(num=3)
    before = build_requests(source, "eval", phase="eval_before")
    after = build_requests(source, "eval", phase="eval_after", train_step=50)
    assert [r.seed for r in before] == [r.seed for r in after]
    assert [r.sampling_seed for r in before] == [r.sampling_seed for r in after]
    assert not {r.request_id for r in before} & {r.request_id for r in after}


def test_ids_tell_splits_apart():
    source = Source(num=1)
    ids = [
        build_requests(source, split, phase=phase)[0].request_id
        for split in ("train", "eval")
        for phase in ("train", "eval", "eval_before")
    ]
    assert ids == [
        "train/scripted/0/0",
        "eval/scripted/train/0/0",
        "eval_before/scripted/train/0/0",
        "train/scripted/eval/0/0",
        "eval/scripted/0/0",
        "eval_before/scripted/0/0",
    ]


def test_training_steps_see_new_worlds():
    first, second = (
        build_requests(Source(), "train", indices=[0], phase="train", train_step=step)[0]
        for step in (1, 2)
    )
    assert first.seed != second.seed
    assert (first.train_step, second.train_step) == (1, 2)
    assert first.request_id != second.request_id
    other_run = build_requests(
        Source(), "train", indices=[0], phase="train", train_step=1, run_seed=1
    )[0]
    assert other_run.seed != first.seed


@pytest.mark.parametrize("indices", [[5], [-1], [0, 7]])
def test_indices_outside_the_split(indices):
    with pytest.raises(ConfigError, match="examples 0 to 4"):
        build_requests(Source(num=5), "eval", indices=indices)


@pytest.mark.parametrize("wanted", [{"num_examples": 0}, {"indices": []}])
def test_nothing_to_run(wanted):
    with pytest.raises(ConfigError, match="nothing to run: none of the 5 examples in the eval"):
        build_requests(Source(num=5), "eval", **wanted)


@pytest.mark.parametrize("wanted", [{}, {"num_examples": 3}, {"indices": [0]}, {"indices": []}])
def test_an_empty_split(wanted):
    with pytest.raises(ConfigError, match=r"nothing to run: .* has no examples in its eval split"):
        build_requests(Source(num=0), "eval", **wanted)


def test_sampling_of_the_caller_goes_over_the_sources():
    source = Source(num=1)
    source.sampling_args = {"temperature": 0.2, "max_tokens": 5}
    request = build_requests(source, "eval", sampling={"temperature": 1.0})[0]
    assert (request.sampling.temperature, request.sampling.max_tokens) == (1.0, 5)
    request = build_requests(source, "eval")[0]
    assert request.sampling.temperature == 0.2
    decided = SamplingParams(temperature=0.7)
    assert build_requests(source, "eval", sampling=decided)[0].sampling == decided
    assert source.sampling_args == {"temperature": 0.2, "max_tokens": 5}


def test_sources_without_sampling_args():
    assert resolve_sampling(Source()) == SamplingParams()
    assert resolve_sampling(None, {"max_tokens": 3}).max_tokens == 3


def test_merging_arguments():
    base = {"temperature": 0.5, "extra_body": {"top_k": 3, "min_p": 0.1}}
    over = {"temperature": 1.0, "extra_body": {"top_k": 5}}
    merged = merge_args(base, over)
    assert merged == {"temperature": 1.0, "extra_body": {"top_k": 5, "min_p": 0.1}}
    assert base["extra_body"] == {"top_k": 3, "min_p": 0.1}
    assert over["extra_body"] == {"top_k": 5}
    assert merge_args(None, None) == {}
    assert merge_args(base, {"extra_body": None})["extra_body"] is None


async def test_seeds_of_calls_never_start_again():
    """Every call of every episode of every step samples with a seed of its own."""
    from rolltree.agents import Agent
    from rolltree.agents.protocols import SingleAgentProtocol
    from rolltree.environments import ProtocolEnvironment
    from rolltree.rollouts import RolloutEngine
    from rolltree.testing import ScriptedClient
    from rolltree.values.steps import ParseResult

    client = ScriptedClient(lambda messages: "hm")
    environment = ProtocolEnvironment(
        SingleAgentProtocol(lambda: Agent(parser=lambda text: ParseResult(None)), max_steps=3),
        dataset=[{"question": "q", "answer": "a"}] * 2,
    )
    engine = RolloutEngine(environment, client)
    for step in (1, 2):
        requests = build_requests(
            environment, "train", group_size=2, run_seed=5, phase="train", train_step=step
        )
        await engine.run_all(requests)
    seeds = [call.sampling.seed for call in client.calls]
    assert len(seeds) == len(set(seeds)) == 2 * 2 * 2 * 3
