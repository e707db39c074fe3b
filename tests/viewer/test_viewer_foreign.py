"""Other pages and odd browsers: a second origin gets nothing; a clumsy hand is told what to do."""

import http.server
import threading
from pathlib import Path

import pytest

from browser_kit import Tab

ATTACK = (Path(__file__).parent / "attack_kit.js").read_text()


class _Evil(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><body>Win a prize")

    def log_message(self, *args):
        pass


@pytest.fixture
def evil():
    """Return the address of a page of another origin, on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Evil) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
def test_a_page_of_another_origin_gets_nothing_and_takes_nothing_away(browser, page, evil):
    tab = Tab(browser, page.link)
    other = tab.page.context.new_page()
    other.goto(evil)
    assert other.evaluate(ATTACK, page.base) == []
    tab.page.reload()
    tab.ready("#/")
    assert tab.texts("h1") == ["Runs"]
    assert tab.texts(".error") == []
    for name in ("main.js", "api.js"):
        other.goto(f"{page.base}/static/{name}")  # a script that is opened is text
        assert other.evaluate("() => document.scripts.length") == 0
    tab.page.context.close()
    assert tab.said == []


def test_a_wrong_link_in_an_open_tab_leaves_it_open(browser, page):
    tab = Tab(browser, page.link)
    for wrong in ("token=wrong", "file=wrong"):
        with tab.page.expect_navigation():
            tab.page.evaluate("(to) => { location.hash = to; }", wrong)
        tab.ready("#/")
        assert tab.texts("h1") == ["Runs"]
    tab.page.context.close()


def test_a_browser_that_is_opened_with_the_file_is_logged_in_and_the_file_is_gone(
    browser, opening, tmp_path
):
    with opening(XDG_RUNTIME_DIR=str(tmp_path)) as (_, _, given):
        tab = Tab(browser, given)
        assert tab.texts("h1") == ["Runs"]
        assert tab.page.evaluate("() => location.hash") == "#/"
        assert list(tmp_path.glob("*.html")) == []
        tab.page.reload()
        tab.ready("#/")
        assert tab.texts(".error") == []
        tab.page.context.close()
    assert tab.said == []


NO_STORAGE = """Object.defineProperty(window, "localStorage", {
  get() { throw new DOMException("The operation is insecure.", "SecurityError"); },
});"""


def test_a_browser_that_stores_nothing_shows_the_page_until_it_is_left(browser, page):
    context = browser.new_context()
    context.add_init_script(NO_STORAGE)
    tab = context.new_page()
    said = []
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(page.link)
    tab.wait_for_selector("h1:has-text('Runs')")
    tab.keyboard.press("t")
    tab.evaluate("() => { location.hash = '#/run/train'; }")
    tab.wait_for_selector("h1:has-text('train')")
    tab.reload()
    tab.wait_for_selector(".error:has-text('Open the link')")
    context.close()
    assert said == []


def test_without_scripts_the_page_says_what_is_missing(browser, page):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(page.link)
    assert "needs JavaScript" in tab.locator("body").inner_text()
    context.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("#/run/gone", "there is no run 'gone'"),
        ("#/run/train/rollout/gone/0", "no rollout 'gone'"),
        ("#/run/train/group/gone", "no group 'gone'"),
        ("#/run/train/rollout/x/y", "index"),
        ("#/run/train/rollouts?where=rewrd%20%3E%201", "'reward'"),
        ("#/run/train/rollouts?step=x", "step"),
        ("#/run/train/rollouts?where=" + "a" * 70_000, "server answers 400"),
        ("#/compare?a=train&b=train", "`arm`"),
        ("#/nowhere", "no such page"),
    ],
)
def test_a_link_that_leads_nowhere_says_so(browser, page, address, said):
    tab = Tab(browser, page.link)
    tab.open(address)
    (error,) = tab.texts(".error")
    assert said in error
    assert len(error) < 1500
    assert tab.looked()["overflow"] == 0
    tab.page.context.close()


def test_a_position_that_is_not_there_shows_the_last_token(browser, page):
    tab = Tab(browser, page.link)
    row = page.get("/api/runs/train/rollouts?limit=1").json()["rows"][0]
    for at in ("99999999", "-5", "x", "1e999", "1.5"):
        tab.open(f"#/run/train/tokens/{row['request_id'].replace('/', '%2F')}/0/0?at={at}")
        assert tab.texts(".error") == [], at
        assert tab.page.locator("[data-at]").count() > 0, at
    tab.page.context.close()
    assert tab.said == []


def test_back_and_forward_and_reload_show_what_was_there(browser, page):
    tab = Tab(browser, page.link)
    tab.open("#/run/train")
    tab.open("#/run/train/rollouts?sort=-reward")
    tab.page.go_back()
    tab.ready("#/run/train")
    assert tab.texts("h1") == ["train"]
    tab.page.go_forward()
    tab.ready("#/run/train/rollouts?sort=-reward")
    tab.page.reload()
    tab.ready("#/run/train/rollouts?sort=-reward")
    assert tab.texts("h1") == ["Rollouts"]
    second = tab.page.context.new_page()
    second.goto(f"{page.base}/#/run/tools")
    second.wait_for_selector("h1:has-text('tools')")
    tab.page.context.close()
    assert tab.said == []


def test_a_folder_without_runs_says_what_to_do(browser, start, tmp_path):
    tab = Tab(browser, start(tmp_path).link)
    text = tab.page.locator("main").inner_text()
    assert "There is no run below" in text
    assert "rolltree eval" in text
    tab.page.context.close()
    assert tab.said == []


def test_a_server_that_ended_is_told_of(browser, start, runs):
    page = start(runs)
    tab = Tab(browser, page.link)
    page.process.terminate()
    page.process.wait(timeout=30)
    tab.open("#/run/train")
    assert "Start `rolltree view` again" in tab.texts(".error")[0]
    tab.page.context.close()
