"""Content codings (RFC 9110, 8.4): gzip, deflate and zstd, decoded in small pieces whatever their ratio."""

import sys
import zlib
from collections.abc import Iterator
from typing import Protocol

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

PIECE_BYTES = 64 * 1024
_WINDOW_LOG = 23
"""A zstd frame may need a window of 8 MB, as RFC 8878 (3.1.1.1.2) advises; no more."""

_GZIP_BITS, _ZLIB_BITS = 31, 15


class _Decompressor(Protocol):
    """What decodes one member or frame. `eof`: it has ended, and `unused_data` follows it."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Zlib:
    """zlib's interface in terms of zstd's, which keeps input that it has not used."""

    def __init__(self, bits: int) -> None:
        self._zlib = zlib.decompressobj(bits)
        self.eof = False
        self.unused_data = b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        self.eof, self.unused_data = self._zlib.eof, self._zlib.unused_data
        return piece


def _new_decompressor(coding: str) -> _Decompressor:
    if coding == "zstd":
        return ZstdDecompressor(options={DecompressionParameter.window_log_max: _WINDOW_LOG})
    return _Zlib(_GZIP_BITS if coding in ("gzip", "x-gzip") else _ZLIB_BITS)


class ContentDecoder:
    """Decodes one body. Raises `ValueError` for a coding that is not known, and `feed` for invalid data."""

    CODINGS = ("zstd", "gzip")
    """What clients are told to use."""

    def __init__(self, coding: str) -> None:
        if coding not in ("zstd", "gzip", "x-gzip", "deflate"):
            raise ValueError(f"the content coding {coding[:40]!r}, which is not known")
        self._coding = coding
        self._decompressor = _new_decompressor(coding)
        self._has_begun = False

    @property
    def is_complete(self) -> bool:
        """Whether the body may end here."""
        return self._decompressor.eof or not self._has_begun

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what the data decodes to, in pieces of at most `PIECE_BYTES`."""
        try:
            yield from self._decode(data)
        except (zlib.error, ZstdError, EOFError) as error:
            raise ValueError(f"invalid {self._coding} data") from error

    def _decode(self, data: bytes) -> Iterator[bytes]:
        while True:
            if self._decompressor.eof:
                data = self._decompressor.unused_data or data
                if not data:
                    return
                self._decompressor = _new_decompressor(self._coding)  # members and frames follow each other
            self._has_begun = self._has_begun or bool(data)
            piece = self._decompressor.decompress(data, PIECE_BYTES)
            data = b""
            if piece:
                yield piece
            if len(piece) < PIECE_BYTES and not self._decompressor.unused_data:
                return


def coding_of(header: str) -> str | None:
    """Return the coding that a `Content-Encoding` names; None if there is none."""
    name = header.strip().lower()
    return None if name in ("", "identity") else name
