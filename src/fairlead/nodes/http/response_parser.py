"""A strict, bounded parser of HTTP/1.1 responses, without a socket or a clock.

httptools, which wraps Node's llhttp, parses heads and chunks. It has no bounds, expects a body in a response
to HEAD, and reads on behind the end of a response. So this module finds the end of a head, bounds it, and
decides what frames the body. httptools decodes only a chunked body. Where llhttp accepts more than one
reading of a head, this module refuses it. `bench/relaying.py` measures the cost, also that of h11.
"""

from http import HTTPStatus

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

HEAD_BYTES = 64 * 1024
HEADERS = 200
INTERIM_HEADS = 10
LENGTH_DIGITS = 15
# Bytes of chunk framing and trailers that are accepted: a fixed number, plus some for each byte of data.
FRAMING_BYTES = 16 * 1024
FRAMING_PER_BYTE = 3

_HEAD_END = b"\r\n\r\n"
_BODILESS = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED})


class InvalidResponse(Exception):
    """The data is not HTTP/1.1, or exceeds a bound. The message completes the words "it sent"."""


class ResponseHead(msgspec.Struct, frozen=True):
    """A response's status and headers. Names are in lower case; values of repeated headers are joined."""

    status: int
    headers: dict[str, str]
    keep_alive: bool

    @property
    def content_type(self) -> str:
        """The media type in lower case, without its parameters; empty if there is none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class ResponseParser:
    """Parses one response to one request. `feed` takes received bytes and returns the body's bytes in them.

    `has_body` is False for a response to HEAD, which has no body whatever its headers say.

    `head` is None until the whole head has been received. `length` is the announced length of the body in
    bytes; None if there is none. `is_complete`: the end of the body has been received. `surplus`: bytes were
    received after the response, so the connection cannot be reused.
    """

    __slots__ = (
        *("_chunks", "_framing_bytes_left", "_has_body", "_interim", "_left", "_message", "_rest"),
        *("head", "is_complete", "length", "surplus"),
    )

    def __init__(self, *, has_body: bool = True) -> None:
        self.head: ResponseHead | None = None
        self.length: int | None = None
        self.is_complete = False
        self.surplus = False
        self._has_body = has_body
        self._interim = 0
        self._rest = b""  # of an incomplete head; later the last bytes of a chunked body
        self._left: int | None = 0  # bytes of the body to come; None: as many as arrive
        self._chunks: HttpResponseParser | None = None  # of a chunked body
        self._message: _Message  # with `_chunks`
        self._framing_bytes_left = FRAMING_BYTES

    @property
    def has_begun(self) -> bool:
        """Whether anything at all has been received."""
        return self.head is not None or bool(self._rest) or self._interim > 0

    def feed(self, data: bytes) -> bytes:
        """Parse received bytes; return those of the body, without framing. Raises `InvalidResponse`."""
        if self.head is None:
            data = self._feed_head(data)
            if self.head is None:
                return b""
        if self._chunks is not None:
            return self._feed_chunks(self._chunks, data)
        if self._left is None:
            return data
        if len(data) > self._left:
            self.surplus = True
            data = data[: self._left]
        self._left -= len(data)
        self.is_complete = not self._left
        return data

    def end(self) -> bool:
        """Record that the connection is closed; return whether the response is complete."""
        if self._left is None and self._chunks is None:
            self.is_complete = True
        return self.is_complete

    def _feed_head(self, data: bytes) -> bytes:
        """Parse the final head, and those of interim responses before it; return the bytes behind it."""
        data = self._rest + data
        while True:
            end = data.find(_HEAD_END) + len(_HEAD_END)
            if end < len(_HEAD_END) or end > HEAD_BYTES:
                if len(data) > HEAD_BYTES:
                    raise InvalidResponse(f"a head of more than {HEAD_BYTES} bytes")
                if not data.startswith(b"HTTP/1."[: len(data)]):
                    raise InvalidResponse("bytes that are not HTTP/1.1")
                if b"\n" in data.replace(b"\r\n", b""):  # it would never end
                    raise InvalidResponse("a head in which a line ends with LF alone")
                self._rest = data
                return b""
            message = _Message()
            parser = HttpResponseParser(message)
            head = _parse_head(parser, data[:end])
            data = data[end:]
            if head.status >= HTTPStatus.OK:
                break
            self._interim += 1
            if self._interim > INTERIM_HEADS:
                raise InvalidResponse(f"more than {INTERIM_HEADS} interim responses")
        self._rest = b""
        self._left = self.length = self._length(head)
        if self._left is None and "transfer-encoding" in head.headers:
            parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)  # some servers pad it
            self._chunks = parser
            self._message = message
        self.head = head
        return data

    def _length(self, head: ResponseHead) -> int | None:
        """Return the length of the body; None if the head does not announce it."""
        if not self._has_body or head.status in _BODILESS:
            return 0
        encoding = head.headers.get("transfer-encoding")
        if encoding is not None and encoding.lower() != "chunked":
            raise InvalidResponse("an invalid Transfer-Encoding")
        length = head.headers.get("content-length")
        if length is not None and len(length) > LENGTH_DIGITS:
            raise InvalidResponse("an invalid Content-Length")
        return None if length is None else int(length)

    def _feed_chunks(self, chunks: HttpResponseParser, data: bytes) -> bytes:
        """Decode a part of a chunked body. If an error follows data, the next call raises it."""
        if self.is_complete:
            self.surplus = self.surplus or bool(data)
            return b""
        message = self._message
        try:
            chunks.feed_data(data)
        except HttpParserError as error:
            self.surplus = message.is_complete
            if not (self.surplus or message.body):
                raise InvalidResponse(f"an invalid chunk: {error}") from error
        body = message.body[0] if len(message.body) == 1 else b"".join(message.body)
        message.body.clear()
        self._rest = (self._rest + data)[-5:] if len(data) < 5 else data[-5:]
        self.is_complete = message.is_complete
        if self.is_complete:
            # httptools ignores line ends behind a message.
            self.surplus |= not self._rest.endswith(_HEAD_END) or self._rest[0] in b"\r\n"
            return body
        self._framing_bytes_left += (1 + FRAMING_PER_BYTE) * len(body) - len(data)
        if self._framing_bytes_left < 0:
            raise InvalidResponse("too many bytes of chunk framing or trailers")
        return body


class _Message:
    """What httptools finds in a chunked body. It does not refer to the parser, which refers to it."""

    __slots__ = ("body", "is_complete", "on_body")

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.on_body = self.body.append
        self.is_complete = False

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise InvalidResponse("more than one response")

    def on_message_complete(self) -> None:
        self.is_complete = True


def _parse_head(parser: HttpResponseParser, data: bytes) -> ResponseHead:
    """Return the head, which httptools has validated: its lines can be split without further checks."""
    if data.count(b"\r\n") > HEADERS + 2:
        raise InvalidResponse(f"more than {HEADERS} headers")
    if b"\0" in data:
        raise InvalidResponse("an invalid head: a NUL")
    if data.lower().count(b"\ncontent-length:") > 1:  # llhttp refuses it also if it is repeated unchanged
        lines = {line.lower(): line for line in data[:-4].split(b"\r\n")}
        data = b"\r\n".join(lines.values()) + _HEAD_END
    try:
        parser.feed_data(data)
    except HttpParserUpgrade as error:
        raise InvalidResponse("an upgrade that was not requested") from error
    except HttpParserError as error:
        raise InvalidResponse(f"an invalid head: {error}") from error
    status = parser.get_status_code()
    is_current = data.startswith(b"HTTP/1.1")
    if not (is_current or data.startswith(b"HTTP/1.0")) or not HTTPStatus.CONTINUE <= status < 600:
        raise InvalidResponse("bytes that are not HTTP/1.1")
    headers: dict[str, str] = {}
    for line in data[:-4].decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if not is_current and "transfer-encoding" in headers:
        raise InvalidResponse("chunks, which HTTP/1.0 does not have")
    connection = headers.get("connection", "").lower()
    keep_alive = "close" not in connection if is_current else "keep-alive" in connection
    return ResponseHead(status, headers, keep_alive)
