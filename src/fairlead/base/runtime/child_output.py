"""Reads the lines that child processes print, and relays them to standard error or to the log's sink.

Packages that start processes do not import the log, and the log is independent of processes.
"""

import contextlib
import sys
from collections.abc import Callable
from time import perf_counter

import trio

LONGEST_LINE_BYTES = 2000
# After this long in a flood of lines, other tasks get a turn.
TURN_S = 0.0005
# A failed read is repeated, because a child process blocks when its output pipe is full.
RETRY_S = 1.0

Sink = Callable[[str, str], None]
"""Called with the name of the process and a line without its end; must neither block nor raise."""


def print_line(source: str, line: str) -> None:
    """Write the name of the process and the line to standard error."""
    with contextlib.suppress(OSError, ValueError):  # it may be closed
        sys.stderr.write(f"[{source}] {line}\n")


async def read_lines(
    stream: trio.abc.ReceiveStream,
    on_line: Callable[[str], None],
    on_partial_line: Callable[[str], None] | None = None,
) -> None:
    """Call `on_line` with each line, without its end, until the stream ends; long lines are cut.

    `on_partial_line` is called with an unfinished line whenever it grows, because a progress bar may be one
    line for minutes.
    """
    rest = b""
    try:
        while data := await _receive(stream, on_line):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > LONGEST_LINE_BYTES:
                lines.append(rest)
                rest = b""
            turn_ends = perf_counter() + TURN_S
            for line in lines:
                on_line(_text(line))
                if perf_counter() >= turn_ends:
                    await trio.lowlevel.checkpoint()
                    turn_ends = perf_counter() + TURN_S
            if rest and on_partial_line is not None:
                on_partial_line(_text(rest))
    finally:
        if rest:
            on_line(_text(rest))


async def _receive(stream: trio.abc.ReceiveStream, on_line: Callable[[str], None]) -> bytes | bytearray:
    while True:
        try:
            return await stream.receive_some()
        except trio.BrokenResourceError as error:
            on_line(f"(its output cannot be read: {error.__cause__ or error!r})")
            await trio.sleep(RETRY_S)


def _text(line: bytes) -> str:
    return line[:LONGEST_LINE_BYTES].decode(errors="replace").rstrip()


_sink: Sink = print_line


def relay(source: str, line: str) -> None:
    """Pass on a line that a child process printed."""
    _sink(source, line)


def set_sink(sink: Sink) -> None:
    """Pass lines to `sink` from now on."""
    global _sink  # noqa: PLW0603  # as there is one standard error
    _sink = sink
