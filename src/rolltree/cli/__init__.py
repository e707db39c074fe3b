"""The command line: parse, validate, call.

Each command's work is imported when the command runs, so `rolltree --help` needs no torch and no
HTTP client. It holds no behaviour of its own: evaluation, training, the store and the reports do.
"""

from rolltree.cli.app import app, main

__all__ = ["app", "main"]
