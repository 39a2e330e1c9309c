"""Linear layers with weights of 8-bit integers: half the memory of bfloat16, in plain torch.

Defines the rule that `cext/cpustep` follows too: each output has one scale, its largest weight / 127, and its
weights are the nearest integers; activations are not rounded. Restoring the matrix at each call takes more
time here than reading less saves: this is for models that the CPU kernel does not run. Embedding, head
and routers stay exact here; the CPU kernel, which reads its head for each token, rounds the first two.
"""

from typing import ClassVar, final

import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor

from fairlead.engine.models.linear import Linear, Packed

LARGEST = 127  # −128 is unused, so that a weight and its opposite are rounded alike
_LEAST_SCALE = 1e-37  # a smaller scale has no inverse in float32: such a row becomes all zeros


class Int8Linear:
    """`Linear` with a weight of integers, int8 [out, in], and scales, float32 [out]."""

    def __init__(self, rounded: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = rounded.shape
        self._bias = bias
        self._rounded, self._scales = rounded, scales
        self.nbytes = self._rounded.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        product = F.linear(x, self._rounded.to(x.dtype)).float() * self._scales
        return (product if self._bias is None else product + self._bias).to(x.dtype)


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of `weight` [out, in] with its own scale: int8 [out, in] and scales, float32 [out]."""
    rows = weight.float()
    scales = rows.abs().amax(-1) / LARGEST
    factors = torch.where(scales >= _LEAST_SCALE, 1 / scales, 0)
    return (rows * factors[:, None]).round_().to(torch.int8), scales


@final
class Int8:
    """`WeightFormat` of 8-bit integers and a scale for each row."""

    name: ClassVar[str | None] = "int8"

    def refusal(self, device: torch.device, _dtype: torch.dtype) -> str | None:
        return None if device.type == "cpu" else f"needs a CPU, not {device}"

    def suits(self, _outputs: int, _inputs: int) -> bool:
        return True

    def pack(self, rows: Tensor) -> Packed:
        return round_rows(rows)

    def unpack(self, packed: Packed, _inputs: int) -> Tensor:
        rounded, scales = packed
        return rounded * scales[:, None]

    def linear(self, packed: Packed, _inputs: int, bias: Tensor | None) -> Linear:
        rounded, scales = packed
        return Int8Linear(rounded, scales, bias)
