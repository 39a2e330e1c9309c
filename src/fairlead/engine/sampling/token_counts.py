"""How often each token occurs in a sequence: counted once, then updated from step to step."""

from collections.abc import Sequence

import numpy as np

from fairlead._cext.inputbatch import SequenceState


class TokenCounts:
    """The token counts of one sequence, only for ids below `vocab_size`, as others have no logits.

    With `prompt`, the prompt's ids are included, with a count of 0: only the output is counted.
    """

    def __init__(self, state: SequenceState, vocab_size: int, *, prompt: bool) -> None:
        self._state = state
        self._vocab_size = vocab_size
        self._ids = np.empty(0, np.int64)
        if prompt:
            distinct = np.unique(np.asarray(state.tokens_view()[: state.prompt_length]))
            self._ids = distinct[(distinct >= 0) & (distinct < vocab_size)].astype(np.int64)
        self._counts = np.zeros_like(self._ids)
        self._size = len(self._ids)  # entries in use of the two arrays
        self._indices = {token_id: index for index, token_id in enumerate(self._ids.tolist())}
        self._seen = state.prompt_length  # tokens considered so far

    def update(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Count the new tokens; return the ids, their counts in the output, and the number of tokens."""
        tokens = self._state.tokens_view()
        for token_id in tokens[self._seen :]:
            self._add(token_id)
        self._seen = len(tokens)
        return self._ids[: self._size], self._counts[: self._size], self._seen

    def with_drafts(self, drafts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and counts of `update` as if these tokens followed."""
        counts = self._counts[: self._size].copy()
        new: dict[int, int] = {}
        for token_id in drafts:
            index = self._indices.get(token_id)
            if index is not None:
                counts[index] += 1
            elif 0 <= token_id < self._vocab_size:
                new[token_id] = new.get(token_id, 0) + 1
        ids = np.array(list(new), np.int64), np.array(list(new.values()), np.int64)
        return np.concatenate((self._ids[: self._size], ids[0])), np.concatenate((counts, ids[1]))

    def _add(self, token_id: int) -> None:
        index = self._indices.get(token_id)
        if index is not None:
            self._counts[index] += 1
        elif 0 <= token_id < self._vocab_size:
            if self._size == len(self._ids):
                more = max(64, self._size)
                self._ids = np.concatenate((self._ids, np.empty(more, np.int64)))
                self._counts = np.concatenate((self._counts, np.empty(more, np.int64)))
            self._indices[token_id] = self._size
            self._ids[self._size], self._counts[self._size] = token_id, 1
            self._size += 1
