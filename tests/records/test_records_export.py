"""Exports are loaded by the programs that they are for, and trained on."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import datetime

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from test_records_tables import TWO_TURNS, result

import rolltree as rt
from rolltree.cli import app
from rolltree.rollouts.record import encode_result
from rolltree.store import Run, StoredRollout
from rolltree.values.errors import ConfigError, UnknownName
from step_kit import answer


def add(run, request_id, *steps, group="g", **state):
    (row,) = encode_result(result(request_id, *steps, **state))
    run.add_rollouts([replace(row, group_id=group)])


@pytest.fixture
def path(tmp_path):
    with Run.create(tmp_path / "run", kind="eval", config={"model": "tiny", "env": "sums"}) as run:
        add(run, "a", *TWO_TURNS, reward=1.0)
        add(run, "b", *TWO_TURNS, reward=1.0)
        add(run, "c", answer([1, 2], [3]), reward=0.0)
        add(
            run,
            "d",
            answer([1], [2]),
            answer([7], [8, 9], logprobs=[-1, -1]),
            reward=0.5,
            group="h",
        )
        add(run, "e", reward=None, group="h")
        error = rt.ErrorRecord(type="ToolError", message="no", traceback="", phase="environment")
        add(run, "f", answer([1], [2]), reward=2.0, error=error, group="h")
    return tmp_path / "run"


def sft(path, **choice):
    with rt.read_run(path) as data:
        return list(data.sft(**choice).rows())


class TestSupervised:
    def test_exact_ids_and_labels_by_hand(self, path):
        (row,) = sft(path, where="request_id = a")
        assert row["input_ids"] == [1, 2, 3, 4, 5, 6]
        assert row["labels"] == [-100, -100, 3, 4, -100, 6]
        assert row["loss_mask"] == [0, 0, 1, 1, 0, 1]
        assert (row["reward"], row["example_id"], row["sample"]) == (1.0, "7", 0)
        assert [each["role"] for each in row["messages"]] == ["user", "assistant"]

    def test_a_break_begins_another_row_and_no_token_is_there_twice(self, path):
        rows = sft(path, request_id="d")
        assert [(row["sample"], row["input_ids"], row["labels"]) for row in rows] == [
            (0, [1, 2], [-100, 2]),
            (1, [7, 8, 9], [-100, 8, 9]),
        ]

    def test_chosen_by_reward(self, path):
        def chosen(**choice):
            return "".join(dict.fromkeys(row["request_id"] for row in sft(path, **choice)))

        assert chosen() == "abcd"  # neither what failed nor what nothing scored
        assert chosen(min_reward=0.5) == "abd"
        assert chosen(best_of_group=True) == "ad"
        assert chosen(best_of_group=True, min_reward=0.75) == "a"
        assert chosen(min_reward=9.0) == chosen(best_of_group=True, min_reward=9.0) == ""
        assert chosen(sort="reward") == "cdab"

    def test_masked_tokens_are_not_learned(self, tmp_path):
        step = answer([1], [2, 3, 4], logprobs=[-1, -1, -1])
        step["tokens"]["completion_mask"] = [1, 0, 1]
        with Run.create(tmp_path / "r") as run:
            add(run, "a", step, reward=1.0)
        (row,) = sft(tmp_path / "r")
        assert row["labels"] == [-100, 2, -100, 4]

    def test_each_sampled_token_of_a_real_run_is_learned_once(self, tmp_path, played):
        rows = sft(played)
        with rt.read_run(played) as data:
            sampled = sorted(row["token_id"] for row in data.tokens().rows() if row["is_sampled"])
        learned = sorted(label for row in rows for label in row["labels"] if label != -100)
        assert learned == sampled
        assert len(sampled) > 20

    def test_training_on_it_raises_the_probability_of_what_was_said(self, path):
        pytest.importorskip("torch")
        rows = sft(path, min_reward=0.5)

        def conversation(row):
            ids, mask = row["input_ids"], np.array([*row["loss_mask"], 0])
            edges = np.flatnonzero(np.diff(np.concatenate([[0], mask])))
            return [(ids[:low], ids[low:high]) for low, high in edges.reshape(-1, 2)]

        states = rt.supervised_states(conversation(row) for row in rows)
        samples = rt.build_samples(states, "tree").samples
        assert sum(len(sample.records) for sample in samples) == sum(
            sum(row["loss_mask"]) for row in rows
        )
        model, _ = rt.load_model("tiny")
        config = rt.load_train_config(
            {"model": {"name": "tiny"}, "env": {"id": "none"}, "algorithm": {"name": "sft"},
             "optim": {"lr": 1e-2}},
        )  # fmt: skip
        worker = rt.Trainer(model, config)
        losses = [worker.step(samples, step)["train/loss"] for step in range(1, 4)]
        assert losses[2] < losses[1] < losses[0]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A run of whole conversations in an environment of two turns."""

    class Twice(rt.MultiTurnEnv):
        async def env_response(self, messages, state):
            return [{"role": "user", "content": "again"}]

    async def length(completion):
        return float(len(completion[-1]["content"]) > 2)

    env = Twice(
        dataset=[{"question": f"{n} + 1 =", "answer": "x"} for n in range(4)],
        rubric=rt.Rubric([length]),
        max_turns=2,
        env_id="twice",
    )
    client = rt.ScriptedClient(lambda messages: f"{len(messages)} it is")
    path = tmp_path_factory.mktemp("played") / "run"
    with Run.create(path, kind="eval", config={"model": "tiny"}) as run:
        rt.evaluate(env, client, num_examples=4, rollouts_per_example=2, run=run)
    return path


