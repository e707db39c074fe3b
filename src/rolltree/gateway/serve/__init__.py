"""`rolltree serve`: the gateway's protocols over the embedded engine, without sessions.

`create_app` makes the application, `serve` runs it until it is stopped. Both need starlette and
uvicorn (the `serve` extra) but not torch: the caller passes the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader

if TYPE_CHECKING:
    from rolltree.gateway.serve.app import ServerOptions as ServerOptions
    from rolltree.gateway.serve.app import create_app as create_app
    from rolltree.gateway.serve.app import serve as serve
    from rolltree.gateway.serve.model_server import ServedModel as ServedModel

_MODULES: dict[str, str] = {
    "app": "ServerOptions create_app serve",
    "model_server": "ServedModel",
}
__all__ = sorted(" ".join(_MODULES.values()).split())
__getattr__ = loader(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
