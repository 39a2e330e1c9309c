"""Settings of Python and the C library for a server process; for the garbage collector see `gc_tuning`."""

import ctypes
import sys

SWITCH_INTERVAL_S = 0.001
MMAP_THRESHOLD_BYTES = 256 * 1024
TRIM_THRESHOLD_BYTES = 8 * 1024 * 1024

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def prepare() -> None:
    """Apply the settings. Call it once, before anything is served."""
    # After each wait for the network the event loop needs the GIL again. While a thread renders a long chat,
    # it gets the GIL after this interval. Python's default of 5 ms, several times a request, is too long.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _return_memory()


def _return_memory() -> None:
    """Make glibc return large blocks to the system as soon as they are freed.

    By default it raises the size from which blocks are mapped, up to 32 MB, when one is freed. Later ones
    then come from the heap, which shrinks only at its end. 25 bodies of 16 MB left 125 MB allocated; with
    this, 6 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
