"""Adjusts a sequence's logits by its own parameters before a token is chosen: penalties, biases, bans.

Every id from a client is checked against the logits' width; one outside it changes nothing.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from fairlead._cext.inputbatch import InputBatch, SequenceState
from fairlead.engine.inputs import upload
from fairlead.job import Sampling

_BANNED = float("-inf")


class Penalties(msgspec.Struct, frozen=True, kw_only=True):
    """The repetition, frequency and presence penalties of rows of logits [S, V].

    `rows` and `ids` are distinct places (row, id) whose id is in the row's prompt or output; `counts` says
    how often it is in the output. The three penalties are by row [S]. `late`: rows whose last token was
    still being computed on the device when this was made, so that it is not counted here.
    """

    rows: np.ndarray
    ids: np.ndarray
    counts: np.ndarray
    repetition: np.ndarray
    frequency: np.ndarray
    presence: np.ndarray
    late: np.ndarray

    def apply(self, logits: Tensor, latest: Tensor) -> None:
        """Change `logits` in place. `latest` [S]: the last token of each row, used only for `late` rows."""
        device = logits.device
        rows, ids, counts = (upload(column, device) for column in (self.rows, self.ids, self.counts))
        if not len(self.late):
            logits[rows, ids] = self._penalised(logits[rows, ids], rows, counts)
            return
        late = upload(self.late, device)
        late_ids = latest.long()[late]
        late_of_row = torch.full((len(logits),), -1, device=device).index_copy_(0, late, late_ids)
        again = ids == late_of_row[rows]
        known = torch.zeros_like(late_of_row).index_add_(0, rows, again.long())[late] > 0
        first = self._penalised(logits[late, late_ids], late, torch.ones_like(late))
        logits[rows, ids] = self._penalised(logits[rows, ids], rows, counts + again)
        logits[late, late_ids] = torch.where(known, logits[late, late_ids], first)

    def _penalised(self, before: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        repetition, frequency, presence = (
            upload(column.astype(np.float32), before.device)[rows]
            for column in (self.repetition, self.frequency, self.presence)
        )
        after = torch.where(before > 0, before / repetition, before * repetition)
        # An infinite penalty makes NaN, which fails only its row.
        return after - (frequency * counts + presence * (counts > 0))


class Additions(msgspec.Struct, frozen=True):
    """Amounts to add to the logits at distinct places (row, id); −inf bans a token."""

    rows: np.ndarray
    ids: np.ndarray
    amounts: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, ids: Sequence[np.ndarray], amounts: Sequence[np.ndarray]) -> Self | None:
        """Return the additions of the ids and amounts of each of `rows`; None if there are none."""
        lengths = [len(some) for some in ids]
        return (
            cls(rows.repeat(lengths), np.concatenate(ids), np.concatenate(amounts)) if any(lengths) else None
        )

    def apply(self, logits: Tensor) -> None:
        """Change `logits` [S, V] in place."""
        rows, ids, amounts = (upload(column, logits.device) for column in (self.rows, self.ids, self.amounts))
        after = logits[rows, ids] + amounts
        logits[rows, ids] = after.masked_fill_(amounts == _BANNED, _BANNED)  # even where +inf − inf is NaN


class LogitAdjustments(msgspec.Struct, frozen=True, kw_only=True):
    """All adjustments of a step's logits, in the order in which they apply; None: nothing to do."""

    penalties: Penalties | None = None
    biases: Additions | None = None
    bans: Additions | None = None

    @classmethod
    def gather(
        cls,
        batch: InputBatch,
        slots: np.ndarray,
        positions: np.ndarray,
        eos_token_ids: Collection[int],
        vocab_size: int,
        notes: "Notes | None" = None,
    ) -> Self:
        """Collect the adjustments of the sequences in `slots` [S], whose next tokens are at `positions` [S].

        `notes`: the token counts of the steps before, if there were any.
        """
        counters, asked = batch.counters, (vocab_size, notes or Notes())
        return cls(
            penalties=_penalties(batch, slots, positions, *asked) if counters.penalties else None,
            biases=_biases(batch, slots, *asked) if counters.biased else None,
            bans=_bans(batch, slots, positions, eos_token_ids, *asked) if counters.min_tokens else None,
        )

    def apply(self, logits: Tensor, latest: Tensor) -> Tensor:
        """Return `logits` [S, V], float32, adjusted; the given tensor stays unchanged.

        `latest` [S]: the last token of each row.
        """
        if self.penalties is None and self.biases is None and self.bans is None:
            return logits
        logits = logits.clone()
        if self.penalties is not None:
            self.penalties.apply(logits, latest)
        for additions in (self.biases, self.bans):
            if additions is not None:
                additions.apply(logits)
        return logits


