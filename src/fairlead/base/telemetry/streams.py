"""Standard output and standard error of a server: every line is written by a `LogWriter`.

While `redirected` is entered, `sys.stdout` and `sys.stderr` are `LogStream`s. A thread writes whatever Python
code prints (events, progress bars, warnings, tracebacks, lines of child processes), in order. So a file that
blocks or fails cannot delay or end the server. Only the output of C libraries bypasses this. Fast to import;
independent of events and their format.
"""

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TextIO

from fairlead.base.telemetry.log_writer import LogBuffer, LogWriter, OutputTarget

# Enough for the lines of ten thousand requests, about 300 bytes each, while a terminal is stopped.
MAX_LINES = 10_000
MAX_BYTES = 4 * 1024 * 1024
CLOSE_S = 1.0
# A line longer than this is written in parts of about this size.
PARTIAL_CHARACTERS = 16 * 1024

Wrap = Callable[[str], str]


class LogStream(io.TextIOBase):
    """A text stream that passes complete lines to a writer.

    `wrap` renders each printed line. If it is None, lines are written unchanged, and flushing writes an
    incomplete line, too. `like` is the stream that it replaces.
    """

    def __init__(self, writer: LogWriter, like: TextIO | None) -> None:
        super().__init__()
        self.wrap: Wrap | None = None
        self._writer = writer
        self._like = like
        self._partial = ""
        self._lock = threading.RLock()  # reentrant, as the buffer's is

    encoding = "utf-8"
    errors = "backslashreplace"

    def put(self, line: str) -> None:
        """Write a rendered line, without wrapping it."""
        self._writer.put(f"{line}\n")

    def write(self, text: str) -> int:
        """Write complete lines and keep the beginning of the next one."""
        with self._lock:
            lines, newline, self._partial = (self._partial + text).rpartition("\n")
            if newline:
                self._emit(lines + newline)
            if len(self._partial) > PARTIAL_CHARACTERS:
                self.finish()
        return len(text)

    def flush(self) -> None:
        """Write the beginning of a line, unless lines are wrapped."""
        if self.wrap is None:
            self.finish()

    def finish(self) -> None:
        """Write the beginning of a line as if it were complete."""
        with self._lock:
            text, self._partial = self._partial, ""
            if text:
                self._emit(text)

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return whether the replaced stream is a terminal."""
        return self._like is not None and self._like.isatty()

    def fileno(self) -> int:
        """Return the replaced stream's descriptor. Raises `OSError` if it has none."""
        if self._like is None:
            raise io.UnsupportedOperation("fileno")
        return self._like.fileno()

    def _emit(self, text: str) -> None:
        if self.wrap is None:
            self._writer.put(text)
            return
        for line in text.splitlines():
            if line.strip():
                self.put(self.wrap(line))


class LogStreams:
    """Both streams of this process. If both are the same file, they share a writer, so that lines keep order.

    `notice` renders how many lines were dropped.
    """

    def __init__(self, stdout: TextIO | None, stderr: TextIO | None, notice: Callable[[int], str]) -> None:
        self._notice = notice
        self._descriptors: list[int] = []
        self._writers: list[LogWriter] = []
        error_writer = self._writer(stderr)
        output_writer = error_writer if _same_file(stdout, stderr) else self._writer(stdout)
        self.stderr = LogStream(error_writer, stderr)
        self.stdout = LogStream(output_writer, stdout)

    @property
    def dropped(self) -> int:
        """The number of lines that were dropped so far."""
        return sum(writer.dropped for writer in self._writers)

    def close(self) -> bool:
        """Write the remaining lines, for at most `CLOSE_S` per file; return whether all are written."""
        self.stdout.finish()
        self.stderr.finish()
        is_written = True
        for writer in self._writers:
            is_written &= writer.close(CLOSE_S)
        if is_written:  # a blocked thread still uses its descriptor; the number must not be reused
            for descriptor in self._descriptors:
                os.close(descriptor)
        return is_written

    def _writer(self, stream: TextIO | None) -> LogWriter:
        buffer = LogBuffer(max_lines=MAX_LINES, max_bytes=MAX_BYTES, notice=self._notice)
        writer = LogWriter(self._sink(stream), buffer)
        self._writers.append(writer)
        return writer

    def _sink(self, stream: TextIO | None) -> OutputTarget:
        if stream is None:
            return len
        try:
            descriptor = os.dup(stream.fileno())  # a copy that nothing else closes
        except (OSError, ValueError):
            return partial(_write_text, stream)
        self._descriptors.append(descriptor)
        return partial(os.write, descriptor)


# One per process, because a process has one standard error.
_current: LogStreams | None = None


def current() -> LogStreams | None:
    """Return the streams while `redirected` is entered."""
    return _current


def is_json() -> bool:
    """Return whether every line must be a JSON object."""
    return _current is not None and _current.stderr.wrap is not None


def lines_dropped() -> int:
    """Return how many lines were dropped since `redirected` was entered."""
    return 0 if _current is None else _current.dropped


@contextmanager
def redirected(notice: Callable[[int], str]) -> Iterator[LogStreams]:
    """Write the output of this process from threads until the block ends.

    Then write the remaining lines for a bounded time; lines that cannot be written by then are lost.
    """
    global _current  # noqa: PLW0603
    _open_missing_descriptors()
    replaced = sys.stdout, sys.stderr
    _current = LogStreams(*replaced, notice=notice)
    sys.stdout, sys.stderr = _current.stdout, _current.stderr
    try:
        yield _current
    finally:
        is_written = _current.close()
        _current = None
        # A file that blocks would also delay what the interpreter prints when it exits.
        sys.stdout, sys.stderr = replaced if is_written else (_null_stream(), _null_stream())


def _open_missing_descriptors() -> None:
    """Open /dev/null as each of the descriptors 0, 1 and 2 that is closed.

    Otherwise a socket would get the number, and output of a library would be sent to a client.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # returns the lowest number that is free: this one


def _same_file(one: TextIO | None, other: TextIO | None) -> bool:
    if one is None or other is None:
        return False
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError):
        return False


def _write_text(stream: TextIO, data: memoryview) -> int:
    stream.write(str(data, "utf-8", "replace"))
    stream.flush()
    return len(data)


def _null_stream() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123  # open until the process ends
