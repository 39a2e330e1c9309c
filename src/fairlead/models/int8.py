"""Linear layers whose weights are 8-bit integers: half the memory of bfloat16, in plain torch.

Owns the rule that `cext/cpustep` follows too: each output has one scale, its largest weight / 127, and its
weights are the nearest integers; activations are not rounded. Restoring the matrix at each call takes more
time here than reading less saves: this is for models that the compiled step does not run. Embedding, head
and routers stay exact here; the compiled step, which reads its head for each token, rounds the first two.
"""

import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor

from fairlead.models.layers import Linear

LARGEST = 127  # −128 is unused, so that a weight and its opposite are rounded alike
_LEAST_SCALE = 1e-37  # a smaller scale has no inverse in float32: such a row becomes all zeros


class Int8Linear(Linear):
    """x·Wᵀ + b for x [T, in] and a weight [out, in], which it rounds to 8-bit integers."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        # Does not call Linear's own, which would keep the original weight.
        self._packed = False
        self._bias = bias
        self._saved_per_weight = weight.itemsize - 1
        self._rounded, self._scales = round_rows(weight)

    def __call__(self, x: Tensor) -> Tensor:
        product = F.linear(x, self._rounded.to(x.dtype)).float() * self._scales
        return (product if self._bias is None else product + self._bias).to(x.dtype)

    @property
    def saved_bytes(self) -> int:
        """How many bytes less it takes than the weight that it was made from."""
        return self._rounded.numel() * self._saved_per_weight - self._scales.nbytes


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of `weight` [out, in] with its own scale: int8 [out, in] and scales, float32 [out]."""
    rows = weight.float()
    scales = rows.abs().amax(-1) / LARGEST
    factors = torch.where(scales >= _LEAST_SCALE, 1 / scales, 0)
    return (rows * factors[:, None]).round_().to(torch.int8), scales
