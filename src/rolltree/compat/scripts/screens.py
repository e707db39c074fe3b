"""The screens of `vf-tui`: choose an environment, a model and a run, then page through rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Label, OptionList, Static

from rolltree.compat.scripts.tui import (
    RunInfo,
    discover_results,
    format_prompt_or_completion,
    load_run_results,
)
from rolltree.redact import shown

Index = dict[str, dict[str, list[RunInfo]]]
_QUIT = Binding("q", "quit", "Quit")
_BACK = Binding("b,backspace", "back", "Back")


class Panel(Container):
    """A box with a border."""

    DEFAULT_CSS = "Panel { border: round $primary; padding: 1 2; margin: 1; }"


class _Choice(Screen[None]):
    """A list of lines; `open` gives the screen that follows the chosen one."""

    BINDINGS: ClassVar[list[BindingType]] = [_QUIT, _BACK, Binding("enter", "select", "Select")]
    title_text = ""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__()
        self.lines = lines

    def compose(self) -> ComposeResult:
        """Make the parts."""
        options = OptionList(*(Text(shown(line)) for line in self.lines))
        yield Panel(Label(Text(self.title_text, style="bold")), options)
        yield Footer()

    def on_mount(self) -> None:
        """Let the keys go to the list."""
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def on_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open what was chosen."""
        self.app.push_screen(self.open(event.option_index))

    def action_select(self) -> None:
        """Open the highlighted line."""
        self.query_one(OptionList).action_select()

    def action_back(self) -> None:
        """Return to the screen before; the first one stays."""
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    def open(self, index: int) -> Screen[None]:
        """Return the screen that follows line `index`."""
        raise NotImplementedError


class SelectEnvScreen(_Choice):
    """Choose an environment."""

    title_text = "Environment"

    def __init__(self, index: Index) -> None:
        self.index = index
        self.env_ids = sorted(index)
        super().__init__(self.env_ids or ["no results here: vf-eval -s writes some"])

    def open(self, index: int) -> Screen[None]:
        """Return the models of an environment."""
        if not self.env_ids:
            return SelectEnvScreen(self.index)
        return SelectModelScreen(self.index, self.env_ids[index])


class SelectModelScreen(_Choice):
    """Choose a model."""

    title_text = "Model"

    def __init__(self, index: Index, env_id: str) -> None:
        self.index, self.env_id = index, env_id
        self.models = sorted(index[env_id])
        super().__init__(self.models)

    def open(self, index: int) -> Screen[None]:
        """Return the runs of a model."""
        return SelectRunScreen(self.index, self.env_id, self.models[index])


class SelectRunScreen(_Choice):
    """Choose a run."""

    title_text = "Run"

    def __init__(self, index: Index, env_id: str, model: str) -> None:
        self.runs = index[env_id][model]
        super().__init__([_line(run) for run in self.runs])

    def open(self, index: int) -> Screen[None]:
        """Return the rollouts of a run."""
        return ViewRunScreen(self.runs[index])


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
        """Make the parts."""
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
        """Show the rollout before."""
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
    """The program."""

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
