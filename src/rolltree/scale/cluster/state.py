"""What a driver writes for those who ask it: its address, its processes, and its token.

The run folder may be somebody else's, so nothing of it is taken on trust: a token is sent only if
it looks like one, and only to this machine.
"""

from __future__ import annotations

import os
import re
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from rolltree._helpers.files import open_regular, read_regular
from rolltree.values.errors import ClusterError

STATE_FILE = "cluster.json"
TOKEN_FILE = "cluster.token"
_STATE_BYTES = 2**20
_LONGEST_NAME = 300
_FOREIGN = "Was this run folder made by somebody else? Remove the file if no driver runs."


class DriverProcess(msgspec.Struct, frozen=True):
    """Where a driver runs."""

    host: Annotated[str, msgspec.Meta(max_length=_LONGEST_NAME)]
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class DriverState(msgspec.Struct, frozen=True):
    """The content of `cluster.json`."""

    control: Annotated[str, msgspec.Meta(max_length=_LONGEST_NAME)]
    launch_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    driver: DriverProcess
    roles: dict[str, dict[str, Any]]


def read_state(run_dir: Path) -> DriverState | None:
    """Return the state that a run's driver wrote; None if there was none, or it has ended.

    Raises:
        ClusterError: the file is not one that a driver has written.
    """
    path = run_dir / STATE_FILE
    try:
        return msgspec.json.decode(read_regular(path, _STATE_BYTES), type=DriverState)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ClusterError(
            f"{path} does not have the state of a driver ({error}), so it is not known which "
            "roles run. Remove the file after you have ended all processes of the run."
        ) from error


def read_token(run_dir: Path) -> str:
    """Return the token of a run's driver; it is sent, so it must not be another file's content.

    Raises:
        FileNotFoundError: the driver has ended.
        ClusterError: the file is not one that a driver has written.
    """
    path = run_dir / TOKEN_FILE
    try:
        # Opened for writing, too, which also refuses a second name of another file.
        with open(open_regular(path, os.O_RDWR), "rb") as file:
            token = file.read(_LONGEST_NAME).decode("ascii", "replace")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ClusterError(f"{path} cannot be used: {error}. {_FOREIGN}") from error
    if not re.fullmatch(r"[\w-]{43}", token, re.ASCII):
        raise ClusterError(f"{path} does not hold the token of a driver. {_FOREIGN}")
    return token


def control_url(state: DriverState) -> str:
    """Return the address of a driver that runs on this machine, to which its token may be sent.

    Raises:
        ClusterError: it is not an address of a control server on this machine.
    """
    try:
        parts = urlsplit(state.control)
        address, is_plain = ip_address(parts.hostname or ""), parts.port is not None
    except ValueError:
        is_plain = False
    if not is_plain or state.control != f"http://{parts.netloc}" or "@" in parts.netloc:
        raise ClusterError(
            f"{STATE_FILE} names {state.control!r}, which is not the address of a driver, so "
            f"nothing is sent there. {_FOREIGN}"
        )
    if not address.is_loopback and not _is_own(str(address)):
        raise ClusterError(
            f"{STATE_FILE} names the driver {state.control}, which is not on this machine, so the "
            f"run's token is not sent there. Give the command on {state.driver.host}."
        )
    return state.control


def _is_own(address: str) -> bool:
    """Return whether an address belongs to this machine."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
