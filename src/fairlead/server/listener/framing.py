"""Strict line parsing for h11, which accepts what another server on a request's path may read differently.

Servers that disagree about where a line or a request ends enable request smuggling. A part of one client's
body is then taken for another client's request. So only CRLF ends a line, in a head, between chunks and in
trailers (RFC 9112, 2.2, leaves this to the server). A header folded over several lines is refused (5.2).
There is one `Content-Length` with one number (6.3 lets a server refuse several equal ones). Each byte is
examined once, in whatever pieces a head arrives.

h11 finds lines in its receive buffer, which this module replaces. It closes each connection of HTTP/1.0; this
module keeps one open for a client that asks for it. Neither is a public part of h11, so pyproject.toml bounds
its version.
"""

import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

# A body may have this many chunks, and one more for each `CHUNK_BYTES` in it.
MAX_SMALL_CHUNKS = 1000
CHUNK_BYTES = 64

_LENGTH = b"\ncontent-length:"
_EMPTY_LINES = re.compile(rb"\A(?:\r\n)*")


class StrictConnection(h11.Connection):
    """The server side of an h11 connection, with a `StrictBuffer`.

    It counts a body's chunks and their bytes: parsing a small chunk costs more than its few bytes.

    Attributes:
        keeps_open_for_1_0: whether the current request is HTTP/1.0 with `Connection: keep-alive`, as load
            generators and old proxies send it. Its response must say the same, or the client waits for the
            end of the connection; h11 closes after a response whose length is not known before.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._receive_buffer = StrictBuffer()
        self._half_line = b""  # the CR of an empty line before a request
        self._chunks = self._body_bytes = 0
        self.keeps_open_for_1_0 = False

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes received and not yet parsed."""
        return len(self._receive_buffer)

    def without_empty_lines(self, data: bytes) -> bytes:
        """Return data received before a request without the CRLF that some clients add to a body."""
        if self._half_line or data.startswith(b"\r"):  # RFC 9112, 2.2
            data = _EMPTY_LINES.sub(b"", self._half_line + data, count=1)
            self._half_line = data if data == b"\r" else b""
            return b"" if self._half_line else data
        return data

    def next_event(self) -> Any:
        """Return the next event, as in h11. Raises `RemoteProtocolError` also for too many small chunks."""
        event = super().next_event()
        if type(event) is h11.Data:
            self._chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._chunks > MAX_SMALL_CHUNKS + self._body_bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError(f"the body comes in chunks of fewer than {CHUNK_BYTES} bytes")
        elif type(event) is h11.Request:
            self._chunks = self._body_bytes = 0
            self.keeps_open_for_1_0 = event.http_version == b"1.0" and _asks_to_keep_open(event)
            if self.keeps_open_for_1_0:
                self._cstate.keep_alive = True  # h11 has just set it to False, and not used it yet
        return event


class StrictBuffer(ReceiveBuffer):
    """A receive buffer that accepts only CRLF. Faults raise `LocalProtocolError`, as in h11's parsers."""

    def __init__(self) -> None:
        super().__init__()
        self._checked = 0  # up to here there are only CRLF line ends, and no end of a head

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the line before a chunk, with its end; None if it is not complete."""
        line = super().maybe_extract_next_line()
        if b"\n" in self._data if line is None else line.count(b"\n") + line.count(b"\r") != 2:
            raise _line_end_error()
        return line

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of a head, or of trailers, without their ends; None if they are not complete."""
        data = self._data
        if data.startswith(b"\r\n"):  # no trailers
            self._extract(2)
            return []
        start = self._checked
        found = data.find(b"\r\n\r\n", max(0, start - 2))
        # The LF of a CR at the end may still arrive.
        end = found + 4 if found >= 0 else len(data) - data.endswith(b"\r")
        line_ends = data.count(b"\r\n", start, end)
        if not line_ends == data.count(b"\n", start, end) == data.count(b"\r", start, end):
            raise _line_end_error()
        if found < 0:
            self._checked = end
            return None
        self._checked = 0
        head = self._extract(end)
        if b"\0" in head or b"\v" in head or b"\f" in head:  # h11's parser takes quadratic time to find them
            raise h11.LocalProtocolError("a control character in the head")
        if b"\n " in head or b"\n\t" in head:
            raise h11.LocalProtocolError("a header is folded over several lines")
        _check_content_length(head)
        return head[:-4].split(b"\r\n")


def _check_content_length(head: bytearray) -> None:
    """Raise if there are several lengths. h11 accepts them if they are equal."""
    lowered = head.lower()
    start = lowered.find(_LENGTH) + len(_LENGTH)
    if start < len(_LENGTH):
        return
    if lowered.find(_LENGTH, start) >= 0 or lowered.find(b",", start, lowered.find(b"\r", start)) >= 0:
        raise h11.LocalProtocolError("several values of Content-Length")


def _asks_to_keep_open(request: h11.Request) -> bool:
    options = [
        option.strip().lower()
        for name, value in request.headers
        if name == b"connection"
        for option in value.split(b",")
    ]
    return b"keep-alive" in options and b"close" not in options


def _line_end_error() -> h11.LocalProtocolError:
    return h11.LocalProtocolError("a line does not end with CR LF")
