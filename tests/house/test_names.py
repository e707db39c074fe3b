"""One name, one meaning: no two modules define a public class or function of the same name."""

import ast
from collections import defaultdict

import rolltree
from house.texts import SRC

ALLOWED = {
    "main": "the entry point of a script",
}
"""Names that two modules may define, each with the reason."""


def public_definitions():
    """Return the modules that define each public class or function, at the top level."""
    places = defaultdict(set)
    for path in sorted(SRC.rglob("*.py")):
        module = path.relative_to(SRC).as_posix()
        if module.startswith("verifiers/"):
            continue  # its names are those of verifiers 0.1.8, by design
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, kinds) and not node.name.startswith("_"):
                places[node.name].add(module)
    return places


def test_no_public_name_has_two_meanings():
    twice = {
        name: sorted(modules)
        for name, modules in public_definitions().items()
        if len(modules) > 1 and name not in ALLOWED
    }
    assert not twice, "each is one thing, private, or renamed"


def test_every_exception_is_needed():
    assert not [name for name in ALLOWED if len(public_definitions()[name]) < 2]


def test_the_root_lists_its_public_names_only():
    assert dir(rolltree) == rolltree.__all__
