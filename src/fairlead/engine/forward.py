"""One step through a model: what replaces it must answer the same logits. Knows no sampling and no batch.

Owns the model and the cache's memory. A compiled kernel for a whole step goes in here, in the place of
`TorchForward`; all that it needs of the step is in `Inputs`.
"""

from typing import Protocol

import torch
from torch import Tensor

from fairlead.engine.attention import PagedAttention
from fairlead.engine.cache import KVCache
from fairlead.engine.inputs import Inputs, upload
from fairlead.models.registry import Model


class Forward(Protocol):
    """A model with its KV cache. Steps are given to it in their order."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int:
        """V: the width of the logits; token ids are below it."""

    @property
    def kernel(self) -> str:
        """What computes, in a word, for people: "torch", or the instruction set of the compiled step."""

    def __call__(self, inputs: Inputs) -> Tensor:
        """Write the step's keys and values to the cache; return the sampling rows' logits, [S, V] floats."""


class TorchForward:
    """`Forward` in torch, layer by layer, on any device."""

    kernel = "torch"

    def __init__(self, model: Model, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.device
        self.vocab_size = model.shape.vocab_size

    def __call__(self, inputs: Inputs) -> Tensor:
        attend = PagedAttention(inputs, self.cache, self.model.shape)
        hidden = self.model.hidden(inputs.token_ids, inputs.positions, attend)
        if not len(inputs.sample_rows):
            return hidden.new_empty((0, self.vocab_size))
        return self.model.logits(hidden.index_select(0, upload(inputs.sample_tokens, self.device)))
