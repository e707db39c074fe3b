"""Benchmarks as modules: `load("samples")` is `benchmarks/samples.py`, imported once."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name: str) -> ModuleType:
    """Return the module of a benchmark; its neighbour `verdict` can be imported from then on."""
    own = f"bench_{name}"
    if own not in sys.modules:
        if str(FOLDER) not in sys.path:
            sys.path.append(str(FOLDER))
        spec = importlib.util.spec_from_file_location(own, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[own] = module
        spec.loader.exec_module(module)
    return sys.modules[own]
