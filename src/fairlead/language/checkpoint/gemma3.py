"""Gemma 3's text part: most layers have a window; norms before and after both attention and MLP."""

import msgspec

from fairlead.language.checkpoint.architecture import (
    ArchitectureSpec,
    TensorNames,
    read_architecture,
    read_layer_types,
    read_layers,
)
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.rope import Rope, read_variant

DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_ACTIVATION = "gelu_pytorch_tanh"
_NAMES = TensorNames(mlp_norm="pre_feedforward_layernorm")
_IMAGE_PREFIXES = tuple(
    (f"{before}{part}.", None)
    for before in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)
# As transformers saves multimodal checkpoints since version 4.52, and as it did before.
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


def read_gemma3(config: CheckpointConfig) -> ArchitectureSpec:
    """Read the text part of `config.json`: its `text_config` if it has one, else all of it.

    Its `max_position_embeddings` is the length after the scaling of its full-attention layers.
    """
    config = config.section("text_config") if "text_config" in config else config
    config = config.with_defaults(DEFAULTS)
    if config.flag("use_bidirectional_attention", default=False):
        raise config.fails("use_bidirectional_attention", "only causal attention is supported")
    if (activation := config.text("hidden_activation", _ACTIVATION)) != _ACTIVATION:
        raise config.fails("hidden_activation", f"only {_ACTIVATION} is supported, not {activation!r}")
    bias = config.flag("attention_bias", default=False)
    rope, window_rope = _read_ropes(config)
    windows = _read_windows(config)
    return read_architecture(
        config,
        head_dim=256,
        tied=True,
        windows=windows,
        ropes=tuple(rope if window is None else window_rope for window in windows),
        norm_placement="before and after",
        norm_offset=True,
        query_key_norm="head",
        activation="gelu_tanh",
        embedding_scale=config.integer("hidden_size") ** 0.5,
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_cap=_read_cap(config, "attn_logit_softcapping"),
        logit_cap=_read_cap(config, "final_logit_softcapping"),
        qkv_bias=bias,
        output_bias=bias,
        names=_NAMES,
    )


def read_multimodal_gemma3(config: CheckpointConfig) -> ArchitectureSpec:
    """Read `config.json` of a multimodal checkpoint. Its vision tensors are not loaded."""
    names = msgspec.structs.replace(_NAMES, prefixes=_TEXT_PREFIXES + _IMAGE_PREFIXES)
    return msgspec.structs.replace(read_gemma3(config), names=names)


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

    full_rope, window_rope = map(read, keys, bases)
    return full_rope, window_rope


def _read_cap(config: CheckpointConfig, key: str) -> float | None:
    return config.number(key) if key in config else None
