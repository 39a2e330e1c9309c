"""The layers of a dense built-in model on a GPU: its matrix products, with one fused kernel between two.

Owns nothing: weights are the model's. Computes what the model's own layers compute, and is tested against
them. The residual stream is float32, so that what the layers add is not rounded away.

T tokens, C hidden size, I the MLP's inner size, H query heads, K KV heads, D channels per head.
"""

import torch
from torch import Tensor

from fairlead.engine import device_kernels as kernels
from fairlead.engine.models.layers import GatedMLP
from fairlead.engine.models.model import Model
from fairlead.engine.models.network import Attention, Network, Norm
from fairlead.engine.paged_attention import DeviceAttention, power_of_two
from fairlead.language.checkpoint.architecture import COMMON, unsupported

_GATE_TILE = 1024
SUPPORTED = {
    **COMMON,
    "norm_placement": ("before", "before and after"),
    "query_key_norm": (None, "head"),
    "activation": ("silu", "gelu_tanh"),
    "headless": (False, True),
}


def refusal(model: Model) -> str | None:
    """Return why `DeviceLayers` does not run the model; None if it does."""
    if not isinstance(model, Network):
        return "models that are not built in are not supported"
    value = unsupported(model.shape, SUPPORTED)
    return None if value is None else f"{value} is not supported"


class DeviceLayers:
    """Runs a step's tokens through all layers of `model`, which `refusal` must accept."""

    def __init__(self, model: Model) -> None:
        assert isinstance(model, Network)
        self.model = model
        shape = model.shape
        self._ones = model.embedding.table.new_ones(shape.hidden_size)
        self._head_dim = shape.head_dim
        self._fixed = {
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "HEAD_DIM": shape.head_dim,
            "CHANNELS": power_of_two(shape.head_dim),
        }

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: DeviceAttention) -> Tensor:
        """Run all layers over token ids [T] at positions [T]: [T, C], not yet normalized, float32."""
        model = self.model
        stream = model.embed(token_ids).float()
        output: Tensor | None = None
        output_norm: Norm | None = None
        for number, (layer, angles) in enumerate(zip(model.layers, model.angles(positions), strict=True)):
            normal = self._add(stream, output, output_norm, layer.attention_norm)
            query = self._query(number, layer.attention, normal, angles, attention)
            output = layer.attention.output(attention.read(number, query))
            normal = self._add(stream, output, layer.post_attention_norm, layer.mlp_norm)
            assert isinstance(layer.mlp, GatedMLP)
            output, output_norm = self._mlp(layer.mlp, normal), layer.post_mlp_norm
        self._add(stream, output, output_norm, None)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits for rows of `hidden`: [T, C] → [T, V]."""
        return self.model.logits(hidden.to(self.model.embedding.table.dtype))

    def _add(
        self, stream: Tensor, output: Tensor | None, output_norm: Norm | None, norm: Norm | None
    ) -> Tensor:
        """Add a layer's `output` to the residual `stream` in place; return the stream normalized."""
        normal = torch.empty(stream.shape, dtype=self.model.embedding.table.dtype, device=stream.device)
        weight, epsilon = (norm.scale, norm.epsilon) if norm else (self._ones, 1.0)
        kernels.add_and_normalize[(len(stream),)](
            stream,
            stream if output is None else output,
            weight if output_norm is None else output_norm.scale,
            weight,
            normal,
            output_norm.epsilon if output_norm else epsilon,
            SIZE=stream.shape[1],
            TILE=power_of_two(stream.shape[1]),
            ADDS=output is not None,
            OUTPUT_NORM=output_norm is not None,
            num_warps=8 if stream.shape[1] > 2048 else 4,
            enable_fp_fusion=True,
        )
        return normal

    def _query(
        self,
        number: int,
        layer: Attention,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: DeviceAttention,
    ) -> Tensor:
        """Project `x` [T, C]; write its keys and values to the cache; return its queries [T, H, D]."""
        qkv = layer.qkv(x)
        query = qkv.new_empty((len(x), self._fixed["HEADS"], self._head_dim))
        norm = layer.head_norm
        kernels.rotate_and_store[(len(x), self._fixed["HEADS"] + 2 * self._fixed["KV_HEADS"])](
            qkv,
            *angles,
            qkv if norm is None else norm.scale,
            attention.cache_slots(number),
            query,
            attention.cache.keys[number],
            attention.cache.values[number],
            1.0 if norm is None else norm.epsilon,
            **self._fixed,
            NORM=norm is not None,
            num_warps=1,
            enable_fp_fusion=True,
        )
        return query

    def _mlp(self, mlp: GatedMLP, x: Tensor) -> Tensor:
        gate_up = mlp.gate_up(x)
        size = gate_up.shape[1] // 2
        activated = gate_up.new_empty((len(x), size))
        kernels.activate_gate[(len(x), -(-size // _GATE_TILE))](
            gate_up,
            activated,
            SIZE=size,
            TILE=_GATE_TILE,
            GELU=mlp.uses_gelu,
            num_warps=4,
            enable_fp_fusion=True,
        )
        return mlp.down(activated)
