"""`ClientConfig` and `EvalConfig` of verifiers 0.1.8, which are pydantic models."""

from __future__ import annotations

from typing import Any

from rolltree.values.errors import ConfigError

try:
    from pydantic import BaseModel
except ImportError as _missing:
    raise ConfigError(
        "ClientConfig and EvalConfig are pydantic models, and pydantic is missing. Install it with "
        "`pip install 'rolltree[compat]'`."
    ) from _missing


class ClientConfig(BaseModel):
    """How to reach a server: `api_key_var` names the environment variable with the key.

    `timeout` is in seconds.
    """

    api_key_var: str = "PRIME_API_KEY"
    api_base_url: str = "https://api.pinference.ai/api/v1"
    timeout: float = 3600.0
    max_connections: int = 28000
    max_keepalive_connections: int = 28000
    max_retries: int = 10
    extra_headers: dict[str, str] | None = None


class EvalConfig(BaseModel):
    """The settings of vf-eval."""

    env_id: str
    env_args: dict  # type: ignore[type-arg]
    env_dir_path: str
    model: str
    client_config: ClientConfig
    sampling_args: dict[str, Any]
    num_examples: int
    rollouts_per_example: int
    max_concurrent: int
    max_concurrent_generation: int | None = None
    max_concurrent_scoring: int | None = None
    print_results: bool = False
    verbose: bool = False
    state_columns: list[str] | None = None
    save_results: bool = False
    save_every: int = -1
    save_to_hf_hub: bool = False
    hf_hub_dataset_name: str | None = None
