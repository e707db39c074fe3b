"""`vf-tui`: look through the results that `vf-eval -s` wrote, in the terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text

from rolltree.compat.helpers import messages_as_text
from rolltree.errors import ConfigError
from rolltree.redact import shown

try:
    from textual import on
    from textual.app import App, ComposeResult
    from textual.binding import Binding, BindingType
    from textual.containers import Container, VerticalScroll
    from textual.screen import Screen
    from textual.widgets import Footer, Label, OptionList, Static
except ImportError as _missing:
    raise ConfigError(
        "vf-tui needs the textual package. Install it with `pip install 'rolltree[compat]'`, or "
        "read a run with `rolltree show`."
    ) from _missing


@dataclass
class RunInfo:
    """Where the results of one evaluation are; `metadata` is the content of its metadata.json."""

    env_id: str
    model: str
    run_id: str
    path: Path
    metadata: dict[str, Any]


Index = dict[str, dict[str, list[RunInfo]]]


def discover_results(
    env_dir_path: str = "./environments", outputs_dir_path: str = "./outputs"
) -> Index:
    """Return all results by environment and model, the oldest first."""
    roots = [*Path(env_dir_path).glob("*/outputs/evals"), Path(outputs_dir_path) / "evals"]
    found: Index = {}
    for root in roots:
        for file in sorted(root.glob("**/results.jsonl")):
            run = file.parent
            # `env--org--model`: the first two dashes end the environment's id.
            env_id, dashes, model = str(run.parent.relative_to(root)).partition("--")
            # A run that was killed while it wrote has no metadata yet.
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
    return messages_as_text(prompt_or_completion)


_QUIT = Binding("q", "quit", "Quit")
_BACK = Binding("b,backspace", "back", "Back")


class Panel(Container):
    """A box with a border."""

    DEFAULT_CSS = "Panel { border: round $primary; padding: 1 2; margin: 1; }"


class _Choice(Screen[None]):
    """A list of lines; choosing a line opens its screen."""

    BINDINGS: ClassVar[list[BindingType]] = [_QUIT, _BACK, Binding("enter", "select", "Select")]
    title_text = ""

    def __init__(self, choices: Iterable[tuple[str, Callable[[], Screen[None]]]]) -> None:
        super().__init__()
        self.choices = list(choices)

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        options = OptionList(*(Text(shown(line)) for line, _ in self.choices))
        yield Panel(Label(Text(self.title_text, style="bold")), options)
        yield Footer()

    def on_mount(self) -> None:
        """Focus the list."""
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def on_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open the screen of the chosen line."""
        _, follow = self.choices[event.option_index]
        self.app.push_screen(follow())

    def action_select(self) -> None:
        """Open the highlighted line."""
        self.query_one(OptionList).action_select()

    def action_back(self) -> None:
        """Return to the previous screen; the first one stays."""
        # The stack begins with an empty screen of the framework.
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()


class SelectEnvScreen(_Choice):
    """Choose an environment."""

    title_text = "Environment"

    def __init__(self, index: Index) -> None:
        found = [(env_id, partial(SelectModelScreen, index, env_id)) for env_id in sorted(index)]
        nothing = ("no results here: vf-eval -s writes some", partial(SelectEnvScreen, index))
        super().__init__(found or [nothing])


class SelectModelScreen(_Choice):
    """Choose a model of an environment."""

    title_text = "Model"

    def __init__(self, index: Index, env_id: str) -> None:
        models = sorted(index[env_id])
        super().__init__((m, partial(SelectRunScreen, index, env_id, m)) for m in models)


class SelectRunScreen(_Choice):
    """Choose a run of a model."""

    title_text = "Run"

    def __init__(self, index: Index, env_id: str, model: str) -> None:
        super().__init__((_line(run), partial(ViewRunScreen, run)) for run in index[env_id][model])


def _line(run: RunInfo) -> str:
    reward = run.metadata.get("avg_reward")
    mean = f"{reward:.3f}" if isinstance(reward, int | float) else "none"
    return f"{run.run_id}  {run.metadata.get('date', '')}  mean reward {mean}"


class ViewRunScreen(Screen[None]):
    """One rollout at a time."""

    BINDINGS: ClassVar[list[BindingType]] = [
        _QUIT,
        _BACK,
        Binding("left,h", "prev_record", "Previous"),
        Binding("right,l", "next_record", "Next"),
    ]

    def __init__(self, run: RunInfo) -> None:
        super().__init__()
        self.run = run
        self.records: list[dict[str, Any]] = load_run_results(run)
        self.position = 0

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(id="facts")
        yield VerticalScroll(Panel(Static(id="prompt")), Panel(Static(id="completion")))
        yield Footer()

    def on_mount(self) -> None:
        """Show the first rollout."""
        self.update_display()

    def update_display(self) -> None:
        """Show the rollout at `position`."""
        record = self.records[self.position] if self.records else {}
        said = ("prompt", "completion")
        facts = {name: value for name, value in record.items() if name not in said}
        lines = [f"{self.position + 1} of {len(self.records)}"]
        lines += [f"{name}: {value}" for name, value in facts.items()]
        self.query_one("#facts", Static).update(Text(shown("\n".join(lines))))
        for name in said:
            text = format_prompt_or_completion(record.get(name, ""))
            self.query_one(f"#{name}", Static).update(text)

    def action_prev_record(self) -> None:
        """Show the previous rollout."""
        self._move(-1)

    def action_next_record(self) -> None:
        """Show the next rollout."""
        self._move(1)

    def _move(self, by: int) -> None:
        self.position = (self.position + by) % max(1, len(self.records))
        self.update_display()

    def action_back(self) -> None:
        """Return to the runs."""
        self.app.pop_screen()


class VerifiersTUI(App[None]):
    """The app that shows the results."""

    BINDINGS: ClassVar[list[BindingType]] = [_QUIT, Binding("d", "toggle_dark", "Dark or light")]

    def __init__(
        self, env_dir_path: str = "./environments", outputs_dir_path: str = "./outputs"
    ) -> None:
        super().__init__()
        self.env_dir_path, self.outputs_dir_path = env_dir_path, outputs_dir_path

    def on_mount(self) -> None:
        """Open the first screen."""
        self.push_screen(
            SelectEnvScreen(discover_results(self.env_dir_path, self.outputs_dir_path))
        )

    async def action_quit(self) -> None:
        """End the program."""
        self.exit()

    def action_toggle_dark(self) -> None:
        """Change between a dark and a light theme."""
        self.theme = "textual-light" if self.theme == "textual-dark" else "textual-dark"


def main() -> None:
    """Open the screens on the results of this folder."""
    argparse.ArgumentParser(prog="vf-tui", description=__doc__).parse_args()
    VerifiersTUI().run()


if __name__ == "__main__":
    from rolltree.compat.scripts import messages

    messages(main)
