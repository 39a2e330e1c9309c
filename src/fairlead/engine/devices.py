"""What a device can do, asked without what does it."""

from functools import cache
from importlib.util import find_spec

import torch

_OLDEST_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies begin there
_FLOAT8_CAPABILITY = (9, 0)


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
