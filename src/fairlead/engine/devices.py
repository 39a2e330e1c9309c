"""What a device can do, asked without what does it."""

from functools import cache
from importlib.util import find_spec

import torch

_OLDEST_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies begin there
_FLOAT8_CAPABILITY = (9, 0)
# What a process takes of a CUDA device besides its tensors: the context and the kernels' code.
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
        """See `DeviceMemory`. The device only tells what all processes take together."""
        return torch.cuda.memory_reserved(self._device) + _CONTEXT_BYTES


@cache
def runs_our_kernels(device: torch.device) -> bool:
    """Whether `device` is a CUDA one that is not too old, and Triton is here, which torch brings for it."""
    return (
        device.type == "cuda"
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY
    )


def multiplies_float8(device: torch.device) -> bool:
    """Whether `device` multiplies matrices of 8-bit floats: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY
