"""Ten questions of a researcher, each answered in at most three clicks from the list of runs."""

import pytest

import golden_kit
import planted_kit
from browser_kit import Tab
from golden.pictures import RUNS

SOON = 60_000
MOST = 3


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, start):
    """Serve the demo with two seeds, an evaluation with tools, and runs with planted problems."""
    root = tmp_path_factory.mktemp("questions")
    for name in ("demo", "seed1", "tools"):
        golden_kit.unpack(RUNS[name], root / name)
    for problem in ("drift", "empty_answers"):
        planted_kit.plant(root / problem, problem)
    return start(root)


class Clicks:
    """A tab on the list of runs that counts what is clicked, chosen or typed."""

    def __init__(self, browser, link):
        self.tab = Tab(browser, link)
        self.page = self.tab.page
        self.num = 0

    def click(self, found):
        found = found.first
        found.wait_for(timeout=SOON)
        self.num += 1
        found.click()

    def run(self, name):
        self.click(self.page.get_by_role("link", name=name, exact=True))
        self.page.get_by_role("heading", name=name, exact=True).wait_for(timeout=SOON)

    def link(self, name):
        self.click(self.page.get_by_role("link", name=name, exact=True))

    def choose(self, label, value):
        self.num += 1
        self.page.get_by_label(label, exact=True).select_option(value)

    def sentence(self, text, link):
        self.click(self.page.locator(".sentence", has_text=text).get_by_role("link", name=link))

    def says(self, selector, text):
        self.page.locator(selector, has_text=text).first.wait_for(timeout=SOON)

    def rollouts(self):
        self.link("Rollouts")
        self.page.locator(".vrow[data-row]").first.wait_for(timeout=SOON)


@pytest.fixture
def clicks(browser, shelf):
    made = Clicks(browser, shelf.link)
    yield made
    assert made.num <= MOST
    assert made.tab.said == []
    made.page.context.close()


def test_did_it_learn(clicks):
    clicks.says("tr:has-text('demo') .health", "The reward rises")
    clicks.run("demo")
    clicks.says(".sentence", "Held out, the reward rose")
    clicks.says(".gain", "+0.690")


def test_is_the_gain_noise(clicks):
    clicks.run("demo")
    clicks.says(".gain", "[+0.572, +0.775] higher")
    clicks.link("what changed")
    clicks.says(".story", "not noise")


def test_are_two_runs_apart_by_noise(clicks):
    for run in ("seed1", "demo"):
        clicks.click(clicks.page.get_by_label(f"Choose {run}"))
    clicks.click(clicks.page.get_by_role("button", name="Compare 2 runs"))
    clicks.says(".story", "noise, the interval contains 0")
    clicks.says("figcaption", "reward in training")
    clicks.says("summary", "settings differ")


def test_what_got_worse(clicks):
    clicks.run("demo")
    clicks.link("what changed")
    clicks.says("p", "pass with step 0 and not with step 28")
    clicks.says(".badge", "won")
    changed = clicks.page.locator(".members li").first.get_by_role("link").first
    clicks.click(changed)
    clicks.page.wait_for_function("() => location.hash.includes('where=example_id')")


def test_why_did_this_fail(clicks):
    clicks.click(clicks.page.locator("tr:has-text('tools') a.bad"))
    clicks.click(clicks.page.locator(".vrow[data-row] a"))
    clicks.says(".failure", "scripted fault")


def test_where_did_the_prefix_break(clicks):
    clicks.run("tools")
    clicks.sentence("does not extend", "see")
    clicks.says(".break", "tokens agree")
    assert clicks.page.locator(".tokens .mark").count() == 1


def test_which_tokens_got_gradient(clicks):
    clicks.run("demo")
    clicks.rollouts()
    clicks.page.locator(".vtable").evaluate("(box) => { box.scrollTop = 200 * 32; }")
    clicks.click(clicks.page.locator(".vbody .vrow a[href*='colour=gradient']"))
    clicks.page.locator(".tokens [data-at]").first.wait_for(timeout=SOON)
    kinds = {*clicks.tab.texts(".tk.plus[data-at]"), *clicks.tab.texts(".tk.minus[data-at]")}
    assert kinds
    assert clicks.page.locator(".tk.unknown[data-at]").count() > 0


def test_is_it_gamed(clicks):
    clicks.says("tr:has-text('empty_answers') .health", "Empty answers earn reward")
    clicks.run("empty_answers")
    clicks.sentence("Empty answers", "see")
    clicks.says("h2", "Conversation")


