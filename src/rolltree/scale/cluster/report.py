"""Requests of a user to a run's driver: the status of its roles, and scaling them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rolltree.scale.cluster.beat import Link
from rolltree.scale.cluster.control import Scale
from rolltree.scale.cluster.roles import CLUSTER_TOKEN, CLUSTER_URL, ROLE
from rolltree.scale.cluster.state import DriverProcess, control_url, read_state, read_token
from rolltree.values.errors import ClusterError, ConfigError, did_you_mean

_SHOWN_NOTICES = 5


def ask_driver(
    run_dir: str | Path, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the answer of a run's driver.

    Raises:
        ClusterError: no driver runs on this machine, or it refuses, or the run folder's files are
            not those of a driver.
    """
    folder = Path(run_dir)
    state = read_state(folder)
    if state is not None:
        url = control_url(state)
        with contextlib.suppress(OSError):
            where = {CLUSTER_URL: url, CLUSTER_TOKEN: read_token(folder), ROLE: "a person"}
            return Link(where).ask(path, body)
    killed = "" if state is None else f" The last one, {state.driver}, was killed."
    raise ClusterError(
        f"no driver runs for {folder}, so there is nothing to ask.{killed} `rolltree train` with a "
        "[cluster] in its config starts one, and continues the run."
    )


def scale(run_dir: str | Path, settings: Sequence[str]) -> dict[str, Any]:
    """Change the numbers of roles of a run that has a driver: `["rollout_workers=16"]`.

    Raises:
        ConfigError: a setting is not `rollout_workers` or `engines`, or not a whole number above 0.
        ClusterError: no driver runs, or it refuses.
    """
    numbers = {}
    for setting in settings:
        name, _, number = setting.partition("=")
        if name not in Scale.__struct_fields__:
            hint = did_you_mean(name, Scale.__struct_fields__)
            raise ConfigError(f"{name!r} is not a number of roles that can be scaled.{hint}")
        if not (number.isdecimal() and len(number) < 10 and int(number)):
            raise ConfigError(
                f"{setting!r} does not set a number of roles. Write {name}=N, with N at least 1."
            )
        numbers[name] = int(number)
    if not numbers:
        raise ConfigError(
            "nothing to scale was named. Write rollout_workers=16, engines=4, or both."
        )
    return ask_driver(run_dir, "/scale", msgspec.to_builtins(numbers))


class _RoleStatus(msgspec.Struct, frozen=True):
    name: str
    host: str | None
    pid: int | None
    up_s: float
    restarts: int
    state: str
    stall: str | None
    waits_for: str | None
    metrics: dict[str, Any]


class _Status(msgspec.Struct, frozen=True):
    run: str
    launcher: str
    driver: DriverProcess
    wanted: dict[str, int]
    roles: list[_RoleStatus]
    notices: list[str]


def status_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return the lines that show the answer to `GET /status`.

    Raises:
        ClusterError: it is not the answer of a driver.
    """
    try:
        status = msgspec.convert(answer, _Status)
    except msgspec.ValidationError as error:
        raise ClusterError(
            f"what answers is not a driver of this version of rolltree ({error}), so its status "
            "cannot be shown. Does another program listen on the port of a driver that was killed?"
        ) from error
    wanted = ", ".join(f"{number} {name}" for name, number in status.wanted.items())
    heads = ("role", "where", "up", "restarts", "state", "metrics")
    rows = [heads, *(_cells(role) for role in status.roles)]
    # The last column is not padded: it may be long.
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads) - 1)]
    table = [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    ]
    notices = status.notices[-_SHOWN_NOTICES:]
    return [
        f"{status.run}: launcher {status.launcher}, driver {status.driver}, {wanted}",
        *table,
        *(["latest notices:", *(f"  {notice}" for notice in notices)] if notices else []),
    ]


def _cells(role: _RoleStatus) -> tuple[str, ...]:
    waits = f", waits for {role.waits_for}" if role.waits_for else ""
    return (
        role.name,
        f"{role.host or '?'}:{role.pid or '?'}",
        f"{role.up_s:.0f} s",
        str(role.restarts),
        (role.stall or role.state) + waits,
        " ".join(f"{name}={_short(value)}" for name, value in role.metrics.items()),
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
