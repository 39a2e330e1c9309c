"""How much of a device's memory a model may take. Pure: the device is asked through `DeviceMemory`."""

from typing import Protocol

from fairlead.errors import LoadFailed

_MIB = 1024 * 1024
# What the KV cache gets of the memory that is left beside the weights; steps need the rest.
CACHE_SHARE = 0.9


class DeviceMemory(Protocol):
    """The memory of one device, of which other processes take a part too."""

    def free_and_total(self) -> tuple[int, int]:
        """Return the bytes that nobody has taken, and those that the device has."""

    def taken(self) -> int:
        """Return the bytes that this process has taken."""


def cache_bytes(memory: DeviceMemory, gpu_memory: float | None, most: int | None = None) -> int:
    """Return the size of a KV cache beside weights that are loaded; at most `most` bytes.

    `gpu_memory` is what the process may take in all, as a share of the device up to 1, or in MiB; None: what
    is free. Raises `LoadFailed` if that is not free, or if the weights take all of it.
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
    """Return in bytes what is a share of `total` bytes up to 1, or MiB."""
    return int(gpu_memory * (total if gpu_memory <= 1 else _MIB))
