"""The JSON endpoints give what Python gives: one query layer under both."""

import asyncio
import json
import math
import re
import threading
import time
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from starlette.requests import Request

import golden_kit
import rolltree as rt
from rolltree.cli import app
from rolltree.inference.models.made import byte_tokenizer
from rolltree.insight.page import api
from rolltree.insight.page.bundle import STATIC
from rolltree.records.tokenizer import choose_tokenizer
from rolltree.store import Run, StoredRollout, list_runs


def data(page, path):
    answer = page.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def plain(value):
    """Return what JSON makes of a value: no number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return json.loads(json.dumps(value))


def test_the_runs_are_those_of_the_store(page, runs):
    found = data(page, "/api/runs")["runs"]
    listed = list_runs(runs)
    assert [row["path"] for row in found] == [str(run.path) for run in listed]
    assert {row["id"] for row in found} == {"train", "deep/agents", "tools"}
    for row, run in zip(found, listed, strict=True):
        assert row["state"] == run.state
        assert row["num_steps"] == run.num_steps
        assert row["num_rollouts"] == sum(phase.num_rollouts for phase in run.phases)
        assert row["tokens"]["sampled"] == sum(phase.num_completion_tokens for phase in run.phases)


def test_a_run_below_a_folder_is_one_segment(page):
    assert data(page, "/api/runs/deep%2Fagents")["name"] == "agents"
    assert page.get("/api/runs/deep/agents").status_code == 404


def test_a_single_run_is_shown_alone(start, runs):
    page = start(runs / "train")
    assert [row["id"] for row in data(page, "/api/runs")["runs"]] == ["train"]
    assert page.get("/api/runs/tools").status_code == 404


def test_the_curves_are_the_steps_table(page, runs):
    found = data(page, "/api/runs/train/curves")
    with rt.read_run(runs / "train") as stored:
        steps = list(stored.steps().rows())
        evaluations = list(stored.evaluations().rows())
    rows = {row["step"]: row for row in [*evaluations, *steps]}
    assert found["steps"] == sorted(rows)
    series = {each["name"]: each for each in found["series"]}
    assert series["reward/mean"]["values"][-len(steps) :] == [s["reward/mean"] for s in steps]
    assert all(len(each["values"]) == len(found["steps"]) for each in found["series"])
    shown = {name for each in found["series"] for name in [each["name"]]}
    bounds = {"reward/low", "reward/high"}
    kept = {name for step in steps for name, value in step.items() if value is not None}
    assert kept - {"step", "created_at"} - bounds <= shown
    if "eval/reward" in series:
        assert {"low", "high"} <= series["eval/reward"].keys()


@pytest.mark.parametrize(
    ("query", "filters"),
    [
        ("", {}),
        ("?phase=train", {"phase": "train"}),
        (
            "?phase=train&step=1&sort=-reward",
            {"phase": "train", "train_step": 1, "sort": "-reward"},
        ),
        (
            "?where=" + quote("reward > 0 and num_calls >= 1"),
            {"where": "reward > 0 and num_calls >= 1"},
        ),
        ("?offset=3&limit=2", {"offset": 3, "limit": 2}),
    ],
)
def test_a_page_of_rollouts_is_the_rollouts_table(page, runs, query, filters):
    found = data(page, f"/api/runs/train/rollouts{query}")
    with rt.read_run(runs / "train") as stored:
        wanted = list(stored.rollouts(**filters).rows())
        counted = {k: v for k, v in filters.items() if k not in ("sort", "offset", "limit")}
        assert found["total"] == stored.run.num_rollouts(**counted)
    assert found["rows"]
    for row, same in zip(found["rows"], wanted, strict=True):
        metrics = row.pop("metrics")
        assert {name: plain(same[name]) for name in row} == row
        assert metrics == {
            name.removeprefix("metrics/"): value
            for name, value in same.items()
            if name.startswith("metrics/") and value is not None
        }


def test_groups_have_the_rewards_of_their_rollouts(page, runs):
    found = data(page, "/api/runs/train/groups?phase=train&limit=1000")
    assert found["total"] == len(found["rows"]) > 1
    with rt.read_run(runs / "train") as stored:
        for group in found["rows"]:
            rows = list(stored.rollouts(group_id=group["group_id"]).rows())
            rows.sort(key=lambda row: (row["index_in_group"], row["trajectory_index"]))
            assert group["rewards"] == [row["reward"] for row in rows]
            assert [m["request_id"] for m in group["members"]] == [r["request_id"] for r in rows]
            scored = [reward for reward in group["rewards"] if reward is not None]
            if not scored:
                assert group["mean"] is group["std"] is None
                continue
            mean = sum(scored) / len(scored)
            assert group["mean"] == pytest.approx(mean)
            spread = math.sqrt(sum((reward - mean) ** 2 for reward in scored) / len(scored))
            assert group["std"] == pytest.approx(spread)


@pytest.mark.parametrize("name", ["train", "deep/agents", "tools"])
def test_a_rollout_is_the_same_as_in_python(page, runs, name):
    with rt.read_run(runs / name) as stored:
        rows = list(stored.conversations(limit=6).rows())
        for row in rows:
            key = {name: row[name] for name in ("request_id", "trajectory_index")}
            query = f"id={quote(row['request_id'], safe='')}&index={row['trajectory_index']}"
            found = data(page, f"/api/runs/{quote(name, safe='')}/rollout?{query}")
            said = [(m["role"], m["content"] or "") for m in found["messages"]]
            both = [*row["prompt"], *row["completion"]]
            assert said == [(m["role"], m.get("content") or "") for m in both]
            assert [m["is_prompt"] for m in found["messages"]].count(True) == len(row["prompt"])
            calls = list(stored.calls(**key).rows())
            assert len(found["calls"]) == len(calls)
            for call, same in zip(found["calls"], calls, strict=True):
                for column in ("num_prompt_tokens", "num_new_tokens", "reward", "finish_reason"):
                    assert call[column] == plain(same[column])
                mean = same["mean_logprob"]
                assert call["mean_logprob"] == (None if mean is None else pytest.approx(mean))
            assert len(found["breaks"]) == len(list(stored.breaks(**key).rows()))
            told = [each["call"] for each in found["messages"] if each.get("call") is not None]
            assert told == sorted(told)
            errors = json.loads(row["errors"])
            assert [e["type"] for e in found["errors"]] == [e["type"] for e in errors]
            assert len(found["others"]) == row["num_trajectories"] - 1
            assert found["rollout"] == {name: plain(row[name]) for name in found["rollout"]}


def test_the_comparison_is_compares(start, tmp_path):
    golden_kit.unpack("demo", tmp_path / "demo")
    page = start(tmp_path / "demo")
    folder = tmp_path / "demo"
    before, after = f"{folder}:eval_before", f"{folder}:eval_after"
    for query, arms in (
        ("arm=demo", [folder]),
        ("arm=demo:eval_after&arm=demo:eval_before", [after, before]),
        ("arm=demo:0&arm=demo&arm=demo:train", [before, after, f"{folder}:train"]),
    ):
        found = data(page, f"/api/compare?{query}")
        wanted = plain(json.loads(json.dumps(rt.compare(*arms).as_dict(), default=float)))
        for told, arm in zip(found["arms"], wanted["arms"], strict=True):
            assert told.pop("phases") == ["eval_before", "train", "eval_after"]
            assert arm["runs"] == [f"{folder}:{told.pop('phase')}"]
            assert told.pop("id") == "demo"
        assert found == wanted


def test_an_arm_is_a_run_below_the_folder_whatever_its_name(start, tmp_path):
    golden_kit.unpack("4/train", tmp_path / "runs" / "a,b:c=d")
    golden_kit.unpack("4/train", tmp_path / "other")
    page = start(tmp_path / "runs")
    name = quote("a,b:c=d", safe="")
    found = data(page, f"/api/compare?arm={name}&arm={name}:eval_before")
    arms = [(arm["id"], arm["phase"]) for arm in found["arms"]]
    assert arms == [("a,b:c=d", "eval_after"), ("a,b:c=d", "eval_before")]
    outside = quote(f"a,b:c=d:eval_after,{tmp_path / 'other'}", safe="")
    answer = page.get(f"/api/compare?arm={name}&arm={outside}")
    assert (answer.status_code, "no phase" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/runs/none", 404, "there is no run 'none'"),
        ("/api/runs/train/nothing", 404, "there is nothing"),
        ("/api/runs/train/rollouts?limt=3", 400, "Did you mean 'limit'?"),
        ("/api/runs/train/rollouts?limit=0", 400, "limit"),
        ("/api/runs/train/rollouts?limit=1000000", 400, "limit"),
        ("/api/runs/train/rollouts?step=x", 400, "step"),
        ("/api/runs/train/rollouts?step=1&step=2", 400, "twice"),
        ("/api/runs/train/rollouts?where=rewrd%20%3E%201", 400, "reward"),
        ("/api/runs/train/rollouts?sort=1;drop", 400, "sorted"),
        ("/api/runs/train/rollout", 400, "id"),
        ("/api/runs/train/rollout?id=no", 404, "no rollout"),
        ("/api/compare", 400, "arm"),
        ("/api/compare?a=train&b=tools", 400, "'a'"),
        ("/api/compare?arm=train&arm=../x", 404, "no run"),
        ("/api/compare?arm=train&arm=train:none", 400, "no phase 'none'"),
    ],
)
def test_what_cannot_be_answered_says_why(page, path, status, words):
    answer = page.get(path)
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text


def test_a_run_that_goes_on_is_seen_to(start, tmp_path):
    with Run.create(tmp_path / "live", kind="eval") as run:
        page = start(tmp_path)
        before = data(page, "/api/runs/live/changed")
        again = data(page, f"/api/runs/live/changed?since={before['commits']}")
        assert not again["changed"]
        run.add_rollouts([StoredRollout(request_id="one", reward=1.0)])
        after = data(page, f"/api/runs/live/changed?since={before['commits']}")
        assert after["changed"]
        assert data(page, "/api/runs/live/rollouts")["total"] == 1
        assert data(page, "/api/runs/live")["state"] == "running"
        assert data(page, "/api/runs")["runs"][0]["reward"]["mean"] == 1.0
    assert data(page, "/api/runs/live")["state"] != "running"


def test_a_run_at_a_glance_has_its_newest_reward_and_its_failures_by_type(start, tmp_path):
    failed = [
        StoredRollout(request_id=f"f{at}", status="error", error_type=kind)
        for at, kind in enumerate(["ToolError", "Timeout", "ToolError"])
    ]
    with Run.create(tmp_path / "steps", kind="train") as run:
        run.add_rollouts([*failed, StoredRollout(request_id="fine", reward=0.25)])
        run.add_step(1, {"reward/mean": 0.5})
        run.add_step(2, {"reward/mean": 0.75, "reward/low": 0.5, "reward/high": 1.0})
        assert run.newest_step() == run.steps()[-1]
    (row,) = data(start(tmp_path), "/api/runs")["runs"]
    assert row["reward"] == {"mean": 0.75, "low": 0.5, "high": 1.0, "of": "step 2"}
    assert row["failures"] == {"ToolError": 2, "Timeout": 1}
    assert row["num_failed"] == 3


def test_a_list_opens_again_only_the_runs_that_grew(tmp_path, monkeypatch):
    read = []

    def overview(run):
        read.append(run.path.name)
        return api_overview(run)

    api_overview = api.run_overview
    monkeypatch.setattr(api, "run_overview", overview)
    for name in ("old", "new"):
        Run.create(tmp_path / name, kind="eval").close()
    runs = api.Runs(tmp_path)
    first = runs.overviews()["runs"]
    time.sleep(0.01)
    second = runs.overviews()["runs"]
    assert sorted(read) == ["new", "old"]
    assert all(a["age_s"] < b["age_s"] for a, b in zip(first, second, strict=True))
    with Run.open(tmp_path / "new") as run:
        run.add_rollouts([StoredRollout(request_id="one", reward=1.0)])
        grown = {row["id"]: row for row in runs.overviews()["runs"]}
    assert (grown["new"]["num_rollouts"], grown["new"]["state"]) == (1, "running")
    assert {row["id"]: row["state"] for row in runs.overviews()["runs"]}["new"] != "running"
    assert read.count("old") == 1
    (tmp_path / "old").rename(tmp_path / "moved")
    assert {row["name"] for row in runs.overviews()["runs"]} == {"moved", "new"}


def test_another_run_in_the_same_place_is_read(start, tmp_path):
    page = start(tmp_path)
    for number in (1, 2):
        with Run.create(tmp_path / "again", kind="eval") as run:
            rows = [StoredRollout(request_id=f"{number}-{at}") for at in range(number)]
            run.add_rollouts(rows)
        assert data(page, "/api/runs/again/rollouts")["total"] == number
        (tmp_path / "again").rename(tmp_path / f"was-{number}")


def test_a_damaged_run_is_an_error_and_the_others_are_shown(start, runs, tmp_path):
    golden_kit.unpack("4/tools", tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.db").write_bytes(b"no database" * 1000)
    page = start(tmp_path)
    assert [row["id"] for row in data(page, "/api/runs")["runs"]] == ["good"]
    answer = page.get("/api/runs/bad")
    assert answer.status_code == 500
    assert "bad" in answer.json()["error"]


def test_a_story_is_told_again_after_a_pause(tmp_path, monkeypatch):
    told = []

    def tell(run):
        told.append(run.num_commits)
        time.sleep(0.05)
        return {"sentences": []}

    monkeypatch.setattr(api, "run_story", tell)
    with Run.create(tmp_path / "run", kind="eval") as run:
        assert api._story(run) == api._story(run) == {"sentences": [], "again_s": None}
        run.add_event("noted")
        assert 0 < api._story(run)["again_s"] <= 20 * 60
        assert len(told) == 1
        monkeypatch.setattr(api, "_PAUSE", 0)
        run.add_event("noted")
        api._STORIES[run] = (told[0], 0.0, {"sentences": []})  # the pause is over
        assert api._story(run)["again_s"] is None
        assert len(told) == 2


def test_the_page_asks_for_every_module_at_once(page):
    named = re.findall(r'rel="modulepreload" href="static/([^"]+)"', page.get("/", token="").text)
    assert named == sorted(path.name for path in STATIC.glob("*.js"))


async def test_a_server_that_ends_answers_what_it_was_asked(tmp_path):
    served = api.Api(tmp_path)
    asked, ended = threading.Event(), threading.Event()

    def slow(path, query):
        asked.set()
        ended.wait(10)

    served._answer = slow
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/runs",
        "query_string": b"",
        "headers": [],
    }
    task = asyncio.create_task(served.answer(Request(scope)))
    await asyncio.to_thread(asked.wait, 10)
    task.cancel()
    ended.set()
    assert (await task).status_code == 503


@pytest.mark.long  # transformers makes the tokenizer
def test_tokens_by_a_tokenizer_that_somebody_names(start, page, runs, tmp_path):
    """The run's own model is not on this machine, so without the folder there are ids alone."""
    byte_tokenizer(512).save_pretrained(tmp_path)
    with rt.read_run(runs / "train") as stored:
        row = next(iter(stored.rollouts(phase="train", where="status = ok", limit=1).rows()))
    path = f"/api/runs/train/tokens?id={quote(row['request_id'], safe='')}"
    raw, named = data(page, path), data(start(runs, "--tokenizer", tmp_path), path)
    assert raw["ids"] == named["ids"]
    assert (raw["texts"], raw["bytes"], named["why_raw"]) == (None, None, None)
    assert "rolltree view --tokenizer FOLDER" in raw["why_raw"]
    assert "You write." in "".join(named["texts"])
    # The page as one file is written by the same folder.
    target = tmp_path / "page.html"
    for words, has_text in (((), False), (("--tokenizer", str(tmp_path)), True)):
        words = ["view", str(runs / "train"), "--export", str(target), *words]
        assert CliRunner().invoke(app, words).exit_code == 0
        assert ("Tokens are shown by their ids" in target.read_text()) != has_text
    choose_tokenizer(None)
    (tmp_path / "tokenizer.json").write_text("{}")
    done = CliRunner().invoke(app, ["view", str(runs), "--tokenizer", str(tmp_path)])
    assert done.exit_code == 2
    assert "is not a tokenizer that can be read" in done.stderr