class TestFiles:
    def test_hugging_face_loads_the_folders(self, path, tmp_path):
        datasets = pytest.importorskip("datasets")
        assert rt.export_run(path, tmp_path / "sft", "sft", best_of_group=True) == 3
        assert rt.export_run(path, tmp_path / "all", "dataset") == 6
        cache = str(tmp_path / "cache")
        learned = datasets.load_dataset(str(tmp_path / "sft"), split="train", cache_dir=cache)
        assert learned["input_ids"][0] == [1, 2, 3, 4, 5, 6]
        assert learned["labels"][0] == [-100, -100, 3, 4, -100, 6]
        (file,) = (tmp_path / "all").glob("data/*.parquet")
        whole = pq.read_table(file).to_pylist()
        assert [row["reward"] for row in whole[:2]] == [1.0, 1.0]
        assert whole[0]["prompt"][0]["content"] == "?"
        assert "| `reward` | float64 |" in (tmp_path / "all" / "README.md").read_text()
        with pytest.raises(ConfigError, match="exists already"):
            rt.export_run(path, tmp_path / "all", "dataset")

    def test_one_file(self, path, tmp_path):
        assert rt.export_run(path, tmp_path / "sft.jsonl", "sft", min_reward=1.0) == 2
        lines = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
        assert [line["request_id"] for line in lines] == ["a", "b"]
        assert lines[0]["messages"][0] == {"role": "user", "content": "?"}

    def test_messages_keep_tool_calls_parts_and_unknown_keys(self):
        from rolltree.records.conversations import message_rows

        given = [
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "weight": 2},
            {
                "role": "assistant", "content": None, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
                ],
            },
        ]  # fmt: skip
        first, second = message_rows(given, "user")
        assert json.loads(first["content"]) == [{"type": "text", "text": "hi"}]
        assert json.loads(first["extra"]) == {"weight": 2}
        assert second["tool_calls"] == given[1]["tool_calls"]
        assert "content" not in second
        assert message_rows("half \ud800", "assistant") == [
            {"role": "assistant", "content": "half \\ud800"}
        ]

    def test_results_are_those_of_an_evaluation(self, played, tmp_path):
        assert rt.export_run(played, tmp_path / "out", "results") == 8
        text = (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        assert len(lines) == 8
        assert {"prompt", "completion", "reward", "answer", "length"} <= lines[0].keys()
        metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
        assert (metadata["env_id"], metadata["rollouts_per_example"]) == ("twice", 2)
        mean = sum(line["reward"] for line in lines) / 8
        assert metadata["avg_reward"] == pytest.approx(mean)
        with Run.open(played, mode="r") as run:
            rows = {(row.example_id, row.total_ms): row for row in run.rollouts()}
        for line in lines:  # each rollout's own times
            row = rows[line["example_id"], line["total_ms"]]
            assert line["generation_ms"] == row.generation_ms > 0
            assert line["total_ms"] == row.generation_ms + line["scoring_ms"]

    def test_results_have_the_date_and_time_of_the_run_and_not_of_the_export(self, tmp_path):
        """Two starts of 3 and 2 seconds, a day apart, on a day long gone."""
        day, noon = 86_400.0, 1_700_000_000.0
        spans = [(0.0, 2.0), (1.0, 3.0), (day, day + 1.5), (day + 1.0, day + 2.0)]
        with Run.create(tmp_path / "run", kind="eval") as run:
            for number, (start, end) in enumerate(spans):
                timing = {"start_time": noon + start, "total_ms": 1e3 * (end - start)}
                (row,) = encode_result(result(str(number), *TWO_TURNS, reward=1.0, timing=timing))
                run.add_rollouts([replace(row, created_at=noon + end)])
        rt.export_run(tmp_path / "run", tmp_path / "out", "results")
        metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
        assert datetime.fromisoformat(metadata["date"]).timestamp() == noon + day + 2.0
        assert metadata["time_ms"] == pytest.approx(5_000.0)

    def test_what_is_whole_of_a_damaged_run_is_written(self, path, tmp_path):
        with closing(sqlite3.connect(path / "run.db")) as raw, raw:
            raw.execute("UPDATE rollouts SET reward = 9 WHERE request_id = 'b'")
        said = invoke("export", path, tmp_path / "x.jsonl", status=1)
        assert "5 rollouts are in" in said
        assert "rollout 'b' (row 2) differs" in said
        assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 5
        assert "is damaged" in invoke("export", path, tmp_path / "y", "--as", "sft", status=1)

    def test_what_does_not_belong_together_is_refused(self, path, tmp_path):
        with pytest.raises(UnknownName, match="Did you mean 'dataset'"):
            rt.export_run(path, tmp_path / "x", "datasets")
        with pytest.raises(ConfigError, match="kind 'sft' only"):
            rt.export_run(path, tmp_path / "x", "dataset", min_reward=1.0)
        with pytest.raises(ConfigError, match="whole phase"):
            rt.export_run(path, tmp_path / "x", "results", where="reward > 0")
        with pytest.raises(UnknownName, match="Did you mean 'eval'"):
            rt.export_run(path, tmp_path / "x", "results", phase="evil")
        assert not (tmp_path / "x").exists()


def invoke(*words, status=0):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == status, (done.output, done.exception)
    return done.stdout if status == 0 else done.stderr


class TestCommands:
    def test_the_tables_are_listed(self, path):
        out = invoke("data", path)
        assert all(name in out for name in ("rollouts", "tokens", "trainer_logprob"))
        listed = json.loads(invoke("data", path, "--json"))
        assert listed["steps"][0]["name"] == "step"

    def test_a_table_in_the_terminal(self, path):
        out = invoke("data", path, "rollouts", "-c", "request_id,reward", "--sort", "-reward")
        assert [line.split() for line in out.splitlines()] == [
            ["request_id", "reward"], ["f", "2"], ["a", "1"], ["b", "1"], ["d", "0.5"], ["c", "0"],
            ["e", "-"],
        ]  # fmt: skip
        assert "more rows" in invoke("data", path, "tokens", "-n", 3)
        assert "no rows" in invoke("data", path, "steps")

    def test_a_pipe_gets_whole_keys_and_a_terminal_too(self, tmp_path, monkeypatch):
        name = "train/000012/" + "g" * 90 + "/7"
        with Run.create(tmp_path / "run") as run:
            run.add_rollouts([StoredRollout(request_id=name, group_id=name[:-2], task="t" * 60)])
        words = ("data", tmp_path / "run", "rollouts", "-c", "request_id,group_id,task,reward")
        monkeypatch.setenv("COLUMNS", "60")
        row = invoke(*words).splitlines()[1]
        assert row.split() == [name, name[:-2], "t" * 60, "-"]
        monkeypatch.setattr("rolltree.insight.reports.data.SafeConsole.is_terminal", True)
        lines = [line.split() for line in invoke(*words).splitlines()[1:]]
        assert "".join(line[0] for line in lines if line[0] not in "t-").startswith(name[:60])
        assert max(map(len, invoke(*words).splitlines()[1:])) <= 60

    def test_every_format_says_the_same(self, path, tmp_path):
        words = ("data", path, "tokens", "--where", "reward = 1")
        rows = [json.loads(line) for line in invoke(*words, "--format", "jsonl").splitlines()]
        assert len(rows) == 12
        assert json.loads(invoke(*words, "--json"))["rows"] == rows
        assert len(invoke(*words, "--format", "csv").splitlines()) == 13
        assert "wrote 5 rows" in invoke(*words, "-n", 5, "-o", tmp_path / "x.jsonl")
        lines = (tmp_path / "x.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows[:5]

    def test_hostile_text_does_not_reach_the_terminal(self, tmp_path):
        with Run.create(tmp_path / "r") as run:
            add(run, "\x1b[31mred", *TWO_TURNS, reward=1.0, metrics={"a\x1b": 1})
        for form in ("table", "jsonl", "csv", "json"):
            assert "\x1b" not in invoke("data", tmp_path / "r", "rollouts", "--format", form)
        assert "\x1b" not in invoke("data", tmp_path / "r")

    def test_export_of_each_kind(self, path, tmp_path):
        assert "wrote 6 rollouts" in invoke("export", path, tmp_path / "a.jsonl")
        assert "wrote 3 rows" in invoke(
            "export", path, tmp_path / "b", "--as", "sft", "--best-of-group"
        )
        told = invoke("export", path, tmp_path / "c", "--as", "results", "--json")
        assert json.loads(told)["num_rows"] == 6
        invoke("export", path, tmp_path / "d.parquet", "--as", "dataset", "--where", "reward > 0")

    @pytest.mark.parametrize(
        ("words", "name"),
        [
            (("export", "--as", "rollouts"), "a.jsonl"),
            (("export", "--as", "rollouts"), "a.py"),
            (("export", "--as", "results"), "results.jsonl"),
            (("export", "--as", "results"), "metadata.json"),
            (("export", "--as", "dataset"), "a.csv"),
            (("export", "--as", "sft"), "a.jsonl"),
            (("export", "--as", "sft"), "a.parquet"),
            (("data", "rollouts", "-o"), "a.arrow"),
            (("view", "--export"), "a.html"),
        ],
    )
    def test_only_an_earlier_export_is_replaced(self, path, tmp_path, words, name):
        target = tmp_path / "out" / name
        target.parent.mkdir()
        given = target.parent if "results" in words else target
        command, *flags = words
        ask = [command, path, *flags, given] if command != "export" else [*words, path, given]
        for foreign in ("print('mine')\n", '{"prompt": "mine"}\n', "\x80"):
            target.write_bytes(foreign.encode("latin-1"))
            assert "not an earlier export" in invoke(*ask, status=2)
            assert target.read_bytes() == foreign.encode("latin-1")
        target.write_bytes(b"")
        for _ in range(2):
            invoke(*ask)
        assert target.stat().st_size

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("token",), "Did you mean 'tokens'"),
            (("rollouts", "-c", "rewrd"), "Did you mean 'reward'"),
            (("rollouts", "--where", "rewrd < 1"), "Did you mean 'reward'"),
            (("rollouts", "--where", ""), "cannot be read"),
            (("rollouts", "--sort", ""), "cannot be sorted by ''"),
            (("rollouts", "--format", "jsn"), "Did you mean 'json"),
            (("steps", "--phase", "x"), "would do nothing"),
            (("-n", "3"), "name a table"),
            (("rollouts", "--full"), "'full'"),
            (("rollouts", "-o", "x.xlsx"), ".parquet"),
        ],
    )
    def test_mistakes_end_with_2_and_one_message(self, path, words, said):
        assert said in invoke("data", path, *words, status=2)
