"""Where vf-eval puts its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4


def get_results_path(env_id: str, model: str, base_path: Path = Path("./outputs")) -> Path:
    """Return a new folder for the results of one evaluation."""
    name = f"{env_id}--{model.replace('/', '--')}"
    return base_path / "evals" / name / uuid4().hex[:8]


def get_eval_results_path(config: Any) -> Path:
    """Return a new folder for results: in the environment's own folder where there is one."""
    folder = Path(config.env_dir_path) / config.env_id.replace("-", "_")
    base = folder / "outputs" if folder.exists() else Path("./outputs")
    return get_results_path(config.env_id, config.model, base)
