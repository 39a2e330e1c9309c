"""Structured logs on stderr, one line an event: readable on a terminal, JSON when asked.

Whatever a client has put into a value, it can neither begin a line of its own nor command a terminal. A
traceback says where a fault is, not which values were there. Within `log_streams` nothing that is printed
waits for whoever reads it, and with JSON every line is an object.
"""

import json as json_module
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Literal

import structlog

from fairlead import child_output
from fairlead.telemetry import streams

Level = Literal["debug", "info", "warn", "error"]
_LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}

# Changed in place: loggers that were used already keep this list.
_processors: list[structlog.typing.Processor] = []


def configure(*, json: bool, level: Level = "info") -> None:
    """Set up structlog, and what is printed by other means, for the whole process."""
    _wrap_lines(json=json)
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json
        # The default one shows the variables of every frame: keys of other servers, and what people wrote.
        else structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
    )
    _processors[:] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info if json else _printable,
        renderer,
    ]
    structlog.configure(
        processors=_processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: _Stderr(),
        cache_logger_on_first_use=True,
    )


@contextmanager
def log_streams(*, json: bool = False) -> Iterator[None]:
    """Write what this process prints from threads until the block ends; see `streams.redirected`.

    With `json`, until `configure` says otherwise, every line is an object. A block within another one changes
    nothing.
    """
    if streams.current() is not None:
        yield
        return
    earlier = structlog.get_config()
    with streams.redirected(_dropped_notice):
        try:
            configure(json=json)
            yield
        finally:
            child_output.set_sink(child_output.print_line)
            structlog.configure(**earlier)


class _Stderr:
    """Writes a line to what stderr is then: a progress bar may have put itself before it."""

    def msg(self, message: str) -> None:
        current = streams.current()
        if current is not None and streams.is_json():
            current.stderr.put(message)
            return
        with suppress(OSError, ValueError):  # it may be closed
            sys.stderr.write(message + "\n")

    debug = info = warning = error = critical = exception = msg


def _wrap_lines(*, json: bool) -> None:
    """Have what is printed become an event, where the log is JSON."""
    current = streams.current()
    if current is None:
        return
    current.stdout.wrap = partial(_output, "stdout") if json else None
    current.stderr.wrap = partial(_output, "stderr") if json else None

    def relay(source: str, line: str) -> None:
        if line:
            current.stderr.put(_output(source, line))

    child_output.set_sink(relay if json else child_output.print_line)


def _output(source: str, line: str) -> str:
    return _object({"source": source, "line": line, "event": "output", "level": "info"})


def _dropped_notice(lines: int) -> str:
    event = "log lines dropped"
    if streams.is_json():
        return _object({"lines": lines, "event": event, "level": "warning"}) + "\n"
    return f"{_now()} [warning  ] {event:<30} lines={lines}\n"


def _object(event: dict[str, object]) -> str:
    return json_module.dumps({**event, "timestamp": _now()})


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _printable(
    _logger: structlog.typing.WrappedLogger, _name: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape what cannot be shown. Tracebacks are no values yet, and JSON escapes all by itself."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    return event
