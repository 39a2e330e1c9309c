"""The interface of what runs a step through a model. All implementations return the same logits.

No sampling, no batch: all that a `Forward` needs of a step is in `Inputs`. Imports no torch, because the CPU
kernel (`cpu_step.py`) needs none; `forward.py` is the reference in torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from fairlead.engine.arrays import Array, Device
from fairlead.engine.inputs import BlockTables, Inputs, PreparedStep


class Forward(Protocol):
    """A model with its KV cache. Steps must be passed in their order."""

    @property
    def device(self) -> Device: ...

    @property
    def vocab_size(self) -> int:
        """V: the width of the logits; token ids are below it."""

    @property
    def samples_several(self) -> bool:
        """Whether a row of several samples has the logits that as many steps would have, bit for bit.

        Else such a row is prepared as several rows that sample once (`InputBatch`), or run by the reference.
        """

    @property
    def columns(self) -> Mapping[str, int]:
        """The optional columns of rows that it computes (`Inputs`), with their widths.

        A row that has another one is run by the reference (`split_forward.py`), or its sequence is refused.
        """

    @property
    def kernel(self) -> str:
        """What computes, for display: "torch", or the instruction set of the compiled step."""

    def __call__(self, inputs: Inputs) -> Array:
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
        most_drafts: int = 0,
        report: Callable[[float], None],
    ) -> None:
        """Allocate memory for steps within these limits, and do all that would make the first one slow."""

    def stage(self, step: PreparedStep, batch: BlockTables, latest: Array | None) -> Inputs:
        """Start the copy of a step, to be run next. `latest` [S]: what the previous one chose, if any."""


def staging(forward: Forward) -> Callable[[PreparedStep, BlockTables, Array | None], Inputs]:
    """Return a function that makes a step's inputs, with the arguments of `StagedForward.stage`."""
    if isinstance(forward, StagedForward):
        return forward.stage

    def read(step: PreparedStep, batch: BlockTables, latest: Array | None) -> Inputs:
        inputs = Inputs.read(step, batch, forward.device)
        return inputs.resolved(np.asarray(step.input_ids), latest, forward.vocab_size)

    return read
