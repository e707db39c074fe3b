"""How fast the page opens and scrolls: a run of 100,000 rollouts, and a rollout of 200,000 tokens.

    python benchmarks/viewer.py                      the figures
    python benchmarks/viewer.py --check              exit 1 when a bar is missed
    python benchmarks/viewer.py --runs FOLDER        keep the runs there, and use them again

`rolltree view` is its own process, the browser a real Chromium without a window. Times are the
browser's own: `performance.measure`, paints, frames, long tasks. Every view is opened in a server
that was just started and a tab that has loaded nothing, and then again.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

from load import LONG, TURNS, make_long, make_wide
from verdict import Bar, conclude, make_parser

from rolltree.insight.page.api import index_of
from rolltree.store import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser_kit import serving, started_chromium

SCRIPT = (Path(__file__).parent / "load" / "page.js").read_text()
MOST_MS = 1000.0
LATE_MS = 1.5 * 1000.0 / 60
"""A frame that took longer was not drawn in its turn."""
ROUNDS = 3
YARDSTICK, FOUND = "a still table", "a text found"
_CELLS = "".join(f"<td>cell {number}" for number in range(10))
STILL = (
    "<!doctype html><div style='height:650px;overflow:auto;font:14px sans-serif'><table>"
    + 1600 * f"<tr style='height:32px'>{_CELLS}"
)
"""A table of as many rows as are scrolled through, without a script: what this machine can draw."""


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
        client.send("Performance.enable", {"timeDomain": "threadTicks"})  # whatever else is running
        before = _work_s(client)
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
        return smoothness(found, _work_s(client) - before)

    def close(self) -> None:
        self.page.context.close()


def _work_s(client: Any) -> float:
    """Return how much CPU time the page's main thread has taken."""
    found = client.send("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in found if each["name"] == "TaskDuration"))


def smoothness(found: dict[str, Any], work_s: float) -> dict[str, float]:
    """Return what the frames of a scroll tell: how many a second, how many were late, blank ones.

    `work_ms` is what the main thread did for a frame; `longest_gap_ms` is for how long in a row
    something in sight was not drawn yet.
    """
    frames = found["frames"]
    gap = longest = 0.0
    for ms, blank in zip(frames, found["blank"], strict=False):
        gap = gap + ms if blank else 0.0
        longest = max(longest, gap)
    return {
        "frames_per_s": 1000.0 * len(frames) / sum(frames),
        "late_share": sum(ms > LATE_MS for ms in frames) / len(frames),
        "longest_frame_ms": max(frames),
        "work_ms": 1000.0 * work_s / len(frames),
        "longest_task_ms": found["longest_ms"],
        "longest_gap_ms": longest,
        "pixels": found["tops"][-1] - found["tops"][0],
        "num_requests": len(found["asked"]),
    }


def addresses() -> dict[str, str]:
    """Return the views that are opened, by name."""
    wide, long = "#/run/wide", f"{quote(LONG, safe='')}/0"
    group = quote("train/000100/g05", safe="")
    return {
        "runs": "#/",
        "run": wide,
        "rollouts": f"{wide}/rollouts",
        "filtered": f"{wide}/rollouts?where=reward+%3C+0.5+and+metrics%2Fnoise+%3E+0",
        "sorted": f"{wide}/rollouts?sort=-metrics%2Fnoise",
        "groups": f"{wide}/rollouts?by=group",
        "group": f"{wide}/group/{group}",
        "rollout": f"{wide}/rollout/{group}%2F0/0",
        "long run": "#/run/long",
        "long rollout": f"#/run/long/rollout/{long}",
        "long tokens": f"#/run/long/tokens/{long}/{TURNS - 1}",
        "long tokens, by advantage": f"#/run/long/tokens/{long}/{TURNS - 1}?colour=advantage",
        "long tree": f"#/run/long/tree/{long}",
        "long group": f"#/run/long/group/{quote(LONG.rpartition('/')[0], safe='')}",
    }


def opened(browser: Any, folder: Path, address: str) -> dict[str, Any]:
    """Open a view in a new server and tab, and again from another view; the median of a few."""
    first, again = [], []
    for _ in range(ROUNDS):
        with serving(folder) as (_, link):
            tab = Tab(browser, link)
            first.append(tab.first(address))
            tab.open("#/?q=")
            again.append(tab.open(address))
            tab.close()
    for each in (*first, *again):
        if each["error"]:
            raise SystemExit(f"{address}: the page says {each['error']!r}")
    (_, new, _), (_, known, _) = (sorted(each, key=_drawn) for each in (first, again))
    return {
        "first_ms": new["drawn_ms"],
        "first_paint_ms": new["first_paint_ms"],
        "first_view_ms": new["view_ms"],
        "again_ms": known["drawn_ms"],
        "again_view_ms": known["view_ms"],
        "longest_task_ms": max(new["longest_ms"], known["longest_ms"]),
        "asked": new["asked"],
    }


def searched(browser: Any, folder: Path) -> dict[str, Any]:
    """Find a text in all rollouts, by an index that was made when it was first asked for."""
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, ROLLTREE_CACHE=cache),
    ):
        with Run.open(folder / "wide", "r") as run:
            index_of(run).build()
        return opened(browser, folder, "#/run/wide/rollouts?text=no+answer")


def _drawn(found: dict[str, Any]) -> float:
    return float(found["drawn_ms"])


def moving(browser: Any, folder: Path) -> dict[str, dict[str, float]]:
    """Scroll the tables and the token lens, jump to their ends, change what they show."""
    found: dict[str, dict[str, float]] = {}
    places = addresses()
    with serving(folder) as (_, link):
        tab = Tab(browser, link)
        tab.page.route(
            "**/still", lambda route: route.fulfill(body=STILL, content_type="text/html")
        )
        tab.page.goto(f"{link.partition('#')[0]}still")
        found[YARDSTICK] = tab.scroll("div", 7200, 1800)
        found[f"{YARDSTICK}, fast"] = tab.scroll("div", 36_000, 12_000)
        tab.first(places["rollouts"])
        found["rollouts"] = tab.scroll(".vtable", 7200, 1800)
        found["rollouts, fast"] = tab.scroll(".vtable", 48_000, 12_000)
        last = int(tab.page.locator(".vtable").get_attribute("aria-rowcount") or 0)
        found["rollouts, to the end"] = tab.until(
            "document.querySelector('.vtable').scrollTop = 1e9;",
            f'.vrow[data-row][aria-rowindex="{last + 1}"]',
        )
        tab.open(places["groups"])
        found["groups"] = tab.scroll(".vtable", 7200, 1800)
        tab.open(places["long tokens"])
        found["tokens"] = tab.scroll("html", 7200, 1800)
        last = int(tab.page.get_by_label("Go to position").get_attribute("max") or 0)
        jump = _change("Go to position", last)
        found["tokens, to the end"] = tab.until(jump, f'.chosen[data-at="{last}"]')
        colour = _change("Colour by", "logprob")
        found["tokens, by logprob"] = tab.until(colour, ".ramp.cold")
        tab.close()
    with serving(folder) as (_, link):
        tab = Tab(browser, link)
        tab.first(places["run"])
        tab.page.wait_for_selector(".story > .sentence")
        found["story"] = {"drawn_ms": tab.page.evaluate("() => performance.now()")}
        tab.close()
    return found


def _change(label: str, value: object) -> str:
    return (
        f"const field = document.querySelector('[aria-label=\"{label}\"]');"
        f"field.value = '{value}'; field.dispatchEvent(new Event('change'));"
    )


def measure(folder: Path, only: list[str]) -> dict[str, Any]:
    """Return all figures, or those of the views that are named."""
    with started_chromium() as browser:
        results: dict[str, Any] = {
            "environment": {
                "chromium": browser.version,
                "python": platform.python_version(),
                "machine": platform.machine(),
                "cores": os.cpu_count(),
                "load": [round(each, 1) for each in os.getloadavg()],
            },
            "opened": {
                name: opened(browser, folder, address)
                for name, address in addresses().items()
                if not only or name in only
            },
        }
        if not only or FOUND in only:
            results["opened"][FOUND] = searched(browser, folder)
        if not only or "moving" in only:
            results["moving"] = moving(browser, folder)
    return results


def bars_of(results: dict[str, Any]) -> list[Bar]:
    """Return what is promised of the figures."""
    bars = [
        Bar.below(f"ms to open {name}", each["first_ms"], MOST_MS)
        for name, each in results["opened"].items()
    ]
    moved = results.get("moving", {})
    for name, each in moved.items():
        if name.startswith(YARDSTICK):
            continue
        speed = ", fast" if name.endswith(", fast") else ""
        least = min(57.0, 0.9 * moved[YARDSTICK + speed]["frames_per_s"])
        if "frames_per_s" in each:
            bars += [
                Bar.at_least(f"frames a second while {name} scroll", each["frames_per_s"], least),
                Bar.at_most(f"ms of work for a frame while {name} scroll", each["work_ms"], 16.7),
                Bar.at_most(f"ms in which {name} in sight were blank", each["longest_gap_ms"], 100),
            ]
        elif name != "story":
            bars.append(Bar.below(f"ms for {name}", each["drawn_ms"], MOST_MS))
    return bars


def show(results: dict[str, Any]) -> None:
    print(", ".join(f"{name} {value}" for name, value in results["environment"].items()))
    names = ("first_ms", "first_paint_ms", "first_view_ms", "again_ms", "again_view_ms")
    heads = ("first", "paint", "view", "again", "view", "task")
    print(f"{'ms':28}" + "".join(f"{head:>8}" for head in heads) + "  what was asked, KiB")
    for name, each in results["opened"].items():
        numbers = [each[key] or 0.0 for key in (*names, "longest_task_ms")]
        asked = (
            f"{a['path'].split('/')[-1][:12]} {a['ms']:.0f} ms {a['kb']:.0f}" for a in each["asked"]
        )
        print(f"{name:28}" + "".join(f"{n:8.0f}" for n in numbers) + f"  {'; '.join(asked)}")
    for name, each in results.get("moving", {}).items():
        said = ", ".join(f"{k} {v:.3g}" for k, v in each.items() if isinstance(v, int | float))
        print(f"{name:28}  {said}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    parser.add_argument("--num", type=int, default=100_000, help="rollouts of the wide run")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of the long rollout")
    parser.add_argument("--only", nargs="+", default=[], help="names of views, or `moving`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        if not (folder / "wide").is_dir():
            make_wide(folder / "wide", options.num)
        if not (folder / "long").is_dir():
            make_long(folder / "long", options.tokens)
        results = measure(folder, options.only)
    return conclude(options, bars_of(results), results, lambda: show(results))


if __name__ == "__main__":
    sys.exit(main())
