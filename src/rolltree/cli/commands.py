"""Groups of commands that load those of wings when they are run, not for `--help`."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any

import click

from rolltree import wings


class _Commands(UserDict[str, Any]):
    """Commands by name; one of a wing is its row of the table until it is taken out."""

    def __getitem__(self, name: str) -> click.Command:
        command = self.data[name]
        if isinstance(command, wings.Wing):
            command = self.data[name] = command.load(name)
        loaded: click.Command = command
        return loaded


class WingGroup(click.Group):
    """The given commands and then those of wings, in the order of definition.

    Args:
        name: that of the group.
        commands: the core's.
        prefix: what the names of the wings' commands begin with in the table.
        options: the other arguments of `click.Group`.
    """

    commands: _Commands

    def __init__(
        self, name: str, commands: Sequence[click.Command] = (), prefix: str = "", **options: Any
    ) -> None:
        table = _Commands({command.name or "": command for command in commands})
        for wing in wings.rows("command"):
            group, _, last = wing.names.rpartition(" ")
            if group == prefix:
                table[last] = wing
        super().__init__(name, commands=table, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the line of each command, which the table has for those of wings."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, click.Command(name, help=each.help).get_short_help_str(limit))
                    for name, each in self.commands.data.items()
                ]
            )
