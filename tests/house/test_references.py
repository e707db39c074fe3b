"""Files, modules, classes, commands and flags that docs and docstrings name exist.

Only text in backticks is read. Sections of `design/` that describe former code stand between
`<!-- past -->` and `<!-- /past -->`, and are left out.
"""

import ast
import importlib
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import click
import pytest

from house.texts import ROOT, SRC, code_files, docstrings, pages
from rolltree.cli.app import app

TOP = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
TOP -= {"runs", "outputs", "build", "dist"}
EXAMPLES = re.compile(
    r"\bmy[_-]|^samples/[a-z]+_[a-z]+$|owner/|NAME|FOLDER|PATH|\.\.\.|XXXX|results\.jsonl"
)
"""Paths that stand for a reader's own files."""


def references():
    """Yield (where, text) for each text in backticks of the pages and docstrings."""
    for page, text in pages().items():
        text = re.sub(r"<!-- past -->.*?<!-- /past -->", "", text, flags=re.DOTALL)
        text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
        yield from ((page, found) for found in re.findall(r"`([^`\n]+)`", text))
    for path in code_files():
        for line, text in docstrings(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            yield from ((where, found) for found in re.findall(r"`([^`\n]+)`", text))


@cache
def files():
    """Return every tracked-looking path below the root."""
    return {
        str(path.relative_to(ROOT)).replace("\\", "/")
        for top in TOP
        for path in (ROOT / top).rglob("*")
        if "__pycache__" not in path.parts
    } | {path.name for path in ROOT.iterdir()}


def is_path(text):
    """Whether a text is the path of a file of this project, as a page would write it."""
    bare = re.sub(r":\d+$", "", text)
    if not re.fullmatch(r"[\w./-]+", bare) or EXAMPLES.search(bare):
        return False
    first = bare.split("/")[0]
    rooms = {path.name for path in SRC.iterdir() if path.is_dir()}
    return re.fullmatch(r".+\.(py|md)", bare) is not None or ("/" in bare and first in TOP | rooms)


def test_every_path_exists():
    wrong = []
    for where, text in references():
        if not is_path(text):
            continue
        bare = re.sub(r":\d+$", "", text).rstrip("/")
        if not any(file == bare or file.endswith(f"/{bare}") for file in files()):
            wrong.append(f"{where}: {text}")
    assert not wrong


def test_every_name_beside_a_file_is_in_it():
    """As the design page of the model call writes it: `file.py`: `name`, `Class.name`."""
    wrong, num_rows = [], 0
    for page, text in pages().items():
        text = re.sub(r"<!-- past -->.*?<!-- /past -->", "", text, flags=re.DOTALL)
        for bare, listed in re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", text):
            (path,) = [ROOT / file for file in files() if file.endswith(f"src/rolltree/{bare}")]
            code, num_rows = path.read_text(encoding="utf-8"), num_rows + 1
            for name in re.findall(r"[\w.]+(?=`)", listed):
                parts = name.split(".")
                if not all(re.search(rf"\b(class|def) {part}\b", code) for part in parts):
                    wrong.append(f"{page}: {bare}: {name}")
    assert num_rows > 20
    assert not wrong


@cache
def members():
    """Return what each class of the project has, by the class's name: members of all bases too."""
    own, bases = defaultdict(set), defaultdict(set)
    for path in [*code_files(), *sorted((ROOT / "tests").rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            bases[node.name] |= {
                base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                for base in node.bases
            }
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    own[node.name].add(inner.name)
                elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    own[node.name].add(inner.attr)
                elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    own[node.name].add(inner.id)

    def everything(name, seen):
        if name in seen:
            return set()
        above = [everything(base, seen | {name}) for base in bases[name] if base in bases]
        return own[name].union(*above)

    def is_closed(name, seen=frozenset()):
        """Whether every base is a class of this project."""
        outside = {"object", "Protocol", "StrEnum", "NamedTuple", "TypedDict", "Generic", ""}
        return all(
            base in outside
            or (base in bases and base not in seen and is_closed(base, seen | {name}))
            for base in bases[name]
        )

    return {name: everything(name, frozenset()) for name in bases if is_closed(name)}


def test_every_dotted_name_exists():
    wrong = []
    for where, text in references():
        name = re.sub(r"\(.*\)$", "", text)
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name) or name.endswith((".py", ".md")):
            continue
        first, *rest = name.split(".")
        if first in ("rolltree", "rt"):
            if not resolves(rest):
                wrong.append(f"{where}: {text}")
        elif first in members() and rest[0] not in members()[first] | {"value", "name"}:
            wrong.append(f"{where}: {text}")
    assert not wrong


@cache
def _module(name):
    return importlib.import_module(name)


def resolves(parts):
    """Whether `rolltree` followed by these names is a module, or a member of one."""
    value = _module("rolltree")
    for at, part in enumerate(parts):
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        if SRC.joinpath(*parts[:at], f"{part}.py").exists() and at + 1 == len(parts):
            return True  # a module that needs an extra is there, too
        try:
            value = _module(".".join(["rolltree", *parts[: at + 1]]))
        except ImportError:
            closed = members().get(getattr(value, "__name__", ""), set())
            return part in closed
    return True


FOREIGN = {
    "DefaultAioHttpClient": "openai",
    "EzPickle": "gymnasium",
    "ParallelEnv": "pettingzoo",
    "TrainingArguments": "transformers",
    "environment_factory": "trl",
    "gate_up_proj": "transformers",
    "generation_batch_size": "trl",
    "hierarchical_grpo": "prime-rl",
    "max_async_level": "prime-rl",
    "max_rl": "prime-rl",
    "dppo_mask_high": "prime-rl",
    "dppo_mask_low": "prime-rl",
    "import_path": "prime-rl",
    "ipo_threshold": "prime-rl",
    "kl_tau": "prime-rl",
    "token_batch_size": "prime-rl",
    "resume_from_checkpoint": "trl",
    "reward_std": "trl",
    "rollout_func": "trl",
    "routed_experts_prompt_start": "vllm",
    "sequence_truncate": "trl",
    "steps_per_generation": "trl",
    "token_truncate": "trl",
    "trajectory_strategy": "prime-rl",
    "vllm_importance_sampling_correction": "trl",
    "vllm_importance_sampling_mode": "trl",
}
"""Identifiers of other libraries that our code does not write, by the library."""


@cache
def identifiers():
    """Return every word of the code: names and strings, but neither docstrings nor comments."""
    words = set()
    tests = sorted(ROOT.glob("tests*/**/*.py"))
    for path in (*code_files(), *tests):
        if path.parent == Path(__file__).parent:
            continue
        shown = {line for line, _ in docstrings(path)}
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                is_docstring = token.type == tokenize.STRING and token.start[0] in shown
                if token.type != tokenize.COMMENT and not is_docstring:
                    words.update(re.findall(r"\w+", token.string))
    data = (*ROOT.glob("*.toml"), *ROOT.glob("src/**/*.toml"), *ROOT.glob("examples/**/*.toml"))
    for path in (*ROOT.glob("src/**/*.js"), *data):
        words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return words


def test_every_identifier_exists():
    """`snake_case` and `CamelCase` words in backticks are somewhere in the code."""
    written = re.compile(r"([a-z]\w*_\w+|[A-Z][a-z]+[A-Z]\w+)(\(.*\))?")
    wrong = [
        f"{where}: {text}"
        for where, text in references()
        if (found := written.fullmatch(text)) and found[1] not in identifiers() | FOREIGN.keys()
    ]
    assert not wrong


def commands():
    """Return the options of each command, by its words: `("env", "check")`."""
    found = {}

    def walk(command, words):
        options = {
            name for option in command.params for name in (*option.opts, *option.secondary_opts)
        }
        found[words] = options | {"--help", "--version"}
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                walk(command.get_command(click.Context(command), name), (*words, name))

    walk(app, ())
    return found


def test_every_command_and_flag_exists():
    known, wrong = commands(), []
    for where, text in references():
        words = text.split()
        if words[0] != "rolltree" or len(words) < 2:
            continue
        depth = max(n for n in range(len(words)) if tuple(words[1 : 1 + n]) in known)
        name = tuple(words[1 : 1 + depth])
        flags = {re.split(r"[=\]|,]", word)[0] for word in words if word.startswith("-")}
        if (depth == 0 and re.fullmatch(r"[a-z]+", words[1])) or not flags <= known[name]:
            wrong.append(f"{where}: {text}")
    assert not wrong


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = [
        f"{where}: {text}"
        for where, text in references()
        if (found := re.match(r"make ([a-z-]+)", text)) and found[1] not in targets
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (["Environment"], True),
        (["tokens", "tree", "TokenTree", "insert"], True),
        (["tokens", "lost"], False),
    ],
)
def test_the_test_of_names_can_fail(text, expected):
    assert resolves(text) is expected
