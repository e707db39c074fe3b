"""The edits that make an environment of verifiers 0.1.8 use rolltree's own names.

The syntax tree gives the places of names, and only their characters are replaced: formatting and
comments stay. A place that cannot be edited safely gets a remark that says what to do.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import rolltree
from rolltree.compat.names import MODULES, REMOVED, SOURCE_OF
from rolltree.errors import ConfigError
from rolltree.files import write_whole

WITHOUT_EFFECT = {"parallelize_scoring", "use_tqdm"}
"""Keywords that can be left out: they have no effect here."""
RENAMED = {
    "ReasoningGymEnv": {
        "gym": "tasks",
        "num_train_examples": "num_train",
        "num_eval_examples": "num_eval",
    },
}
"""Keywords that have a different name in rolltree."""
KEPT = {"TextArenaEnv": "rolltree.compat.textarena_environment"}
"""Classes whose namesake in rolltree takes other arguments: they come from `compat`."""
_EXTRAS = {
    **{"datasets": "envs", "load_example_dataset": "envs", "openai": "openai", "mcp": "mcp"},
    **{"JudgeRubric": "openai", "MathRubric": "math", "math_verify": "math", "MCPEnv": "mcp"},
    **{"TextArenaEnv": "worlds", "textarena": "worlds", "ReasoningGymEnv": "worlds"},
}
"""The extras of rolltree that imports and names need; verifiers included some of them."""


@dataclass(frozen=True, slots=True)
class Migration:
    """The new texts of the files that change, with the old ones, and what is left to do.

    A remark is about a place that was not edited: `file:line`, and what to do.
    """

    folder: Path
    before: dict[Path, str]
    after: dict[Path, str]
    remarks: tuple[str, ...]

    def diff(self) -> str:
        """Return the edits as a unified diff."""
        parts: list[str] = []
        for file, new in self.after.items():
            name = file.relative_to(self.folder)
            lines = (self.before[file].splitlines(True), new.splitlines(True))
            parts += difflib.unified_diff(*lines, f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in parts)

    def with_todo(self, lines: Sequence[str]) -> Migration:
        """Return the migration with `lines` as comments at the top of the loading module."""
        loads = [file for file, text in self.after.items() if "def load_environment" in text]
        if not lines or not self.after:
            return self
        file = (loads or list(self.after))[0]
        text = self.after[file]
        # Below `#!` and encoding lines, which only count at the top.
        head = re.match(r"(#.*\n)*", text)
        assert head is not None
        comments = "".join(f"# {' '.join(line.split())}\n" for line in lines)
        after = {**self.after, file: f"{head[0]}{comments}{text[head.end() :]}"}
        return replace(self, after=after)

    def write(self, folder: Path | None = None) -> None:
        """Write the files that change, into `folder` if it is a copy of the environment."""
        for file, text in self.after.items():
            target = file if folder is None else folder / file.relative_to(self.folder)
            write_whole(target, text)


def migrate(path: Path) -> Migration:
    """Return the edits of an environment: a file, or a folder with all its Python files.

    Raises:
        ConfigError: there is no Python file at `path`, or a file cannot be read.
    """
    folder = path.parent if path.is_file() else path
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    files = [f for f in files if not any(p.startswith(".") for p in f.relative_to(folder).parts)]
    if not files:
        raise ConfigError(f"there is no Python file in {path}. Pass the environment's folder.")
    before: dict[Path, str] = {}
    after: dict[Path, str] = {}
    remarks: list[str] = []
    extras: set[str] = set()
    for file in files:
        before[file] = _read(file)
        edited = _File(before[file], str(file.relative_to(folder)))
        extras |= edited.extras
        after[file] = edited.text
        remarks += edited.remarks
    project = folder / "pyproject.toml"
    if path.is_dir() and project.is_file():
        before[project] = _read(project)
        after[project], more = _project(before[project], extras)
        remarks += more
    changed = {file: text for file, text in after.items() if text != before[file]}
    return Migration(folder, before, changed, tuple(remarks))


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read as text ({error}), so nothing was edited."
        ) from error


def home_of(name: str) -> str | None:
    """Return the module of rolltree that has a public name of verifiers; None if none has."""
    if name in REMOVED or name in KEPT:
        return KEPT.get(name)
    try:
        getattr(rolltree, name)
    except AttributeError:
        return SOURCE_OF.get(name)
    return "rolltree"


@dataclass
class _File:
    """The edits of one file."""

    source: str
    name: str
    text: str = ""
    remarks: list[str] = field(default_factory=list)
    extras: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        try:
            self.tree = ast.parse(self.source)
        except SyntaxError as error:
            raise ConfigError(
                f"{self.name} is not valid Python ({error}); nothing was edited."
            ) from error
        # Not `splitlines`, which also splits at form feeds and other marks that Python does not
        # count.
        self.lines = re.findall(r"[^\n]*\n|[^\n]+", self.source)  # as Python counts lines
        self.edits: list[tuple[int, int, str]] = []
        self.aliases: set[str] = set()  # names of the package itself
        self.names: dict[str, str] = {}  # local name -> public name
        self.wanted: dict[str, str] = {}  # names that need their own import -> module
        self.last_import: ast.stmt | None = None
        nodes = list(ast.walk(self.tree))
        # In `vf.types.State`, `vf.types` is an attribute too; the outermost one is edited.
        self.inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            self._import(node)
        for node in nodes:
            self._use(node)
        self._import_wanted()
        self.text = self.source
        # From the end, so that places further up stay valid.
        for start, end, new in sorted(self.edits, reverse=True):
            self.text = self.text[:start] + new + self.text[end:]

    def _import_wanted(self) -> None:
        if not self.wanted or self.last_import is None:
            return
        lines = [f"from {home} import {name}\n" for name, home in sorted(self.wanted.items())]
        end = self._offset(self.last_import.end_lineno or 1, None)
        newline = "" if self.source[:end].endswith("\n") else "\n"
        self.edits.append((end, end, newline + "".join(lines)))

    def _offset(self, line: int, column: int | None) -> int:
        """Return the index in the text of a line and column; None is the end of the line."""
        # `ast` counts columns in bytes of UTF-8, but the text is edited by characters.
        before = sum(map(len, self.lines[: line - 1]))
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return before + (len(text) if column is None else len(text.encode()[:column].decode()))

    def _span(self, node: ast.AST) -> tuple[int, int]:
        at: Any = node
        start = self._offset(at.lineno, at.col_offset)
        return start, self._offset(at.end_lineno, at.end_col_offset)

    def _remark(self, node: ast.AST, what: str) -> None:
        self.remarks.append(f"{self.name}:{getattr(node, 'lineno', 1)}: {what}")

    # Imports

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._need_extra(alias.name.partition(".")[0])
                self._import_module(node, alias)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            self._need_extra(node.module.partition(".")[0])
            if node.module == "openai" and any(a.name == "OpenAI" for a in node.names):
                self._blocking_client(node)
            if node.module.partition(".")[0] == "verifiers":
                self._import_names(node)

    def _import_module(self, node: ast.Import, alias: ast.alias) -> None:
        package, _, rest = alias.name.partition(".")
        if package != "verifiers":
            return
        # `import verifiers.utils.tools as t` has no counterpart: names are in several modules here.
        if rest and (rest not in MODULES or alias.asname):
            self._remark(node, f"import the names of {alias.name} from rolltree, one by one")
            return
        local = alias.asname or "verifiers"
        self.aliases.add(local)
        start, end = self._span(alias)
        self.edits.append(
            (start, end, "rolltree" if local == "rolltree" else f"rolltree as {local}")
        )
        if node in self.tree.body:
            self.last_import = node

    def _import_names(self, node: ast.ImportFrom) -> None:
        homes: dict[str, list[ast.alias]] = {}
        for alias in node.names:
            home = home_of(alias.name) if alias.name != "*" else None
            if home is None:
                what = f"rolltree has no {alias.name} of {node.module}"
                self._remark(node, f"{what}; {_what_instead(alias.name)}")
                return
            self._need_extra(alias.name)
            self.names[alias.asname or alias.name] = alias.name
            homes.setdefault(home, []).append(alias)
        start, end = self._span(node)
        if len(homes) == 1:
            (home,) = homes
            # Only the module's name changes, so comments and line ends of the list of names stay.
            found = re.compile(r"from\s+([\w.]+)").match(self.source, start)
            assert found is not None
            self.edits.append((*found.span(1), home))
        else:
            indent = self.source[self._offset(node.lineno, 0) : start]
            lines = [
                f"from {home} import {', '.join(map(ast.unparse, aliases))}"
                for home, aliases in sorted(homes.items())
            ]
            self.edits.append((start, end, f"\n{indent}".join(lines)))

    def _blocking_client(self, node: ast.ImportFrom) -> None:
        """Replace `OpenAI` by `AsyncOpenAI` if the file only makes clients and calls none."""
        uses = [n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n.id == "OpenAI"]
        # If the file calls the client itself, every such call would need an `await`.
        if "completions.create(" in self.source:
            what = "OpenAI blocks the event loop; use AsyncOpenAI, and await what it returns"
            self._remark(node, what)
            return
        has_both = any(alias.name == "AsyncOpenAI" for alias in node.names)
        for alias in node.names:
            if alias.name == "OpenAI" and alias.asname is None and not has_both:
                self.edits.append((*self._span(alias), "AsyncOpenAI"))
        self.edits += [(*self._span(use), "AsyncOpenAI") for use in uses]

    def _need_extra(self, name: str) -> None:
        if name in _EXTRAS:
            self.extras.add(_EXTRAS[name])

    # Uses

    def _use(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute):
            self._attribute(node)
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if _dotted(target) == ["self", "tools"]:
                    self._remark(node, "the tools of a ToolEnv cannot be set; use self.add_tool")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"verifiers(\.\w+)+", str(node.value)):
            self._remark(node, f"the text {node.value!r} names a module of verifiers")

    def _attribute(self, node: ast.Attribute) -> None:
        path = _dotted(node)
        if path is None or path[0] not in self.aliases or id(node) in self.inner:
            return
        modules = [n for n in range(1, len(path)) if ".".join(path[1 : n + 1]) in MODULES]
        skip = max(modules, default=0) if len(path) > 2 else 0
        name = path[skip + 1] if skip + 1 < len(path) else path[-1]
        self._need_extra(name)
        home = home_of(name)
        outer: ast.expr = node
        for _ in range(len(path) - skip - 2):
            assert isinstance(outer, ast.Attribute)
            outer = outer.value
        if home == "rolltree":
            if skip:
                self.edits.append((*self._span(outer), f"{path[0]}.{name}"))
        elif home is None:
            self._remark(node, f"rolltree has no {name}; {_what_instead(name)}")
        # A new import would be shadowed by the file's own name, or has no place to go.
        elif self.last_import is None or name in _bound(self.tree):
            self._remark(node, f"take {name} from {home}")
        else:
            self.wanted[name] = home
            self.edits.append((*self._span(outer), name))

    def _call(self, node: ast.Call) -> None:
        path = _dotted(node.func)
        if path is None:
            return
        if path[-2:] == ["funcs", "append"]:
            self._remark(node, "rubric.funcs cannot be changed; use rubric.add_reward_func")
        name = self.names.get(path[0]) if len(path) == 1 else None
        if path[0] in self.aliases:
            name = path[-1]
        target: Any = (
            getattr(rolltree, name, None) if name and home_of(name) == "rolltree" else None
        )
        known = _keywords(target) if inspect.isclass(target) else None
        if path[-1] in ("evaluate", "evaluate_sync", "generate", "generate_sync"):
            # By the method's name alone: the type of the object is not known.
            target = rolltree.Environment
            method = getattr(target, path[-1].removesuffix("_sync"))
            # `evaluate` passes keywords that it does not have to `generate`.
            known = {*inspect.signature(method).parameters}
            known |= {*inspect.signature(target.generate).parameters}
        for keyword in node.keywords if known is not None else ():
            if keyword.arg is None or keyword.arg in (known or ()):
                continue
            renamed = RENAMED.get(path[-1], {}).get(keyword.arg)
            if renamed is not None:
                start, _ = self._span(keyword)
                self.edits.append((start, start + len(keyword.arg), renamed))
            elif keyword.arg in WITHOUT_EFFECT:
                self._leave_out(node, keyword)
            else:
                known_by = f"see help(rolltree.{target.__name__})"
                self._remark(
                    keyword.value,
                    f"{path[-1]} has no argument {keyword.arg!r} in rolltree; {known_by}, or keep "
                    "this environment on rolltree.compat",
                )

    def _leave_out(self, call: ast.Call, keyword: ast.keyword) -> None:
        start, end = self._span(keyword)
        # With the comma and line end after it; for the last argument, with the comma before it.
        after = re.compile(r"\s*,[ \t]*\n?[ \t]*").match(self.source, end)
        before = re.compile(r",?\s*$").search(self.source, self._span(call.func)[1], start)
        if after is not None:
            self.edits.append((start, after.end(), ""))
        elif before is not None:
            self.edits.append((before.start(), end, ""))


def _dotted(node: ast.AST) -> list[str] | None:
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return [node.id, *path] if isinstance(node, ast.Name) else None


def _bound(tree: ast.AST) -> set[str]:
    """Return the names that a module defines or assigns."""
    found = {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found |= {n.name for n in ast.walk(tree) if isinstance(n, kinds)}
    return found | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}


def _keywords(kind: Any) -> set[str]:
    """Return the keywords of a constructor, including those that it passes to its bases."""
    known: set[str] = set()
    for base in inspect.getmro(kind):
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        known |= {p.name for p in parameters}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return known


def _what_instead(name: str) -> str:
    if name == "*":
        return "name what you use"
    if name in REMOVED:
        return "train with rolltree.train; see docs/training.md"
    return "see docs/compat.md"


def _project(text: str, extras: set[str]) -> tuple[str, list[str]]:
    """Return pyproject.toml with rolltree in the place of verifiers."""
    try:
        project = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return text, [f"pyproject.toml:1: it is not valid TOML ({error})"]
    about = project.get("project", {})
    lists = [about.get("dependencies", []), *about.get("optional-dependencies", {}).values()]
    asked = f"[{','.join(sorted(extras))}]" if extras else ""
    remarks = []
    for line in {x for lines in lists for x in lines if re.match(r"verifiers\b", x)}:
        for quote in ('"', "'"):
            text = text.replace(f"{quote}{line}{quote}", f"{quote}rolltree{asked}>=0.1{quote}")
    text = re.sub(r"(?m)^\[tool\.verifiers\.eval\]", "[tool.rolltree.eval]", text)
    for number, line in enumerate(text.splitlines(), start=1):
        if re.search(r"\bverifiers\b", line) and not line.lstrip().startswith(("#", "description")):
            remarks.append(f"pyproject.toml:{number}: this line still names verifiers")
    return text, remarks
