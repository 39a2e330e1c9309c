"""Structured logs on stderr, one line per event: formatted for a terminal, or JSON.

A value from a client can neither begin a new line nor control a terminal. A traceback shows where an error
is, but no values of variables. Within `log_streams`, printing never blocks, and with JSON every line
is an object.
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

from fairlead.base.errors import printable
from fairlead.base.runtime import child_output
from fairlead.base.telemetry import streams

Level = Literal["debug", "info", "warn", "error"]
_LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}

# Changed in place, because loggers that were used keep this list.
_processors: list[structlog.typing.Processor] = []


def configure(*, json: bool, level: Level = "info") -> None:
    """Configure structlog, and the form of lines printed by other means, for the whole process."""
    _wrap_lines(json=json)
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json
        # The default formatter prints the variables of each frame: API keys of other servers, users' texts.
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
    """Write the output of this process from threads until the block ends; see `streams.redirected`.

    With `json`, until `configure` changes it, every line is an object. A nested block changes nothing.
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
    """Writes a line to the current `sys.stderr`, which a progress bar may have replaced."""

    def msg(self, message: str) -> None:
        current = streams.current()
        if current is not None and streams.is_json():
            current.stderr.put(message)
            return
        with suppress(OSError, ValueError):  # it may be closed
            sys.stderr.write(message + "\n")

    debug = info = warning = error = critical = exception = msg


def _wrap_lines(*, json: bool) -> None:
    """Turn printed lines into events, if the log is JSON."""
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
    """Escape unprintable characters, for the terminal only: JSON escapes them. Tracebacks are added later."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = printable(value)
    return event
