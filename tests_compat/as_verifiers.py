"""Runs a script with rolltree as `verifiers`: `python as_verifiers.py SCRIPT ...`."""

import runpy
import sys
from pathlib import Path

import rolltree.verifiers

if __name__ == "__main__":
    rolltree.verifiers.install()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
