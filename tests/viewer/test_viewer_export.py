"""`rolltree view --export`: a run as one file, which shows what the page shows, from disk."""

import json
import re
import resource
import subprocess
import sys
from contextlib import contextmanager
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from test_viewer_hostile import RUN, STRINGS, played

import golden_kit
import rolltree as rt
from browser_kit import Tab, part
from rolltree.cli import app
from rolltree.insight.page.export import export_page
from rolltree.rollouts.record import encode_result
from rolltree.store import Run
from rolltree.values.errors import ConfigError, StoreError


def data_of(file):
    text = file.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def inside(file):
    """Return the run's address in the file and what the file has of the run."""
    data = data_of(file)
    name = quote(data["run"], safe="!'()*~")  # as encodeURIComponent has it
    return f"#/run/{name}", data["answers"]["run"][data["run"]]


def open_file(browser, file, width=1280, scheme="light"):
    return Tab(browser, file.as_uri(), width, scheme, first=inside(file)[0])


def closed(tab, file):
    """Close a tab; nothing was said, and nothing but the file was requested."""
    tab.page.context.close()
    assert tab.said == []
    assert {each.partition("#")[0] for each in tab.asked} == {file.as_uri()}


def places(file, num=3):
    """Return an address of every kind of view in the file, `num` rollouts and groups of each."""
    base, answers = inside(file)
    found = ["#/", base, f"{base}/rollouts", f"{base}/rollouts?by=group"]
    for request_id, by_index in list(answers["rollout"].items())[:num]:
        for index in by_index:
            name = f"{part(request_id)}/{index}"
            found += [f"{base}/rollout/{name}", f"{base}/tree/{name}"]
            found += [
                f"{base}/tokens/{name}/{call}" for call in answers["tokens"][request_id][index]
            ]
    for group_id in list(answers["group"])[:num]:
        found += [f"{base}/group/{part(group_id)}", f"{base}/tree/{part(group_id)}"]
    return found


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory):
    """Return the files of a training run, one of several agents, and an evaluation with tools."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("train", "deep/agents", "tools"):
        export_page(runs / name, folder / f"{name[-6:]}.html")
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize(("name", "width"), [("train", 1280), ("agents", 390), ("tools", 390)])
def test_every_view_opens_from_disk(browser, files, name, width):
    scheme = "dark" if width == 390 else "light"
    tab = open_file(browser, files[name], width, scheme)
    for place in places(files[name]):
        tab.open(place)
        assert tab.looked() == {"pale": [], "overflow": 0, "hacked": None}, place
        assert tab.texts(".error[role=alert]") == [], place
    closed(tab, files[name])


PREVIEWED = """() => [...document.querySelectorAll(".vbody .vrow")].every(
  (row) => row.children[1].textContent)"""
"""Whether the rows of a table have what is read after them: questions and answers."""
SAME = re.compile(r"^last written\n.*\n", re.MULTILINE)


@pytest.mark.parametrize("name", ["train", "agents", "tools"])
def test_a_file_says_what_the_page_says(browser, files, start, runs, name):
    run = runs / ("deep/agents" if name == "agents" else name)
    live, tab = Tab(browser, start(run).link), open_file(browser, files[name])
    for place in places(files[name], 2)[1:]:
        for each in (live, tab):
            each.open(place)
            each.page.wait_for_selector("main:not(:has(.story[aria-busy]))")
            for block in each.page.query_selector_all(".block"):  # read when it is seen
                block.scroll_into_view_if_needed()
                each.page.wait_for_function("each => each.childElementCount", arg=block)
        if "/rollouts" not in place:
            said = live.page.locator("main").inner_text()
            shown = tab.page.locator("main").inner_text().partition("rolltree view.\n\n")
            assert SAME.sub("", shown[2] or shown[0]) == SAME.sub("", said), place
        else:
            live.page.wait_for_function(PREVIEWED)
            assert tab.texts(".vrow") == live.texts(".vrow"), place
    live.page.context.close()
    closed(tab, files[name])


def test_keys_theme_and_phone(browser, files):
    tab = open_file(browser, files["train"], 390, "dark")
    base, _ = inside(files["train"])
    tab.open(f"{base}/rollouts")
    tab.page.keyboard.press("j")
    address = tab.page.locator(".vrow.marked a").get_attribute("href")
    tab.page.keyboard.press("Enter")
    tab.ready(address)
    tab.page.keyboard.press("u")
    tab.ready(f"{base}/rollouts")
    tab.page.keyboard.press("?")
    assert tab.page.locator("dialog[open]").count() == 1
    tab.page.keyboard.press("Escape")
    before = tab.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    tab.page.keyboard.press("t")
    assert tab.page.evaluate("() => getComputedStyle(document.body).backgroundColor") != before
    tokens = address.replace("/rollout/", "/tokens/") + "/0"
    tab.open(tokens)
    tab.page.get_by_label("Colour by").select_option("logprob")
    assert tab.page.url.endswith("?colour=logprob")
    closed(tab, files["train"])


CHOSEN = ["reward < 0.5", "train_step >= 1"]


@pytest.fixture(scope="module")
def part_of(tmp_path_factory):
    """Return the demo's run, and a file with 24 of its rollouts."""
    folder = tmp_path_factory.mktemp("part")
    golden_kit.unpack("demo-seed1", folder / "demo")
    found = export_page(folder / "demo", folder / "demo.html", where=CHOSEN, limit=24)
    return folder / "demo", folder / "demo.html", found


