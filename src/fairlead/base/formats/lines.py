"""Streams of lines, each of which is one event (newline-delimited JSON). Lines are handled as their bytes."""


class LineSplitter:
    """Splits a stream into lines. Buffers an incomplete one, up to `line_bytes`."""

    def __init__(self, line_bytes: int) -> None:
        self._rest = bytearray()
        self._line_bytes = line_bytes

    @property
    def has_rest(self) -> bool:
        """Whether an incomplete line is buffered."""
        return bool(self._rest.strip())

    def feed(self, data: bytes) -> bytes:
        """Return all lines that are complete now, joined. Raises `OverflowError` if one is too long."""
        end = data.rfind(b"\n") + 1
        complete = bytes(self._rest) + data[:end] if end else b""
        if end:
            self._rest.clear()
        self._rest += data[end:]
        if len(self._rest) > self._line_bytes:
            self._rest.clear()  # the error's traceback refers to it, and would keep it
            raise OverflowError(f"an event of more than {self._line_bytes} bytes")
        return complete

    def take_rest(self) -> bytes:
        """Return the incomplete line with an end, after the end of the body; empty if there is none."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest + b"\n" if rest.strip() else b""


def split_lines(data: bytes) -> list[bytes]:
    """Return the lines in `data`, each with its end. Bytes after the last end are one more."""
    *lines, rest = data.split(b"\n")
    return [line + b"\n" for line in lines] + ([rest] if rest else [])
