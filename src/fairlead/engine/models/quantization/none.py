"""Linear layers with unchanged weights."""

from typing import ClassVar, final

import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor

from fairlead.engine.models.linear import Linear, Packed


class UnquantizedLinear:
    """`Linear` in the weight's own dtype.

    On a CPU a bfloat16 weight is kept in oneDNN's own blocked order. This is up to twice as fast as
    reordering it at each call, and a row's result does not depend on how many rows there are.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes
        self._reordered = self.reorders(weight.dtype, weight.device)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._reordered else weight  # noqa: SLF001
        self._bias = bias

    @staticmethod
    def reorders(dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether it uses a reordered copy of such weights, and does not keep the original."""
        return device.type == "cpu" and dtype == torch.bfloat16 and _onednn_bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        if self._reordered:
            operator = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001  no public name reaches packed weights
            result: Tensor = operator(x.contiguous(), self._weight, self._bias, "none", [], "")
            return result
        return F.linear(x, self._weight, self._bias)


def _onednn_bfloat16() -> bool:
    """Return whether this torch has oneDNN, and it computes bfloat16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001


@final
class Unquantized:
    """`WeightFormat` of the model's own dtype."""

    name: ClassVar[str | None] = None

    def refusal(self, _device: torch.device, _dtype: torch.dtype) -> str | None:
        return None

    def suits(self, _outputs: int, _inputs: int) -> bool:
        return True

    def pack(self, rows: Tensor) -> Packed:
        return (rows,)

    def unpack(self, packed: Packed, _inputs: int) -> Tensor:
        return packed[0].float()

    def linear(self, packed: Packed, _inputs: int, bias: Tensor | None) -> Linear:
        return UnquantizedLinear(packed[0], bias)


NONE = Unquantized()
