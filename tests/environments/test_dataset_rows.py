import json
import sys

import pytest
from env_scripts import ROWS, Echo, single, user
from hypothesis import given
from hypothesis import strategies as st

from rolltree.environments import Rows
from rolltree.environments.dataset import RowFormat
from rolltree.values.errors import ConfigError

SYSTEM = {"role": "system", "content": "be brief"}
SHOT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def first(rows, **settings):
    return single(dataset=rows, **settings).dataset[0]


# Prompts


def test_a_question_becomes_a_prompt():
    row = first([{"question": "2+2", "answer": "4"}])
    assert row["prompt"] == user("2+2")
    assert (row["answer"], row["example_id"], row["task"]) == ("4", 0, "default")


def test_system_prompt_and_few_shot_come_first():
    row = first([{"question": "2+2"}], system_prompt="be brief", few_shot=SHOT)
    assert row["prompt"] == [SYSTEM, *SHOT, *user("2+2")]


def test_a_prompt_column_is_kept_and_gets_the_system_prompt():
    row = first([{"prompt": user("hi")}], system_prompt="be brief")
    assert row["prompt"] == [SYSTEM, *user("hi")]


def test_the_rows_own_system_message_wins():
    own = {"role": "system", "content": "own"}
    row = first([{"prompt": [own, *user("hi")]}], system_prompt="be brief", few_shot=SHOT)
    assert row["prompt"] == [own, *SHOT, *user("hi")]


def test_a_prompt_string_is_a_users_message_in_chat():
    assert first([{"prompt": "hi"}])["prompt"] == user("hi")


def test_other_columns_can_be_the_question_and_the_answer():
    row = first(
        [{"problem": "2+2", "solution": "4"}], question_key="problem", answer_key="solution"
    )
    assert (row["prompt"], row["answer"]) == (user("2+2"), "4")


def test_rows_keep_their_id_task_and_columns():
    row = first([{"question": "q", "example_id": 9, "task": "sums", "level": 3}])
    assert (row["example_id"], row["task"], row["level"]) == (9, "sums", 3)


def test_a_row_without_a_question_is_an_error():
    with pytest.raises(ConfigError, match="'text'"):
        first([{"text": "q"}])


def test_messages_filled_with_none_by_arrow_are_cleaned():
    prompt = [{"role": "assistant", "content": None, "tool_calls": [1], "name": None}]
    cleaned = first([{"prompt": prompt}])["prompt"]
    assert cleaned == [{"role": "assistant", "content": None, "tool_calls": [1]}]


def test_completion_prompts_are_strings():
    assert RowFormat(message_type="completion")({"prompt": "p"}, 0)["prompt"] == "p"
    with pytest.raises(ConfigError, match="row 3"):
        RowFormat(message_type="completion")({"prompt": user("p")}, 3)


@pytest.mark.parametrize("bad", [{"system_prompt": "s"}, {"few_shot": SHOT}])
def test_completion_prompts_have_no_place_for_messages(bad):
    with pytest.raises(ConfigError, match="completion"):
        single(message_type="completion", **bad)


def test_the_rows_given_are_not_changed():
    rows = [{"prompt": user("hi"), "info": {"a": 1}}]
    before = json.dumps(rows)
    env = single(dataset=rows, system_prompt="s")
    env.dataset[0]["prompt"].append("x")
    env.example("train", 0)["task"] = "changed"
    assert json.dumps(rows) == before


# Rows as a sequence


def make(num=10):
    return single(dataset=[{"question": str(i), "answer": str(i)} for i in range(num)]).dataset


def test_rows_behave_like_a_sequence():
    rows = make()
    assert len(rows) == 10
    assert rows[-1]["answer"] == "9"
    assert [row["answer"] for row in rows[2:4]] == ["2", "3"]
    assert rows["answer"][:3] == ["0", "1", "2"]
    assert rows.column_names == ["question", "answer", "prompt", "example_id", "task"]
    assert [row["answer"] for row in rows.select([5, 1])] == ["5", "1"]
    assert rows.to_list()[3] == rows[3]
    with pytest.raises(IndexError):
        rows[10]