class Notes:
    """The token counts of the sequence in each slot: counted once, then updated from step to step.

    One for all steps of a batch. A slot's counts are made anew when another sequence is in it.
    """

    def __init__(self) -> None:
        self._notes: dict[int, _Note] = {}

    def of(self, batch: InputBatch, slot: int, vocab_size: int) -> "_Note":
        """Return the counts of the sequence that is in `slot` now."""
        state = batch.state(slot)
        note = self._notes.get(slot)
        if note is None or note.state is not state:
            note = self._notes[slot] = _Note(state, vocab_size)
        return note


class _Note:
    """One sequence's token counts, only for ids below `vocab_size`, as others have no logits."""

    def __init__(self, state: SequenceState, vocab_size: int) -> None:
        self.state = state
        self.sampling: Sampling = state.sampling
        self._vocab_size = vocab_size
        self._seen = -1  # tokens counted so far; −1: not started
        self._size = 0  # entries in use of the two arrays
        self._ids = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._places: dict[int, int] = {}

    def counted(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the ids that its penalties apply to, their counts in the output, and its number of tokens.

        With a repetition penalty the prompt's ids are included; the other penalties ignore the prompt.
        """
        state, tokens = self.state, self.state.tokens_view()
        if self._seen < 0:
            self._begin(tokens[: state.prompt_length])
        for token_id in tokens[self._seen :]:
            self._add(token_id)
        self._seen = len(tokens)
        return self._ids[: self._size], self._counts[: self._size], self._seen

    @cached_property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids of its `logit_bias` and the amount to add to each, float32."""
        biases = {id_: bias for id_, bias in self.sampling.logit_bias.items() if self._exists(id_)}
        with np.errstate(over="ignore"):
            amounts = np.array(list(biases.values()), np.float64).astype(np.float32)
        return np.array(list(biases), np.int64), amounts

    def ends(self, eos_token_ids: Collection[int]) -> np.ndarray:
        """Return the ids that end it: the client's and, unless it ignores them, the model's."""
        ends = {*self.sampling.stop_token_ids, *(() if self.sampling.ignore_eos else eos_token_ids)}
        return np.array([token_id for token_id in ends if self._exists(token_id)], np.int64)

    def _exists(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size

    def _begin(self, prompt: memoryview) -> None:
        self._seen = len(prompt)
        if self.sampling.repetition_penalty != 1:
            distinct = np.unique(np.asarray(prompt))
            self._ids = distinct[(distinct >= 0) & (distinct < self._vocab_size)].astype(np.int64)
            self._counts = np.zeros_like(self._ids)
            self._size = len(self._ids)
            self._places = {token_id: place for place, token_id in enumerate(self._ids.tolist())}

    def _add(self, token_id: int) -> None:
        place = self._places.get(token_id)
        if place is not None:
            self._counts[place] += 1
        elif self._exists(token_id):
            if self._size == len(self._ids):
                more = max(64, self._size)
                self._ids = np.concatenate((self._ids, np.empty(more, np.int64)))
                self._counts = np.concatenate((self._counts, np.empty(more, np.int64)))
            self._places[token_id] = self._size
            self._ids[self._size], self._counts[self._size] = token_id, 1
            self._size += 1


def _penalties(
    batch: InputBatch, slots: np.ndarray, positions: np.ndarray, vocab_size: int, notes: Notes
) -> Penalties | None:
    repetition, frequency, presence = (
        np.asarray(column)[slots]
        for column in (batch.repetition_penalty, batch.frequency_penalty, batch.presence_penalty)
    )
    penalised = np.flatnonzero((repetition != 1) | (frequency != 0) | (presence != 0))
    if not len(penalised):
        return None
    ids, counts, lengths = zip(
        *(notes.of(batch, slot, vocab_size).counted() for slot in slots[penalised].tolist()), strict=True
    )
    return Penalties(
        rows=penalised.repeat([len(some) for some in ids]),
        ids=np.concatenate(ids),
        counts=np.concatenate(counts),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
        late=penalised[np.array(lengths) < positions[penalised]],
    )


def _biases(batch: InputBatch, slots: np.ndarray, vocab_size: int, notes: Notes) -> Additions | None:
    if not len(slots):
        return None
    found = [notes.of(batch, slot, vocab_size).biases for slot in slots.tolist()]
    ids, amounts = zip(*found, strict=True)
    return Additions.of(np.arange(len(slots)), ids, amounts)


def _bans(
    batch: InputBatch,
    slots: np.ndarray,
    positions: np.ndarray,
    eos_token_ids: Collection[int],
    vocab_size: int,
    notes: Notes,
) -> Additions | None:
    """Ban the ids that end a sequence before `min_tokens`: the client's and, unless ignored, the model's."""
    outputs = positions - np.asarray(batch.num_prompt_tokens)[slots]
    rows = np.flatnonzero(outputs < np.asarray(batch.min_tokens)[slots])
    if not len(rows):
        return None
    ids = [notes.of(batch, slot, vocab_size).ends(eos_token_ids) for slot in slots[rows].tolist()]
    amounts = [np.full(len(some), _BANNED, np.float32) for some in ids]
    return Additions.of(rows, ids, amounts)
