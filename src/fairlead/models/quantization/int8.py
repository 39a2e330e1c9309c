"""Linear layers with weights of 8-bit integers: half the memory of bfloat16, in plain torch.

Defines the rule that `cext/cpustep` follows too: each output has one scale, its largest weight / 127, and its
weights are the nearest integers; activations are not rounded. Restoring the matrix at each call takes more
time here than reading less saves: this is for models that the CPU kernel does not run. Embedding, head
and routers stay exact here; the CPU kernel, which reads its head for each token, rounds the first two.
"""

import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor

from fairlead.models.linear import Quantization

LARGEST = 127  # −128 is unused, so that a weight and its opposite are rounded alike
_LEAST_SCALE = 1e-37  # a smaller scale has no inverse in float32: such a row becomes all zeros


class Int8Linear:
    """`Linear` with a weight that it rounds to 8-bit integers."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._rounded, self._scales = round_rows(weight)
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


def _refusal(device: torch.device, _dtype: torch.dtype) -> str | None:
    return None if device.type == "cpu" else f"needs a CPU, not {device}"


INT8 = Quantization("int8", Int8Linear, _refusal)
