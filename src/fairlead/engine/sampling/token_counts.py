"""How often each token occurs in a sequence: counted once, then updated from step to step."""

from collections.abc import Sequence

import numpy as np

from fairlead._cext.inputbatch import SequenceState

NO_WINDOW = -1


class TokenCounts:
    """The token counts of one sequence, only for ids below `vocab_size`, as others have no logits.

    state: The sequence.
    vocab_size: The width of the logits.
    prompt: The prompt's ids are included, with a count of 0: only the output is counted.
    window: Only the last so many tokens before the one to choose are considered; `NO_WINDOW`: all.

    With the window 3, the prompt 5 5 7 and the output 7 8, the ids before the next token are 7 and 8, each
    with the count 1.
    """

    def __init__(
        self, state: SequenceState, vocab_size: int, *, prompt: bool, window: int = NO_WINDOW
    ) -> None:
        self._state = state
        self._vocab_size = vocab_size
        self._window = window
        self._begin = self._first(self.length)
        self._ids = np.empty(0, np.int64)
        self._occurrences = np.empty(0, np.int64)
        if prompt:
            considered = np.asarray(state.tokens_view()[self._begin : state.prompt_length])
            distinct, occurrences = np.unique(considered, return_counts=True)
            known = (distinct >= 0) & (distinct < vocab_size)
            self._ids, self._occurrences = distinct[known].astype(np.int64), occurrences[known]
        self._counts = np.zeros_like(self._ids)
        self._size = len(self._ids)  # entries in use of the three arrays
        self._indices = {token_id: index for index, token_id in enumerate(self._ids.tolist())}
        self._seen = max(self._begin, state.prompt_length)  # tokens considered so far
        self._prompt = prompt

    @property
    def length(self) -> int:
        """The number of the sequence's tokens that are known here."""
        return len(self._state.tokens_view())

    def update(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Count the new tokens; return the ids, their counts in the output, and the number of tokens."""
        tokens = self._state.tokens_view()
        for token_id in tokens[self._seen :]:
            self._add(token_id)
        self._seen = len(tokens)
        first = self._first(len(tokens))
        for position in range(self._begin, first):
            self._remove(tokens[position], position)
        self._begin = first
        return self._ids[: self._size], self._counts[: self._size], self._seen

    def before(self, position: int, drafts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and counts before the token at `position`, as if `drafts` followed the known tokens.

        A token after these that the device has not sent yet is not counted, but it is in the window.
        """
        ids, counts, length = self.update()
        first = self._first(position)
        if not len(drafts) and first == self._begin:
            return ids, counts
        counts, occurrences = counts.copy(), self._occurrences[: self._size].copy()
        tokens = self._state.tokens_view()
        for at in range(self._begin, min(first, length)):
            if (index := self._indices.get(tokens[at])) is not None and self._has_counted(at):
                occurrences[index] -= 1
                counts[index] -= at >= self._state.prompt_length
        new: dict[int, int] = {}
        for token_id in drafts[max(0, first - length) :]:
            index = self._indices.get(token_id)
            if index is not None:
                occurrences[index] += 1
                counts[index] += 1
            elif 0 <= token_id < self._vocab_size:
                new[token_id] = new.get(token_id, 0) + 1
        kept = occurrences > 0
        more = np.array(list(new), np.int64), np.array(list(new.values()), np.int64)
        return np.concatenate((ids[kept], more[0])), np.concatenate((counts[kept], more[1]))

    def _first(self, position: int) -> int:
        """Return where the window before a position begins."""
        return 0 if self._window == NO_WINDOW else max(0, position - self._window)

    def _has_counted(self, position: int) -> bool:
        return self._prompt or position >= self._state.prompt_length

    def _add(self, token_id: int) -> None:
        index = self._indices.get(token_id)
        if index is not None:
            self._occurrences[index] += 1
            self._counts[index] += 1
        elif 0 <= token_id < self._vocab_size:
            if self._size == len(self._ids):
                more = np.empty(max(64, self._size), np.int64)
                self._ids, self._counts, self._occurrences = (
                    np.concatenate((column, more)) for column in (self._ids, self._counts, self._occurrences)
                )
            self._indices[token_id] = self._size
            self._ids[self._size], self._counts[self._size] = token_id, 1
            self._occurrences[self._size] = 1
            self._size += 1

    def _remove(self, token_id: int, position: int) -> None:
        """Forget a token that has left the window. The last entry takes the place of an id that is gone."""
        index = self._indices.get(token_id)
        if index is None or not self._has_counted(position):
            return
        self._occurrences[index] -= 1
        self._counts[index] -= position >= self._state.prompt_length
        if self._occurrences[index] > 0:
            return
        del self._indices[token_id]
        self._size -= 1
        if index < self._size:
            for column in (self._ids, self._counts, self._occurrences):
                column[index] = column[self._size]
            self._indices[int(self._ids[index])] = index
