"""Decides what runs in the next step: which sequences are admitted, which take part, with how many tokens.

Owns the queue, the running sequences and the batch. Guarantees that a step costs no Python for a sequence
that only decodes, and that every sequence ends: see `_make_room`. Independent of clocks, torch and the
meaning of tokens.
"""

from array import array
from collections.abc import Iterable

import numpy as np

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.base.messages import Speculation
from fairlead.engine.admission import Predictor, SequenceAdmission
from fairlead.engine.memory import Memory, Prefix
from fairlead.engine.running_sequences import RunningSequences
from fairlead.engine.sequence import NO_HANDLE, Sequence, SequenceStatus
from fairlead.engine.sequence_queue import SequenceQueue
from fairlead.engine.slow_masks import SlowMasks
from fairlead.engine.step_cost import ChunkTurns, Pace, Presence, StepWork

PROCESSING = SequenceStatus.PROCESSING  # in Python 3.11, reading it from the enumeration takes 0.5 µs


class StepScheduler:
    """Schedules decodes first, then chunked prefills, first come first served within a class.

    A step has at most `max_batch` sequences and `max_batched_tokens` tokens. When more run than a step
    takes, those that were scheduled least recently go first, so none starves. Of the queued sequences, the
    first of the highest class is admitted as soon as it fits; no other overtakes it.

    With `target_step_s`, a step has only as many tokens of prompts as take that long together with its
    decodes, by the measured cost of steps, but at least a block. The tenants of running prompts
    and of the next sequence in the queue get equal parts. While only one tenant is present, a step without
    decodes is full, because no other tenant waits for its end.

    With `even_chunks` a prompt is cut at the same places whatever shares its steps (unless a window's blocks
    run short). It waits for a step with room for a whole chunk; the first in prefill always gets one.

    A step has at most `most_scored` tokens of prompts with requested log-probabilities, because all their
    logits are in memory at once. With `slow_masks`, a constrained sequence skips the steps that would have to
    wait for its mask. With `speculation`, sequences that decode compute drafts, too: tokens that may follow.
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
        slow_masks: SlowMasks | None = None,
        speculation: Speculation | None = None,
        target_step_s: float | None = None,
    ) -> None:
        self.batch = batch
        self.memory = memory
        self.admission = SequenceAdmission(
            [pool.total * pool.block_size for pool in memory.pools],
            [
                None if window is None else memory.ceiling(group)
                for group, window in enumerate(memory.windows)
            ],
            predictor,
        )
        self.preemptions = 0
        self.recomputed_tokens = 0  # lost in preemptions or suspensions and not found in the prefix cache
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prompt_tokens = 0
        self.cached: dict[int, int] = {}  # cached tokens of prompts, by key, until they are reported
        self._max_batched_tokens = max_batched_tokens
        # A small token budget bounds the rows too, so that decodes always leave a token for each prefill.
        self._max_rows = min(max_batch, max_batched_tokens)
        # What any number of decodes leaves of a step; a prompt with one token to compute counts as a decode.
        self._even_chunk = max(1, max_batched_tokens - self._max_rows) if even_chunks else None
        self._queue = SequenceQueue()
        self._running = RunningSequences(slots)
        self._suspended: dict[int, Sequence] = {}  # by key
        self._has_current_peak = False
        self._refused: Sequence | None = None  # the head of the queue that the forecast last rejected
        self._budget = 0  # tokens left in the step being planned, and rows
        self._rows_left = 0
        self._most_scored = max_batched_tokens if most_scored is None else most_scored
        self._scored_left = 0
        self._chunks_left = 0  # tokens of prompts
        self._block_size = memory.pools[0].block_size
        is_paced = target_step_s and not even_chunks
        self._pace = Pace(target_step_s, self._block_size) if target_step_s and is_paced else None
        self._turns = ChunkTurns()
        self._presence = Presence()
        self._now_s = 0.0
        self._without_room: Sequence | None = None  # the head of the queue that got no blocks
        self._chunked = 0  # tokens of prompts in the step that is planned
        self._chunk_contexts = 0  # the sum, over these, of the tokens before their chunks
        self._slow_masks = slow_masks
        self._speculation = speculation
        self.held = 0  # sequences that the latest plan left out, because their masks are slow

    @property
    def pending(self) -> int:
        """Sequences that are queued for a slot or for blocks."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Sequences that hold a slot and blocks."""
        return len(self._running)

    @property
    def suspended(self) -> int:
        """Sequences that hold no slot until they are resumed."""
        return len(self._suspended)

    @property
    def slots_free(self) -> int:
        return self._running.slots_free

    def running_in(self, slot: int) -> Sequence | None:
        """Return the sequence that has this slot now."""
        return self._running.by_slot[slot]

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence for its tenant's turn. One too long for an empty cache blocks its class."""
        self._presence.add(sequence.tenant)
        self._queue.append(sequence)

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Remove a sequence; its slot and blocks are free at once, even while a step with it is in flight.

        A device works in order: later steps write there only after earlier ones have read. With `keep`, its
        indexed blocks stay cached until memory is needed.
        """
        self._refused = None
        if sequence.handle == NO_HANDLE:
            self.memory.give_up(sequence, keep=keep)
            if self._suspended.pop(sequence.key, None) is None:
                self._queue.remove(sequence)
            return
        self.memory.free(sequence, keep=keep)
        self._running.remove(sequence)

    def suspend(self, sequence: Sequence) -> None:
        """Take a sequence's slot, or its place in the queue, until `resume`; not while a step is planned.

        It drops its results of a step in flight, which it will compute again. It holds its blocks while
        nothing else needs them. A text to embed holds none, because its vector is summed up by slot.
        """
        self._refused = None
        if sequence.handle == NO_HANDLE:
            self._queue.remove(sequence)
        else:
            self.memory.hold(sequence)
            self._running.remove(sequence)
            if self._even_chunk is not None:
                self.memory.give_up(sequence)
        sequence.become(SequenceStatus.SUSPENDED)
        self._suspended[sequence.key] = sequence

    def resume(self, sequence: Sequence) -> None:
        """Queue a suspended sequence before the new ones of its tenant."""
        del self._suspended[sequence.key]
        sequence.become(SequenceStatus.PENDING)
        self._queue.append(sequence, returns=True)

    def plan(self, now_s: float = 0.0) -> Step | None:
        """Return the next step's work.

        None if there is none, none until a step in flight is committed, or none until a mask is found.
        """
        self._now_s = now_s
        if self._slow_masks is not None:
            self._slow_masks.begin_step(now_s)
        if self._pace is None:
            step = self._plan()
        else:
            under_way = self.batch.steps_under_way
            self._pace.begin(now_s)
            step = self._plan()
            if step is None:
                self._pace.pause()
            else:
                context = self._chunk_contexts / max(1, self._chunked)
                work = StepWork(step.tokens - self._chunked, self._chunked, context)
                self._pace.planned(work, under_way=under_way)
        if step is None and self._slow_masks is not None:
            self._slow_masks.begin_pause()
        return step

    def _plan(self) -> Step | None:
        preemptions = self.preemptions
        self._fill_step()
        if self.preemptions == preemptions:  # else admission could take the room that was just made
            self._admit()
        self._hold_slow()
        self._add_drafts()
        step = self.batch.prepare_inputs()
        while step is None and self._running and not self.batch.steps_under_way and not self.held:
            if self.preemptions == preemptions:
                # Chunks of several prompts together hold all blocks of a window: the newest is preempted.
                victim = self._running.newest_of_the_lowest_class()
                assert victim is not None
                self._preempt(victim)
            preemptions = self.preemptions
            self._fill_step()  # the preempted one may have been the only one with a row
            self._hold_slow()
            self._add_drafts()
            step = self.batch.prepare_inputs()
        return step

    def indexed(self, slots: Iterable[int]) -> None:
        """Index the blocks that sequences in these slots filled in the step that was just committed."""
        for sequence in self._running.in_slots(slots):
            self.memory.index(sequence)

    def rewound(self, slots: Iterable[int]) -> None:
        """Free what the drafts of sequences in these slots took that were not accepted."""
        for sequence in self._running.in_slots(slots):
            self.memory.rewind(sequence)

    # Building a step ---------------------------------------------------------------------------------

    def _fill_step(self) -> None:
        """Set how many tokens of each running sequence are in the next step."""
        survey = self.batch.survey(self._max_rows)
        self._budget = self._max_batched_tokens - survey.decodes
        self._scored_left = self._most_scored
        self._rows_left = self._max_rows - survey.decodes - len(survey.prefills)
        if survey.short:
            self._extend_decodes(survey.short)
        self._chunked = self._chunk_contexts = 0
        prefills = self._running.in_slots(survey.prefills)
        newcomer = self._newcomer()
        sharing = prefills if newcomer is None else [*prefills, newcomer]
        tenants = {sequence.tenant for sequence in sharing}
        self._chunks_left = self._budget
        is_shared = self._presence.is_shared(tenants, self._now_s)
        if self._pace is not None and (survey.decodes or is_shared):
            context = max((sequence.tokens.computed for sequence in prefills), default=0)
            tokens = self._pace.tokens(survey.decodes, context, is_shared=is_shared)
            self._chunks_left = min(self._budget, tokens)
        if self._even_chunk is not None or len(tenants) < 2:
            for sequence in prefills:
                self._schedule_chunk(sequence)
            return
        wanted = [(one.tenant, one.tokens.num_tokens - one.tokens.computed) for one in sharing]
        parts = self._turns.divide(self._chunks_left, wanted, self._block_size)
        for sequence, part in zip(prefills, parts, strict=False):  # `_start` schedules the newcomer's
            self._schedule_chunk(sequence, part)

    def _newcomer(self) -> Sequence | None:
        """Return the queued sequence that this step will probably admit, after its chunks are divided."""
        if self._rows_left <= 0 or not self._running.slots_free:
            return None
        head = self._queue.head()
        return None if head is self._refused or head is self._without_room else head

    def _hold_slow(self) -> None:
        """Leave out the sequences that would choose a token in this step, but have to wait for their mask."""
        self.held = 0
        if self._slow_masks is None:
            return
        for sequence in self._running.constrained.values():
            tokens, count = sequence.tokens, self.batch.num_scheduled[sequence.slot]
            chooses = count and count == tokens.num_tokens - tokens.computed
            if chooses and not self._slow_masks.admits(sequence):
                self._leave_out(sequence)
                self.held += 1

    def _add_drafts(self) -> None:
        """Give the rest of the budget to drafts of the sequences that decode, as far as blocks are free and
        their masks are found in time.
        """
        if self._speculation is None:
            return
        short = self.batch.look_up_drafts(self._speculation.ngram, self._budget)
        drafts_of = self.batch.num_drafts
        if self._slow_masks is not None:
            for constrained in self._running.constrained.values():
                if drafts := drafts_of[constrained.slot]:
                    drafts_of[constrained.slot] = self._slow_masks.admit_drafts(constrained, drafts)
        for slot in short:
            sequence = self._running.by_slot[slot]
            assert sequence is not None
            drafts_of[slot] = self.memory.extend_for_drafts(sequence, drafts_of[slot])

    def _extend_decodes(self, short: "array[int]") -> None:
        """Take the block that each decode's next token begins; decodes that get none skip this step."""
        if len(self.memory.pools) == 1 and self.memory.extend_by_one_block(short, self._running.by_slot):
            return
        for sequence in sorted(self._running.in_slots(short), key=lambda one: (one.priority, one.order)):
            if sequence.handle != NO_HANDLE and not self._make_room(sequence):
                self._leave_out(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Take the blocks for a sequence's next token, preempting the newest of the lowest class as needed.

        Why every sequence gets to its end: it is preempted at most three times. Then it is pinned: it stays
        queued, holding nothing, until all that it can ever need is available; that is reserved, and it runs
        to its end. So no sequence that holds blocks waits for another that does (pinned ones do not wait,
        others are preempted). Preemptions are finite in number, and between two of them every step yields a
        token. An empty cache holds any sequence, so the queue advances when nothing runs.

        False: the sequence itself was the newest, and is queued again; or it runs alone, and needs a block
        that slides out at the next commit.
        """
        while not self.memory.extend(sequence, sequence.tokens.computed + 1):
            victim = self._running.newest_of_the_lowest_class()
            if victim is None or len(self._running) == 1:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Free a sequence's blocks and slot, and put it in front of its class, to be recomputed."""
        if self.batch.num_scheduled[victim.slot]:
            self._leave_out(victim)
        victim.preemptions += 1
        victim.become(SequenceStatus.PENDING)
        self.preemptions += 1
        self.admission.predictor.on_preemption()
        victim.evicted_tokens = victim.tokens.committed
        self.remove(victim)
        victim.tokens.rewind(0)
        self._queue.prepend(victim)

    def _leave_out(self, sequence: Sequence) -> None:
        """Leave a sequence out of this step only, and return its tokens to the budget."""
        if sequence.handle == NO_HANDLE:
            return
        count = self.batch.num_scheduled[sequence.slot]
        self._budget += count
        if count > 1:
            self._chunked -= count
            self._chunk_contexts -= count * sequence.tokens.computed
        self.batch.num_scheduled[sequence.slot] = 0

    def _schedule_chunk(self, sequence: Sequence, most: int | None = None) -> None:
        """Schedule as many of a sequence's tokens as the budget and, with windows, the blocks allow.

        `most`: its part of the step; None: all that is left.
        """
        tokens, budget = sequence.tokens, self._budget
        count = tokens.num_tokens - tokens.computed
        if self._even_chunk is not None:
            count = min(count, self._even_chunk)
            if count > budget:
                return
        else:
            count = min(count, budget, self._chunks_left)
            if most is not None:
                count = min(count, most)
        if sequence.scored is not None:
            count = min(count, self._scored_left)
        if count > 0 and self.memory.slides:
            count = self.memory.extend_for_chunk(sequence, count)
        if count > 0:
            self.batch.num_scheduled[sequence.slot] = count
            self._budget = budget - count
            self._chunks_left -= count
            if count > 1:
                self._chunked += count
                self._chunk_contexts += count * tokens.computed
            if sequence.scored is not None:
                self._scored_left -= count

    # Admission ---------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit heads of the queue while they fit."""
        self._has_current_peak = False
        for _ in range(self._running.slots_free):
            sequence = self._queue.head()
            if sequence is None or sequence is self._refused:
                return
            if not self._is_admissible(sequence):
                self._refused = sequence  # until one ends, the running ones only grow
                return
            prefix = self.memory.allocate(sequence)
            if prefix is None and not self._running:
                # Its own blocks are in its way: with a window, those of a chunk that was under way.
                self.memory.give_up(sequence)
                prefix = self.memory.allocate(sequence)
            self._without_room = sequence if prefix is None else None
            if prefix is None:
                return
            self._queue.pop_head()
            self._start(sequence, prefix)

    def _is_admissible(self, sequence: Sequence) -> bool:
        """Return whether the predicted peak fits. It is not computed for a lone or a pinned sequence."""
        longest = self._running.longest_tokens + sequence.longest
        if self.admission.always_fits(longest) or sequence.is_pinned() or not self._running:
            self._has_current_peak = False  # it does not include this one
            return True
        tokens = sequence.tokens
        if not self._has_current_peak:
            self._predict_peak()
        limit = tokens.max_tokens - tokens.output_length
        return self.admission.admit(sequence.key, tokens.num_tokens, tokens.output_length, limit)

    def _predict_peak(self) -> None:
        running, pinned = self._running, self._running.pinned
        prompts, outputs = np.asarray(self.batch.num_prompt_tokens), np.asarray(self.batch.output_tokens)
        slots = np.flatnonzero(prompts)
        keys, outputs = np.asarray(running.keys)[slots], outputs[slots].astype(np.int64)
        self.admission.begin(
            keys,
            prompts[slots] + outputs,
            outputs,
            np.asarray(running.max_tokens)[slots] - outputs,
            reserved=np.isin(keys, list(pinned)) if pinned else None,
            shared=self.memory.shared_tokens(0),
        )
        self._has_current_peak = True

    def _start(self, sequence: Sequence, prefix: Prefix) -> None:
        """Give a sequence a slot, and its first chunk if the step has a row and a token left."""
        slot = self._running.add(sequence)
        if prefix.tokens:
            sequence.tokens.rewind(prefix.tokens)
        self.batch.add_request(slot, sequence.tokens, prefix.blocks)
        sequence.become(PROCESSING)
        if sequence.evicted_tokens is None:
            self._count_prompt(sequence, prefix.tokens)
        else:
            self.recomputed_tokens += max(0, sequence.evicted_tokens - prefix.tokens)
        if self._rows_left > 0:
            self._rows_left -= 1
            self._schedule_chunk(sequence)

    def _count_prompt(self, sequence: Sequence, hit: int) -> None:
        prompt = sequence.tokens.prompt_length
        if hit:
            self.cached[sequence.key] = hit
        self.prompt_tokens += prompt - hit
        if sequence.hashes is not None:
            self.prefix_queries += prompt
            self.prefix_hits += hit
