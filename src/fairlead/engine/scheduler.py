"""Decides what runs in the next step: who enters the batch, who takes part, with how many tokens.

Owns the waiting line, the running set, slots and blocks. Knows no clock, no torch and no token's meaning.
"""

from collections import OrderedDict
from itertools import islice

from fairlead.engine.blocks import BlockPool
from fairlead.engine.sequence import Chunk, Plan, Sequence, State
from fairlead.engine.slots import Slot, SlotPool


class Scheduler:
    """Decodes first, then prefills in chunks, first come first served, within two bounds of a step.

    A step has at most `max_batch` sequences and `max_batched_tokens` tokens. When more run than a step
    takes, those that waited longest since their last step go first, so none starves.
    """

    def __init__(
        self, *, slots: SlotPool, blocks: BlockPool, max_batch: int, max_batched_tokens: int
    ) -> None:
        self.slots = slots
        self.blocks = blocks
        self._max_batched_tokens = max_batched_tokens
        # A small budget bounds the sequences too, so decodes never leave a prefill without a token.
        self._places = min(max_batch, max_batched_tokens)
        self._pending: OrderedDict[int, Sequence] = OrderedDict()
        # In order of admission; the value is the step that the sequence last took part in.
        self._running: dict[Sequence, int] = {}
        self._steps = 0

    @property
    def pending(self) -> int:
        """Sequences that wait for a slot or for blocks."""
        return len(self._pending)

    @property
    def running(self) -> int:
        """Sequences that hold a slot and blocks."""
        return len(self._running)

    def submit(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the line. One that an empty cache cannot hold would block it."""
        self._pending[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; its slot and blocks are free at once."""
        if self._pending.pop(sequence.key, None) is not None:
            return
        del self._running[sequence]
        assert sequence.slot is not None
        self.slots.release(Slot(sequence.slot, sequence.generation))
        sequence.slot = None
        for block_ids in sequence.block_ids:
            self.blocks.release(block_ids)
            block_ids.clear()

    def plan(self) -> Plan | None:
        """The next step's work, or None when there is none."""
        self._admit()
        turn = self._in_turn()
        decodes = [_chunk(sequence, 1) for sequence in turn if _uncomputed(sequence) == 1]
        budget = self._max_batched_tokens - len(decodes)
        prefills = []
        for sequence in turn:
            uncomputed = _uncomputed(sequence)
            if uncomputed > 1 and budget:
                chunk = _chunk(sequence, min(uncomputed, budget))
                budget -= chunk.count
                prefills.append(chunk)
        chunks = (*decodes, *prefills)
        if not chunks:
            return None
        self._steps += 1
        for chunk in chunks:
            self._running[chunk.sequence] = self._steps
        return Plan(chunks)

    def _admit(self) -> None:
        """Let the line's head in while it fits. Nobody overtakes it, so a large sequence gets in too."""
        while self._pending:
            sequence = next(iter(self._pending.values()))
            blocks = self._blocks_needed(sequence)
            if not self.slots.free or blocks > self.blocks.free:
                break
            del self._pending[sequence.key]
            sequence.slot, sequence.generation = self.slots.take()
            for block_ids in sequence.block_ids:
                block_ids.extend(self.blocks.allocate(blocks))
            sequence.become(State.PROCESSING)
            # As if it had just had a step: newcomers do not overtake those who wait for theirs.
            self._running[sequence] = self._steps

    def _blocks_needed(self, sequence: Sequence) -> int:
        """Blocks for the worst case, all of `max_tokens`, so that a running sequence never runs out."""
        return self.blocks.blocks_for(sequence.prompt_length + sequence.sampling.max_tokens)

    def _in_turn(self) -> list[Sequence]:
        """Who takes part in the next step, in order of admission."""
        if len(self._running) <= self._places:
            return list(self._running)
        by_age = sorted(self._running, key=self._running.__getitem__)
        chosen = set(islice(by_age, self._places))
        return [sequence for sequence in self._running if sequence in chosen]


def _uncomputed(sequence: Sequence) -> int:
    """Tokens that are not in the KV cache yet: one while decoding, what is left of the prompt before."""
    return len(sequence.token_ids) - sequence.computed


def _chunk(sequence: Sequence, count: int) -> Chunk:
    return Chunk(sequence, sequence.computed, count, samples=count == _uncomputed(sequence))
