"""A program's arguments and files as templates, its environment variables, and its outcome."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from rolltree._helpers.redact import redact
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.types import ErrorRecord, State

PASSED = ("PATH", "LANG")
"""The variables of this process that a program without a sandbox always gets."""
NAMES = ("prompt", "row", "seed", "folder", "base_url", "root_url", "api_key", "model")
"""The names that a template can use in addition to the row's columns."""
_FIELD = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


@dataclass(frozen=True, slots=True)
class Template:
    """A text with `{name}` in it: a column of the row, `{info.key}`, or one of `NAMES`.

    `{{` and `}}` are braces.

    Raises:
        ConfigError: the text has something else in braces.
    """

    text: str
    parts: tuple[tuple[str, str | None], ...] = field(init=False)

    def __post_init__(self) -> None:
        try:
            parsed = list(Formatter().parse(self.text))
        except ValueError as error:
            raise self._refused(str(error)) from error
        for _, name, spec, conversion in parsed:
            if name is not None and (spec or conversion or not _FIELD.fullmatch(name)):
                raise self._refused(f"{{{name}}} is not a name")
        parts = tuple((literal, name) for literal, name, _, _ in parsed)
        object.__setattr__(self, "parts", parts)

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.text[:200]!r} cannot be filled in ({why}), so the program would not get what "
            "was meant. Write {name} for a column of the row, and {{ and }} for braces."
        )

    @property
    def names(self) -> list[str]:
        """The names in the text, in their order."""
        return [name for _, name in self.parts if name is not None]

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the text with its names replaced by values; non-strings are written as JSON.

        Raises:
            ConfigError: the row has no such column.
        """
        found = []
        for literal, name in self.parts:
            found.append(literal)
            if name is not None:
                value = _look_up(values, name)
                if not isinstance(value, str):
                    value = json.dumps(value, ensure_ascii=False, default=str)
                found.append(value)
        return "".join(found)


def _look_up(values: Mapping[str, Any], name: str) -> Any:
    value: Any = values
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = value if isinstance(value, Mapping) else ()
            raise ConfigError(
                f"the program's template names {{{name}}}, which this row does not have."
                f"{did_you_mean(part, map(str, known))}"
            )
        value = value[part]
    return value


def template_values(state: State) -> dict[str, Any]:
    """Return the values that templates can take from a rollout's row, by name.

    `prompt` is the text of the last message of the row's prompt; `row` is the row as JSON, without
    the answer.
    """
    row = dict(state["input"])
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        prompt = prompt[-1].get("content") if prompt else ""
    visible = {key: value for key, value in row.items() if key != "answer"}
    return {**row, "prompt": prompt or "", "row": visible, "seed": state.seed}


def environment_of_program(
    passed: Sequence[str], own: Mapping[str, str], *, root_url: str, api_key: str
) -> dict[str, str]:
    """Return a program's variables: its model's URLs and key, those passed on, and its own."""
    return {
        **variables_of(passed),
        "OPENAI_BASE_URL": f"{root_url}/v1",
        "OPENAI_API_KEY": api_key,
        # Anthropic's clients add /v1 themselves.
        "ANTHROPIC_BASE_URL": root_url,
        "ANTHROPIC_API_KEY": api_key,
        **own,
    }


def variables_of(names: Sequence[str]) -> dict[str, str]:
    """Return those of these variables that this process has."""
    return {name: os.environ[name] for name in names if name in os.environ}


def program_path(name: str, path: str) -> str | None:
    """Return the path of a command's program; None if not found. A path is returned as it is."""
    return name if "/" in name else shutil.which(name, path=path)


@dataclass(slots=True)
class ProgramOutcome:
    """How a program ended; as plain data it is `state["program"]`.

    `ended` is "exit", "signal", "time" (the time limit), "output" (it printed too much), a limit of
    its sandbox, "lost" (its supervisor was killed), or "closed": the rollout failed or was
    cancelled before it ended. A function that raised has exit status 1 and the exception as its
    `error`.
    """

    ended: str = "closed"
    exit_status: int | None = None
    signal: int | None = None
    stdout: str = ""
    stderr: str = ""
    # The folder of its files until it is scored; None afterwards, and for a function.
    folder: str | None = None
    # The texts of the collected files; None for one that is too large or not a regular file.
    files: dict[str, str | None] = field(default_factory=dict)
    # How many more files `collect` names.
    num_files_left_out: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    # What a function returned.
    returned: Any = None
    error: ErrorRecord | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        # Not `asdict`, which copies what a function returned: it may be JSON of the model's, nested
        # too deeply for that.
        found = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        found["error"] = None if self.error is None else redact(self.error.as_dict())
        return found
