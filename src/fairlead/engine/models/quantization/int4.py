"""Linear layers with weights of 4 bits: a third of the memory of bfloat16, in plain torch.

Defines the rule that `cext/cpustep/format_int4.h` follows too. Each output has groups of 32 inputs. A group
has a scale and an offset in bfloat16, and each weight becomes one of 16 equal steps from the smallest to the
largest: weight = scale · code + offset. That is 5 bits a weight. Activations are not rounded.

A group of weights −1, 0, 0.5, 2 has the scale 3 / 15 = 0.2 and the offset −1, so the codes are 0, 5, 7 and 15
and the weights −1, 0, 0.4 and 2. Half a step is rounded down.

Restoring the matrix at each call takes more time here than reading less saves: this is for models that the
CPU kernel does not run. Embedding, head and routers stay exact here; the CPU kernel rounds the first two.
"""

from typing import ClassVar, final

import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor

from fairlead.engine.models.linear import Linear, Packed

GROUP = 32
_LARGEST = 15
_LEAST_SCALE = 1e-37  # a smaller scale has no inverse in float32: all weights of such a group are its offset


class Int4Linear:
    """`Linear` with the weight that `pack_groups` returns, of `inputs` columns."""

    def __init__(self, packed: Packed, inputs: int, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = len(packed[0]), inputs
        self._bias = bias
        self._packed = packed
        self.nbytes = sum(part.nbytes for part in packed)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, unpack_groups(self._packed, self.in_features).to(x.dtype), self._bias)


def pack_groups(rows: Tensor) -> Packed:
    """Round rows [n, in]: two codes a byte, uint8 [n, groups · 16], scales and offsets, bfloat16 [n, groups].

    Inputs that a last group lacks have its first input's weight, which does not widen its range.
    """
    values = rows.float()
    lacking = -values.shape[1] % GROUP
    if lacking:
        first = values.shape[1] // GROUP * GROUP
        values = torch.cat([values, values[:, first : first + 1].expand(-1, lacking)], 1)
    groups = values.view(len(rows), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales, offsets = (high / _LARGEST - low / _LARGEST).bfloat16(), low.bfloat16()
    widths = scales.float()
    factors = torch.where(widths >= _LEAST_SCALE, 1 / widths, 0)
    steps = (groups - offsets.float()[..., None]) * factors[..., None]
    codes = (steps - 0.5).ceil_().clamp_(0, _LARGEST).to(torch.uint8).view(len(rows), -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, torch.where(factors > 0, scales, 0), offsets


def unpack_groups(packed: Packed, inputs: int) -> Tensor:
    """Return the weights [n, inputs] of such rows in float32."""
    codes, scales, offsets = packed
    numbers = torch.stack((codes & 15, codes >> 4), -1).view(*scales.shape, GROUP).float()
    weights = numbers * scales.float()[..., None] + offsets.float()[..., None]
    return weights.view(len(codes), -1)[:, :inputs]


@final
class Int4:
    """`WeightFormat` of 4-bit codes, and a scale and an offset for each 32 inputs of a row."""

    name: ClassVar[str | None] = "int4"

    def refusal(self, device: torch.device, _dtype: torch.dtype) -> str | None:
        return None if device.type == "cpu" else f"needs a CPU, not {device}"

    def suits(self, _outputs: int, _inputs: int) -> bool:
        return True

    def pack(self, rows: Tensor) -> Packed:
        return pack_groups(rows)

    def unpack(self, packed: Packed, inputs: int) -> Tensor:
        return unpack_groups(packed, inputs)

    def linear(self, packed: Packed, inputs: int, bias: Tensor | None) -> Linear:
        return Int4Linear(packed, inputs, bias)
