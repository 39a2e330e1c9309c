"""The tokens that constrained sequences may choose, as bits beside the logits.

A mask is applied where a token is chosen: in the CPU's kernel by testing bits, elsewhere by
`torch_sampler.without_forbidden`, which writes −inf. Min-tokens, biases and stop ids act on the logits, and
so cannot allow what a mask forbids.
"""

from typing import NamedTuple

import numpy as np

from fairlead._cext.inputbatch import SequenceState
from fairlead.engine.sampling.logits_processors import SampledRows, keep_by_slot
from fairlead.engine.sampling.parameters import BatchUpdate
from fairlead.language.structured.constraint import WORD_BITS, Constraint
from fairlead.language.structured.filling import MaskFilling


class TokenMasks(NamedTuple):
    """The masks of a step. `bits` [M, ⌈V / 32⌉], uint32: a bit for each token that may be chosen.

    `rows` [S], int32: the index of each row's mask, −1 if all tokens may be chosen. `errors`: why a row has
    no token left, by row. `complete`: the rows that get no token, because their answer has ended.
    """

    bits: np.ndarray
    rows: np.ndarray
    errors: dict[int, str]
    complete: frozenset[int] = frozenset()


class ConstrainedSequences:
    """The sequences in the batch that have a constraint. `vocab_size`: the width of the logits."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // WORD_BITS)
        self._by_slot: dict[int, tuple[SequenceState, Constraint]] = {}
        self._bits = np.zeros((0, self._words), np.uint32)
        self._filling = MaskFilling()

    def __len__(self) -> int:
        return len(self._by_slot)

    def update_state(self, update: BatchUpdate) -> None:
        """Record which sequences joined and left the batch."""
        keep_by_slot(self._by_slot, update, _constrained)

    def masks(self, rows: SampledRows) -> TokenMasks | None:
        """Return the masks of a step's rows, after the tokens before them; None if no row has one."""
        found: list[_Masked] = []
        ahead: list[tuple[int, Constraint, np.ndarray]] = []
        for slot, (row, *after) in self._rows_by_slot(rows).items():
            state, constraint = self._by_slot[slot]
            if constraint.ahead is not None:
                assert not after
                ahead.append((row, constraint, constraint.ahead.result()))
                constraint.ahead = None
                continue
            tokens = _new_tokens(state, constraint, rows, row)
            if constraint.matcher is None:
                constraint.consume(tokens)
                tokens = []
            if after or not constraint.is_free:
                drafts = rows.drafts_before(after[-1], len(state.tokens_view())) if after else []
                found.append(_Masked(row, constraint, tokens, drafts))
        rows_after = [one.row + place for one in found for place in range(1, 1 + len(one.drafts))]
        masked = [*(one.row for one in found), *rows_after, *(row for row, _, _ in ahead)]
        count = len(masked)
        if not count:
            return None
        if count > len(self._bits):
            self._bits = np.zeros((2 * count, self._words), np.uint32)
        bits = self._filling.fill(
            [one.constraint for one in found],
            [one.tokens for one in found],
            self._bits[:count],
            [one.drafts for one in found] if rows_after else (),
        )
        if bits.base is not self._bits:  # a thread still writes to the others
            self._bits = bits
        for index, (_, _, mask) in enumerate(ahead, count - len(ahead)):
            bits[index] = mask
        mask_of = np.full(len(rows.slots), -1, np.int32)
        mask_of[masked] = np.arange(count)
        # What is wrong after drafts is found again if they are right: the next step has no such row then.
        constrained = [*((one.row, one.constraint) for one in found), *((row, one) for row, one, _ in ahead)]
        errors = {
            row: f"the answer cannot go on within its grammar: {constraint.error}"
            for row, constraint in constrained
            if constraint.error is not None
        }
        complete = frozenset(row for row, constraint in constrained if constraint.is_complete)
        return TokenMasks(bits, mask_of, errors, complete)

    def _rows_by_slot(self, rows: SampledRows) -> dict[int, list[int]]:
        """Return the adjacent rows of each constrained sequence: one, and one after each of its drafts."""
        found: dict[int, list[int]] = {}
        for row in rows.indices(self._by_slot).tolist() if self._by_slot else ():
            found.setdefault(int(rows.slots[row]), []).append(row)
        return found


class _Masked(NamedTuple):
    """A sequence whose masks are to be filled.

    row: the first of its rows.
    constraint: its constraint.
    tokens: what the constraint has to consume before.
    drafts: what is sampled after besides; each has a row after `row`.
    """

    row: int
    constraint: Constraint
    tokens: list[int]
    drafts: list[int]


def _constrained(state: SequenceState) -> tuple[SequenceState, Constraint] | None:
    constraint: Constraint | None = state.sampling.constraint
    return None if constraint is None else (state, constraint)


def _new_tokens(state: SequenceState, constraint: Constraint, rows: SampledRows, row: int) -> list[int]:
    """Return the tokens of the answer that the constraint has not consumed, up to the one to choose."""
    begin, end = state.prompt_length + constraint.consumed, int(rows.positions[row])
    tokens = state.tokens_view()[begin:end].tolist()
    if begin + len(tokens) < end:  # the last one is of a step that is not committed yet
        assert rows.last_ids is not None
        tokens.append(int(rows.last_ids[row]))
    return tokens
