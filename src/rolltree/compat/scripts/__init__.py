"""`vf-eval`, `vf-init`, `vf-install` and `vf-tui` of verifiers 0.1.8.

Where the real package is installed, too, the commands of these names are its own.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

_OURS = "rolltree.compat.scripts"


def vf_eval() -> None:
    """Run `vf-eval`."""
    _run("vf-eval", "eval")


def vf_init() -> None:
    """Run `vf-init`."""
    _run("vf-init", "init")


def vf_install() -> None:
    """Run `vf-install`."""
    _run("vf-install", "install")


def vf_tui() -> None:
    """Run `vf-tui`."""
    _run("vf-tui", "tui")


def _run(command: str, module: str) -> None:
    """Run the real package's command of this name if it is installed, else rolltree's."""
    # With both packages installed the files `vf-*` belong to whichever came last
    # (design/0020-import-verifiers.md).
    for point in entry_points(group="console_scripts", name=command):
        if point.module.partition(".")[0] == "verifiers":
            point.load()()
            return
    messages(lambda: import_module(f"{_OURS}.{module}").main())


def messages(main: Any) -> None:
    """Run `main`; an error that rolltree raises on purpose ends it with a message and status 1."""
    from rolltree.errors import RolltreeError
    from rolltree.redact import shown

    try:
        main()
    except RolltreeError as error:
        sys.exit(shown(f"error: {error}"))
    except KeyboardInterrupt:
        sys.exit(130)
