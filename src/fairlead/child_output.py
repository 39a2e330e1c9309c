"""Relays the lines that child processes print: to standard error, or to the sink that the log sets.

The rooms that start processes do not import the log, and the log knows no processes.
"""

import contextlib
import sys
from collections.abc import Callable

Sink = Callable[[str, str], None]
"""Called with the name of the process and a line without its end; must neither block nor raise."""


def print_line(source: str, line: str) -> None:
    """Write the name of the process and the line to standard error."""
    with contextlib.suppress(OSError, ValueError):  # it may be closed
        sys.stderr.write(f"[{source}] {line}\n")


_sink: Sink = print_line


def relay(source: str, line: str) -> None:
    """Pass on a line that a child process printed."""
    _sink(source, line)


def set_sink(sink: Sink) -> None:
    """Pass lines to `sink` from now on."""
    global _sink  # noqa: PLW0603  # as there is one standard error
    _sink = sink
