"""An unchanged environment package of verifiers 0.1.8, in the files its template makes."""

from __future__ import annotations

from pathlib import Path

ENVIRONMENT = """\
import verifiers as vf
from verifiers.types import Messages


def load_environment(num_examples: int = 8, **kwargs) -> vf.Environment:
    from verifiers.utils.data_utils import extract_boxed_answer

    from .my_rewards import exact

    rows = [{"question": f"Say {n}.", "answer": str(n)} for n in range(num_examples)]
    parser = vf.Parser(extract_fn=extract_boxed_answer)

    def shortness(completion: Messages, **kwargs) -> float:
        return 1.0 / (1 + len(completion[-1]["content"]))

    return vf.SingleTurnEnv(
        eval_dataset=rows,
        dataset=rows,
        parser=parser,
        rubric=vf.Rubric(funcs=[exact, shortness], weights=[1.0, 0.1], parser=parser),
        **kwargs,
    )
"""

REWARDS = '''\
"""What an answer earns."""

from verifiers.utils.async_utils import maybe_await


async def exact(parser, completion, answer, **kwargs) -> float:
    return await maybe_await(lambda: float(parser.parse_answer(completion) == answer))
'''

PYPROJECT = """\
[project]
name = "{id}"
description = "Say a number"
tags = ["single-turn", "train", "eval"]
version = "0.1.0"
requires-python = ">=3.10"
dependencies = [
    "verifiers>=0.1.8",
    "click",
]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build]
include = ["{module}", "pyproject.toml"]

[tool.verifiers.eval]
num_examples = 3
rollouts_per_example = 2
"""


def write_package(folder: Path, env_id: str = "my-env") -> Path:
    """Write a package of several files into `folder` and return its folder."""
    module = env_id.replace("-", "_")
    package = folder / module
    (package / module).mkdir(parents=True)
    (package / "pyproject.toml").write_text(PYPROJECT.format(id=env_id, module=module))
    (package / "README.md").write_text(f"# {env_id}\n")
    (package / module / "__init__.py").write_text(
        f'from .{module} import load_environment\n\n__all__ = ["load_environment"]\n'
    )
    (package / module / f"{module}.py").write_text(ENVIRONMENT)
    (package / module / "my_rewards.py").write_text(REWARDS)
    return package


def write_module(folder: Path, env_id: str = "my-env") -> Path:
    """Write a package of one module and return its folder."""
    module = env_id.replace("-", "_")
    package = folder / module
    package.mkdir(parents=True)
    text = PYPROJECT.format(id=env_id, module=f"{module}.py")
    (package / "pyproject.toml").write_text(text)
    one_file = ENVIRONMENT.replace("    from .my_rewards import exact\n\n", "")
    rewards = REWARDS.partition("\n\n")[2]
    (package / f"{module}.py").write_text(f"{rewards}\n\n{one_file}")
    return package
