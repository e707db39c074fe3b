"""README.md and docs/ as somebody reads them who pastes every block, top to bottom.

`paste("samples.md", folder)` runs a page in one namespace, in an empty folder: Python is executed,
lines of `sh` that begin with `rolltree` are called, TOML must be a training config. What cannot be
done so is marked in the page, by comments right above the block:

    <!-- not run: it needs a GPU -->                       the block is left out
    <!-- not run, `pip`: ... -->                           lines of it that begin so are
    <!-- run with, `rolltree train`: train.num_steps=2 --> such lines get these words as well
    <!-- in the background, `rolltree view`: ... -->       it serves until the end of the page
    <!-- file: my_agent/agent.py -->                       the block is written to a file

`<!-- given: runs/demo -->` puts that committed run into the folder, `<!-- given: examples -->` the
checkout's. What `print(...)  # prints 12` says, there or on the next line, must be printed, in
that order.
"""

import contextlib
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from click.testing import CliRunner

import rolltree as rt
from golden_kit import unpack

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/README.md",
    *sorted({path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}),
)
SHOWN = ("text", "markdown")
"""Languages of blocks that are only shown."""

_BLOCK = re.compile(
    r"(?P<marks>(?:^ *<!--[^\n]*-->\n)*)^ *```(?P<language>[^\n]*)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(
    r"<!-- (?P<kind>not run|run with|in the background|file)"
    r"(?:, `(?P<begins>[^`]+)`)?: (?P<said>.+) -->"
)
_GIVEN = re.compile(r"^<!-- given: (?P<path>\S+) -->$", re.MULTILINE)
_PRINTS = re.compile(r"^ *print\(.*\)(?:  |\n *)# prints (.*)$", re.MULTILINE)


class Mark(NamedTuple):
    """What a comment above a block says of it, or of the lines of it that begin so."""

    kind: str
    begins: str
    said: str


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page."""

    language: str
    text: str
    first_line: int
    marks: tuple[Mark, ...]

    def said(self, kind: str, line: str | None = None) -> str | None:
        """Return what a mark of this kind says of the block, or of a line; None without one."""
        for mark in self.marks:
            if mark.kind == kind and (line.startswith(mark.begins) if line else not mark.begins):
                return mark.said
        return None

    @property
    def is_run(self) -> bool:
        """Whether anything of it is run."""
        return self.language in RUN and self.said("not run") is None


def text_of(page):
    """Return the text of README.md, of docs/README.md, or of another page in docs/ by its name."""
    folder = ROOT if page in PAGES[:2] else ROOT / "docs"
    return (folder / page).read_text(encoding="utf-8")


def blocks_of(page):
    """Return the code blocks of a page, top to bottom."""
    text = text_of(page)
    return [
        Block(
            found["language"],
            textwrap.dedent(found["text"]),
            text.count("\n", 0, found.start("text")),
            tuple(
                Mark(m["kind"], m["begins"] or "", m["said"])
                for m in _MARK.finditer(found["marks"])
            ),
        )
        for found in _BLOCK.finditer(text)
    ]


def blocks(page, language="python"):
    """Return the texts of a page's blocks of a language."""
    return [block.text for block in blocks_of(page) if block.language == language]


def commands(block):
    """Return the words of each command of a block of `sh` that is run, and whether it serves."""
    found = []
    for line in block.text.splitlines():
        if block.said("not run", line) is None:
            words = shlex.split(f"{line.partition(' #')[0]} {block.said('run with', line) or ''}")
            assert words[0] == "rolltree", f"{line!r} is neither run nor marked"
            found.append((words, block.said("in the background", line) is not None))
    return found


def paste(page, folder):
    """Run a page in a folder, as the module says, and return what it printed."""
    for path in _GIVEN.findall(text_of(page)):
        if path.startswith("runs/"):
            unpack(path.removeprefix("runs/"), folder / path)
        else:
            (folder / path).symlink_to(ROOT / path)
    printed = StringIO()
    with contextlib.chdir(folder), contextlib.ExitStack() as servers:
        names = {"__name__": "docs"}
        for block in blocks_of(page):
            path = block.said("file")
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(block.text, encoding="utf-8")
            elif block.is_run:
                RUN[block.language](page, block, names, printed, servers)
    _check_prints(page, printed.getvalue())
    return printed.getvalue()


def _run_python(page, block, names, printed, servers):
    source = "\n" * block.first_line + block.text  # a traceback has the page's lines
    with contextlib.redirect_stdout(printed):
        exec(compile(source, page, "exec"), names)


def _run_sh(page, block, names, printed, servers):
    from rolltree.cli import app  # late: most pages need none of it

    for words, serves in commands(block):
        if serves:
            servers.enter_context(serving([sys.executable, "-m", *words]))
            continue
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, f"{page}: {words}\n{done.output}\n{done.exception!r}"
        printed.write(done.stdout)


def _run_toml(page, block, names, printed, servers):
    rt.load_train_config(tomllib.loads(block.text))


RUN = {"python": _run_python, "sh": _run_sh, "toml": _run_toml}


@contextlib.contextmanager
def serving(words, cwd=None):
    """Start a command, wait for the URL that it prints, and stop it in the end."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd
    ) as process:
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if "http://" in line:
                    break
            else:
                raise AssertionError(f"{words} ended: {''.join(said)}")
            yield
        finally:
            process.terminate()


def _check_prints(page, printed):
    """Whether what blocks say that they print was printed, in this order."""
    lines = iter(printed.splitlines())
    for block in blocks_of(page):
        if block.language == "python" and block.is_run:
            for said in _PRINTS.findall(block.text):
                assert said in lines, f"{page} says that it prints {said!r}:\n{printed}"
