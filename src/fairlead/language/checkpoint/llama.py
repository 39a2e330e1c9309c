"""Llama 2, 3 and similar models: rotary grouped-query attention, gated MLP, an RMSNorm before each."""

from fairlead.language.checkpoint.architecture import ArchitectureSpec, read_architecture
from fairlead.language.checkpoint.config import CheckpointConfig

DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
"""The values of absent keys here and in other families' files are those of transformers' configurations."""


def read_llama(config: CheckpointConfig) -> ArchitectureSpec:
    """Read `config.json` of a Llama."""
    config = config.with_defaults(DEFAULTS)
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    return read_architecture(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
