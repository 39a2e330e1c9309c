"""A backend whose rows are run by the reference where the backend does not compute them.

The two have one KV cache, so that a row may be run by either: a prompt of embeddings by the reference, and
the tokens after it by the backend. Neither knows of the other.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fairlead.engine.arrays import upload
from fairlead.engine.backend import Forward
from fairlead.engine.forward import TorchForward
from fairlead.engine.inputs import Inputs


class SplitForward:
    """`Forward` that divides each step between `backend` and `reference`, which have one KV cache.

    backend: not a `StagedForward`, which would have to copy the rows of the reference, too.
    reference: computes every column.
    """

    def __init__(self, backend: Forward, reference: TorchForward) -> None:
        assert backend.device == reference.device
        self.device = reference.device
        self.vocab_size = reference.vocab_size
        self.kernel = backend.kernel
        self._backend = backend
        self._reference = reference

    @property
    def samples_several(self) -> bool:
        """Whether either computes rows of several samples: then such rows are prepared."""
        return self._backend.samples_several or self._reference.samples_several

    @property
    def columns(self) -> Mapping[str, int]:
        """The columns of both."""
        return {**self._reference.columns, **self._backend.columns}

    def __call__(self, inputs: Inputs) -> Tensor:
        """Write the step's keys and values to the cache; return the logits of `logit_tokens`, [S + P, V]."""
        is_other = self._rows_of_reference(inputs)
        if not is_other.any():
            return self._whole(self._backend, inputs)
        if is_other.all():
            return self._whole(self._reference, inputs)
        row_of_token = np.repeat(np.arange(len(is_other)), np.diff(inputs.query_starts))
        is_other_logit = is_other[row_of_token[inputs.logit_tokens]]
        logits = torch.empty((len(is_other_logit), self.vocab_size), device=self.device)
        for forward, has_row in ((self._backend, ~is_other), (self._reference, is_other)):
            places = np.flatnonzero(is_other_logit == (forward is self._reference))
            # Copied at once: a backend may use the memory of its logits again.
            logits[upload(places, self.device)] = self._whole(
                forward, inputs.of_rows(np.flatnonzero(has_row))
            )
        return logits

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Return the memory of these blocks of a KV cache group to the system, if possible; ascending ids."""
        self._backend.release(group, blocks)

    def _whole(self, forward: Forward, inputs: Inputs) -> Tensor:
        return torch.as_tensor(forward(inputs)).float()

    def _rows_of_reference(self, inputs: Inputs) -> np.ndarray:
        """Return whether the backend does not compute each row, [B]."""
        rows = len(inputs.slots)
        row_of_token = np.repeat(np.arange(rows), np.diff(inputs.query_starts))
        is_other = np.zeros(rows, np.bool_)
        if not self._backend.samples_several:
            is_other |= np.bincount(row_of_token[inputs.sample_tokens], minlength=rows) > 1
        if "embeddings" not in self._backend.columns:
            is_other[row_of_token[inputs.embedded_tokens]] = True
        return is_other
