"""Llama 2, 3 and similar models: rotary grouped-query attention, gated MLP, an RMSNorm before each.

T tokens of all sequences of a step, flattened; C hidden size; H query heads, K KV heads, D channels per
head; V vocabulary.
"""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from fairlead.models.config import CheckpointConfig
from fairlead.models.layers import Attend
from fairlead.models.rope import Rotary, rotate
from fairlead.models.shape import ModelShape, read_shape
from fairlead.models.weights import Weights


class LlamaAttention:
    """The projections of one layer's attention; the engine computes the attention itself."""

    def __init__(self, shape: ModelShape, weights: Weights, prefix: str, layer: int) -> None:
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        rows = {
            f"{prefix}.q_proj": shape.heads * shape.head_dim,
            f"{prefix}.k_proj": shape.kv_heads * shape.head_dim,
            f"{prefix}.v_proj": shape.kv_heads * shape.head_dim,
        }
        self.qkv = weights.linear(rows, shape.hidden_size, bias=shape.qkv_bias)
        self.output = weights.linear(
            {f"{prefix}.o_proj": shape.hidden_size}, shape.heads * shape.head_dim, bias=shape.output_bias
        )

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)  # [T, H + 2·K, D]
        query_key, value = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        query_key = rotate(self.normalize(query_key), angles)  # [T, H + K, D]
        query, key = query_key[:, : self.heads], query_key[:, self.heads :]
        return self.output(attend(self.layer, query, key, value))  # [T, H·D] → [T, C]

    def normalize(self, query_key: Tensor) -> Tensor:
        """Normalize [T, H + K, D] before the rotation. Llama leaves queries and keys unchanged."""
        return query_key


class LlamaBlock:
    """Attention, then the MLP; each reads the normalized residual stream and adds to it."""

    def __init__(
        self,
        attention: LlamaAttention,
        mlp: Callable[[Tensor], Tensor],
        shape: ModelShape,
        weights: Weights,
        prefix: str,
    ) -> None:
        C = shape.hidden_size  # noqa: N806
        self.attention = attention
        self.attention_norm = weights.norm(f"{prefix}.input_layernorm", C, shape.norm_epsilon)
        self.mlp = mlp
        self.mlp_norm = weights.norm(f"{prefix}.post_attention_layernorm", C, shape.norm_epsilon)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, attend)  # [T, C]
        return x + self.mlp(self.mlp_norm(x))


class LlamaForCausalLM:
    """The whole network: token ids and positions in, logits out."""

    attention: ClassVar[type[LlamaAttention]] = LlamaAttention

    @classmethod
    def read_shape(cls, config: CheckpointConfig) -> ModelShape:
        """Read this family's `config.json`."""
        bias = config.flag("attention_bias", default=False)
        mlp_bias = config.flag("mlp_bias", default=False)
        return read_shape(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)

    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        self.shape = shape
        self.embedding, self.head = weights.vocabulary(
            "model.embed_tokens",
            None if shape.headless else "lm_head",
            shape.vocab_size,
            shape.hidden_size,
            tied=shape.tied,
        )
        self.rotary = Rotary(shape.rope, shape.head_dim, dtype=weights.dtype, device=weights.device)
        self.blocks = [self._block(weights, f"model.layers.{layer}", layer) for layer in range(shape.layers)]
        self.norm = weights.norm("model.norm", shape.hidden_size, shape.norm_epsilon)

    def mlp(self, weights: Weights, prefix: str, layer: int) -> Callable[[Tensor], Tensor]:  # noqa: ARG002
        """Make the MLP that follows a layer's attention. Llama's are all alike."""
        shape = self.shape
        return weights.mlp(f"{prefix}.mlp", shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)

    def _block(self, weights: Weights, prefix: str, layer: int) -> LlamaBlock:
        attention = self.attention(self.shape, weights, f"{prefix}.self_attn", layer)
        mlp = self.mlp(weights, prefix, layer)
        return LlamaBlock(attention, mlp, self.shape, weights, prefix)

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers over token ids [T] at positions [T]: [T, C], not yet normalized."""
        x = self.embedding(token_ids)  # [T, C]
        angles = self.rotary.angles(positions)  # 2 × [T, 1, D]
        for block in self.blocks:
            x = block(x, angles, attend)
        return x

    def states(self, hidden: Tensor) -> Tensor:
        """Return each token's final state, for embeddings: [T, C] → [T, C]."""
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits for the needed rows of `hidden`: [T, C] → [T, V]."""
        assert self.head is not None
        return self.head(self.norm(hidden))
