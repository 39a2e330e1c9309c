"""Structured logs on stderr, one line an event: readable on a terminal, JSON when asked.

Whatever a client has put into a value, it can neither begin a line of its own nor command a terminal. A
traceback says where a fault is, not which values were there.
"""

import logging
import os
import sys
from contextlib import suppress
from typing import Literal

import structlog

Level = Literal["debug", "info", "warn", "error"]
_LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


def configure(*, json: bool, level: Level = "info") -> None:
    """Set up structlog for the whole process. Called once, by the composition root."""
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json
        # The default one shows the variables of every frame: keys of other servers, and what people wrote.
        else structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if json else _printable,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: _Stderr(),
        cache_logger_on_first_use=True,
    )


class _Stderr:
    """Writes a line to what stderr is then: a progress bar may have put itself before it."""

    def msg(self, message: str) -> None:
        with suppress(OSError, ValueError):  # nobody may be there to read it any more
            sys.stderr.write(message + "\n")

    debug = info = warning = error = critical = exception = msg


def _printable(
    _logger: structlog.typing.WrappedLogger, _name: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape what cannot be shown. Tracebacks are no values yet, and JSON escapes all by itself."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    return event