@given(st.integers(1, 30), st.integers(0, 100))
def test_shuffling_is_a_permutation_that_the_seed_decides(num, seed):
    rows = make(num)
    shuffled = rows.shuffle(seed)
    assert sorted(shuffled["example_id"]) == list(range(num))
    assert shuffled["example_id"] == rows.shuffle(seed)["example_id"]
    assert rows["example_id"] == list(range(num))  # nobody else sees the shuffle


def test_get_dataset_shuffles_a_copy():
    env = single(dataset=[{"question": str(i)} for i in range(20)])
    shuffled = env.get_dataset(5, seed=1)
    assert len(shuffled) == 5
    assert shuffled["example_id"] != list(range(5))
    assert env.get_dataset()["example_id"] == list(range(20))
    assert len(env.get_dataset(99)) == 20


def test_slices_of_slices_keep_the_example_ids():
    rows = make(10)[4:].shuffle(3)[1:4]
    assert [str(row["example_id"]) for row in rows] == rows["answer"]


# Splits


def test_evaluation_falls_back_to_the_training_rows():
    env = single()
    assert env.eval_dataset is None
    assert env.get_eval_dataset(2)["answer"] == ["one", "two"]
    assert env.num_examples("eval") == env.num_examples("train") == 3


def test_an_environment_may_have_evaluation_data_only():
    env = single(dataset=None, eval_dataset=ROWS[:2])
    assert env.num_examples("eval") == 2
    assert env.example("eval", 1)["answer"] == "two"
    with pytest.raises(ConfigError, match="evaluation data only"):
        env.num_examples("train")


def test_splits_are_separate():
    env = single(eval_dataset=[{"question": "held out", "answer": "x"}])
    assert (env.num_examples("train"), env.num_examples("eval")) == (3, 1)
    assert env.example("eval", 0)["prompt"] == user("held out")
    assert set(env.example("train", 0)) == {*ROWS[0], "prompt", "example_id", "task"}


def test_no_data_is_an_error():
    with pytest.raises(ConfigError, match="neither dataset nor eval_dataset"):
        Echo(dataset=None)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([], "no rows"),
        ({"train": [1]}, "choose a split"),
        (7, "list of dicts"),
        ((row for row in ROWS), "list of dicts"),
    ],
)
def test_what_is_no_data_set(data, match):
    with pytest.raises(ConfigError, match=match):
        single(dataset=data)


# Files


def test_json_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a\\u2028b", "answer": "1"}\n\n{"question": "c"}\n')
    rows = single(dataset=path).dataset
    assert len(rows) == 2
    assert rows[0]["prompt"] == user("a\u2028b")
    assert len(single(dataset=str(path)).dataset) == 2


@pytest.mark.parametrize(
    ("text", "match"), [('{"a": 1}\n{bad', "line 2"), ("[1, 2]", "line 1"), ("", "no rows")]
)
def test_bad_json_lines(tmp_path, text, match):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        single(dataset=path)


@pytest.mark.parametrize("name", ["missing.jsonl", "rows.csv"])
def test_files_that_cannot_be_read(tmp_path, name):
    with pytest.raises(ConfigError):
        single(dataset=tmp_path / name)


def test_parquet_needs_datasets(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"rolltree\[envs\]"):
        single(dataset=path)


def test_hugging_face_datasets_and_parquet(tmp_path):
    datasets = pytest.importorskip("datasets")
    hf = datasets.Dataset.from_list(
        [
            {"prompt": user("a"), "answer": "1", "info": {"level": 1}},
            {"prompt": [SYSTEM, *user("b")], "answer": "2", "info": {"level": 2}},
        ]
    )
    env = single(dataset=hf, system_prompt="s")
    assert env.num_examples("train") == 2
    assert env.example("train", 0)["prompt"] == [{"role": "system", "content": "s"}, *user("a")]
    assert env.example("train", 1)["info"] == {"level": 2}
    assert env.dataset.shuffle(1)["answer"] in (["1", "2"], ["2", "1"])
    path = tmp_path / "rows.parquet"
    hf.to_parquet(str(path))
    assert single(dataset=path).dataset[1]["answer"] == "2"


def test_rows_pass_through():
    rows = make()
    assert Rows.of(rows, RowFormat()) is rows
    assert single(dataset=rows).dataset is rows
