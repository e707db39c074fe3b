"""How fast the page opens and scrolls: a run of 100,000 rollouts, and a rollout of 200,000 tokens.

    python benchmarks/viewer.py                      the figures
    python benchmarks/viewer.py --check              exit 1 when a bar is missed
    python benchmarks/viewer.py --runs FOLDER        keep the runs there, and use them again

`rolltree view` is a process of its own, the browser a real Chromium without a window; every time is
the browser's own (`performance.measure`, frames, long tasks). The server is started anew for every
view that is opened first, so that nothing is in its memory.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from load import LONG, make_long, make_wide
from verdict import Bar, conclude, make_parser

SCRIPT = (Path(__file__).parent / "load" / "page.js").read_text()
CHROMIUM = os.environ.get("ROLLTREE_CHROMIUM") or shutil.which("chromium")
MOST_MS = 1000.0
FRAME_MS = 1000.0 / 60
LATE_MS = 1.5 * FRAME_MS
"""A frame that took longer was not drawn in its turn."""
ROUNDS = 3


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run `rolltree view` on a folder and give the link that it prints."""
    command = [sys.executable, "-m", "rolltree", "view", str(folder), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=30)
        process.stdout.close()


class Tab:
    """A tab of the browser with the page in it."""

    def __init__(self, browser: Any, link: str) -> None:
        self.link = link
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        self.page = context.new_page()
        self.page.set_default_timeout(120_000)
        self.page.add_init_script(SCRIPT)

    def first(self, address: str) -> dict[str, Any]:
        """Load the page at an address, with the token in the browser already."""
        base = self.link.partition("#")[0]
        self.page.route("**/blank", lambda route: route.fulfill(body="", content_type="text/html"))
        self.page.goto(f"{base}blank")
        token = self.link.partition("#token=")[2]
        self.page.evaluate("(token) => localStorage.setItem('token', token)", token)
        self.page.goto(base + address)
        found: dict[str, Any] = self.page.evaluate("(to) => load.opened(to)", address)
        return found

    def open(self, address: str) -> dict[str, Any]:
        """Go to an address within the page."""
        found: dict[str, Any] = self.page.evaluate("(to) => load.open(to)", address)
        return found

    def until(self, act: str, selector: str) -> dict[str, Any]:
        """Do something, and wait until an element is there."""
        found: dict[str, Any] = self.page.evaluate(
            f"(selector) => load.until(() => {{ {act} }}, selector)", selector
        )
        return found

    def scroll(self, selector: str, pixels: int, speed: int) -> dict[str, Any]:
        """Scroll by a gesture of the browser, and return every frame's length."""
        client = self.page.context.new_cdp_session(self.page)
        self.page.evaluate("(selector) => load.watch(selector)", selector)
        client.send(
            "Input.synthesizeScrollGesture",
            {
                "x": 640,
                "y": 500,
                "yDistance": -pixels,
                "speed": speed,
                "gestureSourceType": "mouse",
            },
        )
        found: dict[str, Any] = self.page.evaluate("() => load.stop()")
        return found

    def close(self) -> None:
        self.page.context.close()


def smoothness(found: dict[str, Any]) -> dict[str, Any]:
    """Return what frames tell: their number a second, how many were late, rows without data."""
    frames = found["frames"]
    gap = longest = 0.0
    for ms, blank in zip(frames, found["blank"], strict=False):
        gap = gap + ms if blank else 0.0
        longest = max(longest, gap)
    return {
        "num_frames": len(frames),
        "frames_per_s": 1000.0 * len(frames) / max(1.0, sum(frames)),
        "late_share": sum(ms > LATE_MS for ms in frames) / max(1, len(frames)),
        "longest_frame_ms": max(frames, default=0.0),
        "longest_task_ms": found["longest_ms"],
        "longest_gap_ms": longest,
        "blank_share": statistics.fmean(found["blank"]) if found["blank"] else 0.0,
        "pixels": found["tops"][-1] - found["tops"][0] if found["tops"] else 0,
        "num_requests": len(found["asked"]),
    }


def views(folder: Path) -> dict[str, str]:
    """Return the views that are opened, by name."""
    wide, long = "#/run/wide", f"{quote(LONG, safe='')}/0"
    step = quote("train/000100/g05", safe="")
    return {
        "runs": "#/",
        "run": wide,
        "rollouts": f"{wide}/rollouts",
        "filtered": f"{wide}/rollouts?where=reward+%3C+0.5+and+metrics%2Fnoise+%3E+0",
        "sorted": f"{wide}/rollouts?sort=-num_completion_tokens",
        "groups": f"{wide}/rollouts?by=group",
        "group": f"{wide}/group/{step}",
        "rollout": f"{wide}/rollout/{step}%2F0/0",
        "long_run": "#/run/long",
        "long_rollout": f"#/run/long/rollout/{long}",
        "long_tokens": f"#/run/long/tokens/{long}/19",
        "long_tree": f"#/run/long/tree/{long}",
    }


