"""Tables of a stored run: rows against numbers worked out by hand, and the ways out of a table."""

import csv
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rolltree as rt
from rolltree.records.columns import TABLES
from rolltree.rollouts.record import encode_result
from rolltree.store import Run, StoredRollout, TrainedRollout
from rolltree.values.errors import ConfigError, StoreError, UnknownName
from step_kit import answer


def result(request_id, *steps, error=None, **state):
    request = rt.RolloutRequest(
        request_id=request_id,
        env_id="sums",
        input={"prompt": "?", "example_id": 7, "task": "adding", "answer": "4"},
        seed=0,
        sampling_seed=0,
        group_id="g",
        index_in_group=0,
        sampling=rt.SamplingParams(),
        phase=state.pop("phase", "eval"),
        train_step=state.pop("train_step", None),
    )
    made = rt.State(
        input=request.input, trajectory=rt.Trajectory(steps), error=error, completion=[], **state
    )
    return rt.RolloutResult(request, (made,), error, 1)


TWO_TURNS = (
    answer([1, 2], [3, 4], logprobs=[-0.5, -1.0], policy_version=1),
    answer([1, 2, 3, 4, 5], [6], logprobs=[-0.25], policy_version=2, turn=1),
)
REWRITTEN = (
    answer([1, 2], [3], logprobs=[-0.5]),
    answer([1, 9, 9], [3], logprobs=[-0.5], turn=1),
)


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run", kind="train", config={"model": "none"}) as made:
        yield made


@pytest.fixture
def data(run):
    run.add_rollouts(encode_result(result("a", *TWO_TURNS, reward=1.0, metrics={"right": 1.0})))
    run.add_rollouts(
        encode_result(result("b", *REWRITTEN, reward=0.5, phase="train", metrics={"tries": 2}))
    )
    run.add_step(1, {"reward/mean": 0.5, "train/loss": math.nan})
    run.add_step(2, {"reward/mean": 0.75, "note": "text"})
    with rt.read_run(run.path) as found:
        yield found


def columns(table, *names):
    return [tuple(row[name] for name in names) for row in table.rows()]


