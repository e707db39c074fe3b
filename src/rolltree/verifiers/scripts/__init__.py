"""`vf-eval`, `vf-init` and `vf-install` of verifiers 0.1.8.

If the real package is installed, too, the commands of these names are its own.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any


def _run(name: str) -> None:
    """Run `main` of the script `name`: the real package's if it is installed, else rolltree's."""
    # With both packages installed, the files `vf-*` belong to whichever was installed last
    # (design/0020-import-verifiers.md).
    for point in entry_points(group="console_scripts", name=f"vf-{name}"):
        if point.module.partition(".")[0] == "verifiers":
            point.load()()
            return
    messages(lambda: import_module(f"{__name__}.{name}").main())


vf_eval, vf_init, vf_install = (partial(_run, name) for name in ("eval", "init", "install"))


def messages(main: Any) -> None:
    """Run `main`; an error that rolltree raises on purpose ends it with a message and status 1."""
    from rolltree._helpers.redact import shown
    from rolltree.values.errors import RolltreeError

    try:
        main()
    except RolltreeError as error:
        sys.exit(shown(f"error: {error}"))
    except KeyboardInterrupt:
        sys.exit(130)
