"""Linear layers with weights of 8-bit floats: half the memory, and half the time to read it.

Weights are scaled per output channel when they are loaded, inputs per token at each call. Both are rounded to
e4m3, multiplied in 8 bits and summed in float32. The error of a product is 2–4 % of its largest possible
value. A model's head and the routers of its experts stay exact.
"""

from importlib.util import find_spec
from typing import ClassVar, final

import torch
from torch import Tensor

from fairlead.engine.models.linear import Linear, Packed

LARGEST = 448.0  # of e4m3; a larger number becomes NaN
_LEAST_SCALE = 1e-12  # for a row of zeros
_UNIT = 16  # the hardware needs multiples of this
_CAPABILITY = (9, 0)  # Hopper, the first that multiplies 8-bit floats
_HAS_TRITON = find_spec("triton") is not None


class Float8Linear:
    """`Linear` for bfloat16, with a weight of 8-bit floats, e4m3 [out, in], and scales, float32 [out, 1]."""

    def __init__(self, rounded: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = rounded.shape
        self._bias = bias
        self._rounded, self._scales = rounded, scales
        self.nbytes = self._rounded.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty((0, self.out_features))
        rounded, scales = round_rows_to_float8(x)
        result: Tensor = torch._scaled_mm(  # noqa: SLF001  no public name takes a scale for each row before 2.10
            rounded,
            self._rounded.t(),
            scale_a=scales,
            scale_b=self._scales.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=x.is_cuda,
        )
        return result if self._bias is None else result.add_(self._bias)


def round_rows_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of `x` [T, C] with its own scale: e4m3 [T, C] and scales, float32 [T, 1]."""
    if x.is_cuda and _HAS_TRITON:
        from fairlead.engine.models.quantization.float8_kernels import launch_round_rows

        rounded: Tensor
        rounded, scales = launch_round_rows(x.contiguous(), LARGEST, _LEAST_SCALE)
        return rounded, scales
    scales = _scales(x)
    return _round(x, scales), scales


def multiplies_float8(device: torch.device) -> bool:
    """Return whether `device` multiplies matrices of 8-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


def _scales(rows: Tensor) -> Tensor:
    return (rows.float().abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=_LEAST_SCALE)


def _round(rows: Tensor, scales: Tensor) -> Tensor:
    return (rows.float() / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


@final
class Float8:
    """`WeightFormat` of 8-bit floats and a scale for each row."""

    name: ClassVar[str | None] = "fp8"

    def refusal(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if not multiplies_float8(device):
            return f"needs a GPU that multiplies 8-bit floats (Hopper), not {device}"
        return None if dtype == torch.bfloat16 else f"needs dtype bfloat16, not {dtype}"

    def suits(self, outputs: int, inputs: int) -> bool:
        return outputs % _UNIT == 0 and inputs % _UNIT == 0

    def pack(self, rows: Tensor) -> Packed:
        scales = _scales(rows)
        return _round(rows, scales), scales

    def unpack(self, packed: Packed, _inputs: int) -> Tensor:
        rounded, scales = packed
        return rounded.float() * scales

    def linear(self, packed: Packed, _inputs: int, bias: Tensor | None) -> Linear:
        rounded, scales = packed
        return Float8Linear(rounded, scales, bias)
