"""Llama 2, 3 and similar models: rotary grouped-query attention, gated MLP, an RMSNorm before each."""

from fairlead.models.architecture import ArchitectureSpec, read_architecture
from fairlead.models.config import CheckpointConfig


def read_llama(config: CheckpointConfig) -> ArchitectureSpec:
    """Read `config.json` of a Llama."""
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    return read_architecture(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
