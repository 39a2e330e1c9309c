"""Linear layers, and the choice of how their weights are kept."""

from collections.abc import Callable
from typing import Protocol

import msgspec
import torch
from torch import Tensor


class Linear(Protocol):
    """x·Wᵀ + b for x [T, in] and a weight [out, in]. `nbytes`: what the weight takes in memory."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Quantization(msgspec.Struct, frozen=True):
    """One way to keep the weights of linear layers.

    `make` makes a layer from a weight [out, in] and a bias [out] or None. The caller reuses their memory
    afterwards unless `UnquantizedLinear.reorders` is false. `refusal` returns why it does not run on a device
    with activations of a dtype, or None.
    """

    name: str | None
    make: Callable[[Tensor, Tensor | None], Linear]
    refusal: Callable[[torch.device, torch.dtype], str | None]
