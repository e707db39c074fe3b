"""The logger `verifiers`, which environments, rubrics and parsers write to, and rolltree's own."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what is the standard error when it writes."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def setup_logging(
    level: str = "INFO", log_format: str | None = None, date_format: str | None = None
) -> None:
    """Let the loggers of `verifiers` and of rolltree write to standard error, from `level` on."""
    for name in ("verifiers", "rolltree"):
        write_to_stderr(name, level, log_format, date_format)


def write_to_stderr(
    name: str, level: str, log_format: str | None = None, date_format: str | None = None
) -> None:
    """Let one logger write to standard error, from `level` on, and nowhere else."""
    handler = _StderrHandler()
    form = log_format or "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
    handler.setFormatter(logging.Formatter(form, date_format or "%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger(name)
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
