"""The command line: parses and validates flags, and calls the library.

The modules that do a command's work are imported when it runs, so `rolltree --help` needs neither
torch nor an HTTP client.
"""

from rolltree.cli.app import app, main

__all__ = ["app", "main"]
