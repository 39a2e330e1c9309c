"""Linear layers whose weights are 8-bit floats: half the memory, and half the time to read it.

Weights are scaled per output channel when they are loaded, inputs per token at each call. Both are rounded to
e4m3, multiplied in 8 bits and summed in float32. A product is off by 2–4 % of the most that its factors could
give. A model's head and the routers of its experts stay exact.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from fairlead.models.layers import Linear

LARGEST = 448.0  # of e4m3; a larger number becomes NaN
_LEAST_SCALE = 1e-12  # for a row of zeros
_UNIT = 16  # the hardware needs multiples of this
_HAS_TRITON = find_spec("triton") is not None


class Float8Linear(Linear):
    """x·Wᵀ + b for bfloat16 x [T, in] and a weight [out, in], which it rounds to 8-bit floats."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        # Does not call Linear's own, which would keep the original weight.
        self._packed = False
        self._bias = bias
        self._scales = _scales(weight)  # [out, 1]
        self._rounded = _round(weight, self._scales)

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Return whether the hardware multiplies by a matrix of this shape."""
        return all(size % _UNIT == 0 for size in weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty((0, len(self._rounded)))
        rounded, scales = narrow(x)
        result: Tensor = torch._scaled_mm(  # noqa: SLF001  no public name takes a scale for each row before 2.10
            rounded,
            self._rounded.t(),
            scale_a=scales,
            scale_b=self._scales.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=x.is_cuda,
        )
        return result if self._bias is None else result.add_(self._bias)

    @property
    def saved_bytes(self) -> int:
        """How many bytes less it takes than the bfloat16 weight that it was made from."""
        return self._rounded.numel() - self._scales.nbytes


def narrow_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Make a layer of 8-bit floats if the hardware multiplies that shape, else an exact one."""
    return Float8Linear(weight, bias) if Float8Linear.fits(weight) else Linear(weight, bias)


def narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of `x` [T, C] with its own scale: e4m3 [T, C] and scales, float32 [T, 1]."""
    if x.is_cuda and _HAS_TRITON:
        from fairlead.models.float8_kernels import launch_narrow

        rounded: Tensor
        rounded, scales = launch_narrow(x.contiguous(), LARGEST, _LEAST_SCALE)
        return rounded, scales
    scales = _scales(x)
    return _round(x, scales), scales


def _scales(rows: Tensor) -> Tensor:
    return (rows.float().abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=_LEAST_SCALE)


def _round(rows: Tensor, scales: Tensor) -> Tensor:
    return (rows.float() / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