def test_a_file_says_how_much_of_the_run_it_has(browser, part_of):
    run, file, found = part_of
    base, answers = inside(file)
    with rt.read_run(run) as data:
        total = data.run.num_rollouts()
        of_step = data.run.num_rollouts(train_step=1)
        groups = {row["group_id"] for row in data.rollouts(where="group_id != ''").rows()}
    assert (found.num_rollouts, found.of_rollouts, found.of_groups) == (24, total, len(groups))
    tab = open_file(browser, file)
    assert f"24 of {total:,} rollouts" in tab.page.locator("main").inner_text()
    tab.open(f"{base}/rollouts")
    assert f"24 of {total:,} rollouts are in this file" in tab.texts(".bar [role=status]")
    assert tab.page.locator(".vtable").get_attribute("aria-rowcount") == "24"
    tab.page.get_by_label("Step").fill("1")
    tab.page.keyboard.press("Enter")
    tab.ready(f"{base}/rollouts?step=1")
    own = [row for row in answers["rollouts"]["rows"] if row["train_step"] == 1]
    said = f"{len(own)} of {of_step} rollouts are in this file"
    assert tab.texts(".bar [role=status]") == [said]
    closed(tab, file)


def test_what_is_not_in_a_file_is_no_link(browser, part_of):
    run, file, _ = part_of
    base, answers = inside(file)
    with Run.open(run, mode="r") as stored:
        lost = next(
            name
            for (name,) in stored.columns(("request_id",), phase="train")
            if name not in answers["rollout"]
        )
        kept = set(answers["rollout"])
        group = next(
            name
            for name in answers["group"]
            if {each for (each,) in stored.columns(("request_id",), group_id=name)} - kept
        )
    tab = open_file(browser, file)
    tab.open(f"{base}/group/{part(group)}")
    dead = tab.page.locator(".members a:not([href])")
    assert dead.count() == 8 - tab.page.locator(".members a[href]").count() > 0
    assert dead.first.get_attribute("title") == "not in this file"
    for address in (f"{base}/rollout/{part(lost)}/0", "#/compare?arm=demo&arm=demo", "#/run/other"):
        tab.open(address)
        assert "not in this file" in tab.page.locator(".error").inner_text()
    tab.open(f"{base}/rollouts?where=reward+%3E+0.7")
    assert "rolltree view" in tab.page.locator(".error").inner_text()
    closed(tab, file)


