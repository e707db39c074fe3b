"""The page while a run goes on: another process writes, the page follows without a reload."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import planted_kit
from browser_kit import Tab, serving
from wait_kit import wait_until

WRITER = Path(__file__).with_name("live_writer.py")
SOON = 60_000
PER_STEP = planted_kit.GROUPS * planted_kit.SIZE


class Writer:
    """A process that trains, a step for each call of `step`."""

    def __init__(self, folder, num_steps=3):
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER), str(folder), str(num_steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"

    def step(self, number=1):
        for _ in range(number):
            print("step", file=self.process.stdin, flush=True)
            assert self.process.stdout.readline() == "step\n"

    def end(self, how="done"):
        print(how, file=self.process.stdin, flush=True)
        self.process.wait(timeout=60)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=60)


@pytest.fixture
def write():
    """Return a function that starts a writer; all are gone at the end."""
    writers = []

    def begin(folder, **more):
        writers.append(Writer(folder, **more))
        return writers[-1]

    yield begin
    for writer in writers:
        writer.kill()
        writer.process.stdin.close()
        writer.process.stdout.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def page(start, root):
    return start(root)


@pytest.fixture
def follow(browser, page):
    """Return a function that opens a tab on the runs below `root`; it must not have reloaded."""
    tabs = []

    def begin(address="#/", link=page.link):
        tab = Tab(browser, link)
        if address != "#/":
            tab.open(address)
        tab.page.evaluate("() => { window.stayed = true; }")
        tabs.append(tab)
        return tab

    yield begin
    for tab in tabs:
        assert tab.page.evaluate("() => window.stayed")
        tab.page.context.close()
        assert tab.said == []


def shows(tab, selector, text):
    """Wait until something that `selector` finds has a text."""
    tab.page.locator(selector, has_text=re.compile(text)).first.wait_for(timeout=SOON)


def test_the_table_of_runs_follows(follow, start, write, tmp_path):
    first = write(tmp_path / "first")
    first.step()
    tab = follow(link=start(tmp_path).link)
    row = 'tr:has(a[title="first"])'
    shows(tab, f"{row} .badge", "^running$")
    shows(tab, f"{row} .progress", "1 / 3 steps")
    tab.page.get_by_label("Choose first").check()
    tab.page.keyboard.press("j")
    first.step(2)
    shows(tab, f"{row} .progress", "3 / 3 steps")
    second = write(tmp_path / "second")
    second.step()
    shows(tab, "tbody th a", "^second$")
    assert tab.texts("tbody th a") == ["second", "first"]
    first.end()
    shows(tab, f"{row} .badge", "^done$")
    second.kill()
    shows(tab, 'tr:has(a[title="second"]) .badge', "^killed$")
    assert tab.page.get_by_label("Choose first").is_checked()
    assert tab.texts("tr.marked th a") == ["first"]


def test_an_empty_folder_waits_for_its_first_run(follow, start, write, tmp_path):
    tab = follow(link=start(tmp_path).link)
    shows(tab, "main", "There is no run below")
    write(tmp_path / "first")
    shows(tab, "tbody th a", "^first$")


def test_a_runs_page_follows_and_keeps_what_one_looks_at(follow, write, root):
    writer = write(root / "zoomed", num_steps=8)
    writer.step(5)
    tab = follow("#/run/zoomed")
    assert tab.texts("#live") == ["live"]
    tab.page.locator(".story:not([aria-busy])").wait_for()
    tab.page.locator("summary", has_text="Settings").click()
    plot = tab.page.locator(".chart .plot").first
    box = plot.bounding_box()
    y = box["y"] + box["height"] / 2
    tab.page.mouse.move(box["x"] + 0.6 * box["width"], y)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 0.95 * box["width"], y, steps=3)
    tab.page.mouse.up()
    ticks = tab.page.locator(".chart").first.locator(".tick[text-anchor=middle]")
    zoomed = ticks.all_text_contents()
    assert "1" not in zoomed
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("reward")
    tab.page.evaluate("() => scrollTo(0, 150)")
    seen = plot.bounding_box()["y"]
    writer.step(3)
    shows(tab, ".progress", "8 / 8 steps")
    shows(tab, "td", f"^{8 * PER_STEP}$")
    assert ticks.all_text_contents() == zoomed
    assert tab.page.get_by_label("Find a curve").input_value() == "reward"
    assert tab.page.evaluate("() => document.activeElement.value") == "reward"
    assert tab.page.locator("details[open]", has_text="Settings").count() == 1
    assert plot.bounding_box()["y"] == pytest.approx(seen, abs=2)
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("Escape")
    wait_until(lambda: ticks.all_text_contents()[-1] == "8")
    writer.end()
    shows(tab, ".badge", "^done$")
    wait_until(lambda: tab.texts("#live") == [""])


def test_a_killed_and_a_failed_run_say_so(follow, write, root):
    writer = write(root / "killed")
    writer.step()
    tab = follow("#/run/killed")
    writer.kill()
    shows(tab, ".badge", "^killed$")
    shows(tab, ".error", "is gone and did not say why")
    failing = write(root / "failed")
    failing.step()
    tab.open("#/run/failed")
    failing.end("fail")
    shows(tab, ".badge", "^failed$")
    shows(tab, ".error", "the disk is full")


def test_the_list_of_rollouts_follows(follow, write, root):
    writer = write(root / "listed", num_steps=9)
    writer.step(4)
    tab = follow("#/run/listed/rollouts")
    table = tab.page.locator(".vtable")
    assert table.get_attribute("aria-rowcount") == str(4 * PER_STEP)
    for _ in range(40):
        tab.page.keyboard.press("j")
    marked = tab.texts(".vrow.marked a")
    top = table.evaluate("(box) => box.scrollTop")
    assert top > 0
    writer.step()
    tab.page.wait_for_selector(f'.vtable[aria-rowcount="{5 * PER_STEP}"]', timeout=SOON)
    assert table.evaluate("(box) => box.scrollTop") == top
    assert tab.texts(".vrow.marked a") == marked


def test_new_groups_come_above_without_moving_what_one_reads(follow, write, root):
    writer = write(root / "grouped", num_steps=30)
    writer.step(10)
    tab = follow("#/run/grouped/rollouts?by=group")
    first = tab.page.locator(".vbody .vrow:first-child a")
    assert first.all_text_contents() == ["train/000010/g00"]
    for _ in range(30):
        tab.page.keyboard.press("j")
    marked = tab.texts(".vrow.marked a")
    y = tab.page.locator(".vrow.marked").bounding_box()["y"]
    writer.step(2)
    rows = 12 * planted_kit.GROUPS
    tab.page.wait_for_selector(f'.vtable[aria-rowcount="{rows}"]', timeout=SOON)
    assert tab.texts(".vrow.marked a") == marked
    assert tab.page.locator(".vrow.marked").bounding_box()["y"] == pytest.approx(y, abs=2)


def test_a_server_that_stops_is_waited_for(browser, write, tmp_path):
    writer = write(tmp_path / "run")
    writer.step()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with serving(tmp_path, "--port", port) as (process, link):
        tab = Tab(browser, link)
        tab.open("#/run/run")
        process.terminate()
        process.wait(timeout=60)
        shows(tab, "#notice", f"server does not answer.*--port {port}")
        assert tab.texts("h1") == ["run"]
        tab.page.evaluate("() => { location.hash = '#/run/run/rollouts'; }")
        shows(tab, ".error", "does not answer")
        writer.step()
    with serving(tmp_path, "--port", port) as (_, link):
        shows(tab, "#notice", "Open the link")
        other = tab.page.context.new_page()
        other.goto(link)
        tab.page.bring_to_front()
        shows(tab, ".vrow", "train/000002")
        wait_until(lambda: tab.texts("#notice") == [""])
        tab.page.context.close()


def test_a_hidden_page_asks_nothing(follow, write, root):
    writer = write(root / "hidden")
    tab = follow("#/run/hidden")
    asked = []
    tab.page.on("request", lambda request: asked.append(request.url))
    hide = "(is) => { Object.defineProperty(document, 'hidden', { value: is, configurable: true });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    tab.page.wait_for_event("request", timeout=SOON)  # it was asked just now
    tab.page.evaluate(hide, True)
    tab.page.clock.install()
    asked.clear()
    tab.page.clock.run_for(20_000)
    writer.step()
    assert asked == []
    tab.page.evaluate(hide, False)
    shows(tab, ".progress", "1 / 3 steps")
