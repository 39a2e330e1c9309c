"""Pools the states of tokens into one vector per text. Independent of the network and the cache.

T tokens of the texts of a step, R rows (each a run of one text's tokens), C channels.
"""

import numpy as np
import torch
from torch import Tensor

from fairlead.language.checkpoint.pooling import Pooling


class Pooler:
    """Makes the vectors of texts. The tokens of a text may span several steps. Sums are float32, by slot.

    For a mean, every token of a text must be added, so texts must not begin with a cached prefix.
    With the row `score` [1, C], a text's vector is a single number: its projection.
    """

    def __init__(
        self,
        pooling: Pooling,
        *,
        slots: int,
        hidden_size: int,
        device: torch.device,
        score: Tensor | None = None,
    ) -> None:
        self._pooling = pooling
        self._score = score
        self._sums = torch.zeros((slots, hidden_size), device=device)

    def add(
        self,
        states: Tensor,
        query_starts: np.ndarray,
        sequence_lengths: np.ndarray,
        slots: np.ndarray,
        finished: np.ndarray,
    ) -> Tensor:
        """Add a step's `states` [T, C], taken after the last norm; return vectors of rows `finished` [F, C].

        With a `score` they are [F, 1].

        As in `engine.inputs.Inputs`: row r's tokens are query_starts[r] … query_starts[r + 1] − 1,
        `sequence_lengths` [R] the length of its text up to them, `slots` [R] its text's slot. `finished` [F]:
        rows with the last token of their text.
        """
        device = states.device
        counts = np.diff(query_starts)
        if self._pooling.kind == "last":
            vectors = states[torch.from_numpy(query_starts[finished + 1] - 1).long().to(device)].float()
            return self._scaled(vectors)
        row_slots = torch.from_numpy(slots).long().to(device)
        started = torch.from_numpy(slots[sequence_lengths == counts]).long().to(device)
        self._sums.index_fill_(0, started, 0)  # removes the sums of the slot's previous text
        token_slots = row_slots.repeat_interleave(torch.from_numpy(counts).to(device))
        self._sums.index_add_(0, token_slots, states.float())
        lengths = torch.from_numpy(sequence_lengths[finished]).to(device)
        return self._scaled(self._sums[row_slots[torch.from_numpy(finished).to(device)]] / lengths[:, None])

    def _scaled(self, vectors: Tensor) -> Tensor:
        if self._score is not None:
            # Not a matrix product: its rounding would depend on the number of rows.
            return (vectors * self._score).sum(-1, keepdim=True)
        return torch.nn.functional.normalize(vectors, dim=-1) if self._pooling.normalize else vectors
