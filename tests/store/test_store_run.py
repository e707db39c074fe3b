"""The run directory: what is stored comes back, once; wrong directories are refused by name."""

import json
import math
import sqlite3
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.store import Run, StoredRollout, list_runs, projection, summarize
from rolltree.store.schema import SCHEMA_VERSION
from rolltree.values.errors import ConfigError, StoreError


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run", config={"a": 1}, kind="eval") as made:
        yield made


def row(request_id="r", **fields):
    return StoredRollout(request_id=request_id, **fields)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
counts = st.integers(0, 2**40)
times = st.floats(0, 1e12)
rows_of_a_run = st.lists(
    st.deferred(lambda: stored_rollouts),
    max_size=4,
    unique_by=lambda stored: (stored.request_id, stored.trajectory_index),
)
stored_rollouts = st.builds(
    StoredRollout,
    request_id=texts,
    trajectory_index=st.integers(0, 3),
    num_trajectories=st.integers(1, 4),
    group_id=texts,
    index_in_group=counts,
    phase=texts,
    train_step=st.none() | counts,
    env_id=texts,
    example_id=st.none() | st.integers(-(2**63), 2**63 - 1) | st.sampled_from(["7", "a"]),
    task=texts,
    agent=texts,
    reward=st.none() | st.floats(allow_nan=False),
    status=st.sampled_from(["ok", "error"]),
    error_type=st.none() | texts,
    error_phase=st.none() | texts,
    stop_condition=st.none() | texts,
    is_completed=st.booleans(),
    terminated=st.booleans(),
    truncated=st.booleans(),
    truncation_reason=st.none() | texts,
    finish_reason=st.none() | texts,
    num_calls=counts,
    num_prompt_tokens=counts,
    num_completion_tokens=counts,
    num_unique_tokens=counts,
    min_version=st.none() | counts,
    max_version=st.none() | counts,
    num_attempts=counts,
    generation_ms=times,
    scoring_ms=times,
    total_ms=times,
    started_at=st.none() | times,
    created_at=times,
    metrics=st.dictionaries(texts, st.none() | st.floats(allow_nan=False), max_size=3),
    input=st.dictionaries(texts, texts | st.integers(), max_size=3),
    errors=st.lists(st.dictionaries(texts, texts.map(lambda t: t[:2]), max_size=2), max_size=2).map(
        tuple
    ),
    record=st.binary(max_size=200),
    tokens=st.binary(max_size=200),
)


