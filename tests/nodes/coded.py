"""Contents in each coding, for tests: `ENCODE` by coding, `ENCODERS` by format with its coding."""

import gzip
import sys
import zlib
from collections.abc import Callable

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["CODINGS", "ENCODE", "ENCODERS", "zstd"]


def _raw_deflate(data: bytes) -> bytes:
    """Encode without zlib's header, as many servers do."""
    return zlib.compress(data, wbits=-zlib.MAX_WBITS)


ENCODE: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}
CODINGS = list(ENCODE)
ENCODERS = {coding: (coding, encode) for coding, encode in ENCODE.items()} | {
    "raw deflate": ("deflate", _raw_deflate)
}
