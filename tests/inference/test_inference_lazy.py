"""The room's names load on first use: the interface alone loads no HTTP and no templates."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rolltree.inference

HEAVY = "{'httpx', 'aiohttp', 'jinja2', 'torch', 'starlette', 'uvicorn'}"


def loaded_by(statement: str) -> str:
    program = f"import sys\n{statement}\nprint(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("from rolltree import Environment", "[]"),
        ("from rolltree.inference import ModelClient, as_client", "[]"),
        ("from rolltree.inference import OpenAIClient", "['aiohttp']"),
    ],
)
def test_what_a_name_costs(statement: str, heavy: str) -> None:
    assert loaded_by(statement) == heavy


def test_every_public_name_loads_and_is_what_its_module_has() -> None:
    for name in rolltree.inference.__all__:
        assert getattr(rolltree.inference, name) is not None
    assert set(rolltree.inference.__all__) <= set(dir(rolltree.inference))
    with pytest.raises(AttributeError, match="no attribute 'OpenAIKlient'"):
        rolltree.inference.OpenAIKlient  # noqa: B018
