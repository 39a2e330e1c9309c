"""Decoding of compressed contents, `Content-Encoding`, piece by piece: no piece is large, whatever comes.

A kilobyte can stand for megabytes, and a frame of zstd can ask for gigabytes of memory. So the caller gets
small pieces, and counts them; a frame has at most the memory that HTTP allows (RFC 9659).
"""

import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

PIECE_BYTES = 64 * 1024
# A content may be several members or frames; each needs a new decompressor.
MEMBERS = 100
# What requests may have, the better one first.
REQUEST_CODINGS = ("zstd", "gzip")
# The logarithm of the most memory for a frame of zstd: 8 MiB.
WINDOW_LOG = 23

_GZIP = 16 + zlib.MAX_WBITS
_ZLIB = zlib.MAX_WBITS
_RAW = -zlib.MAX_WBITS


class InvalidContent(Exception):
    """The content is not what its coding says. The message completes the words "it sent"."""


class _Decompressor(Protocol):
    """What the decompressors of zstd and of zlib have in common here; as in `compression.zstd`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Zlib:
    """A decompressor of zlib. `bits`: the format, as in `zlib.decompressobj`."""

    def __init__(self, bits: int) -> None:
        self._zlib = zlib.decompressobj(bits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        self.needs_input = len(piece) < max_length and not self._zlib.unconsumed_tail
        return piece


class _Deflate(_Zlib):
    """The format of zlib, or what many servers send under the same name: deflate without its header."""

    def __init__(self) -> None:
        super().__init__(_ZLIB)
        self._beginning: bytes | None = b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if self._beginning is not None:
            self._beginning = data = self._beginning + data
            if len(data) < 2:
                return b""
            if data[0] & 0x0F != zlib.DEFLATED or int.from_bytes(data[:2]) % 31:
                self._zlib = zlib.decompressobj(_RAW)
            self._beginning = None
        return super().decompress(data, max_length)


def _gzip() -> _Decompressor:
    return _Zlib(_GZIP)


def _zstd() -> _Decompressor:
    return ZstdDecompressor(options={DecompressionParameter.window_log_max: WINDOW_LOG})


_DECOMPRESSORS: dict[str, Callable[[], _Decompressor]] = {
    "gzip": _gzip,
    "deflate": _Deflate,
    "zstd": _zstd,
}
ANSWER_CODINGS = frozenset(_DECOMPRESSORS)


class ContentDecoder:
    """Decodes one content of a known coding."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._new = _DECOMPRESSORS[coding]
        self._decompressor = self._new()
        self._members = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield the content of the next bytes, in pieces of at most `PIECE_BYTES`. Raises `InvalidContent`.

        All must be taken before the next call.
        """
        has_more = bool(data)
        while has_more:
            if self._members == 0 or self._decompressor.eof:
                self._begin_member()
            try:
                piece = self._decompressor.decompress(data, PIECE_BYTES)
            except (zlib.error, ZstdError) as error:
                raise InvalidContent(f"invalid {self._coding} content: {error}") from error
            if self._decompressor.eof:
                data = self._decompressor.unused_data
                has_more = bool(data)
            else:
                data = b""
                has_more = not self._decompressor.needs_input
            if piece:
                yield piece

    def _begin_member(self) -> None:
        self._members += 1
        if self._members > MEMBERS:
            raise InvalidContent(f"{self._coding} content of more than {MEMBERS} members")
        self._decompressor = self._new()

    def end(self) -> None:
        """Check that the content is complete. Raises `InvalidContent`."""
        if self._members and not self._decompressor.eof:
            raise InvalidContent(f"{self._coding} content that ends too early")


def decoder_of(header: str, known: Collection[str] = ANSWER_CODINGS) -> ContentDecoder | None:
    """Return the decoder for a `Content-Encoding`; None if the content is not encoded.

    Raises `ValueError` for a coding that is not known, or several: compressing twice helps only attackers.
    """
    if not header:  # as nearly always
        return None
    named = (part.strip().lower().removeprefix("x-") for part in header.split(","))
    codings = [coding for coding in named if coding not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in known:
        raise ValueError(f"the content coding {header.strip()[:40]!r}, which is not known")
    return ContentDecoder(codings[0])
