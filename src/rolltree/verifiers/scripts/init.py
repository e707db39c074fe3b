"""`vf-init`: the files of a new environment that runs on verifiers 0.1.8 and here."""

from __future__ import annotations

import argparse
from pathlib import Path

from rolltree._helpers.files import write_whole

_README = """\
# {id}

Say here what the model must do, where the rows come from, and what earns a reward.

| argument | default | meaning |
|---|---|---|
| `num_examples` | 100 | rows |

```
vf-eval {id} -m MODEL -b URL
```
"""

_PYPROJECT = """\
[project]
name = "{id}"
description = "What the model must do"
tags = ["train", "eval"]
version = "0.1.0"
requires-python = ">=3.11"
dependencies = [
    "verifiers>=0.1.8",
]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build]
include = ["{include}", "pyproject.toml"]

[tool.verifiers.eval]
num_examples = 5
rollouts_per_example = 3
"""

_INIT = """\
from .{module} import load_environment

__all__ = ["load_environment"]
"""

_ENVIRONMENT = '''\
import verifiers as vf


def load_environment(num_examples: int = 100, **kwargs) -> vf.Environment:
    """Return the environment: replace the rows, the instructions and the reward."""
    raise NotImplementedError("write the environment here")
'''


def init_environment(
    env: str, path: str = "./environments", rewrite_readme: bool = False, multi_file: bool = False
) -> Path:
    """Write the missing files of the folder `path/<env>` and return it; existing files stay.

    `multi_file` makes a package of the module; `rewrite_readme` writes README.md again.
    """
    env_id, module = env.replace("_", "-"), env.replace("-", "_")
    folder = Path(path) / module
    code = folder / module if multi_file else folder
    files = {
        folder / "README.md": _README,
        folder / "pyproject.toml": _PYPROJECT,
        code / f"{module}.py": _ENVIRONMENT,
        **({code / "__init__.py": _INIT} if multi_file else {}),
    }
    code.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        if file.exists() and not (rewrite_readme and file.name == "README.md"):
            print(f"{file} is there already and stays as it is")
            continue
        fields = {
            "id": env_id,
            "module": module,
            "include": module if multi_file else f"{module}.py",
        }
        for name, value in fields.items():
            text = text.replace(f"{{{name}}}", value)
        write_whole(file, text)
    return folder


def main() -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(prog="vf-init", description=__doc__)
    parser.add_argument("env", help="name of the environment")
    parser.add_argument("-p", "--path", default="./environments", help="parent folder")
    parser.add_argument("--rewrite-readme", action="store_true", help="write README.md again")
    parser.add_argument("--multi-file", action="store_true", help="make a package of several files")
    asked = parser.parse_args()
    init_environment(asked.env, asked.path, asked.rewrite_readme, asked.multi_file)


if __name__ == "__main__":
    main()
