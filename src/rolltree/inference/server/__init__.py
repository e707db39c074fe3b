"""`rolltree serve`: an OpenAI-compatible server over the embedded engine, with vLLM's token fields.

`create_app` makes the application, `serve` runs it until it is stopped. Importing this needs
starlette and uvicorn (the `serve` extra), and no torch: the engine is handed in.
"""

from rolltree.inference.server.app import ServerOptions, create_app, serve
from rolltree.inference.server.model_server import ServedModel

__all__ = ["ServedModel", "ServerOptions", "create_app", "serve"]
