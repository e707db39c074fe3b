"""The data behind group lens, token lens and tree picture, against numbers worked out by hand."""

import json
import os
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import rolltree as rt
from golden_kit import unpack
from rolltree.insight.page.group_tree import group_tree, tree_picture
from rolltree.insight.page.rollout_view import rollout_view
from rolltree.insight.page.token_lens import token_lens
from rolltree.records.tokenizer import RunTokenizer, local_tokenizer
from rolltree.rollouts.record import encode_result
from rolltree.store import Run, TrainedRollout
from rolltree.values.errors import ConfigError, UnknownName
from rolltree.values.state import tool_errors
from step_kit import answer


def step(prompt_ids, completion_ids, turn=0):
    logprobs = [-0.5 * (turn + 1)] * len(completion_ids)
    return answer(prompt_ids, completion_ids, logprobs=logprobs, policy_version=3, turn=turn)


def result(index, reward, *steps, group="g", **state):
    request = rt.RolloutRequest(
        request_id=f"{group}/{index}",
        env_id="sums",
        input={"prompt": "?", "example_id": 7, "task": "adding"},
        seed=0,
        sampling_seed=0,
        group_id=group,
        index_in_group=index,
        sampling=rt.SamplingParams(),
        phase="train",
        train_step=4,
    )
    made = rt.State(
        input=request.input, trajectory=rt.Trajectory(steps), reward=reward, completion=[], **state
    )
    return rt.RolloutResult(request, (made,), None, 1)


def trained(index, advantages, num_sampled):
    size = sum(num_sampled)
    return TrainedRollout(
        request_id=f"g/{index}",
        step=4,
        num_sampled=np.array(num_sampled, np.int32),
        advantage=np.array(advantages, np.float32),
        weight=np.ones(size, np.float32),
        logprob=np.full(size, -0.75, np.float32),
        entropy=np.full(size, 2.0, np.float32),
    )


@pytest.fixture
def run(tmp_path):
    """Two rollouts say the same first token; the third rewrites its history."""
    with Run.create(tmp_path / "run", kind="train", config={"model": "none"}) as made:
        made.add_rollouts(encode_result(result(0, 1.0, step([1, 2], [3, 4]))))
        made.add_rollouts(encode_result(result(1, 0.0, step([1, 2], [3, 5]))))
        broken = (step([1, 2], [6]), step([1, 9, 8], [6], turn=1))
        made.add_rollouts(encode_result(result(2, 0.5, *broken)))
        rows = [trained(0, [2, 2], [2]), trained(1, [-1, -1], [2]), trained(2, [0, 0], [1, 1])]
        made.add_step(4, {}, trained=rows)
        yield made


def test_a_group_is_one_tree(run):
    found = group_tree(run, "g")
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    rows = [
        (s["parent"], s["start"], s["ids"], s["authors"], s["members"], s["reward"], s["advantage"])
        for s in found["segments"]
    ]
    prompt, model = [["environment", 1]], [["model", 1]]
    assert rows == [
        (-1, 0, [1], prompt, [0, 1, 2], 0.5, None),
        (0, 1, [2], prompt, [0, 1, 2], 0.5, None),
        (1, 2, [3], model, [0, 1], 0.5, 0.5),
        (2, 3, [4], model, [0], 1.0, 2.0),
        (2, 3, [5], model, [1], 0.0, -1.0),
        (1, 2, [6], model, [2], 0.5, 0.0),
        (0, 1, [9, 8, 6], [["environment", 2], ["model", 1]], [2], 0.5, 0.0),
    ]
    assert [each["path"] for each in found["members"]] == [
        [0, 1, 2, 3],
        [0, 1, 2, 4],
        [0, 1, 5, 6],
    ]
    assert [each["advantage"] for each in found["members"]] == [2.0, -1.0, 0.0]
    assert [call["segment"] for call in found["members"][2]["calls"]] == [5, 6]
    assert found["shared_tokens"] == 2
    assert found["reuse_factor"] == (4 + 4 + 3 + 4) / 9


