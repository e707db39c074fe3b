"""Runs that are damaged, strange or gone: the page says so in a sentence, and shows the others."""

import os
import sqlite3

import pytest

import golden_kit
from browser_kit import Tab, part
from rolltree.store import Run, StoredRollout
from rolltree.store.integrity import Counts, checksum

NEWEST = golden_kit.SCHEMAS[-1]


def sql(folder, statement):
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute(statement)
    connection.close()


def put_meta(folder, key, text):
    """Store what rolltree never writes, with the checksum that an attacker would compute, too."""
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute("DELETE FROM meta WHERE key = ?", (key,))
        connection.execute(
            "INSERT INTO meta VALUES (?, ?, ?)", (key, text, checksum("meta", [key, text]))
        )
        counts = Counts.read(connection)
        counts.meta = connection.execute("SELECT count(*) FROM meta").fetchone()[0]
        counts.write(connection)
    connection.close()


def overwritten(folder):
    data = bytearray((folder / "run.db").read_bytes())
    data[8192:24576] = b"\xa5" * 16384
    (folder / "run.db").write_bytes(data)


DAMAGE = {
    "truncated": lambda at: os.truncate(at / "run.db", (at / "run.db").stat().st_size // 2),
    "overwritten": overwritten,
    "newer": lambda at: sql(at, "PRAGMA user_version = 99"),
    "older": lambda at: sql(at, "PRAGMA user_version = 1"),
    "config": lambda at: put_meta(at, "config", '{"train": [1], "eval": "x", "model": [2]}'),
    "planned": lambda at: put_meta(at, "planned", '{"steps": "<b>", "phase/a": "x"}'),
    "nested": lambda at: put_meta(at, "config", "[" * 100_000 + "]" * 100_000),
    "text": lambda at: (at / "run.db").write_text("Dear diary"),
    "empty": lambda at: (at / "run.db").write_bytes(b""),
}
"""What becomes of a run's file; a reader refuses all of these."""


def event(folder, kind, data):
    with Run.create(folder, kind="eval", config={}) as run:
        run.add_event(kind, data)


ODD = {
    "ended": lambda at: event(at, "ended", {}),
    "ended-as": lambda at: event(at, "ended", {"state": "constructor"}),
    "phase-list": lambda at: event(at, "evaluation", {"phase": ["x"]}),
    "phase-none": lambda at: event(at, "evaluation", {}),
}
"""Events that no version of rolltree writes."""


@pytest.fixture(scope="module")
def broken(start, tmp_path_factory):
    root = tmp_path_factory.mktemp("broken")
    for name, damage in DAMAGE.items():
        golden_kit.unpack(f"{NEWEST}/train", root / name)
        damage(root / name)
    for name, make in ODD.items():
        make(root / name)
    golden_kit.unpack(f"{NEWEST}/train", root / "good")
    (root / "other").mkdir()
    sql(root / "other", "CREATE TABLE a (b)")
    (root / "folder" / "run.db").mkdir(parents=True)
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / "run.db")
    (root / "loop").symlink_to(".")
    (root / "tick").symlink_to("tock")
    (root / "tock").symlink_to("tick")
    return start(root)


def test_one_broken_run_does_not_take_the_list_with_it(broken):
    answer = broken.get("/api/runs").json()
    shown = {row["id"] for row in answer["runs"]}
    refused = {row["id"]: row["error"] for row in answer["unreadable"]}
    assert {"good", "ended", "ended-as"} <= shown
    assert refused.keys() == {*DAMAGE, *ODD, "other"} - shown
    assert "schema 99" in refused["newer"]
    assert all(text.endswith((".", "]")) and len(text) < 1000 for text in refused.values())
    assert not any("Traceback" in text for text in refused.values())


def test_a_loop_of_links_shows_no_run_twice(broken):
    names = [row["id"] for row in broken.get("/api/runs").json()["runs"]]
    assert len(set(names)) == len(names)
    assert not any("loop" in name for name in names)


