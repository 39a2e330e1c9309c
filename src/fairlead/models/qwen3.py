"""Qwen3: Llama whose queries and keys are normalized head by head before they are rotated."""

import torch
from torch import Tensor

from fairlead.models.config import CheckpointConfig
from fairlead.models.llama import LlamaAttention, LlamaForCausalLM
from fairlead.models.shape import ModelShape, read_layer_windows, read_shape
from fairlead.models.weights import Weights


class Qwen3Attention(LlamaAttention):
    """Llama's attention with an RMSNorm over the D channels of each query and key head."""

    def __init__(self, shape: ModelShape, weights: Weights, prefix: str, layer: int) -> None:
        super().__init__(shape, weights, prefix, layer)
        query_weight = weights.tensor(f"{prefix}.q_norm.weight", shape.head_dim)
        key_weight = weights.tensor(f"{prefix}.k_norm.weight", shape.head_dim)
        self.norm_weight = torch.cat(
            (query_weight.expand(shape.heads, -1), key_weight.expand(shape.kv_heads, -1))
        )  # [H + K, D]: one pass over both
        self.norm_epsilon = shape.norm_epsilon

    def normalize(self, query_key: Tensor) -> Tensor:
        normal = torch.nn.functional.rms_norm(query_key, (self.head_dim,), None, self.norm_epsilon)
        return normal * self.norm_weight


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama's network with that attention. Heads have 128 channels by default, whatever the hidden size."""

    attention = Qwen3Attention

    @classmethod
    def read_shape(cls, config: CheckpointConfig) -> ModelShape:
        bias = config.flag("attention_bias", default=False)
        return read_shape(
            config, head_dim=128, windows=read_layer_windows(config), qkv_bias=bias, output_bias=bias
        )
