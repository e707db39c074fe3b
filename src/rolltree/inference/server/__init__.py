"""`rolltree serve`: an OpenAI-compatible server over the embedded engine, with vLLM's token fields.

`create_app` makes the application, `serve` runs it until it is stopped. Importing this needs
starlette and uvicorn (the `serve` extra), and no torch: the engine is handed in. It knows nothing
about environments and training.
"""

from rolltree.inference.server.app import create_app
from rolltree.inference.server.run import ServerOptions, serve
from rolltree.inference.server.served import ServedModel

__all__ = ["ServedModel", "ServerOptions", "create_app", "serve"]
