"""Serve the environment that openenv's own template makes, as `openenv init` would write it.

python openenv_server.py FOLDER PORT
"""

import importlib.util
import sys
from pathlib import Path

import uvicorn

NAMES = {
    "__ENV_NAME__": "echo",
    "__ENV_CLASS_NAME__": "Echo",
    "__ENV_TITLE_NAME__": "Echo",
}


def filled(text: str) -> str:
    """Return a text of the template with the environment's names."""
    for name, value in NAMES.items():
        text = text.replace(name, value)
    return text


def main(folder: Path, port: int) -> None:
    """Write the template's files into a folder and serve them."""
    package = Path(importlib.util.find_spec("openenv").origin).parent
    template = package / "cli" / "templates" / "openenv_env"
    for source in template.rglob("*.py"):
        target = folder / filled(str(source.relative_to(template)))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(filled(source.read_text()))
    # Its modules fall back to these names if they are not a package.
    sys.path[:0] = [str(folder)]
    from server.app import app

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