def test_did_it_drift(clicks):
    clicks.says("tr:has-text('drift') .health", "drift from the trainer")
    clicks.run("drift")
    clicks.sentence("drift", "see")
    clicks.says("figcaption", "trainer - engine")


@pytest.mark.parametrize(
    ("order", "column"), [("-num_completion_tokens", "sampled"), ("reward", "reward")]
)
def test_the_longest_and_the_worst(clicks, order, column):
    clicks.run("demo")
    clicks.rollouts()
    clicks.choose("Order", order)
    clicks.page.wait_for_function("(sort) => location.hash.endsWith(`sort=${sort}`)", arg=order)
    clicks.page.locator(f"[aria-sort]:has-text('{column}')").wait_for(timeout=SOON)
    heads = [text.rstrip(" ↑↓") for text in clicks.tab.texts(".vhead .cell")]
    at = heads.index(column)
    rows = clicks.page.locator(".vbody .vrow").all()
    shown = [float(row.locator(".cell").nth(at).inner_text()) for row in rows]
    assert shown == sorted(shown, reverse=order.startswith("-"))


def test_the_most_broken(clicks):
    clicks.run("tools")
    clicks.rollouts()
    clicks.choose("Order", "-breaks")
    clicks.page.locator("[aria-sort=descending]:has-text('breaks')").wait_for(timeout=SOON)
    clicks.page.locator(".vrow .warn").first.wait_for(timeout=SOON)
    at = clicks.tab.texts(".vhead .cell").index("breaks ↓")
    rows = clicks.page.locator(".vbody .vrow").all()
    shown = [row.locator(".cell").nth(at).inner_text() for row in rows]
    assert shown == sorted(shown, reverse=True)
    assert int(shown[0]) == 2


def test_a_text_is_found(clicks):
    clicks.run("tools")
    clicks.rollouts()
    field = clicks.page.get_by_label("Find a text")
    clicks.click(field)
    field.fill("4 x kite")
    field.press("Enter")
    # Rows of before stand until the answer is there.
    clicks.page.wait_for_function(
        """() => {
          const rows = [...document.querySelectorAll(".vbody .vrow")];
          const found = (row) => row.textContent.includes("4 x kite");
          return rows.length > 0 && rows.length < 8 && rows.every(found);
        }"""
    )
    clicks.page.keyboard.press("f")
    assert field.evaluate("(each) => each === document.activeElement")


def test_the_list_is_walked_and_kept(browser, shelf):
    """`[` and `]` walk the list one came from, `u` keeps its filter, `j` begins at what is seen."""
    tab = Tab(browser, shelf.link)
    listed = "#/run/demo/rollouts?phase=train&where=reward+%3D+0&sort=-total_ms"
    tab.open(listed)
    # In one reading: between two, the table may draw its rows anew, and one be met twice.
    addresses = tab.page.locator(".vbody .vrow a:first-child").evaluate_all(
        "(links) => links.map((each) => each.getAttribute('href'))"
    )
    addresses = [each for each in addresses if "/rollout/" in each]
    tab.page.keyboard.press("j")
    tab.page.keyboard.press("j")
    tab.page.keyboard.press("Enter")
    tab.ready(addresses[1])
    for key, at in (("]", 2), ("]", 3), ("[", 2), ("[", 1), ("[", 0)):
        tab.page.keyboard.press(key)
        tab.ready(addresses[at])
    tab.page.keyboard.press("u")
    tab.ready(listed)
    tab.page.locator(".vtable").evaluate("(box) => { box.scrollTop = 3200; }")
    tab.page.wait_for_selector('.vrow[data-row][aria-rowindex="110"]')
    tab.page.keyboard.press("j")
    assert tab.page.locator(".vtable").evaluate("(box) => box.scrollTop") == 3200
    marked = tab.page.locator(".vrow.marked")
    assert int(marked.get_attribute("aria-rowindex")) in (102, 103)
    assert tab.said == []
    tab.page.context.close()


def test_a_token_keeps_its_place(browser, shelf):
    tab = Tab(browser, shelf.link)
    tab.open("#/run/demo/tokens/train%2F000002%2Fg06%2F0/0/0")
    tab.page.locator('[data-at="5"]').click()
    assert tab.page.evaluate("location.hash").endswith("?at=5")
    said = tab.texts(".inspector")
    tab.page.locator('[data-at="9"]').hover()
    assert tab.texts(".inspector") == said
    tab.page.keyboard.press("Escape")
    assert "at=" not in tab.page.evaluate("location.hash")
    tab.page.locator('[data-at="12"]').hover()
    assert tab.texts(".inspector") != said
    assert tab.said == []
    tab.page.context.close()
