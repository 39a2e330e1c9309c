"""A bounded buffer of output and the thread that writes it, so that no caller ever waits for a stream.

A stream without a reader, a full disk or a closed pipe loses lines but takes no time: `LogWriter.put` neither
blocks nor raises. Lines keep their order. Lines that do not fit are dropped, and a notice with their number
is written in their place. A failed write is retried until it succeeds. Independent of the lines' format.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from typing import NamedTuple

RETRY_S = 0.1
# The minimum time between two wake-ups of the thread, each of which takes the GIL from the event loop. Waking
# for every line cost a short request 30 % more CPU time.
PAUSE_S = 0.05
# One system call writes many lines, because each call releases the GIL and must wait to acquire it again.
BATCH_BYTES = 64 * 1024
BATCH_ENTRIES = 1000

OutputTarget = Callable[[memoryview], int]
"""Writes at least one of the bytes and returns their number, as `os.write` does; may block or raise."""


class _Entry(NamedTuple):
    data: bytes
    lines: int
    dropped_before: int


class Batch(NamedTuple):
    """What to write next: a number of the oldest entries, and notices for drops up to `reported`."""

    data: bytes
    entries: int
    reported: int


class LogBuffer:
    """At most `max_lines` lines in at most `max_bytes` bytes. `notice` renders the number of dropped lines.

    Any thread may call `put`; one thread reads. An entry counts until it is removed. A text without a
    newline, such as a frame of a progress bar, counts as a line.
    """

    def __init__(self, *, max_lines: int, max_bytes: int, notice: Callable[[int], str]) -> None:
        self.dropped = 0
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._notice = notice
        self._entries: deque[_Entry] = deque()
        self._lines = 0
        self._bytes = 0
        self._reported = 0
        # Reentrant: a destructor that the garbage collector runs within `put` may print a warning.
        self._lock = threading.RLock()

    def put(self, text: str) -> None:
        """Append the text, or drop all of it and count its lines."""
        data = text.encode("utf-8", "backslashreplace")
        lines = max(1, data.count(b"\n"))
        with self._lock:
            if self._lines + lines > self._max_lines or self._bytes + len(data) > self._max_bytes:
                self.dropped += lines
                return
            self._lines += lines
            self._bytes += len(data)
            self._entries.append(_Entry(data, lines, self.dropped))

    def peek(self) -> Batch | None:
        """Return the oldest entries with the notices that belong between them; None if there is nothing."""
        with self._lock:
            parts: list[bytes] = []
            reported, entries, size = self._reported, 0, 0
            for entry in islice(self._entries, BATCH_ENTRIES):
                if size and size + len(entry.data) > BATCH_BYTES:
                    break
                if entry.dropped_before > reported:
                    parts.append(self._notice(entry.dropped_before - reported).encode())
                    reported = entry.dropped_before
                parts.append(entry.data)
                size += len(entry.data)
                entries += 1
            if entries == len(self._entries) and self.dropped > reported:
                parts.append(self._notice(self.dropped - reported).encode())
                reported = self.dropped
        return Batch(b"".join(parts), entries, reported) if parts else None

    def remove(self, batch: Batch) -> None:
        """Remove the entries of a batch that `peek` returned and that was written."""
        with self._lock:
            for _ in range(batch.entries):
                entry = self._entries.popleft()
                self._lines -= entry.lines
                self._bytes -= len(entry.data)
            self._reported = batch.reported


class LogWriter:
    """Writes the contents of the buffer to `sink` on a daemon thread, until it is closed."""

    def __init__(self, sink: OutputTarget, buffer: LogBuffer) -> None:
        self._sink = sink
        self._buffer = buffer
        # A queue, because `SimpleQueue.put` is safe in destructors and `Event.set` is not.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._is_awake = False  # whether the thread was woken and has not read the buffer yet
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """The number of lines that were dropped so far."""
        return self._buffer.dropped

    def put(self, text: str) -> None:
        """Queue the text, or drop it if the buffer is full. Never blocks, never raises."""
        with suppress(MemoryError):
            self._buffer.put(text)
            if not self._is_awake:
                self._is_awake = True
                self._wake.put(None)

    def close(self, within_s: float) -> bool:
        """Stop once everything is written; return whether that happened within the time.

        A write that fails meanwhile is not retried. If the result is False, the thread may still be blocked
        in the sink; it does not keep the process alive.
        """
        self._closing.set()
        self._wake.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive() and self._buffer.peek() is None

    def _run(self) -> None:
        while True:
            self._wake.get()
            is_last = self._closing.is_set()
            self._is_awake = False  # before the buffer is read: a later `put` must wake the thread again
            while self._write_batch():
                pass
            if is_last:
                return
            self._closing.wait(PAUSE_S)

    def _write_batch(self) -> bool:
        """Write the next batch; return False if there is none, or if it cannot be written in time."""
        try:
            batch = self._buffer.peek()
        except MemoryError:
            time.sleep(RETRY_S)
            return not self._closing.is_set()
        if batch is None or not self._write(batch.data):
            return False
        self._buffer.remove(batch)
        return True

    def _write(self, data: bytes) -> bool:
        """Write all of it, with retries; return False if a write fails while the writer is closed."""
        rest = memoryview(data)
        while rest:
            try:
                written = self._sink(rest)
            except BlockingIOError:  # another process made the pipe non-blocking, and it is full
                written = 0
            # Python ignores SIGPIPE and SIGXFSZ, so they are OSErrors here. `ValueError`: the file is closed.
            except (OSError, ValueError):
                if self._closing.is_set():
                    return False
                written = 0
            rest = rest[written:]
            if not written:
                time.sleep(RETRY_S)
        return True