class TestTokens:
    def test_a_row_per_new_token_by_hand(self, data):
        assert columns(
            data.tokens(request_id="a"),
            *("call", "position", "token_id", "author", "sampled_in", "logprob", "version"),
        ) == [
            (0, 0, 1, "environment", None, None, None),
            (0, 1, 2, "environment", None, None, None),
            (0, 2, 3, "model", 0, -0.5, 1),
            (0, 3, 4, "model", 0, -1.0, 1),
            (1, 4, 5, "environment", None, None, None),
            (1, 5, 6, "model", 1, -0.25, 2),
        ]

    def test_a_whole_context_says_who_sampled_its_history(self, data):
        whole = data.tokens(request_id="a", full=True)
        assert columns(whole, "call", "position", "token_id", "author", "sampled_in")[4:] == [
            (1, 0, 1, "environment", None),
            (1, 1, 2, "environment", None),
            (1, 2, 3, "model", 0),
            (1, 3, 4, "model", 0),
            (1, 4, 5, "environment", None),
            (1, 5, 6, "model", 1),
        ]
        assert [row["is_sampled"] for row in whole.rows()][4:] == [False] * 5 + [True]

    def test_rewritten_history_adds_its_new_tokens_alone(self, data):
        found = columns(data.tokens(request_id="b"), "call", "position", "token_id", "is_sampled")
        assert found == [
            (0, 0, 1, False), (0, 1, 2, False), (0, 2, 3, True),
            (1, 1, 9, False), (1, 2, 9, False), (1, 3, 3, True),
        ]  # fmt: skip

    def test_what_training_knew_of_each_sampled_token(self, run):
        run.add_rollouts(encode_result(result("a", *TWO_TURNS, phase="train", train_step=4)))
        known = TrainedRollout(
            request_id="a",
            step=4,
            num_sampled=np.array([2, 1], np.int32),
            advantage=np.array([0.5, 0.5, -1.0], np.float32),
            weight=np.array([0.25, 0.25, 0.0], np.float32),
            logprob=np.array([-0.5, -1.25, math.nan], np.float32),
            entropy=np.array([1.0, 2.0, math.nan], np.float32),
        )
        run.add_step(4, {}, [known])
        names = ("token_id", "trained_step", "advantage", "loss_weight", "trainer_logprob", "kl")
        with rt.read_run(run.path) as data:
            for full in (False, True):
                rows = columns(data.tokens(full=full), "is_sampled", *names)
                assert [row[1:] for row in rows if row[0]] == [
                    (3, 4, 0.5, 0.25, -0.5, None),
                    (4, 4, 0.5, 0.25, -1.25, None),
                    (6, 4, -1.0, 0.0, None, None),
                ]
                assert {row[2:] for row in rows if not row[0]} == {(None,) * 5}

    def test_trained_tokens_of_other_calls_are_refused(self, run):
        run.add_rollouts(encode_result(result("a", *TWO_TURNS, phase="train", train_step=4)))
        one = np.ones(1, np.float32)
        wrong = TrainedRollout(
            request_id="a", step=4, num_sampled=np.array([1], np.int32),
            advantage=one, weight=one, logprob=-one, entropy=one,
        )  # fmt: skip
        run.add_step(4, {}, [wrong])
        with rt.read_run(run.path) as data, pytest.raises(StoreError, match="do not match"):
            list(data.tokens().rows())

    def test_each_sampled_token_has_one_row_also_where_two_calls_sampled_the_same(self, run):
        twice = (answer([1], [5], logprobs=[-0.5]), answer([1], [5], logprobs=[-0.5], turn=1))
        run.add_rollouts(encode_result(result("c", *twice)))
        with rt.read_run(run.path) as data:
            assert columns(data.tokens(), "call", "token_id", "is_sampled", "sampled_in") == [
                (0, 1, False, None), (0, 5, True, 0), (1, 5, True, 0),
            ]  # fmt: skip

    def test_calls_without_ids_or_logprobs(self, run):
        run.add_rollouts(
            encode_result(
                result(
                    "c",
                    {**answer([], [], logprobs=[]), "tokens": None},
                    answer([1], [2], logprobs=[]),
                )
            )
        )
        with rt.read_run(run.path) as data:
            assert columns(data.tokens(), "call", "token_id", "logprob") == [
                (1, 1, None), (1, 2, None),
            ]  # fmt: skip
            assert columns(data.calls(), "call", "num_prompt_tokens", "mean_logprob") == [
                (0, None, None), (1, 1, None),
            ]  # fmt: skip

    def test_batches_hold_whole_rollouts_and_every_row_once(self, run, monkeypatch):
        monkeypatch.setattr("rolltree.records.token_rows.BATCH_ROWS", 10)
        for number in range(9):
            run.add_rollouts(encode_result(result(str(number), *TWO_TURNS)))
        with rt.read_run(run.path) as data:
            batches = list(data.tokens().batches())
            assert [len(batch["call"]) for batch in batches] == [12, 12, 12, 12, 6]
            assert data.tokens().to_arrow().num_rows == 54


class TestOtherTables:
    def test_rollouts_have_a_column_per_metric(self, data):
        names = ("request_id", "phase", "example_id", "reward", "metrics/right", "metrics/tries")
        assert columns(data.rollouts(), *names) == [
            ("a", "eval", "7", 1.0, 1.0, None),
            ("b", "train", "7", 0.5, None, 2.0),
        ]
        assert columns(data.rollouts(phase="train"), "request_id") == [("b",)]
        (row, _) = data.rollouts().rows()
        assert json.loads(row["input"]) == {"answer": "4", "example_id": 7, "task": "adding"}

    def test_an_error_is_told(self, run):
        error = rt.ErrorRecord(
            type="ToolError", message="no \ud800 disk", phase="environment", traceback=""
        )
        run.add_rollouts(encode_result(result("c", error=error)))
        with rt.read_run(run.path) as data:
            (row,) = data.rollouts().rows()
            assert (row["status"], row["error_type"]) == ("error", "ToolError")
            assert row["error_message"] in ("no \\ud800 disk", "no ? disk")
            assert json.loads(row["errors"])[0]["phase"] == "environment"
            assert data.rollouts().to_arrow().num_rows == 1
            assert list(data.tokens().rows()) == []

    def test_steps_have_a_column_per_numeric_metric(self, data):
        assert data.steps().column_names == ["step", "created_at", "reward/mean", "train/loss"]
        assert columns(data.steps(), "step", "reward/mean", "train/loss") == [
            (1, 0.5, None), (2, 0.75, None),
        ]  # fmt: skip

    def test_calls_by_hand(self, data):
        names = (
            *("call", "turn", "num_prompt_tokens", "num_new_tokens", "num_completion_tokens"),
            *("min_version", "mean_logprob", "finish_reason"),
        )
        assert columns(data.calls(request_id="a"), *names) == [
            (0, 0, 2, 2, 2, 1, -0.75, "stop"),
            (1, 1, 5, 1, 1, 2, -0.25, "stop"),
        ]

    def test_breaks_are_those_of_interleaving(self, data):
        (found,) = data.breaks(decode=lambda ids: " ".join(map(str, ids))).rows()
        assert (found["request_id"], found["call"], found["previous_call"]) == ("b", 1, 0)
        assert (found["position"], found["previous_ids"]) == (1, [1, 2, 3])
        assert found["current_text"] == "1 9 9"
        with Run.open(data.run.path, mode="r") as run:
            from rolltree.rollouts.decode import decode_results

            states = [each.states[0] for each in decode_results(run.rollouts())]
        (expected,) = rt.build_samples(states, "interleave").breaks
        assert found["cause"] == expected.cause

    def test_evaluations_are_one_curve(self, run, data):
        for step, mean in ((8, 0.75), (0, 0.25)):
            found = {"reward": {"mean": mean, "low": 0.0, "high": 1.0}, "unit": "share"}
            run.add_event("evaluation", {"phase": f"eval/{step}", "metrics": found}, step=step)
        table = data.evaluations()
        names = ["eval/reward", "eval/reward_low", "eval/reward_high"]
        assert table.column_names == ["step", "phase", *names]
        assert columns(table, "step", "eval/reward") == [(0, 0.25), (8, 0.75)]

    def test_events_are_there(self, run, data):
        run.add_event("checkpoint", {"name": "x"}, step=2)
        assert columns(data.events(), "kind", "step", "data") == [
            ("checkpoint", 2, '{"name": "x"}')
        ]


class TestOneSchema:
    @pytest.mark.parametrize("name", TABLES)
    def test_an_empty_run_has_every_table_with_its_documented_columns(self, run, name):
        with rt.read_run(run.path) as data:
            table = data.table(name)
            assert table.column_names == [column.name for column in TABLES[name]]
            assert table.to_arrow().num_rows == 0
            assert table.to_arrow().schema.field(0).metadata[b"description"]

    def test_rollouts_have_every_light_column_of_the_store(self):
        light = {*StoredRollout.__dataclass_fields__} - {"record", "tokens", "metrics"}
        made = {"error_message", "trained_step"}
        assert {column.name for column in TABLES["rollouts"]} == light | made

    @pytest.mark.parametrize("name", TABLES)
    def test_rows_arrow_and_pandas_say_the_same(self, data, name):
        table = data.table(name)
        assert table.to_arrow().to_pylist() == list(table.rows())
        assert len(table.to_pandas()) == len(list(table.rows()))

    def test_whole_numbers_stay_whole_in_pandas(self, data):
        frame = data.tokens().to_pandas()
        assert str(frame.dtypes["version"]) == "Int32"
        assert frame[frame.is_sampled].logprob.sum() == pytest.approx(-2.75)

    def test_polars(self, data):
        polars = pytest.importorskip("polars")
        frame = data.rollouts().to_polars()
        assert isinstance(frame, polars.DataFrame)
        assert frame["reward"].to_list() == [1.0, 0.5]

    def test_duckdb(self, data):
        duckdb = pytest.importorskip("duckdb")
        with duckdb.connect() as database:
            database.register("rollouts", data.rollouts())
            database.register("tokens", data.tokens())
            asked = "SELECT request_id, sum(logprob) FROM rollouts JOIN tokens "
            asked += "USING (request_id, trajectory_index) WHERE reward > 0.9 GROUP BY 1"
            for _ in range(2):  # a table is read as often as it is asked
                (row,) = database.sql(asked).fetchall()
                assert row[0] == next(data.rollouts(where="reward > 0.9").rows())["request_id"]
        rollouts = data.rollouts()  # DuckDB finds a variable by its name
        found = duckdb.sql("SELECT reward FROM rollouts ORDER BY reward").fetchall()
        assert found == [(row["reward"],) for row in rollouts.select(["reward"]).rows()][::-1]

    def test_any_reader_of_the_c_stream_protocol(self, data):
        assert pa.table(data.tokens()).num_rows == 12
        assert pa.schema(data.tokens()).names == data.tokens().column_names

    def test_a_selection_reads_no_other_column(self, data, monkeypatch):
        asked = []
        columns = Run.columns
        monkeypatch.setattr(
            Run, "columns", lambda self, names, **where: asked.append(names) or columns(
                self, names, **where
            ),
        )  # fmt: skip
        table = data.rollouts().select(["reward", "metrics/right"])
        asked.clear()
        assert table.to_arrow().to_pydict() == {"reward": [1.0, 0.5], "metrics/right": [1.0, None]}
        assert asked == [["reward", "metrics"]]


class TestFiles:
    def test_each_format_holds_the_same(self, data, tmp_path):
        table = data.tokens()
        rows = list(table.rows())
        for suffix in (".parquet", ".arrow", ".jsonl", ".csv"):
            assert table.write(tmp_path / f"x{suffix}") == 12
        assert pq.read_table(tmp_path / "x.parquet").to_pylist() == rows
        with pa.ipc.open_file(tmp_path / "x.arrow") as file:
            assert file.read_all().to_pylist() == rows
        lines = (tmp_path / "x.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows
        with (tmp_path / "x.csv").open(encoding="utf-8", newline="") as file:
            found = list(csv.DictReader(file))
        assert [(each["token_id"], each["logprob"]) for each in found[:3]] == [
            ("1", ""), ("2", ""), ("3", "-0.5"),
        ]  # fmt: skip

    def test_a_suffix_without_a_format(self, data, tmp_path):
        with pytest.raises(ConfigError, match=r"\.parquet, \.arrow, \.jsonl, \.csv"):
            data.steps().write(tmp_path / "x.xlsx")

    def test_a_folder_that_is_not_there(self, data, tmp_path):
        for suffix in (".csv", ".parquet"):
            with pytest.raises(StoreError, match="cannot be written"):
                data.steps().write(tmp_path / "missing" / f"x{suffix}")

    def test_a_missing_package_is_named(self, data, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
        with pytest.raises(ConfigError, match=r"pip install 'rolltree\[data\]'"):
            data.steps().to_arrow()
        assert len(list(data.steps().rows())) == 2


class TestMistakes:
    def test_an_unknown_table_column_or_filter_names_the_nearest(self, data):
        with pytest.raises(UnknownName, match="Did you mean 'tokens'"):
            data.table("token")
        with pytest.raises(UnknownName, match="Did you mean 'reward'"):
            data.rollouts().select(["rewards"])
        for table in (data.rollouts, data.calls, data.tokens, data.breaks):
            with pytest.raises(ConfigError, match="Did you mean 'phase'"):
                table(phaze="eval")

    def test_no_run(self, tmp_path):
        with pytest.raises(StoreError, match="is not a run directory"):
            rt.read_run(tmp_path)

    def test_a_table_and_a_run_outlive_what_they_are_from(self, run):
        run.add_step(1, {"a": 1})
        assert [row["a"] for row in rt.read_run(run.path).steps().rows()] == [1.0]
        assert list(rt.read_run(run.path).rollouts().rows()) == []
        assert len(rt.read_run(run.path).run.steps()) == 1

    def test_a_closed_run_is_not_read(self, run):
        with rt.read_run(run.path) as data:
            table = data.rollouts()
        with pytest.raises(StoreError, match="closed"):
            list(table.rows())
