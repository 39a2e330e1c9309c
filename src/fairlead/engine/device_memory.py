"""How much of a device's memory a model may use. Queries it through `DeviceMemory`; imports no torch."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fairlead.base.errors import LoadFailed

_MIB = 1024 * 1024
# The KV cache's share of the memory that the weights leave; steps need the rest.
CACHE_SHARE = 0.9
# The files of drivers with which torch may find a device of type "cuda": NVIDIA's, theirs under WSL and on
# Tegra, and AMD's.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")


class DeviceMemory(Protocol):
    """The memory of one device, which other processes may use too."""

    def free_and_total(self) -> tuple[int, int]:
        """Return the device's free and total bytes."""

    def taken(self) -> int:
        """Return the bytes that this process uses."""


def may_have_gpu() -> bool:
    """Return whether the system has the driver of a GPU, so that torch must be asked for its devices."""
    return platform.system() != "Darwin" and any(Path(driver).exists() for driver in _DRIVERS)


def cache_bytes(memory: DeviceMemory, gpu_memory: float | None, most: int | None = None) -> int:
    """Return the size in bytes of a KV cache beside the loaded weights; at most `most` bytes.

    `gpu_memory` is what the process may use in all, as a share of the device up to 1, or in MiB; None: what
    is free. Raises `LoadFailed` if that is not free, or if the weights use all of it.
    """
    free, total = memory.free_and_total()
    left = free
    if gpu_memory is not None:
        budget, taken = share_bytes(gpu_memory, total), memory.taken()
        left = budget - taken
        if left <= 0:
            raise LoadFailed(
                f"gpuMemory: {budget // _MIB} MiB are too few: {taken // _MIB} MiB are taken already, mostly "
                "by the weights"
            )
        if left > free:
            raise LoadFailed(
                f"gpuMemory: {left // _MIB} MiB more are needed, and only {free // _MIB} MiB of the "
                "device's memory are free"
            )
    size = int(left * CACHE_SHARE)
    return size if most is None else min(size, most)


def share_bytes(gpu_memory: float, total: int) -> int:
    """Return `gpu_memory`, a share of `total` bytes up to 1 or a number of MiB, in bytes."""
    return int(gpu_memory * (total if gpu_memory <= 1 else _MIB))


def split_blocks(
    bytes_total: int, block_bytes: Sequence[int], limits: Sequence[int | None]
) -> tuple[int, ...]:
    """Return how many blocks each group gets, so that one sequence can be as long as possible.

    A block of group g takes `block_bytes[g]`, and more than `limits[g]` of them would be useless. None means
    no limit; at least one group must have none. All groups get the same number up to their limits, because
    every token needs a slot in each group.
    """
    assert None in limits
    unlimited = sum(size for size, limit in zip(block_bytes, limits, strict=True) if limit is None)
    limited = sorted(
        (limit, size) for size, limit in zip(block_bytes, limits, strict=True) if limit is not None
    )
    left, sharing = bytes_total, unlimited + sum(size for _, size in limited)
    for limit, size in limited:
        if left // sharing < limit:
            break  # this group and those with higher limits stay below them
        left -= limit * size
        sharing -= size
    most = left // sharing
    return tuple(most if limit is None else min(limit, most) for limit in limits)
