"""The command line: parse, validate, call.

Each command's work is imported when the command runs, so `rolltree --help` needs no torch and no
HTTP client.
"""

from rolltree.cli.app import app, main

__all__ = ["app", "main"]