def test_the_rollouts_of_one_agent_are_a_tree_of_their_own(tmp_path):
    with Run.create(tmp_path / "run", kind="train", config={"model": "none"}) as run:
        for index, agent in enumerate(("asker", "helper", "asker")):
            ids = [1, 2] if agent == "asker" else [7]
            played = result(index, float(index), step(ids, [3 + index]))
            played.states[0]["agent"] = agent
            run.add_rollouts(encode_result(played))
        assert group_tree(run, "g")["agents"] == ["asker", "helper"]
        found = group_tree(run, "g", agent="asker")
        assert [each["request_id"] for each in found["members"]] == ["g/0", "g/2"]
        assert (found["shared_tokens"], found["num_tokens"], found["reward"]) == (2, 4, 1.0)
        with pytest.raises(UnknownName, match="no agent 'judge'"):
            group_tree(run, "g", agent="judge")


def test_an_unknown_group_is_named(run):
    with pytest.raises(UnknownName, match="no group 'h'"):
        group_tree(run, "h")


def test_a_tree_is_drawn_to_scale(run):
    found = tree_picture(run, "g/2")
    rows = [tuple(each.values()) for each in found["segments"]]
    assert rows == [
        (-1, 0, 1, 0, 2, [0, 0, 0]),
        (0, 1, 2, 1, 1, [0, 0, 1]),
        (0, 1, 3, 1, 1, [0, 1, 1]),
    ]
    assert found["reuse_factor"] == (3 + 4) / 6
    whole = tree_picture(run, group="g")
    assert sum(each["length"] for each in whole["segments"]) == whole["num_tokens"] == 9
    assert [each["calls"] for each in whole["segments"]] == [4, 3, 2, 1, 1, 1, 1]


def test_a_request_without_a_trajectory_has_no_path(run):
    bare = result(3, None)
    bare = rt.RolloutResult(bare.request, (), rt.ErrorRecord("Oops", "m", "t", "setup"), 1)
    run.add_rollouts(encode_result(bare))
    member = group_tree(run, "g")["members"][3]
    assert (member["path"], member["reward"], member["error_type"]) == ([], None, "Oops")


@pytest.mark.parametrize("name", ["train", "agents", "tools"])
def test_segments_hold_every_token_of_a_real_run(tmp_path, name):
    path = unpack(f"4/{name}", tmp_path / "run")
    with rt.read_run(path) as data:
        groups = dict.fromkeys(row["group_id"] for row in data.rollouts().rows())
        for group in list(groups)[:4]:
            found, drawn = group_tree(data.run, group), tree_picture(data.run, group=group)
            assert len(found["segments"]) == len(drawn["segments"])
            assert sum(s["num_tokens"] for s in found["segments"]) == drawn["num_tokens"]
            for member in found["members"]:
                for call in member["calls"]:
                    at, length = call["segment"], 0
                    while at >= 0:
                        assert at in member["path"]
                        length += found["segments"][at]["num_tokens"]
                        at = found["segments"][at]["parent"]
                    assert length == call["num_prompt_tokens"] + call["num_completion_tokens"]


# -- the token lens --------------------------------------------------------------------------------


def test_the_lens_says_what_each_token_was_paid(tmp_path):
    with Run.create(tmp_path / "run", kind="train", config={"model": "none"}) as run:
        turns = (step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6], turn=1))
        run.add_rollouts(encode_result(result(0, 1.0, *turns)))
        run.add_step(4, {}, trained=[trained(0, [2, 2, 1], [2, 1])])
        found = token_lens(run, "g/0", call=1, offset=2, limit=4)
    assert found["ids"] == [3, 4, 5, 6]
    assert found["author"] == ["model", "model", "environment", "model"]
    assert found["is_sampled"] == [False, False, False, True]
    assert found["sampled_in"] == [0, 0, None, 1]
    assert found["logprob"] == [-0.5, -0.5, None, -1.0]
    assert found["advantage"] == [2.0, 2.0, None, 1.0]
    assert found["difference"] == [-0.25, -0.25, None, 0.25]
    assert found["version"] == [3, 3, None, 3]
    assert found["kl"] is found["texts"] is None
    assert (found["num_tokens"], found["num_prompt_tokens"]) == (6, 5)


