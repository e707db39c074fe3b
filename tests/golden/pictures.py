"""The pictures of the documentation: `cd tests; python -m golden.pictures` (`make pictures`).

Each picture `docs/images/viewer-*.png` is a view of a committed run in a real Chromium, on a fixed
day. Beside them, `viewer.json` has the texts that each shows; a test compares those with today's
page, since pixels depend on the fonts of a machine. `demo.svg` and `reward_curve.png` are what
`make demo` shows and leaves.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops
from rich.console import Console

from browser_kit import Tab, serving, started_chromium
from golden.outputs import NOW, ROOT
from golden_kit import unpack
from rolltree.inference.models import resolve_model
from rolltree.inference.models.made import byte_tokenizer
from rolltree.reports.curves import save_reward_curve
from rolltree.reports.live import TrainView
from rolltree.store import Run
from rolltree.training.reporter import TrainStart

IMAGES = ROOT / "docs" / "images"
TEXTS = IMAGES / "viewer.json"
DEMO = IMAGES / "demo.svg"
MAX_BYTES = 150_000
RUNS = {"demo": "demo", "seed1": "demo-seed1", "delegation": "delegation", "tools": "4/tools"}
"""Name below `runs/` to the packed run."""
GROUP = "train%2F000002%2Fg06"


@dataclass(frozen=True)
class Picture:
    """A view, what is pointed at or scrolled to in it, and the size of the window."""

    name: str
    address: str
    height: int
    point: str = ""
    scroll: str = ""
    width: int = 1280
    scheme: str = "light"
    scale: int = 1

    @property
    def file(self) -> Path:
        """Return where the picture is."""
        return IMAGES / f"viewer-{self.name}.png"


TOOLS = "eval%2Ftool_calls%2F3%2F1/0"
PICTURES = (
    Picture("runs", "#/?q=", 290),
    Picture("run", "#/run/demo", 760),
    Picture("group", f"#/run/demo/group/{GROUP}", 1172, width=1000),
    Picture(
        "tokens",
        f"#/run/demo/tokens/{GROUP}%2F0/0/0?colour=advantage",
        820,
        point="[data-at] >> nth=-2",
        width=1000,
    ),
    Picture("tree", f"#/run/demo/tree/{GROUP}", 390, scheme="dark"),
    Picture("compare", "#/compare?arm=seed1&arm=demo", 560, width=1000),
    Picture("break", f"#/run/tools/tokens/{TOOLS}/2", 480),
    Picture(
        "phone",
        f"#/run/tools/rollout/{TOOLS}",
        844,
        scroll="h2:text('Conversation')",
        width=390,
        scale=2,
    ),
)


@contextmanager
def served() -> Iterator[str]:
    """Serve the runs on the fixed day, and yield the link."""
    frozen = f"import time; time.time = lambda: {NOW}; from rolltree.cli import main; main()"
    resolve_model("smollm2-135m")  # its tokenizer
    with tempfile.TemporaryDirectory() as folder:
        for name, packed in RUNS.items():
            unpack(packed, Path(folder) / "runs" / name)
        for name in ("delegation", "tools"):  # their model was made for them, and is not packed
            byte_tokenizer().save_pretrained(Path(folder) / "runs" / name / "model")
        with serving(program=("-c", frozen), cwd=folder) as (_, link):
            yield link


TOLD = "() => document.querySelector('[aria-busy]') === null"
"""Whether the sentences of runs stand on the page, which does not wait for them."""


@contextmanager
def opened(browser: Any, link: str, picture: Picture) -> Iterator[Any]:
    """Open a picture's view as it is shown, and yield the page."""
    tab = Tab(
        browser,
        link,
        picture.width,
        picture.scheme,
        picture.height,
        device_scale_factor=picture.scale,
        timezone_id="UTC",
        locale="en-GB",
    )
    try:
        tab.page.clock.set_fixed_time(1000 * NOW)
        tab.open(picture.address)
        tab.page.wait_for_load_state("networkidle")
        tab.page.wait_for_function(TOLD, timeout=60_000)
        if picture.point:
            tab.page.hover(picture.point)
        if picture.scroll:
            place = tab.page.locator(picture.scroll).bounding_box()
            tab.page.evaluate("(top) => scrollTo(0, top - 60)", place["y"])
        yield tab.page
        assert tab.said == []
    finally:
        tab.page.context.close()


def seen(page: Any) -> list[str]:
    """Return the lines of text that a page shows."""
    lines = page.evaluate("document.body.innerText").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def write(file: Path, picture: bytes) -> None:
    """Write a picture with a palette, a third as large; one that differs by a shade stays."""
    colours = Image.open(io.BytesIO(picture)).convert("RGB")
    new = colours.quantize(256, dither=Image.Dither.NONE)
    if file.exists():
        with Image.open(file) as old:
            gone = ImageChops.difference(old.convert("RGB"), new.convert("RGB"))
            if old.size == new.size and max(most for _, most in gone.getextrema()) < 24:
                return
    new.save(file, "PNG", optimize=True)


@contextmanager
def demo() -> Iterator[Run]:
    """Open the run that `make demo` stored."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Run.open(unpack(RUNS["demo"], Path(folder) / "demo"), "r") as run,
    ):
        yield run


def demo_svg(run: Run, at: int = 15) -> str:
    """Return what `make demo` shows while it plays a step, told by the run that it stored."""
    console = Console(record=True, width=112, force_terminal=True, file=io.StringIO())
    now = float(run.meta["created_at"])
    view = TrainView(console, clock=lambda: now)
    steps = run.steps()
    view.on_start(TrainStart(Path("runs/demo"), 1, len(steps), 134_515_008, ()))
    view.on_eval("eval_before", 0, run.evaluations()[0].metrics, stored=False)
    for row in steps[: at - 1]:
        now = row.created_at
        view.on_step(row.step, row.metrics)
    view.on_rollouts(at, 0, 64)
    console.print(view._render())
    return console.export_svg(title=f"make demo, step {at}", unique_id="demo") + "\n"


def main() -> None:
    """Write the pictures and their texts."""
    with demo() as run:
        DEMO.write_text(demo_svg(run), encoding="utf-8")
        curve = save_reward_curve(run)
        assert curve is not None
        write(IMAGES / curve.name, curve.read_bytes())
    texts = {}
    with served() as link, started_chromium() as browser:
        for picture in PICTURES:
            with opened(browser, link, picture) as page:
                write(picture.file, page.screenshot())
                texts[picture.name] = seen(page)
            print(f"{picture.file.name}: {picture.file.stat().st_size:,} bytes")
    TEXTS.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