class TestRollouts:
    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(
            stored_rollouts, max_size=4, unique_by=lambda r: (r.request_id, r.trajectory_index)
        )
    )
    def test_every_field_comes_back(self, tmp_path_factory, rows):
        with Run.create(tmp_path_factory.mktemp("run")) as run:
            assert run.add_rollouts(rows) == len(rows)
            assert list(run.rollouts()) == rows

    def test_the_same_row_twice_is_counted_once_and_the_first_stays(self, run):
        assert run.add_rollouts([row("a", reward=1.0), row("a", reward=2.0)]) == 1
        assert run.add_rollouts([row("a", reward=3.0), row("b", reward=4.0)]) == 1
        assert [(r.request_id, r.reward) for r in run.rollouts()] == [("a", 1.0), ("b", 4.0)]

    def test_trajectories_of_one_request_are_different_rows(self, run):
        assert run.add_rollouts([row("a", trajectory_index=i) for i in range(3)]) == 3
        assert run.finished_ids() == {"a"}

    def test_a_batch_is_all_or_nothing(self, run):
        def batch():
            yield row("a")
            yield row("b", reward="not a number")

        with pytest.raises(ValueError, match="could not convert"):
            run.add_rollouts(batch())
        with pytest.raises(StoreError, match="nothing of this batch was stored"):
            run.add_rollouts([row("a"), row("c", phase=None)])  # NOT NULL
        assert run.num_rollouts() == 0
        assert run.add_rollouts([row("a")]) == 1

    def test_filters(self, run):
        run.add_rollouts(
            [
                row("a", phase="eval", reward=1.0),
                row("b", phase="train", train_step=1),
                row("c", phase="train", train_step=2, status="error"),
            ]
        )
        ids = lambda **where: [r.request_id for r in run.rollouts(**where)]  # noqa: E731
        assert ids(phase="train") == ["b", "c"]
        assert ids(phase="train", train_step=2) == ["c"]
        assert ids(train_step=None) == ["a"]
        assert ids(request_id=["a", "c"]) == ["a", "c"]
        assert ids(request_id=[]) == []
        assert ids(limit=2) == ["a", "b"]
        assert ids(limit=0) == []
        assert run.num_rollouts(status="error") == 1
        assert run.finished_ids("train") == {"b", "c"}
        assert run.finished_ids("train", failed=False) == {"b"}

    def test_unknown_filter_names_the_nearest(self, run):
        with pytest.raises(ConfigError, match="Did you mean 'train_step'"):
            next(run.rollouts(trainstep=1))

    def test_without_blobs(self, run):
        run.add_rollouts([row("a", record=b"x" * 1000, tokens=b"y", metrics={"m": 1})])
        light = next(run.rollouts(blobs=False))
        assert (light.record, light.tokens, light.metrics) == (b"", b"", {"m": 1})

    def test_pages_do_not_lose_or_repeat(self, run):
        ids = [f"r{i}" for i in range(200)]
        run.add_rollouts(row(i) for i in ids)
        seen = []
        for stored in run.rollouts(limit=150):
            seen.append(stored.request_id)
            if len(seen) == 70:
                run.add_rollouts([row("late")])  # writing while reading
        assert seen == ids[:150]

    def test_numpy_and_odd_values(self, run):
        run.add_rollouts(
            [
                row(
                    "a",
                    reward=np.float32(0.5),
                    num_calls=np.int64(3),
                    example_id=2**70,
                    task="\ud800",
                    metrics={"x": math.nan},
                ),
                row("b", reward=math.nan, example_id="gsm8k-1"),
            ]
        )
        a, b = run.rollouts()
        assert (a.reward, a.num_calls, a.example_id, a.task) == (0.5, 3, str(2**70), "?")
        assert math.isnan(a.metrics["x"])
        assert b.reward is None  # SQL has no NaN; the record keeps it
        assert b.example_id == "gsm8k-1"

    def test_failed_requests_can_be_replaced_visibly(self, run):
        failed = row("a", status="error", error_type="ServerError", errors=({"message": "500"},))
        run.add_rollouts([failed, row("b", reward=0.0)])
        assert run.add_rollouts([row("a", reward=1.0)]) == 0
        assert run.add_rollouts([row("a", reward=1.0), row("b", reward=9.0)], replace_failed=True)
        assert {r.request_id: r.reward for r in run.rollouts()} == {"a": 1.0, "b": 0.0}
        (event,) = run.events("retried")
        assert event.data["request_id"] == "a"
        assert event.data["failed"][0]["type"] == "ServerError"
        assert event.data["cause"] == ["ServerError", "", ""]

    def test_retries_of_one_cause_are_one_event(self, tmp_path):
        """Also over several starts; another cause or place is another event."""

        def failing(name, kind="ServerError", function="good"):
            errors = ({"message": "500", "phase": "scoring"}, {"function": function})
            return row(name, status="error", error_type=kind, errors=errors)

        Run.create(tmp_path / "r").close()
        for start in range(3):
            with Run.open(tmp_path / "r") as run:
                run.add_rollouts([failing("a"), failing("b")], replace_failed=True)
                if start:
                    run.add_rollouts([failing("c", "Timeout")], replace_failed=True)
        with Run.open(tmp_path / "r") as run:
            run.add_rollouts([row("a"), row("b"), row("c")], replace_failed=True)
            same, other = run.events("retried")
        assert [each.data["times"] for each in (same, other)] == [6, 2]
        assert other.data["cause"] == ["Timeout", "scoring", "good"]
        assert same.data["last_at"] > same.data["first_at"] == same.created_at
        assert same.data["wait_s"] > 0
        assert len(same.data["failed"]) == 1

    def test_threads_share_a_run(self, run):
        def work(name):
            for i in range(20):
                run.add_rollouts([row(f"{name}{i}")])

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert run.num_rollouts() == 80


class TestSteps:
    def test_steps_and_truncation(self, run):
        for step in (1, 2, 3, 4):
            run.add_step(step, {"reward": step / 4, "kl": math.inf})
            run.add_rollouts([row(f"t{step}", phase="train", train_step=step)])
        run.add_step(4, {"reward": 9.0})
        assert [(s.step, s.metrics["reward"]) for s in run.steps()] == [
            (1, 0.25), (2, 0.5), (3, 0.75), (4, 9.0),
        ]  # fmt: skip
        assert run.steps()[0].metrics["kl"] == math.inf
        assert run.truncate_steps(3) == 1
        assert run.num_rollouts() == 4  # rollouts stay unless their phase is named
        assert run.truncate_steps(2, rollout_phases=["train"]) == 1
        assert [s.step for s in run.steps()] == [1, 2]
        assert run.finished_ids("train") == {"t1", "t2"}
        assert [(e.step, e.data) for e in run.events("truncated")] == [
            (3, {"steps": 1, "rollouts": 0}),
            (2, {"steps": 1, "rollouts": 2}),
        ]
        assert run.truncate_steps(2) == 0
        assert len(run.events()) == 2  # nothing happened, nothing is recorded


