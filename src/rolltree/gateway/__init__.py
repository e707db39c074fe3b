"""The gateway: programs that talk to an OpenAI or Anthropic URL become exact trajectories.

    async with rt.gateway(client) as g, g.session() as s:
        ...  # point the program at s.base_url with s.api_key

It needs starlette and uvicorn (the `serve` extra), which are imported when it is used.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rolltree._helpers.lazy import loader

if TYPE_CHECKING:
    from rolltree.gateway.harbor_program import AgentShell as AgentShell
    from rolltree.gateway.harbor_program import HarborProgramEnv as HarborProgramEnv
    from rolltree.gateway.program_env import ProgramEnv as ProgramEnv
    from rolltree.gateway.server import Gateway as Gateway
    from rolltree.gateway.session import GatewaySession as GatewaySession
    from rolltree.gateway.session import SessionLimits as SessionLimits

_MODULES: dict[str, str] = {
    "harbor_program": "AgentShell HarborProgramEnv",
    "program_env": "ProgramEnv",
    "server": "Gateway",
    "session": "GatewaySession SessionLimits",
}
__all__ = sorted(" ".join(_MODULES.values()).split())
__getattr__ = loader(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Room(ModuleType):
    """`rolltree.gateway` is this package, and `rt.gateway(client)` makes a gateway."""

    def __call__(self, client: object, **options: Any) -> Gateway:
        from rolltree.gateway.server import Gateway

        return Gateway(client, **options)


sys.modules[__name__].__class__ = _Room
