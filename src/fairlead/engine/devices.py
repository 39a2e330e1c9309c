"""The capabilities of devices, determined without importing the code that uses them."""

from functools import cache
from importlib.util import find_spec

import torch

from fairlead.base.errors import LoadFailed
from fairlead.engine.models.parallel import Ranks

_OLDEST_CAPABILITY = (8, 0)  # the first with bfloat16 and asynchronous copies
# Memory of a CUDA device that a process uses besides its tensors: the context and the kernels' code.
_CONTEXT_BYTES = 512 * 1024 * 1024


class CudaMemory:
    """`DeviceMemory` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        """Return the device's free and total bytes."""
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total

    def taken(self) -> int:
        """See `DeviceMemory`. Estimated, because the device only reports the sum over all processes."""
        return torch.cuda.memory_reserved(self._device) + _CONTEXT_BYTES


@cache
def runs_our_kernels(device: torch.device) -> bool:
    """Return whether `device` is a recent CUDA device and Triton is installed, as with torch for CUDA."""
    return (
        device.type == "cuda"
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY
    )


def find_device(name: str, ranks: Ranks) -> torch.device:
    """Return the device; "auto" is CUDA if there is any. `LoadFailed` if the device does not exist.

    Each rank has a GPU of its own: the named one or the first, and those after it.
    """
    device = _named_device(name)
    if device.type == "cpu" or ranks.size == 1:
        return device
    first, count = device.index or 0, torch.cuda.device_count()
    if first + ranks.size > count:
        raise LoadFailed(
            f"parallel: {ranks.size} CUDA devices from cuda:{first} on are needed, and torch has {count}"
        )
    return torch.device("cuda", first + ranks.rank)


def _named_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LoadFailed(f"device {name!r} is not known") from error
    if device.type not in {"cpu", "cuda"}:
        raise LoadFailed(f"device {name!r} is not supported (auto, cpu, cuda, cuda:N are)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadFailed(f"device {name!r} is not there: torch has {torch.cuda.device_count()} CUDA devices")
    return device