class TestDirectory:
    def test_reopen(self, tmp_path):
        with Run.create(tmp_path / "run", config={"lr": 1e-5}, kind="train") as run:
            run.set_meta("note", [1])
            run.add_event("started", {"pid": 1}, step=0)
        with Run.open(tmp_path / "run") as run:
            assert run.config == {"lr": 1e-5}
            assert run.meta["kind"] == "train"
            assert run.meta["note"] == [1]
            assert [(e.kind, e.step, e.data) for e in run.events()] == [("started", 0, {"pid": 1})]
            assert run.checkpoints == tmp_path / "run" / "checkpoints"
        assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 1e-5}

    def test_create_refuses_an_existing_run(self, run):
        path = run.path
        run.close()
        with pytest.raises(StoreError, match="already holds a run"):
            Run.create(path)
        Run.open(path).close()  # the refused attempt left no lock behind

    def test_not_a_run(self, tmp_path):
        with pytest.raises(StoreError, match=r"is not a run directory: it has no run\.db"):
            Run.open(tmp_path)
        with pytest.raises(StoreError, match="is not a run directory"):
            Run.open(tmp_path / "missing", mode="r")
        assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind

    def test_other_files_named_run_db(self, tmp_path):
        (tmp_path / "run.db").write_text("hello, this is not a database at all" * 100)
        with pytest.raises(StoreError, match="cannot be read as a run database"):
            Run.open(tmp_path, mode="r")
        (tmp_path / "run.db").unlink()
        with sqlite3.connect(tmp_path / "run.db") as other:
            other.execute("CREATE TABLE t (x)")
        other.close()
        for attempt in (Run.open, Run.create):
            with pytest.raises(StoreError, match="not one that rolltree made"):
                attempt(tmp_path)

    @pytest.mark.parametrize(("version", "word"), [(SCHEMA_VERSION + 1, "upgrade"), (0, "older")])
    def test_other_schema_versions(self, tmp_path, version, word):
        Run.create(tmp_path).close()
        with sqlite3.connect(tmp_path / "run.db") as raw:
            raw.execute(f"PRAGMA user_version = {version}")
        raw.close()
        for mode in ("r", "w"):
            with pytest.raises(StoreError, match=word):
                Run.open(tmp_path, mode=mode)

    def test_an_interrupted_creation_is_said_and_repaired(self, tmp_path):
        (tmp_path / "run.db").touch()  # SQLite makes the file before the first commit
        with pytest.raises(StoreError, match="start that command again"):
            Run.open(tmp_path)
        with Run.create(tmp_path, config={"a": 1}) as run:
            assert run.config == {"a": 1}

    def test_second_writer_is_refused_readers_are_not(self, run):
        with pytest.raises(StoreError, match=r"is being written by process \d+ on"):
            Run.open(run.path)
        with Run.open(run.path, mode="r") as reader:
            assert reader.num_rollouts() == 0
            run.add_rollouts([row("a")])
            assert reader.num_rollouts() == 1
            with pytest.raises(StoreError, match="opened for reading"):
                reader.add_rollouts([row("b")])
            with pytest.raises(StoreError, match="opened for reading"):
                reader.add_event("x")
        run.close()
        Run.open(run.path).close()

    def test_a_directory_that_cannot_be_written_can_be_read(self, run, monkeypatch):
        """On read-only media a reader cannot make SQLite's shared-memory file."""
        run.add_rollouts([row("a")])
        run.close()
        opened, connect = [], sqlite3.connect

        def watched(name, **options):
            opened.append(name)
            return connect(name, **options)

        monkeypatch.setattr(sqlite3, "connect", watched)
        monkeypatch.setattr("os.access", lambda path, mode: False)
        with Run.open(run.path, mode="r") as reader:
            assert reader.num_rollouts() == 1
        assert opened[0].endswith("?mode=ro&immutable=1")

    def test_paths_with_odd_characters(self, tmp_path):
        path = tmp_path / "a ?b#c%20d"
        with Run.create(path) as made:
            made.add_rollouts([row("a")])
        with Run.open(path, mode="r") as reader:
            assert reader.num_rollouts() == 1

    def test_closed(self, run):
        run.close()
        run.close()
        with pytest.raises(StoreError, match="closed"):
            run.num_rollouts()

    def test_open_or_create_continues_with_equal_settings_only(self, tmp_path):
        config = {"model": "m", "sampling": {"temperature": 1.0, "stop": ("a",)}, "n": 5}
        Run.open_or_create(tmp_path / "r", config=config, may_change=["n"]).close()
        with Run.open_or_create(tmp_path / "r", config={**config, "n": 9}, may_change=["n"]) as run:
            assert len(run.events("resumed")) == 1
            run.add_rollouts([row("a")])
        with Run.open_or_create(tmp_path / "r", config={**config, "n": 7}, may_change=["n"]) as run:
            assert run.config["n"] == 7  # as it is now; what it was is in the event
            assert run.events("resumed")[-1].data == {"changed": ["n was 9 and is now 7"]}
        assert json.loads((tmp_path / "r" / "config.json").read_text())["n"] == 7
        other = {**config, "sampling": {"temperature": 0.5, "stop": ("a",)}, "extra": 1}
        with pytest.raises(ConfigError) as caught:
            Run.open_or_create(tmp_path / "r", config=other, may_change=["n"])
        assert "extra was not set and is now 1" in str(caught.value)
        assert "sampling.temperature was 1.0 and is now 0.5" in str(caught.value)
        assert str(caught.value).endswith("config.json.")
        Run.open(tmp_path / "r").close()  # refused without leaving the lock

    @pytest.mark.parametrize("bind", [False, True])
    def test_settings_bind_with_the_first_rollout_or_step(self, tmp_path, bind):
        with Run.open_or_create(tmp_path / "r", config={"model": "tinyy"}, kind="eval") as run:
            run.add_event("notice")
            if bind:
                run.add_step(1, {})
            assert run.is_bound == bind
        if bind:
            with pytest.raises(ConfigError, match=r"model was 'tinyy'.* Do that\.$"):
                Run.open_or_create(tmp_path / "r", config={"model": "tiny"}, advice="Do that.")
            return
        with Run.open_or_create(tmp_path / "r", config={"model": "tiny"}, kind="train") as run:
            assert (run.config, run.meta["kind"]) == ({"model": "tiny"}, "train")
        assert json.loads((tmp_path / "r" / "config.json").read_text()) == {"model": "tiny"}

    @pytest.mark.parametrize("levels", [101, 150, 5000])
    def test_settings_that_would_not_come_back_equal_are_refused(self, tmp_path, levels):
        config = {}
        for _ in range(levels - 1):
            config = {"a": config}
        with pytest.raises(ConfigError, match="deeper than 100 levels"):
            Run.open_or_create(tmp_path / "r", config={"b": config})
        assert not (tmp_path / "r").exists()
        for _ in range(levels - 99):
            config = config["a"]
        for _ in range(2):
            with Run.open_or_create(tmp_path / "r", config={"b": config}) as run:
                assert run.config == {"b": config}

    def test_config_is_redacted_everywhere(self, tmp_path):
        config = {"client": {"api_key": "hunter2hunter2"}}
        Run.open_or_create(tmp_path / "r", config=config).close()
        Run.open_or_create(tmp_path / "r", config=config).close()  # equal after redaction
        for file in (tmp_path / "r").iterdir():
            assert b"hunter2" not in file.read_bytes()


