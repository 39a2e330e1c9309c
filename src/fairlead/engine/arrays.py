"""The arrays that a step computes with: numpy's beside the CPU kernel, torch's tensors elsewhere.

Code for both uses the operations that numpy and torch have in common (`library`). Torch is imported only for
a device or a tensor of torch. A model on the CPU kernel has neither, so its process never imports torch.
"""

import contextlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Any
"""`numpy.ndarray`, or `torch.Tensor` on any device."""
Device: TypeAlias = "torch.device | None"
"""Where a model computes; None: in the CPU kernel, on arrays of numpy."""


def library(array: Array) -> ModuleType:
    """Return numpy or torch, whichever the array is of."""
    if isinstance(array, np.ndarray):
        return np
    import torch

    return torch


def upload(array: np.ndarray, device: Device) -> Array:
    """Copy an array to `device` without waiting for it; on a CPU the result shares its memory."""
    if device is None:
        return array
    import torch

    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # An asynchronous copy needs pinned memory; torch keeps it until the copy is done.
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


def device_of(array: Array) -> Device:
    """Return where an array is."""
    return None if isinstance(array, np.ndarray) else array.device


def inference(device: Device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which torch records nothing for training."""
    if device is None:
        return contextlib.nullcontext()
    import torch

    return torch.inference_mode()


class Arriving:
    """Arrays on their way to the host. They are queued at once, after what the device does already."""

    def __init__(self, columns: Sequence[Array]) -> None:
        self._columns = list(columns)
        self._arrived = None
        if device_of(columns[0]) is None:
            return
        self._columns = [column.to("cpu", non_blocking=True) for column in columns]
        if columns[0].is_cuda:
            import torch

            self._arrived = torch.cuda.current_stream(columns[0].device).record_event()

    def wait(self) -> list[np.ndarray]:
        """Return them as arrays of numpy, as soon as the device is done with them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [column if isinstance(column, np.ndarray) else column.numpy() for column in self._columns]
