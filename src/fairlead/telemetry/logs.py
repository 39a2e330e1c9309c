"""Structured logs on stderr, one line an event: readable on a terminal, JSON when asked."""

import logging
import os
import sys

import structlog


def configure(*, json: bool) -> None:
    """Set up structlog for the whole process. Called once, by the composition root."""
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=colors)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if json else _as_it_is,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: _Stderr(),
        cache_logger_on_first_use=True,
    )


class _Stderr:
    """Writes a line to what stderr is then: a progress bar may have put itself before it."""

    def msg(self, message: str) -> None:
        sys.stderr.write(message + "\n")

    debug = info = warning = error = critical = exception = msg


def _as_it_is(
    _logger: structlog.typing.WrappedLogger, _name: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """The console renderer prints tracebacks itself, and better."""
    return event
