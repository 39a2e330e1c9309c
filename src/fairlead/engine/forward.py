"""One step through a model. All implementations return the same logits. No sampling, no batch.

Owns the model and the cache's memory. A compiled kernel for a whole step takes the place of `TorchForward`;
all that it needs of the step is in `Inputs`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fairlead.engine.attention import PagedAttention
from fairlead.engine.cache import KVCache
from fairlead.engine.inputs import BlockTables, Inputs, PreparedStep, upload
from fairlead.models.model import Model

FEW_ROWS = 32
"""With fewer rows than about half of this, matrix products are summed in another order."""


class Forward(Protocol):
    """A model with its KV cache. Steps must be passed in their order."""

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int:
        """V: the width of the logits; token ids are below it."""

    @property
    def kernel(self) -> str:
        """What computes, for display: "torch", or the instruction set of the compiled step."""

    def __call__(self, inputs: Inputs) -> Tensor:
        """Write the step's keys and values to the cache; return the logits of `logit_tokens`, [S + P, V]."""

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Return the memory of these blocks of a KV cache group to the system, if possible; ascending ids."""


@runtime_checkable
class StagedForward(Forward, Protocol):
    """A `Forward` that copies steps to the device itself, to addresses that do not change."""

    def prepare(
        self,
        *,
        slots: int,
        max_batch: int,
        max_batched_tokens: int,
        max_model_len: int,
        report: Callable[[float], None],
    ) -> None:
        """Allocate memory for steps within these limits, and do all that would make the first one slow."""

    def stage(self, step: PreparedStep, batch: BlockTables, latest: Tensor | None) -> Inputs:
        """Start the copy of a step, to be run next. `latest` [S]: what the previous one chose, if any."""


def staging(forward: Forward) -> Callable[[PreparedStep, BlockTables, Tensor | None], Inputs]:
    """Return what makes a step's inputs for `forward`; its arguments are those of `StagedForward.stage`."""
    if isinstance(forward, StagedForward):
        return forward.stage

    def read(step: PreparedStep, batch: BlockTables, latest: Tensor | None) -> Inputs:
        inputs = Inputs.read(step, batch, forward.device)
        return inputs.resolved(np.asarray(step.input_ids), latest, forward.vocab_size)

    return read


class TorchForward:
    """`Forward` in torch, layer by layer, on any device."""

    kernel = "torch"

    def __init__(self, model: Model, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.device
        self.vocab_size = model.shape.vocab_size

    def __call__(self, inputs: Inputs) -> Tensor:
        attention = PagedAttention(inputs, self.cache, self.model.shape)
        hidden = self.model.hidden(inputs.token_ids, inputs.positions, attention)
        tokens = inputs.logit_tokens
        if not len(tokens):
            return hidden.new_empty((0, self.vocab_size))
        return self.model.logits(hidden.index_select(0, upload(tokens, self.device)))

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """See `Forward`."""
        self.cache.release(group, blocks)

    def states(self, inputs: Inputs) -> Tensor:
        """Write the step's keys and values to the cache; return the final state of each token, [T, C].

        On a CPU and in float32, a text's states are bit for bit the same without the others in the step, if
        it is cut at the same places. Matrix products differ only for few rows, so small steps are padded to
        `FEW_ROWS`, and each text attends separately.
        """
        tokens = len(inputs.token_ids)
        attention = PagedAttention(msgspec.structs.replace(inputs, decodes=0), self.cache, self.model.shape)
        missing = FEW_ROWS - tokens
        if missing <= 0:
            return self.model.states(self.model.hidden(inputs.token_ids, inputs.positions, attention))

        def attend_and_fill(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output = attention(layer, query[:tokens], key[:tokens], value[:tokens])
            return F.pad(output, (0, 0, 0, missing))

        hidden = self.model.hidden(
            F.pad(inputs.token_ids, (0, missing)), F.pad(inputs.positions, (0, missing)), attend_and_fill
        )
        return self.model.states(hidden[:tokens])
