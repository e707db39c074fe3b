"""Names say what a value is: words that fit any value name nothing but short-lived locals."""

import ast
import re
from functools import cache

import pytest

from house.texts import SRC

WORDS = {"found", "said", "told", "there", "news", "hear", "tell"}
"""Words that are not names, nor parts of one (`_there_is`, `MAX_TOLD`, `FoundRows`)."""
MAX_LINES = 15
"""How far the last use of a local of that name may stand below its first binding."""
DOCUMENTED = {
    # A parameter of `ToolFormat` and `ReasoningFormat`, rows that users write (`docs/tools.md`).
    ("inference/formats/rows.py", "found_by"),
}
"""Names that users know; one that is renamed leaves the list."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def is_filler(name):
    """Whether one of the words of a name in snake or camel case is a filler."""
    return bool(WORDS & {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)})


def bindings(node):
    """Return the names that a node itself binds, with their lines."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [(node.id, node.lineno)]
    if isinstance(node, ast.alias):
        return [(node.asname, node.lineno)] if node.asname else []
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        return [(node.name, node.lineno)]
    return []


def within(scope):
    """Yield the nodes of a scope, without those of the scopes and classes in it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*SCOPES, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)


def long_locals(scope):
    """Yield the fillers that a function or comprehension binds and uses many lines below."""
    first = {}
    for name, line in (one for node in within(scope) for one in bindings(node)):
        if is_filler(name):
            first[name] = min(line, first.get(name, line))
    for name, line in first.items():
        uses = [n.lineno for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name]
        if max(uses, default=line) - line > MAX_LINES:
            yield name, line


def lasting_names(tree):
    """Yield the names of a module that a reader meets away from where they are bound."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        if isinstance(node, ast.Module | ast.ClassDef):
            for inner in within(node):
                yield from bindings(inner)


@cache
def fillers():
    """Return the offending names as `(file, line, name)`."""
    rows = []
    for path in sorted(SRC.rglob("*.py")):
        file = path.relative_to(SRC)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [one for one in lasting_names(tree) if is_filler(one[0])]
        for scope in ast.walk(tree):
            if isinstance(scope, SCOPES):
                names += long_locals(scope)
        if is_filler(file.stem):
            names.append((file.stem, 1))
        rows += [(file.as_posix(), line, name) for name, line in names]
    return rows


def test_names_that_last_say_what_the_value_is():
    wrong = [
        f"{file}:{line} {name}" for file, line, name in fillers() if (file, name) not in DOCUMENTED
    ]
    assert not wrong, (
        "name the value by the field's term: rows, matches, reply, problem, events, ..."
    )


@pytest.mark.parametrize(("file", "name"), sorted(DOCUMENTED))
def test_a_name_that_users_know_stands_there(file, name):
    assert (file, name) in {(file, name) for file, _, name in fillers()}, (
        f"take {name!r} out of DOCUMENTED"
    )


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def f(found): ...", ["found"]),
        ("def _tell_others(): ...", ["_tell_others"]),
        ("class _Found: ...", ["_Found"]),
        ("MAX_TOLD = 3", ["MAX_TOLD"]),
        ("class A:\n  said: str", ["said"]),
        ("class A:\n  def f(self): self._said = 1", ["_said"]),
        ("import news_of as news", ["news"]),
        ("def f():\n  found = 1\n  return found", []),
        ("foundation = storyteller = heart = 1", []),
    ],
)
def test_what_counts_as_a_name_that_lasts(code, names):
    assert [name for name, _ in lasting_names(ast.parse(code)) if is_filler(name)] == names


def test_a_local_may_be_short_lived():
    def code(gap):
        return ast.parse("def f():\n  found = 1\n" + "  g()\n" * gap + "  return found").body[0]

    assert not list(long_locals(code(MAX_LINES - 1)))
    assert list(long_locals(code(MAX_LINES))) == [("found", 2)]
