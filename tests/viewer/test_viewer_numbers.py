"""The same numbers on the page, in `rolltree show` and `runs`, as JSON, and in Python."""

import asyncio
import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from statistics import fmean, pstdev

import pytest
from click.testing import CliRunner

import rolltree as rt
from browser_kit import Tab, part
from rolltree.cli import app
from rolltree.evaluation import stored_report
from rolltree.store import Run
from rolltree.values.estimate import estimate

NAMES = ["train", "deep/agents", "tools"]
PHASE = {"train": "eval_after", "deep/agents": "eval", "tools": "eval"}
"""The phase whose reward is the run's."""
MINUS = "\N{MINUS SIGN}"
TEXTS = "(list) => list.map((row) => [...row.children].map((each) => each.innerText))"
"""The texts in each element's children, read at one moment: parts of a page are drawn later."""
NUMBER = re.compile(rf"[+{MINUS}-]?\d[\d,]*(?:\.\d+)?(?:e[{MINUS}+-]?\d+)?")


@pytest.fixture(scope="module")
def tab(browser, page):
    made = Tab(browser, page.link)
    yield made
    made.page.context.close()
    assert made.said == []


def python(runs, name):
    return rt.read_run(runs / name)


def command(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def data(page, name, what="", **query):
    text = "&".join(f"{key}={part(value)}" for key, value in query.items())
    answer = page.get(f"/api/runs/{part(name)}{what and '/' + what}?{text}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def numbers(text):
    return [each.replace(",", "").replace(MINUS, "-") for each in NUMBER.findall(text)]


def says(text, *values):
    """Whether a text's numbers are these values, up to the digits that it shows."""
    found = numbers(text)
    wanted = [value for value in values if value is not None]
    assert len(found) == len(wanted), (text, values)
    for shown, value in zip(found, wanted, strict=True):
        digits, _, power = shown.partition("e")
        unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
        assert abs(float(shown) - value) <= 0.5001 * unit, (text, value)
    return True


def milliseconds(text):
    """Return what the page's `duration` says, and how far it may be rounded."""
    (value,) = map(float, numbers(text))
    if text.endswith("ms"):
        return value, 0.51
    assert text.endswith(" s"), text
    return 1000 * value, 51 if value < 10 else 510


def facts(tab):
    return dict(tab.page.locator(".facts:not(details *) > div").evaluate_all(TEXTS))


def table(tab, selector):
    """Return the rows of a plain table as texts."""
    return tab.page.locator(f"{selector} tbody tr").evaluate_all(TEXTS)


def own_rewards(rows):
    """Return the rewards that count, by example: of scored rollouts that nobody delegated."""
    found = {}
    for row in rows:
        if row["parent_rollout"] is None and row["reward"] is not None:
            key = row["env_id"], row["task"], row["example_id"]
            found.setdefault(key, []).append(row["reward"])
    return found


# -- a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_reward_and_its_interval(tab, page, runs, name):
    """Over examples: with several agents, what was delegated is in neither mean nor interval."""
    phase = PHASE[name]
    with python(runs, name) as stored:
        found = estimate(own_rewards(stored.rollouts(phase=phase).rows()))
        # The lists show the interval that the run's own version stored.
        known = [done.interval for done in stored.run.evaluations() if done.phase == phase]
        kept = stored.run.kept_report(phase)
        low, high = known[0] if known else kept["results"]["reward"][1:3]
        fresh = stored_report(stored.run, phase, outcomes=False).reward
    assert (fresh.low, fresh.high) == pytest.approx((found.low, found.high), rel=1e-12)
    wanted = pytest.approx({"mean": found.mean, "low": low, "high": high}, rel=1e-12)
    listed = page.get("/api/runs").json()["runs"]
    told = {
        "front page": next(row["reward"] for row in listed if row["id"] == name),
        "run": data(page, name)["reward"],
        "show": json.loads(command("show", runs / name, "--json"))["reward"],
        "runs": next(
            each["reward"]
            for each in json.loads(command("runs", runs, "--json"))
            if each["path"] == str(runs / name)
        ),
    }
    for where, reward in told.items():
        assert reward.pop("of") == phase, where
        assert reward == wanted, where
    assert found.low <= found.mean <= found.high
    report = json.loads(command("show", runs / name, "--json"))["phases"][-1]
    assert report["mean_reward"] == pytest.approx(found.mean)

    line = re.search(r"reward (.*?) \((\w+)\)", command("show", runs / name))
    assert says(line[1], found.mean, low, high)
    assert line[2] == phase
    tab.open("#/")
    row = tab.page.locator("tbody tr", has=tab.page.get_by_role("link", name=name, exact=True))
    assert says(row.locator(".estimate b").inner_text(), found.mean)
    title = row.locator(".estimate").get_attribute("title")
    assert says(title.rpartition(",")[0], found.mean, low, high)
    tab.open(f"#/run/{part(name)}")
    said = facts(tab)["reward"]
    assert says(said.removesuffix(phase), found.mean, low, high)


@pytest.mark.parametrize("name", NAMES)
def test_counts_of_rollouts_failures_and_tokens(tab, page, runs, name):
    with python(runs, name) as stored:
        rows = list(stored.rollouts().rows())
    failed = Counter(row["error_type"] for row in rows if row["status"] == "error")
    truncated = sum(row["truncated"] for row in rows)
    prompt, sampled = (
        sum(row[f"num_{kind}_tokens"] for row in rows) for kind in ("prompt", "completion")
    )
    wanted = {
        "num_rollouts": len(rows),
        "num_failed": sum(failed.values()),
        "failures": dict(failed),
        "num_truncated": truncated,
        "tokens": {"prompt": prompt, "sampled": sampled},
    }
    listed = {row["id"]: row for row in page.get("/api/runs").json()["runs"]}
    shown = json.loads(command("show", runs / name, "--json"))
    for found in (listed[name], data(page, name), shown):
        assert {key: found[key] for key in wanted} == wanted
    text = command("show", runs / name)
    assert f"  {len(rows):,} rollouts" in text
    if failed:
        said = ", ".join(f"{kind} {number}" for kind, number in failed.items())
        assert f"{sum(failed.values())} failed: {said}" in text
    tab.open(f"#/run/{part(name)}")
    said = facts(tab)
    assert says(said["rollouts"], len(rows))
    assert says(said["failed"].partition(" ")[0], sum(failed.values()))
    for kind in failed:
        assert kind in said["failed"]


@pytest.mark.parametrize("name", NAMES)
def test_phases(tab, page, runs, name):
    with python(runs, name) as stored:
        rows = list(stored.rollouts().rows())
    by_phase = {}
    for row in rows:
        by_phase.setdefault(row["phase"], []).append(row)
    text = command("show", runs / name).splitlines()
    tab.open(f"#/run/{part(name)}")
    drawn = {row[0]: row[1:] for row in table(tab, "h2:text-is('Phases') + .scroll")}
    assert list(drawn) == list(by_phase)
    for phase, members in by_phase.items():
        rewards = own_rewards(members)
        mean = fmean(map(fmean, rewards.values()))
        if phase == "train":  # no report: over rollouts
            mean = fmean(reward for each in rewards.values() for reward in each)
        counts = [
            sum(row["status"] == "error" for row in members),
            sum(row["truncated"] for row in members),
            sum(row["num_prompt_tokens"] for row in members),
            sum(row["num_completion_tokens"] for row in members),
        ]
        assert says(" ".join(drawn[phase]), mean, len(members), *counts)
        (line,) = (each.split() for each in text if each.split()[:1] == [phase])
        episodes = len({row["request_id"] for row in members})
        assert says(" ".join(line[1:]), episodes, mean, *counts)


def test_curves(tab, page, runs):
    with python(runs, "train") as stored:
        steps = list(stored.steps().rows())
        held_out = list(stored.evaluations().rows())
    found = {each["name"]: each["values"] for each in data(page, "train", "curves")["series"]}
    last = {name: value for name, value in steps[-1].items() if value is not None}
    hidden = {"step", "created_at", "reward/low", "reward/high"}
    assert {name: found[name][-1] for name in last.keys() - hidden} == {
        name: value for name, value in last.items() if name not in hidden
    }
    assert found["eval/reward"][-1] == held_out[-1]["eval/reward"]
    tab.open("#/run/train")
    tab.page.get_by_role("button", name="more curves").click()
    labels = {each["name"]: each["label"] for each in data(page, "train", "curves")["series"]}
    drawn = " ".join(
        each.get_attribute("aria-label") + "," for each in tab.page.locator(".chart .plot").all()
    )
    for name in ("reward/mean", "eval/reward", "train/entropy", "train/grad_norm", "time/step"):
        said = re.search(rf"{re.escape(labels[name])} ([^ ,]+),", drawn)
        assert says(said[1], found[name][-1]), name


# -- rollouts and groups ---------------------------------------------------------------------------


def cells_of_rows(tab, kind):
    """Return the texts of each row, read at once: between two readings the table may be redrawn."""
    return tab.page.locator(".vbody .vrow").evaluate_all(
        "(rows, kind) => rows.map((row) => [...row.querySelectorAll('.cell')].map((c) => c[kind]))",
        kind,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_row_per_rollout(tab, page, runs, name):
    with python(runs, name) as stored:
        rows = list(stored.rollouts(sort="-num_completion_tokens").rows())
    tab.open(f"#/run/{part(name)}/rollouts?sort=-num_completion_tokens")
    heads = [text.rstrip(" ↓") for text in tab.texts(".vhead .cell")]
    drawn = cells_of_rows(tab, "innerText")
    drawn = [each for each in drawn if len(each) == len(heads)]
    assert len(drawn) >= min(len(rows), 20)
    for texts, row in zip(drawn, rows, strict=False):
        cells = dict(zip(heads, texts, strict=True))
        called = cells["rollout"].replace("\n", "").split(" · ")[0]
        assert row["request_id"].endswith(called[-8:])
        if row["reward"] is None:
            assert cells["reward"] == "no reward"
        else:
            assert says(cells["reward"], row["reward"])
        assert says(cells["calls"], row["num_calls"])
        assert says(cells["sampled"], row["num_completion_tokens"])
        time, room = milliseconds(cells["time"])
        assert time == pytest.approx(row["total_ms"], abs=room)
    words = ["--sort", "-num_completion_tokens", "--transcripts", 3, "--json"]
    told = json.loads(command("show", runs / name, *words))["rollouts"]
    by_name = {(row["request_id"], row["trajectory_index"]): row for row in rows}
    assert told
    for line in told:
        row = by_name[line["request_id"], line["trajectory_index"]]
        kept = line.keys() & row.keys() - {"input", "errors", "example_id"}
        assert kept >= {"reward", "num_calls", "num_prompt_tokens", "total_ms", "truncated"}
        assert {key: line[key] for key in kept} == {key: row[key] for key in kept}


@pytest.mark.parametrize("name", NAMES)
def test_means_and_spreads_of_groups(tab, page, runs, name):
    with python(runs, name) as stored:
        rows = [row for row in stored.rollouts().rows() if row["group_id"]]
    groups = {}
    for row in rows:
        if row["parent_rollout"] is None:
            groups.setdefault(row["group_id"], []).append(row["reward"])
    found = data(page, name, "groups", limit=1000)["rows"]
    assert [group["group_id"] for group in found] == list(groups)
    tab.open(f"#/run/{part(name)}/rollouts?by=group&phase=*")
    drawn = cells_of_rows(tab, "textContent")
    drawn = {each[0]: each for each in drawn if len(each) == 7}
    assert drawn
    for group in found:
        scored = [reward for reward in groups[group["group_id"]] if reward is not None]
        tree = data(page, name, "group", id=group["group_id"])
        if not scored:
            assert group["mean"] is group["std"] is tree["reward"] is None
            continue
        mean, std = fmean(scored), pstdev(scored)
        assert (group["mean"], group["std"]) == pytest.approx((mean, std))
        assert tree["reward"] == pytest.approx(mean)
        if cells := drawn.get(group["group_id"]):
            assert says(" ".join(cells[2:4]), mean, std if len(scored) > 1 else None)


def one_rollout(stored, **filters):
    """Return the rollout of the most calls, with its calls and breaks."""
    (row,) = stored.rollouts(sort="-num_calls", limit=1, **filters).rows()
    same = {"request_id": row["request_id"], "trajectory_index": row["trajectory_index"]}
    return row, list(stored.calls(**same).rows()), list(stored.breaks(**same).rows())


@pytest.mark.parametrize("name", NAMES)
def test_one_rollout(tab, page, runs, name):
    with python(runs, name) as stored:
        row, calls, breaks = one_rollout(stored, where="status = ok")
    metrics = {
        key.removeprefix("metrics/"): value
        for key, value in row.items()
        if key.startswith("metrics/") and value is not None
    }
    found = data(page, name, "rollout", id=row["request_id"], index=row["trajectory_index"])
    assert found["rewards"] == {
        "is_recorded": False,
        "functions": [],
        "rest": None,
        "metrics": metrics,
    }
    shown = json.loads(command("show", runs / name, "--where", _where(row), "--json"))
    (line,) = (
        each for each in shown["rollouts"] if each["trajectory_index"] == row["trajectory_index"]
    )
    assert line["rewards"] == found["rewards"]
    assert [each["cause"] for each in found["breaks"]] == [each["cause"] for each in breaks]

    tab.open(f"#/run/{part(name)}/rollout/{part(row['request_id'])}/{row['trajectory_index']}")
    said = facts(tab)
    assert says(said["reward"], row["reward"])
    assert says(said["calls"], row["num_calls"])
    assert says(said["tokens"], row["num_prompt_tokens"], row["num_completion_tokens"])
    drawn = table(tab, "section:has(> h2:text-is('Metrics'))")
    assert [each[0] for each in drawn] == list(metrics)
    assert all(says(text, metrics[metric]) for metric, text in drawn)
    assert "Weights not recorded" in tab.page.locator("main").inner_text()
    steps = table(tab, "section:has(> h2:text-is('Steps'))")
    heads = tab.texts("section:has(> h2:text-is('Steps')) thead th")
    for row_of_cells, call in zip(steps, calls, strict=True):
        cells = dict(zip(heads, row_of_cells, strict=True))
        for head, kind in (("prompt", "prompt"), ("new", "new"), ("sampled", "completion")):
            assert says(cells[head], call[f"num_{kind}_tokens"])
        assert says(cells.get("mean logprob", ""), call["mean_logprob"])
    times = tab.texts(".timeline .span > .number")
    timed = [call["time_ms"] for call in calls if call["time_ms"]]
    assert len(times) == len(timed)
    for text, time in zip(times, timed, strict=True):
        assert milliseconds(text)[0] == pytest.approx(time, abs=milliseconds(text)[1])
    causes = Counter(each["cause"].replace("_", " ") for each in breaks)
    assert Counter(tab.texts("section.break > p > a")) == causes


def _where(row):
    return f"request_id = '{row['request_id']}'"


def test_advantages(tab, page, runs):
    with python(runs, "train") as stored:
        (first,) = stored.rollouts(phase="train", where="status = ok", limit=1).rows()
        tokens = list(stored.tokens(group_id=first["group_id"]).rows())
    tokens = [each for each in tokens if each["is_sampled"]]
    mean = {
        name: fmean(each["advantage"] for each in members)
        for name, members in groupby(tokens, lambda each: each["request_id"])
        if name in {each["request_id"] for each in tokens if each["advantage"] is not None}
    }
    assert mean
    group = data(page, "train", "group", id=first["group_id"])
    found = {each["request_id"]: each["advantage"] for each in group["members"]}
    assert {key: value for key, value in found.items() if value is not None} == pytest.approx(mean)
    lens = data(page, "train", "tokens", id=first["request_id"])
    own = [each for each in tokens if each["request_id"] == first["request_id"]]
    both = zip(lens["advantage"], lens["is_sampled"], strict=True)
    sampled = [value for value, is_sampled in both if is_sampled]
    assert sampled == [each["advantage"] for each in own if each["call"] == 0]
    tab.open(f"#/run/train/group/{part(first['group_id'])}")
    ordered = sorted(group["members"], key=lambda each: -(each["reward"] or -1e9))
    for text, member in zip(tab.texts(".members li"), ordered, strict=True):
        shown = text.replace(member["request_id"], "").split()
        if member["advantage"] is not None:
            assert says(shown[-1], member["advantage"])


def test_a_comparison(tab, page, runs):
    arms = ["train:eval_before", "train:eval_after", "train:train"]
    told = rt.compare(*(f"{runs}/{arm}" for arm in arms)).as_dict()
    query = "&".join(f"arm={part(arm)}" for arm in arms)
    found = page.get(f"/api/compare?{query}").json()
    shown = json.loads(command("compare", *(f"{runs}/{arm}" for arm in arms), "--json"))
    tab.open(f"#/compare?{query}")
    tab.page.locator("details > summary", has_text="against").click()
    rows = table(tab, ".page > .scroll")
    for (name, reward, bounds, gain, gain_bounds, _, verdict, *_), arm, pair in zip(
        rows, shown["arms"], [None, *shown["pairs"]], strict=True
    ):
        assert name == arm["name"]
        (wanted,) = arm["rewards"]
        ends = wanted["low"], wanted["high"]
        assert says(f"{reward} {bounds}".replace("[", " "), wanted["mean"], *ends)
        if pair is None:
            assert gain == "baseline"
            continue
        wanted = pair["measures"]["reward"]
        assert verdict == wanted["verdict"]
        ends = wanted["difference"]["low"], wanted["difference"]["high"]
        assert says(f"{gain} {gain_bounds}".replace("[", " "), wanted["difference"]["mean"], *ends)
    for at, box in enumerate((".page > section", ".page > details")):
        measures = shown["pairs"][at]["measures"]
        assert json.loads(json.dumps(told))["pairs"][at]["measures"] == measures
        assert found["pairs"][at]["measures"] == measures
        drawn = {row[0]: row[1:5] for row in table(tab, f"{box} > .scroll")}
        for name, each in measures.items():
            gain = each["difference"]
            values = each["before"]["mean"], each["after"]["mean"], gain["mean"]
            cells = drawn[name.replace("_", " ")]
            assert says(" ".join(cells).replace("[", " "), *values, gain["low"], gain["high"])
        assert tab.texts(f"{box} > .story p") == shown["pairs"][at]["sentences"]


# -- the story, and the rewards ------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_story(tab, page, runs, name):
    with python(runs, name) as stored:
        told = stored.story()
    assert data(page, name, "story")["sentences"] == told
    assert json.loads(command("show", runs / name, "--json"))["story"] == told
    lines = command("show", runs / name).splitlines()
    wanted = []
    for each in told:
        see = f"(rolltree docs {each['page'].replace('.md', '')})"
        wanted += [each["text"], *([f"  {each['advice']} {see}"] if each["advice"] else [])]
    assert [line[2:] for line in lines[: len(wanted)]] == wanted
    tab.open(f"#/run/{part(name)}")
    tab.page.wait_for_selector(".story:not([aria-busy])")
    drawn = tab.texts(".story .sentence")
    assert len(drawn) == len(told)
    assert all(each["text"] in text for each, text in zip(told, drawn, strict=True))


def right(completion, answer):
    return float(answer in completion[-1]["content"])


def brief(completion):
    return -len(completion[-1]["content"]) / 10


def test_what_was_paid_adds_up(browser, start, tmp_path):
    rubric = rt.Rubric([right, brief], [1.0, 0.25])
    rubric.add_metric(lambda completion: 3.0)
    env = rt.SingleTurnEnv(dataset=[{"question": "1 + 1 =", "answer": "2"}], rubric=rubric)
    with Run.create(tmp_path / "paid" / "run") as run:
        with ThreadPoolExecutor(1) as aside:  # the browser has this thread's loop
            client = rt.ScriptedClient(["it is 2"])
            aside.submit(asyncio.run, rt.evaluate_async(env, client, run=run)).result()
        (row,) = run.rollouts()
    assert row.reward == pytest.approx(1 - 0.25 * 0.7)
    name = f"{part(row.request_id)}/0"
    tab = Tab(browser, start(tmp_path / "paid").link)
    tab.open(f"#/run/run/rollout/{name}")
    *parts, (_, _, _, total) = table(tab, "section:has(> h2:text-is('Reward by function'))")
    assert [each[:3] for each in parts] == [
        ["right", "1", "1"],
        ["brief", f"{MINUS}0.700", "0.250"],
    ]
    assert says(" ".join(each[3] for each in parts), 1.0, -0.175)
    assert says(total, row.reward)
    assert len(table(tab, "section:has(> h2:text-is('Metrics'))")) == 1
    text = command("show", tmp_path / "paid" / "run")
    assert re.search(r"right +1 +1 +1 ", text)
    assert re.search(r"brief +-0.7 +0.25 +-0.175 ", text)
    (line,) = json.loads(command("show", tmp_path / "paid" / "run", "--json"))["rollouts"]
    assert [each["contribution"] for each in line["rewards"]["functions"]] == [1.0, -0.175]
    assert line["rewards"]["rest"] == 0.0
    tab.page.context.close()
    assert tab.said == []
