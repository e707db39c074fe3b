"""A debugger that opens in the environment's own code, right after a recorded answer."""

from __future__ import annotations

import pdb
import sys
from pathlib import Path
from typing import Any

from rolltree.records.replaying import ReplayReport, opened_environment, replay_async
from rolltree.tasks import run_sync

_NAME = "rolltree"


class EnvironmentDebugger(pdb.Pdb):
    """`pdb` that steps through an environment's modules and passes over everything else.

    Args:
        source: the environment. If all of it is rolltree's own, its protocols and worlds are
            stepped through.
    """

    def __init__(self, source: object, **settings: Any) -> None:
        # pdb calls `is_skipped_module` only if `skip` is not empty.
        super().__init__(skip=["-"], nosigint=True, **settings)
        self.prompt = "(rolltree replay) "
        self._modules = environment_modules(source)

    def is_skipped_module(self, module_name: Any) -> bool:
        """Whether a frame's module is not one of the environment's."""
        name = str(module_name)
        return not any(name == each or name.startswith(f"{each}.") for each in self._modules)

    def set_quit(self) -> None:
        """Let the replay go on without the debugger: the environment must not see it end."""
        self.set_continue()

    def open_soon(self) -> None:
        """Stop at the next line of the environment that this thread runs."""
        self.set_trace(sys._getframe(1))


def environment_modules(source: Any) -> set[str]:
    """Return the modules of an environment: of its classes, rewards and `load_environment`."""
    functions = getattr(getattr(source, "rubric", None), "functions", ())
    parts = [
        *type(source).__mro__,
        getattr(source, "loaded_by", None),
        getattr(source, "make_world", None),
        *(getattr(each, "func", None) for each in functions),
        *(getattr(source, "tools", None) or ()),
        *type(getattr(source, "protocol", None)).__mro__,
    ]
    names = {getattr(part, "__module__", None) for part in parts}
    found = {str(name) for name in names if name and str(name).partition(".")[0] != _NAME}
    # A class's bases are among the parts, but stepping through `abc` does not help.
    found -= {"builtins", "abc", "typing"}
    own = {f"{_NAME}.environments", f"{_NAME}.protocols", f"{_NAME}.worlds"}
    return found or own


def replay_with_debugger(
    run: str | Path,
    rollout: str,
    env: Any = None,
    *,
    until: int | None = None,
    debugger: EnvironmentDebugger | None = None,
    **options: Any,
) -> ReplayReport:
    """Play one recorded rollout again, with a debugger where the environment first differs.

    It opens after the last answer before the difference (after `until` answers if that is given),
    at the first line of the environment's own code. To find the difference, the rollout is played
    once before. Reward functions that run in threads are not stepped through. Without a difference
    the debugger does not open.
    `debugger` is for other terminals; the other arguments are `replay`'s.
    """
    env_args, compat = options.pop("env_args", None), options.pop("compat", False)

    async def play() -> ReplayReport:
        async with opened_environment(run, env, env_args, compat) as (stored, source):
            # Played twice: first to find the difference, then to stop before it.
            stop = until
            if stop is None:
                first = await replay_async(stored, rollout, source, **options)
                if first.is_equal:
                    return first
                stop = first.num_replayed
            opened = debugger or EnvironmentDebugger(source)

            def on_answer(_: object, number: int) -> None:
                if number == stop - 1:
                    opened.open_soon()

            try:
                if stop == 0:
                    opened.open_soon()
                return await replay_async(
                    stored, rollout, source, until=until, on_answer=on_answer, **options
                )
            finally:
                sys.settrace(None)

    return run_sync(play())
