"""The pictures in docs/ are of today's page: their texts are compared, since fonts differ."""

import json

import pytest
from PIL import Image

from browser_kit import Tab
from docs_kit import ROOT
from golden import pictures

SHOWN = json.loads(pictures.TEXTS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def link():
    with pictures.served() as found:
        yield found


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda each: each.name)
def test_a_picture_is_of_todays_page(browser, link, picture):
    with pictures.opened(browser, link, picture) as page:
        assert pictures.seen(page) == SHOWN[picture.name], "`make pictures` takes them anew"


def test_the_clicks_of_the_tour_lead_to_its_pictures(browser, link):
    wanted = {picture.name: picture.address for picture in pictures.PICTURES}
    tab = Tab(browser, link)
    page = tab.page
    page.get_by_role("link", name="demo", exact=True).click()
    tab.ready(wanted["run"])
    page.locator(".sentence").first.wait_for()
    curve = page.locator("figure", has_text="groups without variance").locator("svg")
    box = curve.bounding_box()
    curve.click(position={"x": box["width"] * 0.168, "y": box["height"] / 2})
    # The run's own view has a link to all groups, too, until the new view is drawn.
    page.wait_for_selector("body[data-ready$='&trained=2']")
    page.get_by_role("link", name="Groups").click()
    page.get_by_role("heading", name="Groups").wait_for()
    page.get_by_role("link", name="g06").click()
    tab.ready(wanted["group"])
    page.get_by_role("link", name="Tree picture").click()
    tab.ready(wanted["tree"])
    page.go_back()
    tab.ready(wanted["group"])
    page.locator(".ending", has_text="rollout 0").get_by_role("link", name="tokens").click()
    page.get_by_label("Colour by").select_option("advantage")
    page.wait_for_function("(to) => location.hash === to", arg=wanted["tokens"])
    tab.open("#/")
    for run in ("seed1", "demo"):
        page.get_by_label(f"Choose {run}").check()
    page.get_by_role("button", name="Compare 2 runs").click()
    tab.ready(wanted["compare"])
    tab.open("#/run/tools")
    page.locator(".sentence", has_text="does not extend").get_by_role("link").first.click()
    page.locator(".break").wait_for()
    assert page.evaluate("location.hash").partition("?")[0] == wanted["break"]
    page.get_by_role("link", name="Rollout", exact=True).click()
    tab.ready(wanted["phone"])
    page.context.close()
    assert tab.said == []


def test_every_picture_is_small_and_shown():
    files = {picture.file for picture in pictures.PICTURES}
    assert files == set(pictures.IMAGES.glob("viewer-*.png"))
    assert set(SHOWN) == {picture.name for picture in pictures.PICTURES}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for picture in pictures.PICTURES:
        assert picture.file.stat().st_size < pictures.MAX_BYTES
        assert f"images/{picture.file.name}" in text
        with Image.open(picture.file) as image:
            sides = (picture.scale * picture.width, picture.scale * picture.height)
            assert image.size == sides


def test_the_terminal_of_the_demo_is_todays():
    with pictures.demo() as run:
        assert pictures.demo_svg(run) == pictures.DEMO.read_text(encoding="utf-8"), (
            "`make pictures`"
        )
