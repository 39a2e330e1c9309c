"""The layers of a dense built-in model on a GPU: its matrix products, with one fused kernel between two.

Owns nothing: weights are the model's. Computes what the model's own layers compute, and is tested against
them. The residual stream is float32, so that what the layers add is not rounded away.

T tokens, C hidden size, I the MLP's inner size, H query heads, K KV heads, D channels per head.
"""

from collections.abc import Sequence
from typing import Self, TypeGuard

import msgspec
import torch
from torch import Tensor

from fairlead.engine import device_kernels as kernels
from fairlead.engine.paged_attention import DeviceAttention, power_of_two
from fairlead.models.gemma3 import Gemma3Attention, Gemma3Block, Gemma3ForCausalLM
from fairlead.models.layers import GatedMLP, OffsetRMSNorm, RMSNorm
from fairlead.models.llama import LlamaAttention, LlamaBlock, LlamaForCausalLM
from fairlead.models.qwen3 import Qwen3Attention
from fairlead.models.registry import Model

_GATE_TILE = 1024


class Norm(msgspec.Struct, frozen=True):
    """x / rms(x) · weight."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, norm: RMSNorm | OffsetRMSNorm) -> Self:
        """Return the parameters of one of the model's norms."""
        return cls(norm.scale, norm.epsilon)


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's parts. `said_norms`: for outputs of attention and MLP, in families that normalize them.

    `head_norm` [H + K, D]: for queries and keys; `angles`: the index of the rotary embedding that it uses.
    """

    attention: LlamaAttention
    attention_norm: Norm
    mlp: GatedMLP
    mlp_norm: Norm
    said_norms: tuple[Norm, Norm] | None
    head_norm: Norm | None
    angles: int


class DeviceLayers:
    """Runs a step's tokens through all layers of `model`, which `supports` must accept."""

    def __init__(self, model: LlamaForCausalLM | Gemma3ForCausalLM) -> None:
        self.model = model
        shape = model.shape
        self._rotaries = model.rotaries if isinstance(model, Gemma3ForCausalLM) else [model.rotary]
        self._layers = [
            _layer(block, int(isinstance(model, Gemma3ForCausalLM) and window is not None))
            for block, window in zip(_blocks(model), shape.windows, strict=True)
        ]
        self._scale = model.embedding_scale if isinstance(model, Gemma3ForCausalLM) else None
        self._ones = model.embedding.table.new_ones(shape.hidden_size)
        self._head_dim = shape.head_dim
        self._fixed = {
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "HEAD_DIM": shape.head_dim,
            "CHANNELS": power_of_two(shape.head_dim),
        }

    @staticmethod
    def supports(model: Model) -> TypeGuard[LlamaForCausalLM | Gemma3ForCausalLM]:
        """Return whether all parts of the model are supported here."""
        return isinstance(model, LlamaForCausalLM | Gemma3ForCausalLM) and model.shape.experts is None

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: DeviceAttention) -> Tensor:
        """Run all layers over token ids [T] at positions [T]: [T, C], not yet normalized, float32."""
        embedded = self.model.embedding(token_ids)
        if self._scale is not None:
            embedded = embedded * self._scale
        stream = embedded.float()
        angles = [rotary.angles(positions) for rotary in self._rotaries]
        said: Tensor | None = None
        said_norm: Norm | None = None
        for number, layer in enumerate(self._layers):
            after_attention, after_mlp = layer.said_norms or (None, None)
            normal = self._add(stream, said, said_norm, layer.attention_norm)
            query = self._query(number, layer, normal, angles[layer.angles], attention)
            said = layer.attention.output(attention.read(number, query))
            normal = self._add(stream, said, after_attention, layer.mlp_norm)
            said = self._mlp(layer.mlp, normal)
            said_norm = after_mlp
        self._add(stream, said, said_norm, None)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits for rows of `hidden`: [T, C] → [T, V]."""
        return self.model.logits(hidden.to(self.model.embedding.table.dtype))

    def _add(self, stream: Tensor, said: Tensor | None, said_norm: Norm | None, norm: Norm | None) -> Tensor:
        """Add the output `said` to the residual `stream` in place; return the stream normalized."""
        normal = torch.empty(stream.shape, dtype=self.model.embedding.table.dtype, device=stream.device)
        weight, epsilon = (norm.weight, norm.epsilon) if norm else (self._ones, 1.0)
        kernels.add_and_normalize[(len(stream),)](
            stream,
            stream if said is None else said,
            weight if said_norm is None else said_norm.weight,
            weight,
            normal,
            said_norm.epsilon if said_norm else epsilon,
            SIZE=stream.shape[1],
            TILE=power_of_two(stream.shape[1]),
            ADDS=said is not None,
            SAID_NORM=said_norm is not None,
            num_warps=8 if stream.shape[1] > 2048 else 4,
            enable_fp_fusion=True,
        )
        return normal

    def _query(
        self, number: int, layer: Layer, x: Tensor, angles: tuple[Tensor, Tensor], attention: DeviceAttention
    ) -> Tensor:
        """Project `x` [T, C]; write its keys and values to the cache; return its queries [T, H, D]."""
        qkv = layer.attention.qkv(x)
        query = qkv.new_empty((len(x), self._fixed["HEADS"], self._head_dim))
        norm = layer.head_norm
        kernels.turn_and_keep[(len(x), self._fixed["HEADS"] + 2 * self._fixed["KV_HEADS"])](
            qkv,
            *angles,
            qkv if norm is None else norm.weight,
            attention.places(number),
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
        opened = gate_up.new_empty((len(x), size))
        kernels.open_gate[(len(x), -(-size // _GATE_TILE))](
            gate_up, opened, SIZE=size, TILE=_GATE_TILE, SMOOTH=mlp.smooth, num_warps=4, enable_fp_fusion=True
        )
        return mlp.down(opened)


def _blocks(model: LlamaForCausalLM | Gemma3ForCausalLM) -> Sequence[LlamaBlock | Gemma3Block]:
    return model.blocks


def _layer(block: LlamaBlock | Gemma3Block, angles: int) -> Layer:
    attention, mlp = block.attention, block.mlp
    assert isinstance(mlp, GatedMLP)
    head_norm = None
    if isinstance(attention, Qwen3Attention):
        head_norm = Norm(attention.norm_weight, attention.norm_epsilon)
    elif isinstance(attention, Gemma3Attention):
        head_norm = Norm.of(attention.head_norm)
    before: RMSNorm | OffsetRMSNorm
    before_mlp: RMSNorm | OffsetRMSNorm
    said_norms: tuple[Norm, Norm] | None = None
    if isinstance(block, Gemma3Block):
        before, after = block.attention_norms
        before_mlp, after_mlp = block.mlp_norms
        said_norms = Norm.of(after), Norm.of(after_mlp)
    else:
        before, before_mlp = block.attention_norm, block.mlp_norm
    return Layer(
        attention=attention,
        attention_norm=Norm.of(before),
        mlp=mlp,
        mlp_norm=Norm.of(before_mlp),
        said_norms=said_norms,
        head_norm=head_norm,
        angles=angles,
    )
