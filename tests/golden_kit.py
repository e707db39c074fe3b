"""The committed runs: `unpack("4/train", folder)`, `unpack("demo", folder)`."""

import tarfile
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
SCHEMAS = sorted(int(path.name) for path in GOLDEN.iterdir() if path.name.isdigit())
RUNS = ("train", "agents", "tools")
REAL_RUNS = ("demo", "demo-seed1", "delegation", "delegation-evaluated")


def unpack(name, folder):
    """Put a packed run into a folder, which is made, and return the folder."""
    folder.mkdir(parents=True)
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder
