"""How many threads compute in this process. Torch has such a number, but may not be imported for it."""

import os
from functools import cache
from pathlib import Path

MOST = 256
"""The kernel's limit."""

_TOPOLOGY = Path("/sys/devices/system/cpu")
_chosen: int | None = None


def get_threads() -> int:
    """Return the number of threads, at most MOST."""
    return min(_chosen or default_threads(), MOST)


def set_threads(count: int) -> None:
    """Compute on `count` threads from now on. Torch has a number of its own (`torch.set_num_threads`)."""
    global _chosen  # noqa: PLW0603  a property of the process, as torch's number is
    _chosen = count


@cache
def default_threads() -> int:
    """Return the number in OMP_NUM_THREADS, or else the number of cores that this process may use.

    A core's second thread computes nothing faster, since both share one unit.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if given.isdecimal() and int(given) > 0:
        return int(given)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    usable = os.sched_getaffinity(0)
    return len({_siblings(cpu) for cpu in usable})


def _siblings(cpu: int) -> str:
    """Return the threads of a processor's core; its own number if the system does not say."""
    try:
        return (_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
