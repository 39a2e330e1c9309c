"""Qwen2, Qwen2.5, Qwen3 and Qwen3-MoE: Llama with biases or with normalized queries and keys."""

from fairlead.language.checkpoint.architecture import (
    ArchitectureSpec,
    Experts,
    read_architecture,
    read_experts,
    read_layer_types,
    read_layers,
)
from fairlead.language.checkpoint.config import CheckpointConfig

DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
}
MOE_DEFAULTS = {
    **DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def read_qwen2(config: CheckpointConfig) -> ArchitectureSpec:
    """Read `config.json` of a Qwen2. Its biases belong to the family and have no key."""
    config = config.with_defaults(DEFAULTS)
    return read_architecture(config, windows=_read_windows(config), qkv_bias=True)


def read_qwen3(config: CheckpointConfig) -> ArchitectureSpec:
    """Read `config.json` of a Qwen3."""
    config = config.with_defaults(DEFAULTS)
    return _read_qwen3(config, _read_windows(config), None)


def read_qwen3_moe(config: CheckpointConfig) -> ArchitectureSpec:
    """Read `config.json` of a Qwen3 with experts in some or all layers."""
    config = config.with_defaults(MOE_DEFAULTS)
    windowed = config.flag("use_sliding_window", default=False) and "sliding_window" in config
    window = config.integer("sliding_window") if windowed else None
    layers = read_layers(config)
    step = config.integer("decoder_sparse_step", 1)
    dense = set(config.token_ids("mlp_only_layers"))
    experts = read_experts(
        config,
        inner_size=config.integer("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob", default=False),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )
    return _read_qwen3(config, (window,) * layers, experts)


def _read_qwen3(
    config: CheckpointConfig, windows: tuple[int | None, ...], experts: Experts | None
) -> ArchitectureSpec:
    """Read what all Qwen3 have. Heads have 128 channels by default, whatever the hidden size."""
    bias = config.flag("attention_bias", default=False)
    return read_architecture(
        config,
        head_dim=128,
        windows=windows,
        query_key_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        experts=experts,
    )


def _read_windows(config: CheckpointConfig) -> tuple[int | None, ...]:
    """Return the windows, given as a switch, a window, and the first layer with it."""
    layers = read_layers(config)
    if not config.flag("use_sliding_window", default=False) or "sliding_window" not in config:
        return (None,) * layers
    window = config.integer("sliding_window")
    if "layer_types" not in config:
        first = config.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    return read_layer_types(config, window)
