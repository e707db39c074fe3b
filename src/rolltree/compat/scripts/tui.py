"""`vf-tui`: look through the results that `vf-eval -s` wrote, in the terminal.

Finding and reading results needs nothing; the screens need the `textual` package.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.text import Text

from rolltree.errors import ConfigError
from rolltree.redact import shown

_SCREENS = (
    *("Panel", "SelectEnvScreen", "SelectModelScreen", "SelectRunScreen", "ViewRunScreen"),
    "VerifiersTUI",
)


@dataclass
class RunInfo:
    """Where the results of one evaluation are; `metadata` is that of its metadata.json."""

    env_id: str
    model: str
    run_id: str
    path: Path
    metadata: dict[str, Any]


def discover_results(
    env_dir_path: str = "./environments", outputs_dir_path: str = "./outputs"
) -> dict[str, dict[str, list[RunInfo]]]:
    """Return all results by environment and model, the oldest first."""
    roots = [*Path(env_dir_path).glob("*/outputs/evals"), Path(outputs_dir_path) / "evals"]
    found: dict[str, dict[str, list[RunInfo]]] = {}
    for root in roots:
        for file in sorted(root.glob("**/results.jsonl")):
            run = file.parent
            env_id, dashes, model = str(run.parent.relative_to(root)).partition("--")
            if not dashes or not (run / "metadata.json").is_file():
                continue
            metadata: dict[str, Any] = {}
            with suppress(OSError, ValueError):
                metadata = json.loads((run / "metadata.json").read_text(encoding="utf-8"))
            info = RunInfo(env_id, model.replace("--", "/"), run.name, run, metadata)
            found.setdefault(env_id, {}).setdefault(info.model, []).append(info)
    for models in found.values():
        for runs in models.values():
            runs.sort(key=_age)
    return found


def _age(run: RunInfo) -> tuple[str, str, str]:
    return (str(run.metadata.get("date", "")), str(run.metadata.get("time", "")), run.run_id)


def load_run_results(run: RunInfo) -> list[dict[str, Any]]:
    """Return the rows of results.jsonl; lines that are not JSON are left out."""
    rows = []
    with (run.path / "results.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            with suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def format_prompt_or_completion(prompt_or_completion: Any) -> Text:
    """Return messages, or a string, as text with styles; tool calls follow their message."""
    if not isinstance(prompt_or_completion, list):
        return Text(shown(str(prompt_or_completion)))
    out = Text()
    for message in prompt_or_completion:
        if not isinstance(message, dict):
            out.append(f"{shown(str(message))}\n\n")
            continue
        role = message.get("role", "")
        title = "tool result" if role == "tool" else str(role)
        out.append(f"{title}: ", style="bold" if role == "assistant" else "bold dim")
        out.append(f"{shown(str(message.get('content', '')))}\n")
        for call in message.get("tool_calls") or ():
            out.append("\ntool call: ", style="bold")
            out.append(f"{shown(_call_text(call))}\n")
        out.append("\n")
    return out


def _call_text(call: Any) -> str:
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except ValueError:
            return str(call)
    function = call.get("function") if isinstance(call, dict) else None
    return f"{function.get('name')}\n{function.get('arguments')}" if function else str(call)


def __getattr__(name: str) -> Any:
    if name not in _SCREENS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("rolltree.compat.scripts.screens"), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "vf-tui needs the textual package. Install it with `pip install 'rolltree[compat]'`, "
            "or read a run with `rolltree show`."
        ) from error


def main() -> None:
    """Open the screens on the results of this folder."""
    import argparse

    parser = argparse.ArgumentParser(prog="vf-tui", description=__doc__)
    parser.parse_args()
    __getattr__("VerifiersTUI")().run()


if __name__ == "__main__":
    from rolltree.compat.scripts import messages

    messages(main)
