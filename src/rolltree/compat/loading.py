"""`load_environment` of verifiers 0.1.8: rolltree's look-up with the errors that theirs raises."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from rolltree.environments import Environment
from rolltree.environments import load_environment as load
from rolltree.errors import UnknownName

logger = logging.getLogger("rolltree.compat")


def load_environment(env_id: str, **env_args: Any) -> Environment:
    """Return the environment `env_id`; an owner before a slash is left out.

    Raises:
        ValueError: there is no such environment, or something that it imports is missing.
        RuntimeError: its `load_environment` raised; the message says what.
    """
    try:
        return load(env_id, **env_args)
    except (ImportError, UnknownName) as error:
        if isinstance(error, UnknownName) and _is_module(env_id):
            raise RuntimeError(
                f"Failed to load environment '{env_id}': the module of that name is another one, "
                "without load_environment(). Give the environment a name of its own, say "
                f"'{env_id}-env'."
            ) from error
        raise ValueError(
            f"Could not import '{env_id}' environment: {error} Ensure the package for the "
            f"'{env_id}' environment is installed."
        ) from error
    except Exception as error:
        raise RuntimeError(f"Failed to load environment '{env_id}': {error!s}") from error


def _is_module(env_id: str) -> bool:
    try:
        return find_spec(env_id.split("/")[-1].replace("-", "_")) is not None
    except (ImportError, ValueError):
        return False
