"""The parts that every decoder is made of. They hold weights and know no checkpoint, cache or batch.

Dimensions: T tokens of all sequences of a step, flattened; C hidden size; H query heads, K KV heads,
D channels per head; I the MLP's inner size; V vocabulary.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor


class Attend(Protocol):
    """Attention of each token to its sequence so far. The engine implements it, as it owns the cache."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write `key` and `value` [T, K, D] to the cache; return `query`'s [T, H, D] attention: [T, H·D]."""


class Linear:
    """x·Wᵀ + b, for x [T, in] and a weight [out, in].

    On a CPU a bfloat16 weight is kept in oneDNN's own blocked order. This is up to twice as fast as
    reordering it at each call, and a row's result does not depend on how many rows there are.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = self.rearranges(weight.dtype, weight.device)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight  # noqa: SLF001
        self._bias = bias

    @staticmethod
    def rearranges(dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether it keeps such weights in an order of its own."""
        return device.type == "cpu" and dtype == torch.bfloat16 and _onednn_bfloat16()

    @property
    def owns_a_copy(self) -> bool:
        """Whether it uses a rearranged copy, so that it does not keep the weight passed to it."""
        return self._packed

    @property
    def saved_bytes(self) -> int:
        """How many bytes less it takes than the weight that it was made from."""
        return 0

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            operator = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001  no public name reaches packed weights
            result: Tensor = operator(x.contiguous(), self._weight, self._bias, "none", [], "")
            return result
        return F.linear(x, self._weight, self._bias)


class RMSNorm:
    """x / rms(x) · weight over the last dimension, computed in float32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.scale = weight
        self.epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.scale.shape, self.scale, self.epsilon)


class OffsetRMSNorm:
    """x / rms(x) · (1 + weight), as Gemma stores it: computed and multiplied in float32, then rounded."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.scale = weight.float() + 1  # not rounded to bfloat16, where 1 + a small weight would be 1
        self.epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.scale.shape[-1:], None, self.epsilon).mul_(self.scale).type_as(x)


class Embedding:
    """A table [V, C] that gives a row for each token id [T]."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.table.index_select(0, token_ids)


class GatedMLP:
    """down(activation(gate(x)) · up(x)), gate and up in one weight [2·I, C].

    `activation` is "silu" or "gelu_tanh", the approximation of GELU by tanh.
    """

    def __init__(self, gate_up: Linear, down: Linear, activation: str = "silu") -> None:
        self.gate_up = gate_up
        self.down = down
        self.smooth = activation == "gelu_tanh"

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)  # [T, I] each
        opened = F.gelu(gate, approximate="tanh") if self.smooth else F.silu(gate)
        return self.down(opened.mul_(up))


def _onednn_bfloat16() -> bool:
    """Return whether this torch has oneDNN, and it computes bfloat16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
