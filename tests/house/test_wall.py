"""What a run does not need, it does not load: the wings, and ever less code."""

import ast
import functools
import shutil
import tomllib
from pathlib import Path

import tiny
from weigh import SRC, code_lines

from rolltree.testing import ScriptedServer
from rolltree.wings import WINGS

ROOT = SRC.parents[1]
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
MODULES = {
    module
    for contract in LINTER["contracts"]
    if contract["name"] == "Wings import lower wings only"
    for layer in contract["layers"]
    for module in layer.split(" : ")
}
"""The modules and packages of the wings."""
MOST_LINES = 27_000
"""What a reader has to know of a run (design/0032)."""


def is_wing(module):
    parts = module.split(".")
    return any(".".join(parts[:end]) in MODULES for end in range(2, len(parts) + 1))


@functools.cache
def sources():
    """Return the files of rolltree by module."""
    files = {}
    for file in SRC.rglob("*.py"):
        name = ".".join(file.relative_to(SRC.parent).with_suffix("").parts)
        if not name.startswith(("rolltree._environments", "rolltree._docs")):
            files[name.removesuffix(".__init__")] = file
    return files


def named_modules(node):
    """Yield (line, module) of what code imports, and of its texts that are a module's name."""
    # What only type checkers read is not loaded.
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom):
        yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)
    elif isinstance(node, ast.Import):
        yield from ((node.lineno, name.name) for name in node.names)
    elif isinstance(node, ast.Constant) and node.value in sources():
        yield node.lineno, node.value
    for child in ast.iter_child_nodes(node):
        yield from named_modules(child)


def test_the_core_names_no_module_of_a_wing():
    assert sources().keys() >= MODULES
    exported = {
        f"rolltree.{wing.kind}.{name}".replace("rolltree.rolltree.", "rolltree.")
        for wing in WINGS
        for name in wing.names.split()
    }
    crossings = [
        f"{module}:{line} {named}"
        for module, file in sources().items()
        if not is_wing(module)
        for line, named in named_modules(ast.parse(file.read_text(encoding="utf-8")))
        if is_wing(named) or named in exported
    ]
    assert crossings == []


def test_the_table_names_what_is_there():
    for wing in WINGS:
        assert is_wing(wing.module), wing
        if wing.kind == "command":
            said = wing.load("").help.partition("\n\n")[0]
            assert wing.help == " ".join(said.split())
        for name in (
            () if wing.kind == "command" or wing.names == "verifiers" else wing.names.split()
        ):
            assert wing.load(name) is not None


WITHOUT_WINGS = """
import rolltree as rt
from rolltree.cli import app

model = rt.local_client(*rt.load_model("tiny"))
environment = rt.load_environment("arithmetic")
short = {"num_examples": 2, "sampling": {"max_tokens": 4}}
assert rt.evaluate(environment, model, **short).num_rollouts == 2
assert rt.evaluate(environment, rt.OpenAIClient(URL, "scripted"), **short).num_failed == 0
for words in (
    "--help", "env --help", "doctor --no-measure", "models", "env list",
    "show runs/tiny", "init sums",
    "train arithmetic model.name=tiny train.num_steps=1 algorithm.groups_per_step=1 "
    "algorithm.group_size=2 sampling.max_tokens=4 eval.num_examples=1",
    "eval sums -m tiny -n 1 -r 1 -t 4 --run runs/here",
    f"eval sums -m scripted -b {URL} -n 1 -r 1 --run runs/there",
    "show runs/there",
):
    assert app.main(words.split(), standalone_mode=False) in (None, 0), words
for words in ("view", "env install sums", "cluster status runs/tiny", "serve --help"):
    assert app.main(words.split(), standalone_mode=False) == 2, words
"""


def test_a_tiny_training_loads_few_lines_and_a_core_without_wings_trains_evaluates_and_shows(
    tmp_path,
):
    def wings(folder, names):
        """Return which of the names in a folder belong to a wing, or hold no code."""
        relative = Path(folder).relative_to(SRC.parent).parts
        modules = {name: ".".join((*relative, name.removesuffix(".py"))) for name in names}
        return [
            name for name in names if name in ("__pycache__", "_docs") or modules[name] in MODULES
        ]

    shutil.copytree(SRC, tmp_path / "rolltree", ignore=wings)
    with ScriptedServer(lambda messages: "4") as server:
        files = tiny.loaded(tmp_path, f"URL = {server.base_url!r}" + WITHOUT_WINGS)
    assert all(file.is_relative_to(tmp_path) for file in files.values())
    assert sum(map(code_lines, files.values())) <= MOST_LINES