def test_links_of_the_story_are_answered_with_the_runs_numbers(browser, files, runs):
    file = files["train"]
    base, answers = inside(file)
    (where,) = {
        each["evidence"]["where"]
        for each in answers["story"]["sentences"]
        if each["kind"] == "failures"
    }
    with Run.open(runs / "train", mode="r") as run:
        number = run.num_rollouts(phase="train", where=where)
    tab = open_file(browser, file)
    tab.page.locator(".sentence", has_text="failed").get_by_role("link").first.click()
    tab.page.wait_for_selector(".vrow[data-row]")
    assert tab.texts(".bar [role=status]") == [f"{number} of {number} rollouts are in this file"]
    tab.page.get_by_title("Show all").click()
    tab.ready(f"{base}/rollouts?phase=train")
    tab.page.get_by_role("button", name="reward").click()
    tab.ready(f"{base}/rollouts?phase=train&sort=-reward")
    rewards = [row["reward"] for row in answers["rollouts"]["rows"] if row["phase"] == "train"]
    shown = tab.texts(".vbody .vrow .reward")
    scored = sorted((value for value in rewards if value is not None), reverse=True)
    num = min(len(shown), len(scored))
    assert num > 8
    assert [float(each) for each in shown[:num]] == pytest.approx(scored[:num], abs=0.001)
    closed(tab, file)


