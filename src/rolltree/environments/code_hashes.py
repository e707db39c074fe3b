"""Hashes of an environment's files, to notice changes since a run's last start."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolltree.store import Run

META = "environment_code"
TRAIN_CONFIG = "train.toml"
"""The training config of an environment, beside its module or in its package."""
_DATA = (".json", ".jsonl", ".toml", ".yaml", ".txt", ".csv", ".jinja")
_MAX_BYTES = 1 << 20
_LIBRARY = Path(__file__).resolve().parents[1]


def code_hashes(source: object) -> dict[str, str]:
    """Return a hash of each file of an environment, by a short name.

    The files are those of `load_environment`, of the class and of the reward functions. If the
    environment has its own folder, all Python files and small data files in it are included.
    rolltree's own files and code without a file (in a notebook) are left out.
    """
    found: dict[str, str] = {}
    for file in sorted({*_files(source)}):
        name = f"{file.parent.name}/{file.name}"
        found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def changed_code(source: object, run: Run) -> str | None:
    """Record the hashes of an environment's files in a run; return a notice if they changed."""
    now, before = code_hashes(source), run.meta.get(META)
    if now == before:
        return None
    run.set_meta(META, now)
    # Before the first rollout is stored, nothing has been played with the old code.
    if before is None or not run.is_bound:
        return None
    names = sorted(name for name in {*now, *before} if now.get(name) != before.get(name))
    return (
        f"the environment's code has changed since the last start ({', '.join(names)}), so "
        f"rollouts of {run.path} from before and after it may be played and rewarded differently. "
        "To keep them apart, use another run directory, or `rolltree fork` for a training run."
    )


def _files(source: Any) -> Iterator[Path]:
    functions = getattr(getattr(source, "rubric", None), "functions", ())
    parts = [getattr(source, "loaded_by", None), type(source), *(f.func for f in functions)]
    for part in parts:
        file = _file_of(part)
        if file is not None and _LIBRARY not in file.parents:
            yield file
            if file.name == "__init__.py" or file.stem == file.parent.name.replace("-", "_"):
                yield from _neighbours(file.parent)


def _file_of(part: object) -> Path | None:
    try:
        file = inspect.getsourcefile(inspect.unwrap(part))  # type: ignore[arg-type]
    except (TypeError, OSError):
        return None
    return Path(file).resolve() if file is not None and Path(file).is_file() else None


def _neighbours(folder: Path) -> Iterator[Path]:
    for path in (*folder.rglob("*.py"), *folder.glob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file() or path.suffix not in (".py", *_DATA):
            continue
        # The settings of a run are compared separately.
        if path.name == TRAIN_CONFIG:
            continue
        if path.stat().st_size <= _MAX_BYTES:
            yield path.resolve()
