"""Attention for modules of transformers: their calls are passed on to the engine's attention.

transformers finds the function here in its registry of attention functions. A call may have only
parameters that our attention supports; any other, or attention to later tokens, raises `NotImplementedError`.

T tokens of all sequences of a step, flattened; H query heads, K KV heads, D channels per head.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from fairlead.engine.models.model import AttentionFunction

NAME = "fairlead"
"""The name of our attention in transformers' registry."""
_CHANGES_SCORES = ("s_aux", "sinks", "position_bias", "attention_bias", "alibi", "head_mask")


class AttentionCall(msgspec.Struct, frozen=True):
    """The parameters of one layer's attention.

    layer: the layer's index.
    heads: the number of query heads.
    kv_heads: the number of key heads, which is that of value heads.
    head_dim: their size.
    scale: multiplies the scores.
    cap: c: a score x becomes c·tanh(x / c).
    window: how many positions, its own included, a token attends to; None: all.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    cap: float | None
    window: int | None


class AttentionForwarder:
    """Passes the attention calls of a model's modules to the `attention` of the current step."""

    def __init__(self, model: Any) -> None:
        self.attention: AttentionFunction | None = None
        for module in model.modules():
            module.fairlead = self  # where `_attend` finds it

    def __call__(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention = self.attention
        if attention is None:
            raise NotImplementedError("its layers are run by something other than its body")
        if isinstance(attention, RecordingAttention):
            attention.calls.append(call)
        return attention(call.layer, query, key, value)


class RecordingAttention:
    """Plain attention over whole sequences of these `lengths`, which records its `calls`."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.calls: list[AttentionCall] = []
        self._lengths = list(lengths)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002
        call = self.calls[-1]
        outputs = []
        parts = zip(*(torch.split(one, self._lengths) for one in (query, key, value)), strict=True)
        for q, k, v in parts:
            k, v = (one.repeat_interleave(call.heads // call.kv_heads, 1).transpose(0, 1) for one in (k, v))  # noqa: PLW2901
            scores = (q.transpose(0, 1) @ k.transpose(1, 2)).float() * call.scale  # [H, T, T]
            if call.cap is not None:
                scores = torch.tanh(scores / call.cap) * call.cap
            distance = torch.arange(len(q), device=q.device)
            distance = distance[:, None] - distance
            hidden = (distance < 0) | (distance >= (call.window or len(q)))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
            outputs.append((weights @ v).transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  ours does its own masking
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend for transformers' modules: query [1, H, T, D], key and value [1, K, T, D] → [1, T, H, D]."""
    for name in _CHANGES_SCORES:
        if others.get(name) is not None:
            raise NotImplementedError(f"its attention has {name}")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise NotImplementedError("its attention also looks ahead")
    if value.shape != key.shape:
        raise NotImplementedError("its keys and values differ in size")
    heads, length, head_dim = query.shape[1:]
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    call = AttentionCall(
        module.layer_idx, heads, key.shape[1], head_dim, scale, softcap or None, sliding_window or None
    )
    output: Tensor = module.fairlead(call, *(one[0].transpose(0, 1) for one in (query, key, value)))
    return output.view(1, length, heads, head_dim), None


def register_attention() -> None:
    """Register our attention with transformers as `NAME`, without masks. Repeating it does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
