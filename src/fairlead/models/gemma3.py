"""Gemma 3's text part: most layers have a window; norms before and after both attention and MLP.

T tokens of all sequences of a step, flattened; C hidden size; H query heads, K KV heads, D channels per
head; V vocabulary.
"""

import msgspec
import torch
from torch import Tensor

from fairlead.models.config import CheckpointConfig
from fairlead.models.layers import Attend, OffsetRMSNorm
from fairlead.models.llama import LlamaAttention
from fairlead.models.rope import Rope, Rotary, read_variant
from fairlead.models.shape import ModelShape, read_layer_types, read_layers, read_shape
from fairlead.models.weights import Weights

_ACTIVATION = "gelu_pytorch_tanh"

Angles = tuple[Tensor, Tensor]


class Gemma3Attention(LlamaAttention):
    """Llama's attention whose queries and keys are normalized head by head before they are rotated."""

    def __init__(self, shape: ModelShape, weights: Weights, prefix: str, layer: int) -> None:
        super().__init__(shape, weights, prefix, layer)
        query_weight = weights.tensor(f"{prefix}.q_norm.weight", shape.head_dim)
        key_weight = weights.tensor(f"{prefix}.k_norm.weight", shape.head_dim)
        both = torch.cat((query_weight.expand(shape.heads, -1), key_weight.expand(shape.kv_heads, -1)))
        self.head_norm = OffsetRMSNorm(both, shape.norm_epsilon)  # [H + K, D]: one pass over both

    def normalize(self, query_key: Tensor) -> Tensor:
        return self.head_norm(query_key)


class Gemma3Block:
    """Attention, then the MLP: each reads the normalized stream, and its output is normalized too."""

    def __init__(self, shape: ModelShape, weights: Weights, prefix: str, layer: int) -> None:
        def norm(name: str) -> OffsetRMSNorm:
            return OffsetRMSNorm(weights.tensor(f"{prefix}.{name}.weight", C), shape.norm_epsilon)

        C = shape.hidden_size  # noqa: N806
        self.attention = Gemma3Attention(shape, weights, f"{prefix}.self_attn", layer)
        self.attention_norms = norm("input_layernorm"), norm("post_attention_layernorm")
        self.mlp = weights.mlp(f"{prefix}.mlp", C, shape.intermediate_size, activation=shape.activation)
        self.mlp_norms = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")

    def __call__(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        before, after = self.attention_norms
        x = x + after(self.attention(before(x), angles, attend))  # [T, C]
        before, after = self.mlp_norms
        return x + after(self.mlp(before(x)))


class Gemma3ForCausalLM:
    """The whole network: token ids and positions in, logits out."""

    @classmethod
    def read_shape(cls, config: CheckpointConfig) -> ModelShape:
        """Read the text part of `config.json`: its `text_config` if it has one, else all of it."""
        config = config.section("text_config") if "text_config" in config else config
        if config.flag("use_bidirectional_attention", default=False):
            raise config.fails("use_bidirectional_attention", "only causal attention is supported")
        if (activation := config.text("hidden_activation", _ACTIVATION)) != _ACTIVATION:
            raise config.fails("hidden_activation", f"only {_ACTIVATION} is supported, not {activation!r}")
        bias = config.flag("attention_bias", default=False)
        rope, window_rope = _read_ropes(config)
        shape = read_shape(
            config,
            head_dim=256,
            windows=_read_windows(config),
            rope=rope,
            activation="gelu_tanh",
            tied=True,
            qkv_bias=bias,
            output_bias=bias,
        )
        return msgspec.structs.replace(
            shape,
            window_rope=window_rope,
            attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
            attention_cap=_read_cap(config, "attn_logit_softcapping"),
            logit_cap=_read_cap(config, "final_logit_softcapping"),
        )

    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        self.shape = shape
        self.embedding, self.head = weights.vocabulary(
            "model.embed_tokens",
            None if shape.headless else "lm_head",
            shape.vocab_size,
            shape.hidden_size,
            tied=shape.tied,
        )
        # Rounded to the weights' dtype, as in training.
        self.embedding_scale = torch.tensor(
            shape.hidden_size**0.5, dtype=weights.dtype, device=weights.device
        )
        self.rotaries = [
            Rotary(rope, shape.head_dim, dtype=weights.dtype, device=weights.device)
            for rope in (shape.rope, shape.window_rope or shape.rope)
        ]
        self.blocks = [
            Gemma3Block(shape, weights, f"model.layers.{layer}", layer) for layer in range(shape.layers)
        ]
        self.norm = OffsetRMSNorm(weights.tensor("model.norm.weight", shape.hidden_size), shape.norm_epsilon)

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers over token ids [T] at positions [T]: [T, C], not yet normalized."""
        x = self.embedding(token_ids) * self.embedding_scale  # [T, C]
        of_all, of_windows = (rotary.angles(positions) for rotary in self.rotaries)  # 2 × [T, 1, D] each
        for block, window in zip(self.blocks, self.shape.windows, strict=True):
            x = block(x, of_all if window is None else of_windows, attend)
        return x

    def states(self, hidden: Tensor) -> Tensor:
        """Return each token's final state, for embeddings: [T, C] → [T, C]."""
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits for the needed rows of `hidden`: [T, C] → [T, V]."""
        assert self.head is not None
        scores = self.head(self.norm(hidden))
        if (cap := self.shape.logit_cap) is None:
            return scores
        return (scores / cap).tanh_().mul_(cap)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The same network from a multimodal checkpoint, whose vision tensors are not loaded."""

    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        weights.rename(_text_name)
        super().__init__(shape, weights)


def _text_name(name: str) -> str | None:
    """Return the name of a tensor in a text-only model; None for vision tensors."""
    for prefix, alone in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return None if name.startswith(_SIGHT_PREFIXES) else name


# As transformers saves them since version 4.52, and as it did before.
_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_SIGHT_PREFIXES = tuple(
    f"{before}{part}." for before in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)


def _read_windows(config: CheckpointConfig) -> tuple[int | None, ...]:
    """Return the windows by `layer_types`; before transformers 5, each `sliding_window_pattern`th is None."""
    window = config.integer("sliding_window", 4096)
    if "layer_types" in config:
        return read_layer_types(config, window)
    pattern = config.integer("sliding_window_pattern", 6)
    return tuple(window if (layer + 1) % pattern else None for layer in range(read_layers(config)))


def _read_ropes(config: CheckpointConfig) -> tuple[Rope, Rope]:
    """Return the variants of the layers with full attention and of those with a window.

    From `rope_parameters`, an object by kind of layer; or, before transformers 5, from `rope_theta` with
    `rope_scaling` and `rope_local_base_freq`.
    """
    max_positions = config.integer("max_position_embeddings")
    bases = config.number("rope_theta", 1_000_000.0), config.number("rope_local_base_freq", 10_000.0)
    parent, keys = config, ("rope_scaling", "")
    if "rope_parameters" in config:
        parent, keys = config.section("rope_parameters"), ("full_attention", "sliding_attention")

    def read(key: str, theta: float) -> Rope:
        if key not in parent:
            return Rope(theta=theta)
        return read_variant(config, parent.section(key), max_positions=max_positions, theta=theta)

    of_all, of_windows = map(read, keys, bases)
    return of_all, of_windows


def _read_cap(config: CheckpointConfig, key: str) -> float | None:
    return config.number(key) if key in config else None
