"""The server of the page, and a tab of a real Chromium with the page in it, to look and click.

`python -m browser_kit` says which Chromium that is, and fails if there is none.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ASK = (Path(__file__).parent / "page_kit.js").read_text()


class NoChromiumError(Exception):
    """There is no Chromium to look with; the message says what to do."""


def find_chromium(playwrights_own):
    """Return the path of a Chromium: the one that is set, one that is installed, Playwright's own.

    Raises:
        NoChromiumError: there is none.
    """
    named = os.environ.get("ROLLTREE_CHROMIUM")
    if named:
        if shutil.which(named) is None:
            raise FileNotFoundError(f"ROLLTREE_CHROMIUM={named} is not a program.")
        return named
    for found in (*map(shutil.which, COMMANDS), playwrights_own):
        if found and Path(found).exists():
            return found
    raise NoChromiumError(
        "there is no Chromium. `apt install chromium`, or `.venv/bin/playwright install chromium`,"
        " or set ROLLTREE_CHROMIUM to the path of one."
    )


@contextmanager
def serving(*words, program=("-m", "rolltree"), cwd=None):
    """Run `rolltree view` with these arguments; yield its process and the link it prints."""
    command = [sys.executable, *program, "view", *map(str, words), "--no-browser"]
    with tempfile.TemporaryDirectory() as cache:
        env = {"ROLLTREE_CACHE": cache, **os.environ}
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True)
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(timeout=60)
            process.stdout.close()


@contextmanager
def started_chromium():
    """Yield a running Chromium without a window.

    Raises:
        NoChromiumError: there is none, or the package that drives it is missing.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError as error:
        said = "the package playwright is missing: pip install -c constraints.txt playwright"
        raise NoChromiumError(said) from error
    with sync_playwright() as running:
        path = find_chromium(running.chromium.executable_path)
        made = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


def part(text):
    return quote(str(text), safe="")


DRAWN = "() => new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))"


class Tab:
    """A tab with the page; `said` is what reached its console, or asked in a dialog, `asked` the
    addresses that were requested."""

    def __init__(self, browser, link, width=1280, scheme="light", height=800, first="#/", **more):
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce",
            **more,
        )
        self.page = context.new_page()
        self.said = []
        self.asked = []
        self.page.on("request", lambda each: self.asked.append(each.url))
        self.page.on("console", lambda each: self.said.append(each.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.goto(link)
        self.ready(first)

    def ready(self, address):
        self.page.wait_for_selector(f"body[data-ready={json.dumps(address)}]", timeout=30_000)
        self.page.evaluate(DRAWN)  # what takes its size from the page is drawn a frame later

    def open(self, address):
        """Go to an address of the page and wait until its view stands."""
        self.page.evaluate("(to) => { location.hash = to; }", address)
        self.ready(address)

    def texts(self, selector):
        return self.page.locator(selector).all_inner_texts()

    def looked(self):
        """Return texts that are too pale, how far the page sticks out, and whether a text ran."""
        return self.page.evaluate(ASK)


def main():
    """Say which Chromium the tests use."""
    try:
        with started_chromium() as browser:
            print(f"{browser.browser_type.name} {browser.version}")
    except NoChromiumError as error:
        sys.exit(f"The tests of the page are skipped: {error}")


if __name__ == "__main__":
    main()