def test_the_lens_has_the_numbers_of_the_table(tmp_path):
    path = unpack("4/train", tmp_path / "run")
    with rt.read_run(path) as data:
        row = next(r for r in data.rollouts(phase="train").rows() if r["num_calls"] > 2)
        name = {"request_id": row["request_id"]}
        rows = [r for r in data.tokens(full=True, **name).rows() if r["call"] == 2]
        found = token_lens(data.run, row["request_id"], call=2)
    assert found["ids"] == [r["token_id"] for r in rows]
    assert found["author"] == [r["author"] for r in rows]
    assert found["sampled_in"] == [r["sampled_in"] for r in rows]
    for index, r in enumerate(rows):
        if r["is_sampled"]:
            for name in ("logprob", "advantage", "trainer_logprob", "entropy", "version"):
                assert found[name][index] == r[name]
            assert found["loss_weight"][index] == r["loss_weight"]


def test_breaks_show_both_sides(run):
    (found,) = token_lens(run, "g/2", call=1)["breaks"]
    assert (found["call"], found["position"], found["previous_after"]) == (1, 1, None)
    assert found["num_common"] == 1
    byte_level(run.path / "model")
    (found,) = token_lens(run, "g/2", call=1)["breaks"]
    assert found["common_text"] == "b"
    assert (found["previous_after"], found["current_after"]) == ("cg", "ji")
    pieces = group_tree(run, "g")["segments"][6]["pieces"]
    assert [tuple(each.values()) for each in pieces] == [("environment", "ji"), ("model", "g")]
    assert token_lens(run, "g/2", call=0)["breaks"] == []


def test_an_unknown_rollout_or_call_is_named(run):
    with pytest.raises(UnknownName, match="no rollout 'x'"):
        token_lens(run, "x")
    with pytest.raises(UnknownName, match=r"no tokens of a call 7; .* \[0, 1\]"):
        token_lens(run, "g/2", call=7)


def byte_level(folder):
    """A tokenizer: 0 is "a", 1 is "b", ...; then a piece of a character, and a special token."""
    folder.mkdir(exist_ok=True)
    words = [*"abcdefghijĠÃ©"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    made.add_special_tokens(["<|é|>"])
    made.save(str(folder / "tokenizer.json"))


def test_pieces_are_bytes(tmp_path):
    byte_level(tmp_path / "model")
    found = RunTokenizer(tmp_path / "model")
    texts, spelled = found.pieces(np.array([0, 10, 11, 12, 13, 99], np.int32))
    assert spelled == ["61", "20", "c3", "a9", "<|é|>".encode().hex(), ""]
    assert texts == ["a", " ", "�", "�", "<|é|>", ""]


def test_sentencepiece_writes_bytes_and_spaces_otherwise(tmp_path):
    made = Tokenizer(models.BPE({"▁a": 0, "<0xC3>": 1}, []))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    made.save(str(tmp_path / "tokenizer.json"))
    assert RunTokenizer(tmp_path).pieces(np.array([0, 1]))[1] == ["2061", "c3"]


def test_a_run_without_a_tokenizer_has_none(run):
    assert local_tokenizer(run) is None
    (run.path / "model").mkdir()
    (run.path / "model" / "tokenizer.json").write_text("{}")
    assert token_lens(run, "g/0")["texts"] is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "sparse"])
