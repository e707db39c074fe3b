"""Writes `rolltree/training/keywords.py`: the keyword arguments of `rt.train`, with their types.

`cd tests; python -m golden.keywords` (`make docs`) writes them from the settings' sections, and
`test_training_config.py` compares. An editor completes them, and a type checker knows them all.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path

from rolltree.training import sections
from rolltree.training.config import _MAIN_KEY, SECTIONS, keys_of

FILE = Path(sections.__file__).with_name("keywords.py")
_HEAD = '''"""The keyword arguments of `rt.train`: the settings, and what else it takes.

Written by `tests/golden/keywords.py` from the settings' sections; only type checkers read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

{imports}


class TrainSettings(TypedDict, total=False):
    """Sections, their keys, and their keys after the section's name, as `load_train_config`."""

{settings}


class TrainKeywords(TrainSettings, total=False):
    """What `rt.train` takes beside `config`, `environment` and `model`; see `train_async`."""

    tokenizer: Any
    client: ModelClient | None
    engine: WeightTarget | Mapping[str, Any] | None
    evaluate: Evaluate | None
    reporter: Reporter | None
    quiet: bool
    num_transcripts: int
    command: Sequence[str] | None
    run: Run | Mapping[str, Any] | str | Path | None
    cluster: Any  # what `rolltree.training.launch` calls `Outside`
'''
_IMPORTS = {
    "rolltree.inference": "ModelClient",
    "rolltree.store": "Run",
    "rolltree.training": "Evaluate Reporter WeightTarget",
    "rolltree.training.advantages": "BaselineName OnError",
    "rolltree.values.types": "Scope",
}
_OWN = {"environment", "model", "engine", "run", "env", "cluster"}
"""Arguments of `train_async`, or sections that are given by them."""


def _annotations(section: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind in reversed(SECTIONS[section].__mro__):
        found |= inspect.get_annotations(kind)
    return {name: _plain(kind) for name, kind in found.items()}


def _plain(kind: str) -> str:
    kind = re.sub(r"Annotated\[(\w+), Meta\(.*?\)\]", r"\1", kind).replace("'", '"')
    return kind.replace("tuple[str, ...]", "Sequence[str]")


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 100:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def text() -> str:
    """Return the content of the module."""
    counts = Counter(key for section in SECTIONS for key in keys_of(section))
    settings = {
        section: "Mapping[str, Any] | str" if section in _MAIN_KEY else "Mapping[str, Any]"
        for section in SECTIONS
        if section not in _OWN
    }
    for section in SECTIONS:
        kinds = _annotations(section)
        for key in keys_of(section):
            kind = kinds[key]
            if counts[key] == 1 and key not in _OWN and key not in settings:
                settings[key] = kind
            settings[f"{section}_{key}"] = kind
    lines = "\n".join(f"    {name}: {kind}" for name, kind in settings.items())
    wanted: dict[str, set[str]] = {module: set(names.split()) for module, names in _IMPORTS.items()}
    known = {"Any", "Literal", "Mapping", "None", "Sequence"}.union(*wanted.values())
    for name in set(re.findall(r"\b[A-Z]\w+", " ".join(settings.values()))) - known:
        wanted.setdefault("rolltree.training.sections", set()).add(name)
    imports = "\n".join(_import(module, sorted(wanted[module])) for module in sorted(wanted))
    return _HEAD.format(imports=imports, settings=lines)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
