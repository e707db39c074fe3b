"""`rolltree.compat.replay` in the world of `stage.py`, for data that must not be downloaded."""

import sys
import tempfile
from pathlib import Path

from stage import set_stage

from rolltree.compat.replay import main

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="rolltree-compat-") as folder:
        set_stage(Path(folder))
        main(sys.argv[1:])
