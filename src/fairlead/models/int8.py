"""Linear layers whose weights are 8-bit integers: half the memory of bfloat16, in plain torch.

Owns the rule that `cext/cpustep` follows too: each output has one scale, its largest weight / 127, and its
weights are the nearest integers; activations stay as they are. This one makes the matrix again at each call,
which costs more time than reading less saves: it is for what the compiled step does not run. Embedding, head
and routers stay exact here; the compiled step, which reads its head for each token, rounds the first two.
"""

import torch
import torch.nn.functional as F  # noqa: N812  the name that everybody knows it by
from torch import Tensor

from fairlead.models.layers import Linear

LARGEST = 127  # −128 is left out, so that a weight and its opposite are rounded alike
_LEAST_SCALE = 1e-37  # below it there is no factor in float32: such a row is all zeros


class Int8Linear(Linear):
    """x·Wᵀ + b for x [T, in] and a weight [out, in], which is rounded here."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        # Not Linear's own: of the weight as it was, nothing is kept.
        self._packed = False
        self._bias = bias
        self._saved_per_weight = weight.itemsize - 1
        self._rounded, self._scales = round_rows(weight)

    def __call__(self, x: Tensor) -> Tensor:
        product = F.linear(x, self._rounded.to(x.dtype)).float() * self._scales
        return (product if self._bias is None else product + self._bias).to(x.dtype)

    @property
    def saved_bytes(self) -> int:
        """How much smaller it is than the weight that it was made of."""
        return self._rounded.numel() * self._saved_per_weight - self._scales.nbytes


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of `weight` [out, in] by a scale of its own: int8 [out, in] and float32 [out]."""
    rows = weight.float()
    scales = rows.abs().amax(-1) / LARGEST
    factors = torch.where(scales >= _LEAST_SCALE, 1 / scales, 0)
    return (rows * factors[:, None]).round_().to(torch.int8), scales
