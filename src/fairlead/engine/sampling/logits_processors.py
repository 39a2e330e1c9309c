"""Logits processors: each changes the logits of the sequences that need it, before a token is chosen.

A new one is a class here or elsewhere, and an entry of `LOGITS_PROCESSORS`. Its parameters are declared in
`parameters.py`, with `use="logits"`: a step without any such parameter calls no processor. Every id from a
client is checked against the logits' width; one outside it changes nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np

from fairlead._cext.inputbatch import SequenceState
from fairlead.engine.arrays import Array, device_of, library, upload
from fairlead.engine.sampling.parameters import BatchUpdate, SamplingColumns
from fairlead.engine.sampling.token_counts import TokenCounts

_BANNED = float("-inf")
Kept = TypeVar("Kept")


class SampledRows(NamedTuple):
    """The S samples of a step, each a row of its logits. A sequence with drafts has several, one after each.

    slots: of their sequences [S].
    positions: of the tokens to choose [S].
    latest: the tokens before them [S], int32 on the device, which may not be committed yet.
    last_ids: the same as an array, where the step has constrained sequences.
    tokens: the indices of the tokens before them among the step's [S].
    input_ids: the step's tokens, where some are drafts.
    """

    slots: np.ndarray
    positions: np.ndarray
    latest: Array
    last_ids: np.ndarray | None = None
    tokens: np.ndarray | None = None
    input_ids: np.ndarray | None = None

    def drafts_before(self, row: int, known: int) -> list[int]:
        """Return the drafts before a row's token, of a sequence with `known` tokens."""
        if self.input_ids is None or self.tokens is None:
            return []
        end = int(self.tokens[row]) + 1
        drafts: list[int] = self.input_ids[end - int(self.positions[row]) + known : end].tolist()
        return drafts if min(drafts, default=0) >= 0 else []  # else it is a token that the device has

    def indices(self, slots: Collection[int]) -> np.ndarray:
        """Return the indices of the rows with a slot among `slots`."""
        return np.array([row for row, slot in enumerate(self.slots.tolist()) if slot in slots], np.int64)