@pytest.mark.parametrize("name", [*DAMAGE, *ODD, "other", "folder", "pipe"])
def test_every_answer_on_a_broken_run_is_a_sentence(broken, name):
    for what in ("", "/curves", "/story", "/rollouts", "/groups", "/changed"):
        answer = broken.get(f"/api/runs/{name}{what}")
        if answer.status_code != 200:
            said = answer.json()["error"]
            assert said.endswith("."), said
            assert "Traceback" not in said
            assert not said.startswith(("KeyError", "TypeError", "AttributeError", "OSError"))


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api%2fruns", 404, "nothing at"),
        ("/api/", 404, "nothing at"),
        ("/api/runs/good/rollouts?step=99999999999999999999", 400, "step"),
        ("/api/runs/good/rollouts?offset=99999999999999999999", 400, "offset"),
        ("/api/runs/good/groups?step=-99999999999999999999", 400, "step"),
        ("/api/runs/good/rollout?id=a&index=99999999999999999999", 400, "index"),
        ("/api/runs/good/rollouts?where=" + part("metrics/\0 = 1"), 400, "filter"),
        (
            "/api/runs/good/rollouts?where=" + part(" and ".join(["reward > 0"] * 1200)),
            400,
            "conditions",
        ),
        ("/api/runs/good/rollouts?where=" + part("(" * 5000), 400, "cannot be read"),
        ("/api/runs/good/rollouts?where=" + part("rewrd > 1"), 400, "'reward'"),
        ("/api/runs/" + "a" * 3000, 404, "no run"),
        ("/api/runs/" + part("a\ud800b".encode("utf-8", "surrogatepass")), 404, "no run"),
    ],
)
def test_odd_questions_are_answered_with_what_is_wrong(broken, path, status, said):
    answer = broken.get(path)
    assert answer.status_code == status, answer.text[:300]
    assert said in answer.json()["error"]
    assert len(answer.json()["error"]) < 5000


def test_a_filter_takes_any_number(broken):
    page = broken.get("/api/runs/good/rollouts?where=" + part("reward < 1" + "0" * 30)).json()
    assert page["total"] > 0


@pytest.fixture(scope="module")
def strange(start, tmp_path_factory):
    """Runs that rolltree writes and nobody expects: nothing in them, or far too much."""
    root = tmp_path_factory.mktemp("strange")
    with Run.create(root / "nothing", kind="train", config={}):
        pass
    with Run.create(root / "numbers", kind="train", config={"train": {"num_steps": 10**30}}) as run:
        for step, sign in ((2**62, 1), (2**62 + 1000, -1), (2**62 + 5000, 1)):
            metrics = {"train/loss": sign * 1.7e308, "train/kl": 10**400, "x": float("nan")}
            run.add_step(step, {"reward/mean": "<img>", "reward/low": [1], **metrics})
    with Run.create(root / "metrics", kind="train", config={}) as run:
        for step in range(1, 4):
            run.add_step(step, {f"m{at}/x": at * step for at in range(10_000)})
    with Run.create(root / "one", kind="train", config={}) as run:
        run.add_step(7, {"reward/mean": 0.5})
    with Run.create(root / "a:b", kind="eval", config={}) as run:
        rows = [
            StoredRollout(
                request_id=f"r{at}",
                phase=("", "unheard-of", "train")[at % 3],
                group_id="g",
                index_in_group=at,
                train_step=2**62,
                reward=1.7e308 * (-1) ** at,
                metrics={"a": 10**300, "b": "x"},
                total_ms=float("inf"),
                record=b"junk",
            )
            for at in range(9)
        ]
        lost = {"status": "error", "error_type": "Timeout", "errors": ({"message": "late"},)}
        rows += [StoredRollout(request_id=f"lost{at}", phase="x", **lost) for at in range(3)]
        run.add_rollouts(rows)
    return start(root)


VIEWS = {
    "nothing": ["", "/rollouts", "/rollouts?by=group"],
    "numbers": ["", "/rollouts"],
    "metrics": [""],
    "one": [""],
    "a:b": [
        *("", "/rollouts", "/rollouts?by=group", "/rollout/r0/0", "/tokens/r0/0/0", "/tree/r0/0"),
        *("/group/g", "/tree/g", "/rollout/lost0/0", "/tokens/lost0/0/0", "/tree/lost0/0"),
        *(
            "/rollout/gone/0",
            "/group/gone",
            "/tokens/gone/0/0",
            "/rollout/lost0/x",
            "/rollouts?step=x",
        ),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_strange_runs_are_shown(browser, strange, name):
    tab = Tab(browser, strange.link)
    for view in VIEWS[name]:
        tab.open(f"#/run/{part(name)}{view}")
        tab.page.wait_for_timeout(50)  # the story comes later
        assert tab.looked() == {"pale": [], "overflow": 0, "hacked": None}, view
        for said in tab.texts(".error[role=alert]"):
            assert said.endswith("."), said
            assert "is not a function" not in said
            assert "undefined" not in said
    tab.page.context.close()
    known = "Failed to load resource: the server responded with a status of"
    assert [each for each in tab.said if not each.startswith(known)] == []
