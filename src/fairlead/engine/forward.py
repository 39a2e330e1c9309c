"""A step through a model in torch, layer by layer. Owns the model and the cache's memory."""

from collections.abc import Sequence

import msgspec
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fairlead.engine.arrays import upload
from fairlead.engine.attention import PagedAttention
from fairlead.engine.cache import KVCache
from fairlead.engine.inputs import Inputs
from fairlead.engine.models.model import Model

FEW_ROWS = 32
"""With fewer rows than about half of this, matrix products are summed in another order."""


class TorchForward:
    """`Forward` in torch, layer by layer, on any device.

    With `exact`, on a CPU and in float32, a token has the same logits, bit for bit, whatever else is in its
    step. Matrix products differ only for few rows, so small steps are padded to `FEW_ROWS`, and each row
    attends separately. A padded step of one token takes about as long as one of `FEW_ROWS`.
    """

    kernel = "torch"
    samples_several = False  # matrix products and attention round otherwise with more queries

    def __init__(self, model: Model, cache: KVCache, *, exact: bool = False) -> None:
        self.model = model
        self._hidden = self._exact_hidden if exact else self._plain_hidden
        self._fewest = FEW_ROWS if exact else 0
        self.cache = cache
        self.device = cache.device
        self.vocab_size = model.shape.vocab_size
        self.columns = {"embeddings": model.shape.hidden_size} if model.takes_embeddings else {}

    def __call__(self, inputs: Inputs) -> Tensor:
        hidden = self._hidden(inputs)
        tokens = inputs.logit_tokens
        if not len(tokens):
            return hidden.new_empty((0, self.vocab_size))
        needed = hidden.index_select(0, upload(tokens, self.device))
        missing = max(0, self._fewest - len(tokens))
        return self.model.logits(F.pad(needed, (0, 0, 0, missing)))[: len(tokens)]

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Return the memory of these blocks of a KV cache group to the system, if possible; ascending ids."""
        self.cache.release(group, blocks)

    def states(self, inputs: Inputs) -> Tensor:
        """Write the step's keys and values to the cache; return the final state of each token, [T, C].

        They are exact, if a text is cut at the same places.
        """
        return self.model.states(self._exact_hidden(inputs))

    def _plain_hidden(self, inputs: Inputs) -> Tensor:
        attention = PagedAttention(inputs, self.cache, self.model.shape)
        return self.model.hidden(inputs.token_ids, inputs.positions, attention, self._embedded(inputs))

    def _embedded(self, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        if inputs.embeddings is None:
            return None
        return upload(inputs.embedded_tokens, self.device), inputs.embeddings

    def _exact_hidden(self, inputs: Inputs) -> Tensor:
        tokens = len(inputs.token_ids)
        attention = PagedAttention(msgspec.structs.replace(inputs, decodes=0), self.cache, self.model.shape)
        missing = FEW_ROWS - tokens
        if missing <= 0:
            return self.model.hidden(inputs.token_ids, inputs.positions, attention, self._embedded(inputs))

        def attend_and_fill(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output = attention(layer, query[:tokens], key[:tokens], value[:tokens])
            return F.pad(output, (0, 0, 0, missing))

        hidden = self.model.hidden(
            F.pad(inputs.token_ids, (0, missing)),
            F.pad(inputs.positions, (0, missing)),
            attend_and_fill,
            self._embedded(inputs),
        )
        return hidden[:tokens]
