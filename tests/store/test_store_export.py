"""Export, listing and filters of real run directories."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.store import Opaque, Run, StoredRollout, list_runs, summarize, to_plain
from rolltree.values.errors import ConfigError, StoreError


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run", kind="eval") as made:
        yield made


def row(request_id, **fields):
    return StoredRollout(request_id=request_id, **fields)


def lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


class TestExport:
    def test_one_line_per_row_in_the_order_of_storing(self, run, tmp_path):
        run.add_rollouts(row(str(n), reward=n / 4, phase="ab"[n % 2]) for n in range(200))
        assert run.export(tmp_path / "x.jsonl") == 200
        found = lines(tmp_path / "x.jsonl")
        assert [line["request_id"] for line in found] == [str(n) for n in range(200)]
        assert found[3]["reward"] == 0.75
        assert run.export(tmp_path / "x.jsonl", phase="a", reward=[0.0, 0.5]) == 2
        assert [line["request_id"] for line in lines(tmp_path / "x.jsonl")] == ["0", "2"]

    def test_strict_json_for_any_reader(self, run, tmp_path):
        run.add_rollouts(
            [row("a", reward=math.inf, metrics={"nan": math.nan, 3: np.float32(0.5)}, input={
                "info": {"t": (1, 2), "s": {4}, "b": b"x", "a": np.arange(2)},
            })]
        )  # fmt: skip
        run.export(tmp_path / "x.jsonl")

        def refuse(name):
            raise AssertionError(name)

        text = (tmp_path / "x.jsonl").read_text()
        found = json.loads(text, parse_constant=refuse)
        assert found["reward"] is None
        assert found["metrics"] == {"nan": None, "3": 0.5}
        assert found["input"]["info"] == {"t": [1, 2], "s": [4], "b": "b'x'", "a": [0, 1]}

    @settings(max_examples=20, deadline=None)
    @given(st.text(st.characters(), max_size=20))
    def test_any_text_survives(self, tmp_path_factory, text):
        folder = tmp_path_factory.mktemp("run")
        with Run.create(folder) as run:
            run.add_rollouts([row("a", record=b"x")])
            run.export(folder / "x.jsonl", render=lambda _: {"said": text})
        raw = (folder / "x.jsonl").read_bytes()
        assert raw.count(b"\n") == 1
        assert json.loads(raw) == {"said": text}

    def test_letters_stay_readable(self, run, tmp_path):
        run.add_rollouts([row("a", task="Größe 🙂")])
        run.export(tmp_path / "x.jsonl")
        assert "Größe 🙂" in (tmp_path / "x.jsonl").read_text(encoding="utf-8")

    def test_an_unknown_filter_is_said_before_the_target_is_touched(self, run, tmp_path):
        run.add_rollouts([row("a")])
        with pytest.raises(ConfigError, match="Did you mean 'phase'"):
            run.export(tmp_path / "x.jsonl", phaze="eval")

    def test_a_reader_exports_while_somebody_writes(self, run, tmp_path):
        run.add_rollouts(row(str(n)) for n in range(100))
        with Run.open(run.path, mode="r") as reader:
            rows = reader.rollouts(blobs=False)
            first = next(rows)
            run.add_rollouts(row(f"late{n}") for n in range(100))
            assert first.request_id == "0"
            assert reader.export(tmp_path / "x.jsonl") == 200

    @pytest.mark.parametrize("value", [None, True, 3, 0.5, "x", [1, "a"], {"a": None}])
    def test_plain_values_are_left_alone(self, value):
        assert to_plain(value) == value

    def test_what_is_no_value_is_named(self):
        assert to_plain({"c": Opaque("docker.Client"), "p": Path("/x")}) == {
            "c": "<docker.Client>", "p": "/x",
        }  # fmt: skip


class TestFilters:
    def test_a_list_with_none_means_null_too(self, run):
        run.add_rollouts([row("a"), row("b", train_step=1), row("c", train_step=2)])
        ids = lambda **where: [r.request_id for r in run.rollouts(**where)]  # noqa: E731
        assert ids(train_step=[None, 1]) == ["a", "b"]
        assert ids(train_step=[None]) == ["a"]
        assert ids(train_step=(1, 2)) == ["b", "c"]
        assert run.num_rollouts(train_step={None, 2}) == 2
        assert ids(train_step=[None, 1], request_id="b") == ["b"]

    def test_a_page_boundary_loses_nothing(self, run):
        run.add_rollouts(row(str(n), phase="ab"[n % 2]) for n in range(260))
        assert [r.request_id for r in run.rollouts(phase="b")] == [str(n) for n in range(1, 260, 2)]
        for limit in (63, 64, 65, 128, 129, 500):
            found = [r.request_id for r in run.rollouts(limit=limit)]
            assert found == [str(n) for n in range(min(limit, 260))]

    def test_numbers_and_texts_are_different_examples(self, run):
        run.add_rollouts([row("a", example_id=7), row("b", example_id="7")])
        assert [r.request_id for r in run.rollouts(example_id=7)] == ["a"]
        assert [r.request_id for r in run.rollouts(example_id="7")] == ["b"]

    def test_values_are_never_sql(self, run):
        run.add_rollouts([row("a"), row("b")])
        assert run.num_rollouts(request_id="' OR 1 = 1 --") == 0
        with pytest.raises(ConfigError, match="cannot be filtered"):
            run.num_rollouts(**{"1 = 1 --": 1})


class TestListing:
    def make(self, path, kind="run", **fields):
        with Run.create(path, kind=kind, config={"name": path.name}) as run:
            run.add_rollouts([row("a", **fields)])

    def test_runs_at_and_below_newest_first(self, tmp_path):
        for age, name in ((30, "old"), (10, "deep/er/new"), (20, "mid")):
            self.make(tmp_path / name, created_at=2e9 - age, env_id=name)
        found = list_runs(tmp_path)
        assert [run.path.relative_to(tmp_path).as_posix() for run in found] == [
            "deep/er/new", "mid", "old",
        ]  # fmt: skip
        assert [run.env_ids for run in found] == [("deep/er/new",), ("mid",), ("old",)]
        assert found[0].last_written == 2e9 - 10
        assert found[0].config == {"name": "new"}
        assert [run.path for run in list_runs(tmp_path / "mid")] == [tmp_path / "mid"]

    def test_depth(self, tmp_path):
        self.make(tmp_path / "a" / "b" / "c" / "d")
        assert list_runs(tmp_path) == []
        assert len(list_runs(tmp_path, max_depth=4)) == 1

    def test_what_is_no_run_is_skipped(self, tmp_path):
        self.make(tmp_path / "good")
        for name, content in (("empty", b""), ("text", b"hello" * 1000)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "run.db").write_bytes(content)
        (tmp_path / "folder" / "run.db").mkdir(parents=True)
        (tmp_path / "nothing").mkdir()
        assert [run.path.name for run in list_runs(tmp_path)] == ["good"]
        assert list_runs(tmp_path / "missing") == []

    def test_listing_changes_nothing(self, tmp_path):
        self.make(tmp_path / "r")
        before = {file.name: file.read_bytes() for file in (tmp_path / "r").iterdir()}
        list_runs(tmp_path)
        after = {file.name: file.read_bytes() for file in (tmp_path / "r").iterdir()}
        assert {name: after[name] for name in before} == before

    def test_a_run_being_written_is_listed(self, run, tmp_path):
        run.add_rollouts([row("a", reward=1.0)])
        assert [each.phases[0].mean_reward for each in list_runs(tmp_path)] == [1.0]

    def test_sums_by_hand(self, run):
        run.add_rollouts(
            [
                row("a", phase="p", reward=1.0, num_prompt_tokens=10, num_completion_tokens=1),
                row("b", phase="p", reward=None, num_prompt_tokens=20, num_completion_tokens=2),
                row("c", phase="p", reward=0.5, truncated=True, status="ok"),
                row("d", phase="p", status="error", num_prompt_tokens=5),
                row("e", phase="q", status="error"),
            ]
        )
        run.add_step(3, {})
        one, two = summarize(run).phases
        assert (one.phase, one.num_requests, one.num_rollouts) == ("p", 4, 4)
        assert (one.num_errors, one.num_truncated, one.mean_reward) == (1, 1, 0.75)
        assert (one.num_prompt_tokens, one.num_completion_tokens) == (35, 3)
        assert (two.phase, two.mean_reward, two.num_errors) == ("q", None, 1)

    def test_an_empty_run_has_a_time(self, run):
        found = summarize(run)
        assert found.phases == found.env_ids == ()
        assert found.last_written == found.created_at > 0


class TestLocks:
    def test_a_second_writer_of_the_same_directory_by_another_path(self, run, tmp_path):
        os.symlink(run.path, tmp_path / "link")
        with pytest.raises(StoreError, match=f"is being written by process {os.getpid()}"):
            Run.open(tmp_path / "link")
        with Run.open(tmp_path / "link", mode="r") as reader:
            assert reader.read_only

    def test_deleting_the_lock_file_of_a_dead_writer_is_allowed(self, run):
        run.close()
        (run.path / "run.lock").unlink()
        with Run.open(run.path) as again:
            assert again.add_rollouts([row("a")]) == 1
        assert (run.path / "run.lock").exists()

    def test_readers_leave_no_lock(self, run):
        run.close()
        (run.path / "run.lock").unlink()
        Run.open(run.path, mode="r").close()
        assert not (run.path / "run.lock").exists()