class LogitsProcessor(ABC):
    """Changes logits. Keeps what it needs of each sequence by slot; `columns` has all parameters' values."""

    always: ClassVar[bool] = False
    """Whether it may apply to sequences that set no parameter of a logits processor."""
    takes_arrays: ClassVar[bool] = False
    """Whether `apply` also takes the CPU kernel's logits, which are arrays of numpy. Else it gets a tensor
    that shares their memory, and its first use imports torch."""

    @abstractmethod
    def __init__(self, columns: SamplingColumns, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size` is the width of the logits."""

    @abstractmethod
    def update_state(self, update: BatchUpdate) -> None:
        """Record which sequences joined and left the batch. Called before `applies_to` and `apply`."""

    @abstractmethod
    def applies_to(self, rows: SampledRows) -> bool:
        """Return whether it changes the logits of any of these rows."""

    @abstractmethod
    def apply(self, logits: Array, rows: SampledRows) -> None:
        """Change `logits` [S, V], float32, in place. Must not wait for the device."""


def keep_by_slot(
    kept: dict[int, Kept], update: BatchUpdate, make: Callable[[SequenceState], Kept | None]
) -> None:
    """Update `kept`, which has what `make` returns for each sequence that it does not return None for."""
    for slot in update.removed:
        kept.pop(slot, None)
    for slot, state in update.added:
        made = make(state)
        if made is None:
            kept.pop(slot, None)
        else:
            kept[slot] = made


class Penalties(LogitsProcessor):
    """The repetition, frequency and presence penalties."""

    takes_arrays = True

    def __init__(self, columns: SamplingColumns, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        del eos_token_ids
        self._columns = columns
        self._vocab_size = vocab_size
        self._counts: dict[int, TokenCounts] = {}

    def update_state(self, update: BatchUpdate) -> None:
        keep_by_slot(self._counts, update, self._count)

    def applies_to(self, rows: SampledRows) -> bool:
        return len(rows.indices(self._counts)) > 0

    def apply(self, logits: Array, rows: SampledRows) -> None:
        penalised = rows.indices(self._counts)
        counted = []
        for row in penalised.tolist():
            token_counts = self._counts[int(rows.slots[row])]
            drafts = rows.drafts_before(row, token_counts.length)
            some_ids, some_counts = token_counts.before(int(rows.positions[row]), drafts)
            counted.append((some_ids, some_counts, token_counts.length + len(drafts)))
        ids_of, counts_of, lengths = zip(*counted, strict=True)
        device, xp = device_of(logits), library(logits)
        # Distinct (row, id) of the ids in a row's prompt or output, and how often each is in the output.
        row_indices = upload(penalised.repeat([len(ids) for ids in ids_of]), device)
        ids = upload(np.concatenate(ids_of), device)
        counts = upload(np.concatenate(counts_of).astype(np.float32), device)
        penalties = [
            upload(self._columns[name][rows.slots], device)
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        ]
        # Rows with a last token that the device still computes, so that it is not counted yet.
        late_rows = penalised[np.array(lengths) < rows.positions[penalised]]
        if not len(late_rows):
            logits[row_indices, ids] = _penalised(logits[row_indices, ids], row_indices, counts, penalties)
            return
        late = upload(late_rows, device)
        late_ids = xp.asarray(rows.latest, dtype=xp.int64)[late]
        late_of_row = upload(np.full(len(logits), -1), device)
        late_of_row[late] = late_ids
        again = ids == late_of_row[row_indices]
        # Whether a row's last token is among its ids. The entry after the last row takes all that are not.
        known_rows = upload(np.zeros(len(logits) + 1, bool), device)
        known_rows[xp.where(again, row_indices, len(logits))] = True
        first = _penalised(logits[late, late_ids], late, xp.ones_like(late, dtype=xp.float32), penalties)
        logits[row_indices, ids] = _penalised(
            logits[row_indices, ids], row_indices, counts + again, penalties
        )
        logits[late, late_ids] = xp.where(known_rows[late], logits[late, late_ids], first)

    def _count(self, state: SequenceState) -> TokenCounts | None:
        sampling = state.sampling.parameters
        repeats = sampling.repetition_penalty != 1
        applies = repeats or sampling.frequency_penalty or sampling.presence_penalty
        if not applies or sampling.repeat_last_n == 0:
            return None
        return TokenCounts(state, self._vocab_size, prompt=repeats, window=sampling.repeat_last_n)


def _penalised(before: Array, rows: Array, counts: Array, penalties: list[Array]) -> Array:
    repetition, frequency, presence = (column[rows] for column in penalties)
    after = library(before).where(before > 0, before / repetition, before * repetition)
    # An infinite penalty makes NaN, which fails only its row.
    return after - (frequency * counts + presence * (counts > 0))


class LogitBias(LogitsProcessor):
    """Adds a client's amounts to the logits of single tokens."""

    takes_arrays = True

    def __init__(self, columns: SamplingColumns, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        del columns, eos_token_ids
        self._vocab_size = vocab_size
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # ids and amounts

    def update_state(self, update: BatchUpdate) -> None:
        keep_by_slot(self._biases, update, self._biases_of)

    def applies_to(self, rows: SampledRows) -> bool:
        return len(rows.indices(self._biases)) > 0

    def apply(self, logits: Array, rows: SampledRows) -> None:
        biased = rows.indices(self._biases)
        ids, amounts = zip(*(self._biases[slot] for slot in rows.slots[biased].tolist()), strict=True)
        add_to_logits(logits, biased, ids, amounts)

    def _biases_of(self, state: SequenceState) -> tuple[np.ndarray, np.ndarray] | None:
        biases = {
            id_: bias
            for id_, bias in state.sampling.parameters.logit_bias.items()
            if 0 <= id_ < self._vocab_size
        }
        if not biases:
            return None
        with np.errstate(over="ignore"):
            amounts = np.array(list(biases.values()), np.float64).astype(np.float32)
        return np.array(list(biases), np.int64), amounts


class MinTokens(LogitsProcessor):
    """Bans the ids that end a sequence before it has `min_tokens`: the client's and the model's."""

    takes_arrays = True

    def __init__(self, columns: SamplingColumns, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        del columns
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._ends: dict[int, tuple[int, np.ndarray]] = {}  # the position from which it may end, and the ids

    def update_state(self, update: BatchUpdate) -> None:
        keep_by_slot(self._ends, update, self._ends_of)

    def applies_to(self, rows: SampledRows) -> bool:
        if not self._ends:
            return False
        first = dict(zip(rows.slots.tolist()[::-1], rows.positions.tolist()[::-1], strict=True))
        for slot, position in first.items():  # those after drafts may come again
            if slot in self._ends and position >= self._ends[slot][0]:
                del self._ends[slot]
        return len(self._early(rows)) > 0

    def apply(self, logits: Array, rows: SampledRows) -> None:
        early = self._early(rows)
        ids = [self._ends[slot][1] for slot in rows.slots[early].tolist()]
        add_to_logits(logits, early, ids, [np.full(len(some), _BANNED, np.float32) for some in ids])

    def _early(self, rows: SampledRows) -> np.ndarray:
        pairs = zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        early = [slot in self._ends and position < self._ends[slot][0] for slot, position in pairs]
        return np.flatnonzero(early)

    def _ends_of(self, state: SequenceState) -> tuple[int, np.ndarray] | None:
        if state.min_tokens == 0:
            return None
        sampling = state.sampling.parameters
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)}
        ids = np.array([token_id for token_id in ends if 0 <= token_id < self._vocab_size], np.int64)
        return state.prompt_length + state.min_tokens, ids


class AllowedTokens(LogitsProcessor):
    """Bans all tokens but those that the client allows, also the model's own end."""

    takes_arrays = True

    def __init__(self, columns: SamplingColumns, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        del columns, eos_token_ids
        self._vocab_size = vocab_size
        self._ids: dict[int, np.ndarray] = {}

    def update_state(self, update: BatchUpdate) -> None:
        keep_by_slot(self._ids, update, self._ids_of)

    def applies_to(self, rows: SampledRows) -> bool:
        return len(rows.indices(self._ids)) > 0

    def apply(self, logits: Array, rows: SampledRows) -> None:
        restricted = rows.indices(self._ids)
        ids_of = [self._ids[slot] for slot in rows.slots[restricted].tolist()]
        device = device_of(logits)
        row_indices = upload(restricted.repeat([len(ids) for ids in ids_of]), device)
        ids = upload(np.concatenate(ids_of), device)
        allowed = logits[row_indices, ids]
        logits[upload(restricted, device)] = _BANNED
        logits[row_indices, ids] = allowed

    def _ids_of(self, state: SequenceState) -> np.ndarray | None:
        allowed = state.sampling.parameters.allowed_token_ids
        if allowed is None:
            return None
        return np.array([token_id for token_id in allowed if 0 <= token_id < self._vocab_size], np.int64)


LOGITS_PROCESSORS: tuple[type[LogitsProcessor], ...] = (Penalties, LogitBias, MinTokens, AllowedTokens)
"""In the order in which they apply."""


def add_to_logits(
    logits: Array, rows: np.ndarray, ids: Sequence[np.ndarray], amounts: Sequence[np.ndarray]
) -> None:
    """Add amounts to the logits of each of `rows` at its distinct `ids`; −inf bans a token."""
    device = device_of(logits)
    row_indices = upload(rows.repeat([len(some) for some in ids]), device)
    columns, added = upload(np.concatenate(ids), device), upload(np.concatenate(amounts), device)
    after = logits[row_indices, columns] + added
    # Banned even where +inf − inf is NaN.
    logits[row_indices, columns] = library(logits).where(added == _BANNED, _BANNED, after)