@pytest.mark.long
def test_hostile_strings_in_a_file_do_nothing(browser, tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    with Run.create(folder, kind="train", config={"model": "</script><script>" + RUN}) as run:
        for at, text in enumerate(STRINGS[::10] + STRINGS[3::20]):
            run.add_rollouts(encode_result(played(at, text)))
    file = tmp_path / "hostile.html"
    export_page(folder, file)
    assert file.read_text(encoding="utf-8").count("<script") == 2
    tab = open_file(browser, file, 390)
    opened = [each for each in places(file, 30) if "/tree/" not in each]
    assert sum("/rollout/" in each for each in opened) >= 15
    for place in opened:
        tab.open(place)
        assert tab.looked() == {"pale": [], "overflow": 0, "hacked": None}, place
        assert tab.texts(".error[role=alert]") == [], place
        dangerous = "main :is(script, iframe, img, style, link, form, base)"
        assert tab.page.locator(dangerous).count() == 0
    closed(tab, file)


# -- what is chosen --------------------------------------------------------------------------------


def test_the_rollouts_that_tell_most_are_chosen(tmp_path):
    run = golden_kit.unpack("demo-seed1", tmp_path / "demo")
    found = export_page(run, tmp_path / "demo.html")
    answers = inside(tmp_path / "demo.html")[1]
    assert 40 <= found.num_rollouts <= 80
    assert {"best", "worst", "of whole groups"} <= found.reasons.keys()
    assert sum(found.reasons.values()) == found.num_rollouts == len(answers["rollouts"]["rows"])
    assert found.num_without_tokens == 0
    with rt.read_run(run) as data:
        rows = {row["request_id"]: row for row in data.rollouts().rows()}
    kept = set(answers["rollout"])
    assert {rows[name]["reward"] for name in kept} >= {0.0, 1.0}
    whole = [g for g in answers["group"] if {n for n in rows if rows[n]["group_id"] == g} <= kept]
    assert sum(len([n for n in kept if rows[n]["group_id"] == g]) > 1 for g in whole) >= 2
    for sentence in answers["story"]["sentences"]:
        assert {name for name, _ in sentence["evidence"].get("rollouts", [])[:3]} <= kept


def test_rollouts_are_chosen_as_show_chooses_them(part_of, tmp_path):
    run, _, _ = part_of
    export_page(run, tmp_path / "a.html", where=["reward < 0.5"], sort="-num_calls", limit=5)
    with Run.open(run, mode="r") as stored:
        columns = stored.columns(("request_id",), where="reward < 0.5", sort="-num_calls", limit=5)
        wanted = {name for (name,) in columns}
    assert set(inside(tmp_path / "a.html")[1]["rollout"]) == wanted


def test_there_is_room_for_so_much(part_of, tmp_path, monkeypatch):
    run, _, _ = part_of
    monkeypatch.setattr("rolltree.insight.page.export.MAX_BYTES", 500_000)
    found = export_page(run, tmp_path / "a.html")
    assert 0 < found.num_without_tokens < found.num_rollouts
    assert found.num_bytes < 900_000
    monkeypatch.setattr("rolltree.insight.page.export.MAX_BYTES", 30_000)
    assert 0 < export_page(run, tmp_path / "a.html").num_rollouts < found.num_rollouts


def test_a_run_without_rollouts_is_a_file(browser, tmp_path):
    Run.create(tmp_path / "empty", kind="eval").close()
    export_page(tmp_path / "empty", tmp_path / "empty.html")
    tab = open_file(browser, tmp_path / "empty.html")
    tab.open("#/run/empty/rollouts")
    assert tab.texts(".empty") == ["The run has no rollouts yet."]
    closed(tab, tmp_path / "empty.html")


# -- the file --------------------------------------------------------------------------------------


def test_no_secret_is_in_a_file(tmp_path):
    secret, plain = "sk-" + "a1B2" * 8, "plain-word-of-a-judge"
    config = {
        "model": "m",
        "api_key": plain,
        "args": {"url": f"https://me:{plain}@host/", "x": secret},
    }
    with Run.create(tmp_path / "run", kind="eval", config=config) as run:
        run.add_rollouts(encode_result(played(0, f"Authorization: Bearer {secret} and {secret}")))
    export_page(tmp_path / "run", tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "[redacted]" in text
    assert secret not in text
    assert plain not in text
    assert str(tmp_path) not in text


@contextmanager
def full_disk(room_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_written_whole_or_not_at_all(runs, tmp_path):
    file = tmp_path / "run.html"
    export_page(runs / "tools", file)
    before = file.read_text(encoding="utf-8") + "<!-- the one before -->"
    file.write_text(before, encoding="utf-8")
    with full_disk(100_000), pytest.raises(StoreError, match=r"run\.html cannot be written"):
        export_page(runs / "tools", file)
    assert [each.name for each in tmp_path.iterdir()] == ["run.html"]
    assert file.read_text(encoding="utf-8") == before
    export_page(runs / "tools", file)
    assert [each.name for each in tmp_path.iterdir()] == ["run.html"]
    assert "the one before" not in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "more", "error", "words"),
    [
        ("no/run.html", {}, StoreError, "No such file or directory"),
        ("run.txt", {}, ConfigError, "run.html"),
        ("run.html", {"where": ["rewrd > 1"]}, ConfigError, "reward"),
        ("run.html", {"where": ["reward > 99"]}, ConfigError, "no rollout"),
        ("run.html", {"sort": "rewrd"}, ConfigError, "reward"),
    ],
)
def test_what_cannot_be_exported_says_why(runs, tmp_path, name, more, error, words):
    with pytest.raises(error, match=words):
        export_page(runs / "tools", tmp_path / name, **more)
    assert list(tmp_path.iterdir()) == []


def view(*words):
    return CliRunner().invoke(app, ["view", *map(str, words)])


def test_the_command_says_what_is_in_the_file(runs, tmp_path):
    file = tmp_path / "run.html"
    done = view(runs / "train", "--export", file, "-n", 3)
    assert done.exit_code == 0, done.output
    first, second = done.stdout.splitlines()
    assert re.fullmatch(r"wrote .*run\.html, 0\.\d MB, which opens in a browser by itself:", first)
    assert second == "3 of 50 rollouts, 3 of 26 groups"
    assert "rolltree runs" in view(runs, "--export", file).stderr
    for words in (["--limit", 3], ["--export", file, "--port", 1]):
        refused = view(runs, *words)
        assert (refused.exit_code, "--export" in refused.stderr) == (2, True)


def test_no_web_server_is_needed(runs, tmp_path):
    code = (
        "import sys; sys.modules.update(starlette=None, uvicorn=None)\n"
        "from rolltree.cli import app; app()"
    )
    file = tmp_path / "a b.html"
    subprocess.run(
        [sys.executable, "-c", code, "view", runs / "tools", "--export", file], check=True
    )
    assert file.is_file()
