"""A tab of a real Chromium with the page in it, for tests that look and click."""

import json
import os
import shutil
from pathlib import Path
from urllib.parse import quote

CHROMIUM = os.environ.get("ROLLTREE_CHROMIUM") or shutil.which("chromium")
ASK = (Path(__file__).parent / "page_kit.js").read_text()


def part(text):
    return quote(str(text), safe="")


class Tab:
    """A tab with the page; `said` is what reached its console, or asked in a dialog."""

    def __init__(self, browser, link, width=1280, scheme="light"):
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.page = context.new_page()
        self.said = []
        self.page.on("console", lambda each: self.said.append(each.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.goto(link)
        self.ready("#/")

    def ready(self, address):
        self.page.wait_for_selector(f"body[data-ready={json.dumps(address)}]", timeout=30_000)

    def open(self, address):
        """Go to an address of the page and wait until its view stands."""
        self.page.evaluate("(to) => { location.hash = to; }", address)
        self.ready(address)

    def texts(self, selector):
        return self.page.locator(selector).all_inner_texts()

    def looked(self):
        """Return texts that are too pale, how far the page sticks out, and whether a text ran."""
        return self.page.evaluate(ASK)
