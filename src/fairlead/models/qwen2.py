"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and optional windows in upper layers."""

from fairlead.models.config import CheckpointConfig
from fairlead.models.llama import LlamaForCausalLM
from fairlead.models.shape import ModelShape, read_layer_windows, read_shape


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama's network; the biases belong to the family and have no key in `config.json`."""

    @classmethod
    def read_shape(cls, config: CheckpointConfig) -> ModelShape:
        return read_shape(config, windows=read_layer_windows(config), qkv_bias=True)
