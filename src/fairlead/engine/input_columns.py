"""The optional columns of rows, by slot: what some sequences have and a step needs besides tokens.

A column is a field of `SequenceSampling`, an entry here, and fields of `Inputs`; a backend that computes it
names it in `Forward.columns`. A step without any sequence that has one costs nothing.
"""

import msgspec
import numpy as np

from fairlead.engine.arrays import Array, Device, library, upload
from fairlead.engine.inputs import Inputs
from fairlead.engine.sampling.parameters import BatchUpdate, SequenceSampling


class InputColumns:
    """The columns of the sequences in a batch, on the device of its steps."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._embeddings: dict[int, Array] = {}

    def update_state(self, update: BatchUpdate) -> None:
        """Record which sequences joined and left the batch."""
        for slot in update.removed:
            self._embeddings.pop(slot, None)
        for slot, state in update.added:
            sampling: SequenceSampling = state.sampling
            self._embeddings.pop(slot, None)
            if sampling.embeddings is not None:
                self._embeddings[slot] = upload(sampling.embeddings, self._device)

    def add_to(self, inputs: Inputs) -> Inputs:
        """Return a step's inputs with the columns of its rows."""
        tokens: list[np.ndarray] = []
        vectors: list[Array] = []
        for row, slot in enumerate(inputs.slots.tolist() if self._embeddings else ()):
            if (given := self._embeddings.get(slot)) is None:
                continue
            first, end = inputs.query_starts[row : row + 2].tolist()
            position = int(inputs.sequence_lengths[row]) - (end - first)
            if position < len(given):  # else its prompt is computed
                vectors.append(given[position : position + end - first])
                tokens.append(np.arange(first, first + len(vectors[-1])))
        if not tokens:
            return inputs
        embeddings = library(vectors[0]).concatenate(vectors)
        return msgspec.structs.replace(inputs, embedded_tokens=np.concatenate(tokens), embeddings=embeddings)
