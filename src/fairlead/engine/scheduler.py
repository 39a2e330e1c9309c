"""Decides what runs in the next step: who enters the batch, who takes part, with how many tokens.

Owns the waiting line, the running set, the slots and the batch. Promises that a step costs nothing in Python
for a sequence that only goes on, and that every sequence gets to its end: see `_make_room`. Knows no clock,
no torch and no token's meaning.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead._cext.slotmap import SlotMap
from fairlead.engine.admission import Admission, Predictor
from fairlead.engine.memory import Memory
from fairlead.engine.sequence import NO_HANDLE, Sequence, State


class Scheduler:
    """Decodes first, then prefills in chunks, first come first served within a class, within a step's bounds.

    A step has at most `max_batch` sequences and `max_batched_tokens` tokens. When more run than a step
    takes, those that waited longest since their last step go first, so none starves. Of those that wait, the
    first of the highest class enters as soon as it fits, and nobody overtakes it.

    With `even_chunks` a prompt is cut at the same places whoever shares its steps (unless the blocks of a
    window run short): it waits for a step with room for a whole chunk, which the first in prefill finds.

    Of prompts whose log-probabilities are wanted a step has at most `most_scored` tokens: the logits of all
    of them are in memory at once.
    """

    def __init__(
        self,
        batch: InputBatch,
        memory: Memory,
        *,
        slots: int,
        max_batch: int,
        max_batched_tokens: int,
        predictor: Predictor | None = None,
        even_chunks: bool = False,
        most_scored: int | None = None,
    ) -> None:
        self.batch = batch
        self.memory = memory
        self.admission = Admission(
            [pool.total * pool.block_size for pool in memory.pools],
            [
                None if window is None else memory.ceiling(group)
                for group, window in enumerate(memory.windows)
            ],
            predictor,
        )
        self.preemptions = 0
        self.recomputed_tokens = 0  # what preemptions took out of the cache, and the cache had no more
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prompt_tokens = 0
        self.cached: dict[int, int] = {}  # cached tokens of prompts, by key, until they are reported
        self._slots = SlotMap(slots)
        self._max_batched_tokens = max_batched_tokens
        # A small budget bounds the sequences too, so decodes never leave a prefill without a token.
        self._places = min(max_batch, max_batched_tokens)
        # What a step has left however many decodes it has: a prompt of one token is surveyed as one.
        self._even_chunk = max(1, max_batched_tokens - self._places) if even_chunks else None
        self._lines: dict[int, OrderedDict[int, Sequence]] = {}
        self._running: dict[int, dict[int, Sequence]] = {}  # by class, then key; in order of admission
        self._by_slot: list[Sequence | None] = [None] * slots
        self._occupied = np.zeros(slots, np.bool_)
        self._reserved = np.zeros(slots, np.bool_)  # pinned
        self._keys = np.zeros(slots, np.int64)
        self._admissions = 0
        self._longest_tokens = 0  # of all that run, if each comes to its max_tokens
        self._forecast_is_new = False
        self._refused: Sequence | None = None  # who was first in line when the forecast last said no
        self._budget = 0  # tokens, and rows, that the step being planned has left
        self._rows_left = 0
        self._most_scored = max_batched_tokens if most_scored is None else most_scored
        self._scored_left = 0

    @property
    def pending(self) -> int:
        """Sequences that wait for a slot or for blocks."""
        return sum(map(len, self._lines.values()))

    @property
    def running(self) -> int:
        """Sequences that hold a slot and blocks."""
        return len(self._slots)

    @property
    def slots_free(self) -> int:
        return self._slots.available

    def running_in(self, slot: int) -> Sequence | None:
        """The sequence that has this slot now."""
        return self._by_slot[slot]

    def submit(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of its class's line. One that no empty cache holds would block it."""
        self._line(sequence.priority)[sequence.key] = sequence

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Forget a sequence; its slot and blocks are free at once, even while a step of its is under way.

        A device works in order: what a later step writes there comes after what an earlier one reads. With
        `keep`, what the cache has of it stays for reuse until the room is needed.
        """
        self._refused = None
        if sequence.handle == NO_HANDLE:
            line = self._lines[sequence.priority]
            del line[sequence.key]
            if not line:
                del self._lines[sequence.priority]
            return
        slot = sequence.slot
        self.memory.leave(sequence, keep=keep)
        self.batch.remove_request(slot)
        self._slots.free(sequence.handle)
        sequence.handle = NO_HANDLE
        self._by_slot[slot] = None
        self._occupied[slot] = self._reserved[slot] = False
        self._longest_tokens -= sequence.tokens.prompt_length + sequence.tokens.max_tokens
        del self._running[sequence.priority][sequence.key]

    def plan(self) -> Step | None:
        """The next step's work, or None when there is none, or none until a step under way is committed."""
        preemptions = self.preemptions
        self._fill_step()
        if self.preemptions == preemptions:  # or the room that was just made would be taken from its owner
            self._admit()
        step = self.batch.prepare_inputs()
        while step is None and self.running and not self.batch.steps_under_way:
            if self.preemptions == preemptions:
                # Chunks of several prompts hold all blocks of a window between them: the newest yields.
                victim = self._newest_of_the_lowest_class()
                assert victim is not None
                self._preempt(victim)
            preemptions = self.preemptions
            self._fill_step()  # now that one has yielded, perhaps the only one that had a place
            step = self.batch.prepare_inputs()
        return step

    def indexed(self, slots: Iterable[int]) -> None:
        """Sequences in these slots filled a block in the step that was just committed."""
        for sequence in self._in_slots(slots):
            self.memory.index(sequence)

    # Who takes part ----------------------------------------------------------------------------------

    def _fill_step(self) -> None:
        """Say how many tokens of each sequence that runs are in the next step."""
        survey = self.batch.survey(self._places)
        self._budget = self._max_batched_tokens - survey.decodes
        self._scored_left = self._most_scored
        self._rows_left = self._places - survey.decodes - len(survey.prefills)
        if survey.short:
            self._extend_decodes(survey.short)
        for sequence in self._in_slots(survey.prefills):
            self._give_chunk(sequence)

    def _extend_decodes(self, short: "array[int]") -> None:
        """Give decodes the block that their next token begins; who gets none does without this step."""
        if len(self.memory.pools) == 1 and self.memory.hold_one_each(short, self._in_slots(short)):
            return
        for sequence in sorted(self._in_slots(short), key=lambda one: (one.priority, one.order)):
            if sequence.handle != NO_HANDLE and not self._make_room(sequence):
                self._leave_out(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Get the blocks for a sequence's next token, at the cost of the newest of the lowest class.

        Why everybody gets to an end: a sequence is a victim at most three times. Then it is pinned: it waits
        without holding anything until all that it can ever need is there, is promised that, and runs to its
        end. So nobody who holds blocks waits for somebody who does (pinned ones do not wait, others are
        victims), preemptions are finite in number, and between two of them every step brings a token. An
        empty cache takes any sequence, so the line moves when nothing runs.

        False: the sequence itself was the newest, and waits in line; or it runs alone, and a block that
        slides out at the next commit is what it needs.
        """
        while not self.memory.hold(sequence, sequence.tokens.computed + 1):
            victim = self._newest_of_the_lowest_class()
            if victim is None or self.running == 1:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _newest_of_the_lowest_class(self) -> Sequence | None:
        for priority in sorted(self._running, reverse=True):
            for sequence in reversed(self._running[priority].values()):
                if not sequence.pinned:
                    return sequence
        return None

    def _preempt(self, victim: Sequence) -> None:
        """Take a sequence's blocks and slot; it goes to the front of its line, to be computed anew."""
        if self.batch.num_scheduled[victim.slot]:
            self._leave_out(victim)
        victim.preemptions += 1
        victim.become(State.PENDING)
        self.preemptions += 1
        self.admission.predictor.regret()
        victim.evicted_tokens = victim.tokens.committed
        self.remove(victim)
        victim.tokens.rewind(0)
        line = self._line(victim.priority)
        line[victim.key] = victim
        line.move_to_end(victim.key, last=False)

    def _leave_out(self, sequence: Sequence) -> None:
        """Of this step only; the token that it had in the budget is free."""
        if sequence.handle == NO_HANDLE:
            return
        self._budget += self.batch.num_scheduled[sequence.slot]
        self.batch.num_scheduled[sequence.slot] = 0

    def _give_chunk(self, sequence: Sequence) -> None:
        """Let a sequence compute as many of its tokens as the budget allows and, with windows, blocks."""
        tokens = sequence.tokens
        count = min(tokens.num_tokens - tokens.computed, self._even_chunk or self._budget)
        if count > self._budget:
            return
        if sequence.scored is not None:
            count = min(count, self._scored_left)
        if count > 0 and self.memory.slides:
            count = self.memory.hold_chunk(sequence, count)
        if count > 0:
            self.batch.num_scheduled[sequence.slot] = count
            self._budget -= count
            if sequence.scored is not None:
                self._scored_left -= count

    # Who enters --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let the line's heads in while they fit."""
        self._forecast_is_new = False
        while self._lines and self._slots.available:
            line = self._lines[min(self._lines)]
            sequence = next(iter(line.values()))
            if sequence is self._refused:
                return
            if not self._may_enter(sequence):
                self._refused = sequence  # while nobody leaves, all that run only hold more
                return
            prefix = self.memory.enter(sequence)
            if prefix is None:
                return
            self.remove(sequence)
            self._seat(sequence, prefix.blocks, prefix.tokens)

    def _may_enter(self, sequence: Sequence) -> bool:
        """Whether the forecast has room for it. One alone needs no forecast; one pinned has a promise."""
        tokens = sequence.tokens
        longest = self._longest_tokens + tokens.prompt_length + tokens.max_tokens
        if not self.running or sequence.pinned or self.admission.fits_whole(longest):
            self._forecast_is_new = False  # it will not know of this one
            return True
        if not self._forecast_is_new:
            self._forecast()
        limit = tokens.max_tokens - tokens.output_length
        return self.admission.admit(sequence.key, tokens.num_tokens, tokens.output_length, limit)

    def _forecast(self) -> None:
        slots = np.flatnonzero(self._occupied)
        outputs = np.asarray(self.batch.output_tokens)[slots].astype(np.int64)
        self.admission.begin(
            self._keys[slots],
            np.asarray(self.batch.num_prompt_tokens)[slots] + outputs,
            outputs,
            np.asarray(self.batch.max_tokens)[slots] - outputs,
            reserved=self._reserved[slots],
            shared=self.memory.shared_tokens(0),
        )
        self._forecast_is_new = True

    def _seat(self, sequence: Sequence, blocks: tuple[list[int], ...], computed: int) -> None:
        """Give it a slot, and its first chunk if the step has a place and a token left."""
        tokens = sequence.tokens
        sequence.handle = self._slots.alloc(sequence.key)
        slot = sequence.slot
        tokens.rewind(computed)
        self.batch.add_request(slot, tokens, blocks)
        sequence.become(State.PROCESSING)
        self._admissions += 1
        sequence.order = self._admissions
        self._by_slot[slot] = sequence
        self._occupied[slot] = True
        self._reserved[slot] = sequence.pinned
        self._keys[slot] = sequence.key
        self._longest_tokens += tokens.prompt_length + tokens.max_tokens
        self._running.setdefault(sequence.priority, {})[sequence.key] = sequence
        self._count(sequence, computed)
        if self._rows_left > 0:
            self._rows_left -= 1
            self._give_chunk(sequence)

    def _count(self, sequence: Sequence, hit: int) -> None:
        if sequence.preemptions:
            self.recomputed_tokens += max(0, sequence.evicted_tokens - hit)
            return
        prompt = sequence.tokens.prompt_length
        if hit:
            self.cached[sequence.key] = hit
        self.prompt_tokens += prompt - hit
        if sequence.hashes is not None:
            self.prefix_queries += prompt
            self.prefix_hits += hit

    # Helpers -----------------------------------------------------------------------------------------

    def _line(self, priority: int) -> OrderedDict[int, Sequence]:
        return self._lines.setdefault(priority, OrderedDict())

    def _in_slots(self, slots: Iterable[int]) -> list[Sequence]:
        return [sequence for slot in slots if (sequence := self._by_slot[slot]) is not None]
