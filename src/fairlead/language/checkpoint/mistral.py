"""Mistral, Llama with sliding-window attention in every layer; and Mixtral, which has experts too."""

from fairlead.language.checkpoint.architecture import (
    ArchitectureSpec,
    TensorNames,
    read_architecture,
    read_experts,
    read_layers,
)
from fairlead.language.checkpoint.config import CheckpointConfig

_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
DEFAULTS = {**_SIZES, "sliding_window": 4096}
MIXTRAL_DEFAULTS = {
    **_SIZES,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def read_mistral(config: CheckpointConfig) -> ArchitectureSpec:
    """Read `config.json` of a Mistral."""
    config = config.with_defaults(DEFAULTS)
    return read_architecture(config, windows=_read_windows(config))


def read_mixtral(config: CheckpointConfig) -> ArchitectureSpec:
    """Read `config.json` of a Mixtral, which has experts in every layer."""
    config = config.with_defaults(MIXTRAL_DEFAULTS)
    return read_architecture(
        config,
        windows=_read_windows(config),
        experts=read_experts(
            config,
            inner_size=config.integer("intermediate_size"),
            normalize=True,
            layers=(True,) * read_layers(config),
        ),
        names=TensorNames(
            router="block_sparse_moe.gate",
            expert="block_sparse_moe.experts.{}.",
            expert_gate="w1",
            expert_up="w3",
            expert_down="w2",
        ),
    )


def _read_windows(config: CheckpointConfig) -> tuple[int | None, ...]:
    # Mistral 0.1 has a window of 4096, also without the key; from 0.2 on the key is null, which means none.
    window = config.integer("sliding_window") if "sliding_window" in config else None
    return (window,) * read_layers(config)
