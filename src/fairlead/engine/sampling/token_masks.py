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
        found: list[tuple[int, Constraint, list[int]]] = []
        ahead: list[tuple[int, Constraint, np.ndarray]] = []
        for row in rows.indices(self._by_slot).tolist() if self._by_slot else ():
            state, constraint = self._by_slot[int(rows.slots[row])]
            if constraint.ahead is not None:
                ahead.append((row, constraint, constraint.ahead.result()))
                constraint.ahead = None
                continue
            tokens = _new_tokens(state, constraint, rows, row)
            if constraint.matcher is None:
                constraint.consume(tokens)
                tokens = []
            if not constraint.is_free:
                found.append((row, constraint, tokens))
        count = len(found) + len(ahead)
        if not count:
            return None
        if count > len(self._bits):
            self._bits = np.zeros((2 * count, self._words), np.uint32)
        constraints, tokens_of = [one[1] for one in found], [one[2] for one in found]
        bits = self._filling.fill(constraints, tokens_of, self._bits[:count])
        if bits.base is not self._bits:  # a thread still writes to the others
            self._bits = bits
        for index, (_, _, mask) in enumerate(ahead, len(found)):
            bits[index] = mask
        constrained = [(row, constraint) for row, constraint, _ in [*found, *ahead]]
        mask_of = np.full(len(rows.slots), -1, np.int32)
        mask_of[[row for row, _ in constrained]] = np.arange(count)
        errors = {
            row: f"the answer cannot go on within its grammar: {constraint.error}"
            for row, constraint in constrained
            if constraint.error is not None
        }
        complete = frozenset(row for row, constraint in constrained if constraint.is_complete)
        return TokenMasks(bits, mask_of, errors, complete)


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
