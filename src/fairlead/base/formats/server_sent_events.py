"""Server-sent events: a stream split where events end, the content of an event, and an event as bytes.

Events are handled as their bytes, so that a relay can send them on unchanged. The format is that of the HTML
standard: an event ends with an empty line, and a line with CRLF, LF or CR.
"""

import re
from collections.abc import Iterator

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n")
_LONGEST_END = 4
_LINE_END = re.compile(rb"\r\n|\n|\r")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The data of the event that ends a stream of OpenAI's, and often one of other dialects.
END_MARK = b"[DONE]"


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

    def take_rest(self) -> bytes:
        """Return the incomplete event with an end, after the end of the body; empty if there is none."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest.rstrip(b"\r\n") + b"\n\n" if rest.strip() else b""

    def _check(self) -> None:
        if len(self._rest) > self._event_bytes:
            self._rest.clear()  # the error's traceback refers to it, and would keep it
            raise OverflowError(f"an event of more than {self._event_bytes} bytes")


def split_events(data: bytes) -> list[bytes]:
    """Return the events in `data`, each with its end. Bytes after the last end are one more."""
    if b"\r" not in data:
        *events, rest = data.split(b"\n\n")
        complete = [event + b"\n\n" for event in events]
    else:
        complete, rest = [], data
        start = 0
        for end in _EVENT_END.finditer(data):
            complete.append(data[start : end.end()])
            start = end.end()
        rest = data[start:]
    if rest:
        complete.append(rest)
    return complete


def event_data(event: bytes) -> bytes | None:
    """Return the data of an event without surrounding white space; None if it has none."""
    if event.startswith(b"data: {") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]  # nearly all events
    event = event.strip(b"\r\n")
    if event.startswith(b"data:") and b"\n" not in event and b"\r" not in event:
        return event[5:].strip()
    lines = list(_values(event, b"data"))
    return b"\n".join(lines).strip() if lines else None


def event_error(event: bytes) -> bytes | None:
    """Return the field `error` of an event, an extension of llama.cpp; None if it has none."""
    return next(_values(event, b"error"), None) if b"error" in event else None


def is_comment(event: bytes) -> bool:
    """Return whether an event has only comments, or is empty."""
    return all(line.startswith(b":") for line in _LINE_END.split(event) if line)


def event_name(event: bytes) -> str:
    """Return the name of an event: "message" if it has none of its own."""
    *_, name = (b"message", *_values(event, b"event"))
    return name.decode(errors="replace")


def event_comments(event: bytes) -> list[str]:
    """Return the comments in an event, which may contain nothing else."""
    return [comment.decode(errors="replace") for comment in _values(event, b"")]


def encode_event(data: bytes, *, name: str = "") -> bytes:
    """Return an event. `data` must be one line."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data) if name else b"data: %s\n\n" % data


def encode_comment(text: str) -> bytes:
    """Return a comment, which readers ignore. `text` must be one line."""
    return b": %s\n\n" % text.encode()


def _last_end(data: bytes) -> int:
    """Return where the last complete event ends."""
    if b"\r" not in data:
        return data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
    end = 0
    for found in _EVENT_END.finditer(data):
        end = found.end()
    return end


def _values(event: bytes, field: bytes) -> Iterator[bytes]:
    """Yield the values of a field; of the comments for the empty name."""
    for line in _LINE_END.split(event.removeprefix(BYTE_ORDER_MARK)):
        name, colon, value = line.partition(b":")
        if name == field and (colon or field):
            yield value.removeprefix(b" ")