def test_a_tokenizer_is_read_from_bounded_files(name, kind, tmp_path):
    byte_level(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**40)
    if name == "tokenizer.json":
        with pytest.raises(ConfigError, match="not a tokenizer that can be read"):
            RunTokenizer(tmp_path)
    else:
        assert RunTokenizer(tmp_path).decode([0]) == "a"


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"run": {"dir": "runs/book/run"}, "model": {"name": "runs/book/warm"}}, True),
        ({"run": {"dir": "/home/a/book/run"}, "model": {"name": "/home/a/book/warm"}}, True),
        ({"run": {"dir": "/home/a/book/run"}, "model": {"name": "runs/book/warm"}}, False),
        ({"run": {"dir": "runs/run"}, "model": {"name": "models/warm"}}, False),
        ({"model": {"name": "runs/book/warm"}}, False),
    ],
)
def test_a_model_that_was_moved_with_its_run_is_found(tmp_path, told, found):
    byte_level(tmp_path / "warm")
    with Run.create(tmp_path / "run", kind="train", config=told) as run:
        shown = local_tokenizer(run)
        assert (shown is not None) == found
        if shown is not None:
            assert shown.folder == tmp_path / "warm"


def test_200_000_tokens_take_half_a_second(tmp_path):
    with Run.create(tmp_path / "run", kind="train", config={"model": "none"}) as run:
        byte_level(run.path / "model")
        ids = (np.arange(200_000) % 10).astype(np.int32)
        run.add_rollouts(encode_result(result(0, 1.0, step(ids[:100_000], ids[100_000:].tolist()))))
        token_lens(run, "g/0", limit=1)
        began = time.process_time()
        found = token_lens(run, "g/0")
        taken = time.process_time() - began
    assert len(found["texts"]) == 200_000
    assert taken < 0.5  # measured: 0.08


# -- one rollout to read ---------------------------------------------------------------------------


def test_a_rollout_says_where_its_time_went(tmp_path):
    path = unpack("4/tools", tmp_path / "run")
    with rt.read_run(path) as data:
        found = rollout_view(data.run, "eval/tool_calls/0/0")
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    said = [(m["role"], m["call"], len(m["tool_calls"])) for m in found["messages"]]
    assert said == [
        ("system", None, 0),
        ("user", None, 0),
        ("assistant", 0, 1),
        ("tool", None, 0),
        ("assistant", 1, 1),
        ("tool", None, 0),
        ("assistant", 2, 0),
    ]
    call = found["messages"][2]["tool_calls"][0]
    assert (call["name"], call["arguments"]) == ("price", '{"item": "clock"}')
    assert found["rewards"]["metrics"]["total_tool_calls"] == 2.0
    timing, calls = found["timing"], found["calls"]
    assert timing["server_ms"] == pytest.approx(sum(each["time_ms"] for each in calls))
    assert timing["server_ms"] + timing["own_ms"] == pytest.approx(timing["generation_ms"])
    own = calls[1]["sent_ms"] - calls[0]["sent_ms"] - calls[0]["time_ms"]
    assert calls[1]["own_ms"] == pytest.approx(own)
    assert [each["call"] for each in found["breaks"]] == [1, 2]
    (error,) = tool_errors({"tool_errors": [{"tool": "price", "type": "ToolTimeLimit"}]})
    assert (error["tool"], error["message"]) == ("price", "")


def test_a_failed_rollout_has_its_traceback(tmp_path):
    with rt.read_run(unpack("4/train", tmp_path / "run")) as data:
        found = rollout_view(data.run, "eval_before/letters/3/0")
    assert found["rollout"]["reward"] is None
    assert "the letter box is stuck" in found["errors"][0]["traceback"]
    assert found["messages"][-1]["call"] == 0


def test_times_that_nobody_noted_are_not_zero(run):
    found = rollout_view(run, "g/0")
    assert found["timing"]["server_ms"] is found["calls"][0]["own_ms"] is None
