"""Bodies in each content coding."""

import gzip
import sys
import zlib

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ENCODE = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}
CODINGS = list(ENCODE)
