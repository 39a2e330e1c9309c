"""The parts that every decoder is made of. They hold weights and use no checkpoint, cache or batch.

Dimensions: T tokens of all sequences of a step, flattened; C hidden size; H query heads, K KV heads,
D channels per head; I the MLP's inner size; E experts, k of them per token; V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor

from fairlead.engine.models.linear import Linear


class RMSNorm:
    """x / rms(x) · weight over the last dimension, computed in float32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.scale = weight
        self.epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.scale.shape, self.scale, self.epsilon)


class HeadRMSNorm(RMSNorm):
    """`RMSNorm` over the D channels of each head, [T, H + K, D], with a weight for each, [H + K, D]."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.scale.shape[-1:], None, self.epsilon) * self.scale


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

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.uses_gelu = activation == "gelu_tanh"

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)  # [T, I] each
        activated = F.gelu(gate, approximate="tanh") if self.uses_gelu else F.silu(gate)
        return self.down(activated.mul_(up))


class MixtureMLP:
    """Runs each token through the k experts with the highest router weights, and sums their weighted outputs.

    Works expert by expert, each over all its tokens; an expert without tokens costs nothing. `total` makes
    the result of the sum: if ranks have a part of each expert, their sums are added.
    """

    def __init__(
        self,
        router: Linear,
        experts: Sequence[GatedMLP],
        per_token: int,
        *,
        normalize: bool,
        total: Callable[[Tensor], Tensor] = lambda result: result,
    ) -> None:
        self.router = router
        self._experts = experts
        self._per_token = per_token
        self._normalize = normalize
        self._total = total

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1, dtype=torch.float32)  # [T, E]
        weights, chosen = scores.topk(self._per_token, -1)  # [T, k]
        if self._normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        # All (token, expert) pairs, grouped by expert, in the order of the tokens.
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self._per_token
        shares = weights.flatten()[order, None].to(x.dtype)
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        result = torch.zeros_like(x)
        start = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                rows = tokens[start : start + count]
                output = expert(x.index_select(0, rows)) * shares[start : start + count]
                result.index_add_(0, rows, output)
                start += count
        return self._total(result)
