"""The capabilities of devices, determined without importing the code that uses them."""

from functools import cache
from importlib.util import find_spec

import torch

_OLDEST_CAPABILITY = (8, 0)  # the first with bfloat16 and asynchronous copies
# Memory of a CUDA device that a process uses besides its tensors: the context and the kernels' code.
_CONTEXT_BYTES = 512 * 1024 * 1024


class CudaMemory:
    """`DeviceMemory` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        """See `DeviceMemory`."""
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
