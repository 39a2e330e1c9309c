"""Mistral, Llama with sliding-window attention in every layer; and Mixtral, which has experts too."""

from fairlead.models.architecture import (
    ArchitectureSpec,
    TensorNames,
    read_architecture,
    read_experts,
    read_layers,
)
from fairlead.models.config import CheckpointConfig


def read_mistral(config: CheckpointConfig) -> ArchitectureSpec:
    """Read `config.json` of a Mistral."""
    return read_architecture(config, windows=_read_windows(config))


def read_mixtral(config: CheckpointConfig) -> ArchitectureSpec:
    """Read `config.json` of a Mixtral, which has experts in every layer."""
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
    # Version 0.1 has a window of 4096; from 0.2 on the key is null, which means none.
    window = config.integer("sliding_window") if "sliding_window" in config else None
    return (window,) * read_layers(config)
