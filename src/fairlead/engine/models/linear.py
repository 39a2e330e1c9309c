"""Linear layers, and the formats in which they keep their weights."""

from typing import ClassVar, Protocol

import torch
from torch import Tensor

Packed = tuple[Tensor, ...]
"""Rows of a weight in a format. Each tensor has one entry for each row: to stack rows is to stack tensors."""


class Linear(Protocol):
    """x·Wᵀ + b for x [T, in] and a weight [out, in]. `nbytes`: what the weight takes in memory."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class WeightFormat(Protocol):
    """One way to keep the weights of linear layers. `models/quantization` registers each by its name.

    Each row is packed by itself: pieces have any number of rows, and rows of several tensors may be stacked.
    """

    name: ClassVar[str | None]
    """As `quantization` names it in a configuration, and `form` in a checkpoint; None: the model's dtype."""

    def refusal(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why layers with activations of `dtype` do not run on `device`; None if they do."""

    def suits(self, outputs: int, inputs: int) -> bool:
        """Return whether a weight of this shape can be kept so; others keep the model's dtype."""

    def pack(self, rows: Tensor) -> Packed:
        """Round rows [n, in] of a weight."""

    def unpack(self, packed: Packed, inputs: int) -> Tensor:
        """Return the rows [n, in] in float32."""

    def linear(self, packed: Packed, inputs: int, bias: Tensor | None) -> Linear:
        """Make a layer of a whole weight with `inputs` columns and a bias [out]. It keeps these tensors."""