class TestReading:
    def test_query_reads_and_only_reads(self, run):
        run.add_rollouts([row("a", reward=1.0, metrics={"len": 3}), row("b", reward=0.0)])
        assert run.query("SELECT avg(reward) AS mean FROM rollouts") == [{"mean": 0.5}]
        assert run.query(
            "SELECT json_extract(metrics, '$.len') AS n FROM rollouts WHERE request_id = ?", "a"
        ) == [{"n": 3}]
        with pytest.raises(StoreError, match="query failed"):
            run.query("DELETE FROM rollouts")
        with pytest.raises(StoreError, match="no such column"):
            run.query("SELECT x FROM rollouts")
        assert run.add_rollouts([row("c")]) == 1  # writing works again after a query

    def test_export(self, run, tmp_path):
        run.add_rollouts([row("a", reward=1.0, record=b"blob"), row("b", metrics={"x": math.nan})])
        assert run.export(tmp_path / "all.jsonl") == 2
        lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
        assert [line["request_id"] for line in lines] == ["a", "b"]
        assert lines[1]["metrics"] == {"x": None}
        assert "record" not in lines[0]
        shown = run.export(
            tmp_path / "some.jsonl", render=lambda r: {"blob": r.record.decode()}, request_id="a"
        )
        assert shown == 1
        assert (tmp_path / "some.jsonl").read_text() == '{"blob": "blob"}\n'

    def test_summaries(self, run, tmp_path):
        run.add_rollouts(
            [
                row("a", phase="eval", env_id="e", reward=1.0, num_prompt_tokens=5, truncated=True),
                row("b", phase="eval", env_id="e", status="error"),
                row("t", phase="train", env_id="e", trajectory_index=0, reward=0.5),
                row("t", phase="train", env_id="e", trajectory_index=1, reward=0.0),
            ]
        )
        run.add_step(1, {})
        summary = summarize(run)
        assert (summary.kind, summary.env_ids, summary.num_steps) == ("eval", ("e",), 1)
        evaluation, training = summary.phases
        assert (evaluation.num_requests, evaluation.num_errors, evaluation.num_truncated) == (
            2,
            1,
            1,
        )
        assert evaluation.mean_reward == 1.0  # the failed one is not a zero
        assert (training.num_requests, training.num_rollouts, training.mean_reward) == (1, 2, 0.25)
        run.add_rollouts(
            [row("t", phase="train", trajectory_index=2, parent_rollout="t/0", depth=1, reward=1)]
        )
        assert summarize(run).phases[1].mean_reward == 0.25  # what was delegated does not count
        report = {"results": {"reward": [0.75, 0.5, 0.875, "t", 2, 2]}}
        assert run.keep_report("eval", report, num_requests=2)
        evaluation = summarize(run).phases[0]
        assert (evaluation.mean_reward, evaluation.low, evaluation.high) == (0.75, 0.5, 0.875)
        run.close()
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "run.db").write_text("junk")
        assert [found.path for found in list_runs(tmp_path)] == [run.path]


class TestColumns:
    def test_columns_are_those_of_the_rows(self, tmp_path):
        with Run.create(tmp_path / "r") as run:
            rows = [
                StoredRollout(
                    request_id=f"r{n}", reward=n / 3, truncated=n % 2 == 0, metrics={"n": n}
                )
                for n in range(5)
            ]
            run.add_rollouts(rows)
            names = ("metrics", "truncated", "reward", "request_id")
            wanted = [tuple(getattr(row, name) for name in names) for row in rows]
            assert list(run.columns(names, phase="eval")) == wanted
            assert list(run.columns(names, truncated=False)) == wanted[1::2]

    def test_a_row_has_its_columns_by_name_as_a_row_in_memory_has(self, tmp_path):
        row = StoredRollout(request_id="r", reward=0.5, metrics={"n": 1})
        with Run.create(tmp_path / "r") as run:
            run.add_rollouts([row])
            (found,) = run.columns(("metrics", "reward"))
        assert (found.reward, found.metrics) == (row.reward, row.metrics)
        with pytest.raises(AttributeError):
            _ = found.num_calls  # was not asked for: no default stands for it
        assert projection(("reward", "num_calls"))(num_calls=2) == (None, 2)

    @pytest.mark.parametrize("name", ["reword", "record"])
    def test_what_is_no_light_column_is_refused(self, tmp_path, name):
        with Run.create(tmp_path / "r") as run, pytest.raises(ConfigError, match="no light column"):
            next(run.columns([name]))

    @pytest.mark.parametrize(
        ("where", "index"),
        [
            ("phase IS 'eval'", "rollouts_by_phase"),
            ("phase IS 'train' AND train_step IS 3", "rollouts_by_step"),
            ("phase IS 'train' AND train_step IS 3 AND group_id IN ('a', 'b')", "rollouts_by_"),
            ("request_id IS 'a'", "sqlite_autoindex_rollouts"),
        ],
    )
    def test_a_page_is_read_in_order_and_not_sorted(self, tmp_path, where, index):
        with Run.create(tmp_path / "r") as run:
            plan = run.query(
                f"EXPLAIN QUERY PLAN SELECT id, reward FROM rollouts WHERE id > 0 AND 1 AND {where}"
                " ORDER BY id LIMIT 64"
            )
        said = " ".join(row["detail"] for row in plan)
        assert index in said
        assert ("TEMP B-TREE" in said) == where.startswith("request_id")

    def test_a_row_is_counted_by_its_request_and_not_among_its_phase(self, tmp_path):
        """With 4,000 rows stored, 50 more take no more steps of SQLite's machine than the first."""
        steps = []
        with Run.create(tmp_path / "r") as run:
            connection = run._database._connection
            for start, num in ((0, 50), (50, 4000), (4050, 50)):
                rows = [StoredRollout(request_id=f"r{n}") for n in range(start, start + num)]
                seen = []
                connection.set_progress_handler(lambda seen=seen: seen.append(1), 100)
                run.add_rollouts(rows)
                connection.set_progress_handler(None, 0)
                steps.append(len(seen))
        assert steps[2] <= 2 * steps[0] + 10
