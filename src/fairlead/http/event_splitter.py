"""Splits a stream of server-sent events where events end. Does not read what is in them."""

import re

# An event ends with an empty line; a line ends with CRLF, LF or CR.
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n")
_LONGEST_END = 4


class EventSplitter:
    """Splits a stream into events. Buffers an incomplete one, up to `event_bytes`."""

    def __init__(self, event_bytes: int) -> None:
        self._rest = bytearray()
        self._event_bytes = event_bytes

    @property
    def has_rest(self) -> bool:
        """Whether an incomplete event is buffered."""
        return bool(self._rest.strip())

    def feed(self, data: bytes) -> bytes:
        """Return all events that are complete now, joined. Raises `OverflowError` if one is too long."""
        searched = max(0, len(self._rest) - _LONGEST_END)
        if self._rest:
            self._rest += data
            if _EVENT_END.search(self._rest, searched) is None:
                self._check()
                return b""
            data = bytes(self._rest)
            self._rest.clear()
        end = _last_end(data)
        if end < len(data):
            self._rest += data[end:]
            self._check()
        return data[:end]

    def _check(self) -> None:
        if len(self._rest) > self._event_bytes:
            self._rest.clear()  # the error's traceback refers to it, and would keep it
            raise OverflowError(f"an event of more than {self._event_bytes} bytes")


def _last_end(data: bytes) -> int:
    """Return where the last complete event ends."""
    if b"\r" not in data:
        return data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
    end = 0
    for found in _EVENT_END.finditer(data):
        end = found.end()
    return end


def split_events(data: bytes) -> list[bytes]:
    """Return the events in `data`, each with its end. Bytes after the last end are one more."""
    if b"\r" not in data:
        *events, rest = data.split(b"\n\n")
        whole = [event + b"\n\n" for event in events]
    else:
        whole, rest = [], data
        start = 0
        for end in _EVENT_END.finditer(data):
            whole.append(data[start : end.end()])
            start = end.end()
        rest = data[start:]
    if rest:
        whole.append(rest)
    return whole