def opened(browser: Any, folder: Path, name: str, address: str) -> dict[str, Any]:
    """Open a view first in a new server, then again from the front page."""
    first, again = [], []
    for _ in range(ROUNDS):
        with server(folder) as link:
            tab = Tab(browser, link)
            first.append(tab.first(address))
            tab.open("#/compare?") if address == "#/" else tab.open("#/?q=")
            again.append(tab.open(address))
            tab.close()
    errors = [each["error"] for each in (*first, *again) if each["error"]]
    if errors:
        raise SystemExit(f"{name}: the page says {errors[0]!r}")
    first.sort(key=lambda each: each["drawn_ms"])
    again.sort(key=lambda each: each["drawn_ms"])
    middle, warm = first[len(first) // 2], again[len(again) // 2]
    return {
        "first_ms": middle["drawn_ms"],
        "first_paint_ms": middle["first_paint_ms"],
        "first_view_ms": middle["view_ms"],
        "again_ms": warm["drawn_ms"],
        "again_view_ms": warm["view_ms"],
        "longest_task_ms": max(middle["longest_ms"], warm["longest_ms"]),
        "asked": middle["asked"],
        "asked_again": warm["asked"],
    }


def moving(browser: Any, folder: Path, places: dict[str, str]) -> dict[str, Any]:
    """Scroll the tables and the token lens, and jump to their ends."""
    found: dict[str, Any] = {}
    with server(folder) as link:
        tab = Tab(browser, link)
        tab.first(places["rollouts"])
        for name, speed in (("rollouts", 1200), ("rollouts_fast", 8000)):
            found[name] = smoothness(tab.scroll(".vtable", 4 * speed, speed))
        end = "document.querySelector('.vtable').scrollTop = 1e9;"
        last = tab.page.locator(".vtable").get_attribute("aria-rowcount")
        at_end = f'.vrow[data-row][aria-rowindex="{int(last or 0) + 1}"]'
        found["rollouts_end"] = tab.until(end, at_end)
        tab.open(places["groups"])
        found["groups"] = smoothness(tab.scroll(".vtable", 4800, 1200))
        tab.open(places["long_tokens"])
        found["tokens"] = smoothness(tab.scroll("html", 4800, 1200))
        num = int(tab.page.locator("[aria-label='Go to position']").get_attribute("max") or 0)
        jump = (
            "const field = document.querySelector('[aria-label=\"Go to position\"]');"
            f"field.value = {num}; field.dispatchEvent(new Event('change'));"
        )
        found["tokens_end"] = tab.until(jump, f'.chosen[data-at="{num}"]')
        colour = (
            "const field = document.querySelector('[aria-label=\"Colour by\"]');"
            "field.value = 'logprob'; field.dispatchEvent(new Event('change'));"
        )
        found["tokens_colour"] = tab.until(colour, ".ramp.cold")
        tab.close()
    return found


def environment(browser: Any) -> dict[str, Any]:
    """Return what the figures were taken on."""
    return {
        "chromium": browser.version,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": [round(each, 1) for each in os.getloadavg()],
    }


def measure(folder: Path, only: str | None) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    places = views(folder)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        results: dict[str, Any] = {"environment": environment(browser)}
        results["opened"] = {
            name: opened(browser, folder, name, address)
            for name, address in places.items()
            if only is None or name in only.split(",")
        }
        if only is None or "moving" in only.split(","):
            results["moving"] = moving(browser, folder, places)
        browser.close()
    return results


def show(results: dict[str, Any]) -> None:
    print(results["environment"])
    print(f"{'view':14}{'first':>8}{'paint':>8}{'view':>8}{'again':>8}{'view':>8}{'task':>8}  ms")
    for name, each in results["opened"].items():
        names = ("first_ms", "first_paint_ms", "first_view_ms", "again_ms", "again_view_ms")
        numbers = [each[key] for key in (*names, "longest_task_ms")]
        print(f"{name:14}" + "".join(f"{number or 0:8.0f}" for number in numbers))
        for kind in ("asked", "asked_again"):
            said = [f"{a['path'][:40]} {a['ms']:.0f} ms {a['kb']:.0f} KiB" for a in each[kind]]
            print(f"    {kind}: {'; '.join(said)}")
    for name, each in results.get("moving", {}).items():
        print(name, {k: round(v, 3) if isinstance(v, float) else v for k, v in each.items()})


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    parser.add_argument("--num", type=int, default=100_000, help="rollouts of the wide run")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of the long rollout")
    parser.add_argument("--only", help="names of views, or `moving`, with commas")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        if not (folder / "wide").is_dir():
            make_wide(folder / "wide", options.num)
        if not (folder / "long").is_dir():
            make_long(folder / "long", options.tokens)
        results = measure(folder, options.only)
    bars: list[Bar] = []
    return conclude(options, bars, results, lambda: show(results))


if __name__ == "__main__":
    sys.exit(main())
