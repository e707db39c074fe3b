"""What a person asks of a run that is driven: its roles, and how many there are to be."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rolltree.cluster.beat import Link
from rolltree.cluster.control import Scale
from rolltree.cluster.driver import TOKEN_FILE, read_state
from rolltree.cluster.roles import CLUSTER_TOKEN, CLUSTER_URL, ROLE
from rolltree.errors import ClusterError, ConfigError, did_you_mean

_SHOWN_NOTICES = 5


def ask_driver(
    run_dir: str | Path, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what the driver of a run answers.

    Raises:
        ClusterError: no driver runs, or it refuses.
    """
    folder = Path(run_dir)
    state = read_state(folder)
    if state is not None:
        token = ""
        with contextlib.suppress(OSError):
            token = (folder / TOKEN_FILE).read_text(encoding="utf-8")
        where = {CLUSTER_URL: state["control"], CLUSTER_TOKEN: token or "none", ROLE: "a person"}
        with contextlib.suppress(OSError):
            return Link(where).ask(path, body)
    killed = "" if state is None else f" The last one, {_process(state['driver'])}, was killed."
    raise ClusterError(
        f"no driver runs for {folder}, so there is nothing to ask.{killed} `rolltree train` with a "
        "[cluster] in its config starts one, and continues the run."
    )


def scale(run_dir: str | Path, settings: Sequence[str]) -> dict[str, Any]:
    """Have a run that is driven use other numbers of roles: `["rollout_workers=16"]`.

    Raises:
        ConfigError: a setting is none of `rollout_workers` and `engines`, or no whole number.
        ClusterError: no driver runs, or it refuses.
    """
    numbers = {}
    for setting in settings:
        name, equals, number = setting.partition("=")
        if name not in Scale.__struct_fields__:
            hint = did_you_mean(name, Scale.__struct_fields__)
            raise ConfigError(f"{name!r} cannot be scaled while a run is driven.{hint}")
        if not equals or not number.isdigit() or int(number) < 1:
            raise ConfigError(
                f"{setting!r} sets no number of roles. Write {name}=N, with N at least 1."
            )
        numbers[name] = int(number)
    if not numbers:
        raise ConfigError(
            "nothing to scale was named. Write rollout_workers=16, engines=4, or both."
        )
    return ask_driver(run_dir, "/scale", msgspec.to_builtins(numbers))


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """Return the lines that show the answer to `GET /status`."""
    wanted = ", ".join(f"{number} {name}" for name, number in status["wanted"].items())
    heads = ("role", "where", "up", "restarts", "state", "metrics")
    rows = [heads, *(_cells(role) for role in status["roles"])]
    # The last column may be long, and nothing stands after it.
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads) - 1)]
    table = [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    ]
    notices = status["notices"][-_SHOWN_NOTICES:]
    return [
        f"{status['run']}: launcher {status['launcher']}, driver {_process(status['driver'])}, "
        f"{wanted}",
        *table,
        *(["latest notices:", *(f"  {notice}" for notice in notices)] if notices else []),
    ]


def _process(driver: Mapping[str, Any]) -> str:
    return f"process {driver.get('pid')} on {driver.get('host')}"


def _cells(role: Mapping[str, Any]) -> tuple[str, ...]:
    waits = f", waits for {role['waits_for']}" if role["waits_for"] else ""
    return (
        role["name"],
        f"{role['host'] or '?'}:{role['pid'] or '?'}",
        f"{role['up_s']:.0f} s",
        str(role["restarts"]),
        (role["stall"] or role["state"]) + waits,
        " ".join(f"{name}={_short(value)}" for name, value in role["metrics"].items()),
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
