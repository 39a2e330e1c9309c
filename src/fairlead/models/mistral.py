"""Mistral: Llama without biases, with sliding-window attention in every layer."""

from fairlead.models.config import CheckpointConfig
from fairlead.models.llama import LlamaForCausalLM
from fairlead.models.shape import ModelShape, read_layers, read_shape


class MistralForCausalLM(LlamaForCausalLM):
    """Llama's network. The window concerns only the attention: it is in the shape, not in the weights."""

    @classmethod
    def read_shape(cls, config: CheckpointConfig) -> ModelShape:
        # Version 0.1 has a window of 4096; from 0.2 on the key is null, which means none.
        window = config.integer("sliding_window") if "sliding_window" in config else None
        return read_shape(config, windows=(window,) * read_layers(config))
