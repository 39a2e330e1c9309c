"""The engine under random submits, aborts, suspensions, timeouts and failures, compared with a plain loop.

A sequence's output is the same as alone, whether it is preempted, suspended, prefilled in chunks, found in
the prefix cache or overlapped. The state machines of the compiled extensions are in `tests/cext`.
"""

from array import array
from collections import Counter
from typing import NamedTuple
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.fake_model import EOS, VOCABULARY, FakeRunner, Loop, answer
from fairlead._cext.blockpool import OutOfBlocks
from fairlead.base.job import Sampling
from fairlead.base.messages import Output, Speculation
from fairlead.engine.engine import Engine
from fairlead.engine.live_sequences import LiveSequences
from fairlead.engine.memory import Memory, Prefix
from fairlead.engine.running_sequences import RunningSequences
from fairlead.engine.scheduler import StepScheduler
from fairlead.engine.sequence import MOST_PREEMPTIONS, SequenceStatus
from fairlead.engine.step import SampledTokens
from first_failure import until_first_failure

BLOCK_SIZE = 4
LONGEST = 40
SALTS = (b"", b"tenant")

samplings = st.builds(
    Sampling,
    max_tokens=st.integers(0, 50),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(st.integers(0, VOCABULARY), max_size=2).map(tuple),
    grammar=st.sampled_from([None] * 6 + ["kept", "compiled", "refused"]),
)
# Mostly prefixes of the same few texts, so that the prefix cache has hits.
texts = st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8] * 6, [5] * 48, [1, 2, 3, 4, 5, 6, 7, 9] * 6])
prompts = (
    st.lists(st.integers(-1, VOCABULARY), max_size=3)
    | st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=LONGEST + 2)
    | st.builds(lambda text, length: text[:length], texts, st.integers(1, LONGEST + 2))
)


class Submitted(NamedTuple):
    prompt: list[int]
    sampling: Sampling
    timeout_s: float | None


class FakeCompiler:
    """Compiles grammars when the test calls for it. They do not change the output."""

    def __init__(self) -> None:
        self.pending: dict[int, str] = {}
        self.ready: dict[int, str] = {}

    @property
    def waiting(self) -> int:
        return len(self.pending) + len(self.ready)

    def submit(self, key, grammar, owner, size_bytes):
        if grammar == "kept":
            return object()
        self.pending[key] = grammar
        return None

    def compile(self, count=None) -> None:
        for key in list(self.pending)[:count]:
            self.ready[key] = self.pending.pop(key)

    def take_ready(self):
        found = [(key, object() if grammar == "compiled" else grammar) for key, grammar in self.ready.items()]
        self.ready.clear()
        return found

    def cancel(self, key) -> None:
        self.pending.pop(key, None)
        self.ready.pop(key, None)

    def renew(self, grammar):
        return object()

    def count_use(self, grammar, owner, tokens) -> None:
        pass

    def discard(self, grammar) -> None:
        pass

    mask_words = 1
    missing_end = None

    def first_mask_s(self, grammar, owner) -> float:
        return 0.0


class FakeSlowMasks:
    """Holds the constrained sequences that the test names."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def begin_step(self, now_s) -> None:
        pass

    def begin_pause(self) -> None:
        pass

    def admits(self, sequence) -> bool:
        return sequence.key not in self.held

    def admit_drafts(self, sequence, most) -> int:
        return most - sequence.key % 2

    def forget(self, sequence) -> None:
        self.held.discard(sequence.key)


class BlindPredictor:
    """Predicts that every sequence ends at once, so that too many are admitted and memory runs out."""

    def remaining(self, keys, outputs, limits):
        return np.zeros_like(limits)

    def learn(self, length) -> None:
        pass

    def on_preemption(self) -> None:
        pass

    def __repr__(self) -> str:
        return "Blind()"


class EngineMachine(RuleBasedStateMachine):
    """Subclasses may have `fixed_options`, which are used instead of those that are drawn.

    With a `grammar` in them, every sequence has that one.
    """

    fixed_options = {}  # noqa: RUF012

    @initialize(
        slots=st.integers(1, 6),
        batch=st.integers(1, 6),
        tokens=st.integers(1, 3) | st.integers(4, 12),
        blocks=st.lists(st.integers(5, 16), min_size=3, max_size=3),
        windows=st.sampled_from([(None,), (None,), (None, 6), (5,), (None, 3, 9)]),
        overlaps=st.booleans(),
        prefix_cache=st.booleans(),
        predictor=st.sampled_from([None, BlindPredictor()]),
        speculation=st.none() | st.builds(Speculation, ngram=st.just(1), drafts=st.integers(1, 5)),
        samples_several=st.booleans(),
    )
    def start(self, **options) -> None:
        options |= self.fixed_options
        self.grammar = options.get("grammar")
        self.slots, self.tokens, self.windows = options["slots"], options["tokens"], options["windows"]
        self.batch = min(options["batch"], self.slots)
        self.runner = FakeRunner(
            BLOCK_SIZE,
            windows=self.windows,
            overlaps=options["overlaps"],
            samples_several=options["samples_several"],
        )
        self.compiler = FakeCompiler()
        self.slow_masks = FakeSlowMasks()
        self.engine = Engine(
            self.runner,
            compiler=self.compiler,
            slow_masks=self.slow_masks,
            slots=self.slots,
            max_batch=self.batch,
            max_batched_tokens=self.tokens,
            max_model_len=LONGEST,
            blocks_total=options["blocks"][: len(self.windows)],
            windows=self.windows,
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
            eos_token_ids=[EOS],
            draw_seed=lambda: 1,
            prefix_cache=options["prefix_cache"],
            hash_key=bytes(16),
            max_entries=60,
            cleanup_interval_s=2.0,
            predictor=options["predictor"],
            speculation=options["speculation"],
        )
        self.longest = self.engine._validator.longest
        self.loop = Loop(self.engine, self.runner)
        self.under_way: list = []
        self.submitted: list[Submitted] = []
        self.open: set[int] = set()
        self.suspended: set[int] = set()  # as was requested last; ended ones stay
        self.deadlines: dict[int, float] = {}
        self.errors_collected: dict[int, str] = {}

    @property
    def most_steps(self) -> int:
        return 2 if self.runner.overlaps else 1

    # Requests and time -------------------------------------------------------------------------------

    @rule(
        prompt=prompts,
        sampling=samplings,
        priority=st.integers(0, 2),
        timeout_s=st.none() | st.floats(0.5, 3.0),
        salt=st.sampled_from(SALTS),
    )
    def submit(self, prompt, sampling, priority, timeout_s, salt) -> None:
        key = len(self.submitted)
        if self.grammar is not None:
            sampling = msgspec.structs.replace(sampling, grammar=self.grammar)
        self.submitted.append(Submitted(prompt, sampling, timeout_s))
        self.open.add(key)
        self.engine.submit(key, prompt, sampling, priority=priority, timeout_s=timeout_s, salt=salt)

    @rule(prompt=prompts.filter(lambda prompt: prompt and min(prompt) >= 0), number=st.integers(2, 5))
    def submit_many(self, prompt, number) -> None:
        """Submit sequences with long outputs, so that memory runs out."""
        for _ in range(number):
            self.submit(prompt, Sampling(max_tokens=30, ignore_eos=True), 1, None, b"")

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def abort(self, data) -> None:
        """Abort any sequence: queued, running, in an unfinished step, ended, aborted or unknown."""
        key = data.draw(st.integers(0, len(self.submitted)), label="key")
        self.open.discard(key)
        self.engine.abort(key)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def suspend(self, data) -> None:
        """Suspend any sequence: new, compiling, running, in a step, suspended, ended or unknown."""
        key = data.draw(st.integers(0, len(self.submitted)), label="key")
        self.suspended |= {key} & self.open
        self.engine.suspend(key)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def suspend_some_for_steps(self, data) -> None:
        """Suspend some of those that run, take steps without them, and resume some."""
        open_now = sorted(self.open)
        keys = data.draw(
            st.lists(st.sampled_from(open_now), min_size=1, max_size=4, unique=True), label="keys"
        )
        for key in keys:
            self.suspended.add(key)
            self.engine.suspend(key)
        self.run_steps(data.draw(st.integers(1, 8), label="steps"))
        for key in keys[: data.draw(st.integers(0, 4), label="resumed")]:
            self.resume_key(key)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def resume(self, data) -> None:
        self.resume_key(data.draw(st.integers(0, len(self.submitted)), label="key"))

    def resume_key(self, key: int) -> None:
        self.suspended.discard(key)
        self.engine.resume(key)

    @rule(seconds=st.floats(0.1, 2.0))
    def let_time_pass(self, seconds) -> None:
        self.loop.now_s += seconds

    @precondition(lambda self: self.compiler.pending)
    @rule(count=st.integers(1, 3))
    def compile(self, count) -> None:
        self.compiler.compile(count)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def hold_or_release(self, data) -> None:
        """Let a sequence wait for its mask, or no longer."""
        self.slow_masks.held ^= {data.draw(st.sampled_from(sorted(self.open)), label="key")}

    # Steps -------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.under_way) < self.most_steps)
    @rule()
    def begin_step(self) -> None:
        step = self.plan()
        if step is not None:
            self.under_way.append((step, self.runner.launch(step, self.engine.batch)))
        elif not self.under_way:
            self.collect(self.engine.take_outcome())

    @precondition(lambda self: len(self.under_way) < self.most_steps)
    @rule()
    def begin_step_that_cannot_be_launched(self) -> None:
        """Fail a planned step, after the previous one has ended."""
        step = self.plan()
        while self.under_way:
            self.end_step()
        if step is not None:
            self.fail(step, "no memory for this step")

    def plan(self):
        now_s = self.loop.now_s
        for key in sorted(self.open - self.deadlines.keys()):
            if self.submitted[key].timeout_s is not None:
                self.deadlines[key] = now_s + self.submitted[key].timeout_s
        step = self.engine.plan(now_s)
        assert all(self.deadlines[key] >= now_s for key in self.deadlines.keys() & self.engine._live.by_key)
        for sequence in self.engine._live.by_key.values():
            if sequence.state is not SequenceStatus.COMPILING:
                is_suspended = sequence.state is SequenceStatus.SUSPENDED
                assert is_suspended == (sequence.key in self.suspended), sequence.key
        if step is not None:
            self.check_step(step)
        elif self.open and self.open <= self.suspended and not self.under_way and not self.compiler.waiting:
            self.check_rest(now_s)
        return step

    def check_rest(self, now_s) -> None:
        """An engine with nothing but suspended sequences uses no time until one of them is overdue."""
        self.collect(self.engine.take_outcome())
        if not self.open:
            return
        wait_s = self.engine.wait_s(now_s)
        limits = [self.deadlines[key] - now_s for key in self.open if key in self.deadlines]
        if limits and wait_s is not None:
            assert wait_s <= min(limits) + 0.01
        if wait_s is None:
            assert not limits
            assert not self.engine._trimming.changed
        else:
            assert wait_s > 0 or self.engine.trim_if_due(now_s) is not None

    def check_step(self, step) -> None:
        counts = [last - first for first, last in zip(step.query_starts, step.query_starts[1:], strict=False)]
        assert 0 < step.rows == len(counts)
        assert sum(counts) == step.tokens <= self.tokens
        assert min(counts) > 0
        draft_rows = 0 if self.runner.samples_several else step.drafts
        assert len(set(step.slots)) == step.rows - draft_rows <= self.batch
        sampled = set(step.sample_tokens)
        ends = step.query_starts[1:]
        decodes = [count == 1 and end - 1 in sampled for count, end in zip(counts, ends, strict=True)]
        assert sorted(decodes, reverse=True) == decodes
        assert step.decodes == sum(decodes)
        choosing = [self.engine._scheduler.running_in(slot) for slot in step.sample_slots]
        assert not any(one.constraint is not None and one.key in self.slow_masks.held for one in choosing)

    @precondition(lambda self: self.under_way)
    @rule()
    def end_step(self) -> None:
        step, pending = self.under_way.pop(0)
        self.collect(self.engine.commit(step, pending.wait()))

    @precondition(lambda self: self.under_way)
    @rule()
    def end_step_with_failures(self) -> None:
        step, pending = self.under_way.pop(0)
        pending.broken = True
        with pytest.raises(RuntimeError, match="broken"):
            pending.wait()
        self.fail(step, "the device hiccuped")

    def fail(self, step, reason: str) -> None:
        before = self.engine._live.by_key.keys() & self.open
        outcome = self.engine.fail(step, reason)
        failed = {output.key for output in outcome.outputs if output.error == reason}
        assert failed <= before
        assert not failed & self.engine._live.by_key.keys()
        for key in failed:
            self.errors_collected[key] = reason
        self.collect(outcome)

    @rule(number=st.integers(1, 25))
    def run_steps(self, number) -> None:
        for _ in range(number):
            while len(self.under_way) >= self.most_steps:
                self.end_step()
            planned = len(self.under_way)
            self.begin_step()
            if self.under_way and (len(self.under_way) == self.most_steps or planned):
                self.end_step()

    # Outputs -----------------------------------------------------------------------------------------

    def collect(self, outcome) -> None:
        reported = self.loop.token_ids_of.keys() | self.loop.ends.keys()
        self.loop.collect(outcome)
        named = {*memoryview(outcome.keys).cast("q"), *(output.key for output in outcome.outputs)}
        assert named <= self.open, "output of a sequence that has ended or was aborted"
        assert reported is not None
        for key in named:
            self.check(key, self.loop.token_ids_of[key], self.loop.ends.get(key))

    def check(self, key: int, token_ids: list[int], end: Output | None) -> None:
        """Compare a sequence's output so far with what the model generates for it alone."""
        prompt, sampling, _ = self.submitted[key]
        if end is not None:
            self.open.remove(key)
            if end.code == "request_timeout":
                assert self.deadlines[key] < self.loop.now_s
            elif end.error is not None:
                assert key in self.errors_collected or not self.can_run(prompt, sampling)
        if not self.can_run(prompt, sampling):
            assert end is not None
            assert token_ids == []
            return
        expected, reason = answer(prompt, sampling, self.longest, self.windows)
        assert expected[: len(token_ids)] == token_ids
        if end is None:
            assert len(token_ids) < len(expected)
        elif end.error is None:
            assert (expected, reason) == (token_ids, end.finish_reason)
            assert (token_ids[-1] if reason == "stop" else None) == end.stop_token

    def can_run(self, prompt: list[int], sampling: Sampling) -> bool:
        known = all(0 <= token_id < VOCABULARY for token_id in prompt)
        compiles = sampling.grammar != "refused"
        return 0 < len(prompt) < self.longest and sampling.max_tokens > 0 and known and compiles

    # Invariants --------------------------------------------------------------------------------------

    @invariant()
    def every_sequence_is_in_one_state(self) -> None:
        counts = self.engine.statistics()
        assert counts.slots_free + counts.running == self.slots
        assert counts.accepted_tokens <= counts.draft_tokens
        assert counts.preemptions <= MOST_PREEMPTIONS * len(self.submitted)
        assert self.engine._live.by_key.keys() <= self.open
        assert counts.running + counts.pending + counts.suspended == len(self.engine._live.by_key)
        assert self.engine.idle == (not self.open and not self.under_way)
        states = Counter(sequence.state for sequence in self.engine._live.by_key.values())
        assert self.compiler.waiting == states[SequenceStatus.COMPILING]
        for sequence in self.engine._live.by_key.values():
            assert sequence.preemptions <= MOST_PREEMPTIONS
            assert (sequence.state is SequenceStatus.PROCESSING) == (sequence.handle != 0)
            assert sequence.held is None or sequence.handle == 0
        assert counts.suspended == states[SequenceStatus.SUSPENDED]

    @invariant()
    def all_blocks_are_accounted_for(self) -> None:
        memory = self.engine._memory
        running = [one for one in self.engine._live.by_key.values() if one.state is SequenceStatus.PROCESSING]
        running_tables = [self.engine.batch.block_ids(one.slot) for one in running]
        held = [one.held for one in self.engine._live.by_key.values() if one.held is not None]
        tables = running_tables + held
        for group, pool in enumerate(memory.pools):
            in_batch = Counter(block for table in running_tables for block in table[group] if block >= 0)
            assert memory.shared_tokens(group) == (in_batch.total() - len(in_batch)) * BLOCK_SIZE
            used = Counter(block for table in tables for block in table[group] if block >= 0)
            assert [used[block] for block in range(pool.total)] == [
                pool.reference_count(block) for block in range(pool.total)
            ]
            assert pool.total == pool.free + pool.evictable + len(used)
            assert pool.shared == used.total() - len(used)
            reserved = sum(one.reserved[group] for one in running if one.reserved is not None)
            assert memory._reserved[group] == reserved <= pool.available

    def teardown(self) -> None:
        """Run all sequences to their ends, bounded in steps to detect a livelock; nothing may stay in use."""
        if not hasattr(self, "engine"):
            return
        steps = 0
        self.slow_masks.held.clear()
        for key in sorted(self.suspended):
            self.resume_key(key)
        while self.open or self.under_way:
            steps += 1
            self.compiler.compile()
            assert steps < 200 + len(self.submitted) * 12 * LONGEST, "a livelock"
            self.run_steps(1)
            if self.under_way and not self.engine._live.by_key:
                self.end_step()
        assert self.engine.idle
        self.every_sequence_is_in_one_state()
        self.all_blocks_are_accounted_for()
        memory = self.engine._memory
        assert all(pool.available == pool.total for pool in memory.pools)
        assert self.engine._scheduler._running.longest_tokens == 0


MACHINE_SETTINGS = settings(
    phases=[Phase.generate],
    report_multiple_bugs=False,
    stateful_step_count=30,
)


def test_every_sequence_generates_what_it_would_alone():
    run_state_machine_as_test(EngineMachine, settings=MACHINE_SETTINGS)


# Engines with one defect each ----------------------------------------------------------------------


def never_frees_blocks(self, sequence, *, keep):
    self._batch.remove_request(sequence.slot)


def frees_blocks_but_not_the_reservation(self, sequence, *, keep):
    reserved = list(self._reserved)
    free(self, sequence, keep=keep)
    self._reserved[:] = reserved


def uses_reserved_blocks(self, group):
    return self.pools[group].available


def finds_a_prefix_in_the_first_group_only(self, sequence):
    prefix = match(self, sequence)
    if len(prefix.blocks) > 1 and sequence.hashes is not None:
        limit = (sequence.tokens.num_tokens - 1) // BLOCK_SIZE
        found = self._match_in(0, sequence.hashes, limit)
        others = [blocks + [0] * (len(found) - len(blocks)) for blocks in prefix.blocks[1:]]
        return Prefix((found, *others), len(found) * BLOCK_SIZE)
    return prefix


def starts_one_block_after_its_prefix(self, sequence):
    prefix = match(self, sequence)
    if sequence.tokens.num_tokens > prefix.tokens + BLOCK_SIZE:
        blocks = tuple(
            ids + pool.get_new_blocks(1) for ids, pool in zip(prefix.blocks, self.pools, strict=True)
        )
        for pool, ids in zip(self.pools, blocks, strict=True):
            pool.free_blocks(ids[-1:])
        return Prefix(blocks, prefix.tokens + BLOCK_SIZE)
    return prefix


def omits_indexed_blocks(self, sequence):
    index(self, sequence)
    sequence.indexed = 0
    sequence.hashes = sequence.hashes and self.new_hashes(b"another")


def omits_preempted_sequences(self, victim):
    preempt(self, victim)
    self.remove(victim)


def preempts_pinned_sequences_too(self):
    return next((one for one in reversed(self._by_class[max(self._by_class)].values())), None)


def spends_the_budget_twice(self, sequence):
    budget = self._budget
    schedule_chunk(self, sequence)
    self._budget = budget


def admits_more_rows_than_a_step_takes(self):
    fill_step(self)
    self._rows_left += 1


def waits_for_slow_masks(self):
    self.held = 0


def counts_held_sequences_as_stuck(self):
    hold_slow(self)
    self.held = 0


def keeps_the_slot(self, sequence):
    slots, self._slots = self._slots, _Unfreeable(self._slots)
    remove(self, sequence)
    self._slots = slots


def ignores_the_clock(self, now_s):
    self._untimed.clear()


def fails_without_a_report(self, sequence, reason):
    fail(self, sequence, reason)
    return Output(-1, [], error=reason)


def continues_after_its_end(self, key, token_id, reason, details):
    return Output(key, [token_id], finish_reason="length")


def aborts_without_freeing(self, key):
    self._early_outputs.pop(key, None)
    self.by_key.pop(key, None)


def ends_without_cancelling_its_grammar(self, sequence, final, *, keep=True):
    compiler, self._compiler = self._compiler, mock.Mock()
    end(self, sequence, final, keep=keep)
    self._compiler = compiler


def ends_before_its_grammar_is_refused(self, sequence, reason):
    if self._compiler.waiting:
        self.cancel(sequence.key)
        return Output(sequence.key, [], finish_reason="stop")
    return fail(self, sequence, reason)


def accepts_wrong_drafts(self, step, sampled):
    """Commit the drafts in place of what the model has chosen before them."""
    ids, tokens = list(sampled.token_ids), list(step.sample_tokens)
    for sample, (slot, after) in enumerate(zip(step.sample_slots, step.sample_slots[1:], strict=False)):
        if slot == after:
            ids[sample] = step.input_ids[tokens[sample + 1]]
    return commit(self, step, SampledTokens(array("i", ids), {}, sampled.errors))


def keeps_the_blocks_of_wrong_drafts(self, sequence):
    self._batch.take_unused_blocks(sequence.slot)


def leaks_held_blocks(self, sequence, *, keep=True):
    if sequence.held is not None:
        del self._holders[sequence.key]
        sequence.held = None
        sequence.tokens.rewind(0)


def frees_held_blocks(self, sequence):
    hold(self, sequence)
    for pool, blocks in zip(self.pools, sequence.held, strict=True):
        pool.free_blocks(blocks)


def holds_no_partial_block(self, sequence):
    hold(self, sequence)
    whole = sequence.tokens.committed // BLOCK_SIZE
    for pool, blocks in zip(self.pools, sequence.held, strict=True):
        pool.free_blocks(blocks[whole:])
        del blocks[whole:]


def resumes_a_token_late(self, sequence):
    prefix = allocate_rest(self, sequence)
    if prefix is not None and prefix.tokens + 1 < sequence.tokens.num_tokens:
        prefix.tokens += 1
    return prefix


def never_takes_held_blocks(self, needed, *, but=None):
    return self._are_available(needed)


def keeps_the_slot_of_suspended_ones(self, sequence):
    sequence.become(SequenceStatus.SUSPENDED)
    self._suspended[sequence.key] = sequence


def keeps_the_suspended_one_queued(self, sequence):
    queued = sequence.handle == 0
    suspend(self, sequence)
    if queued:
        self._queue.append(sequence)


def never_resumes(self, sequence):
    pass


def resumes_twice(self):
    suspends = dict(self._suspends)
    suspend_and_resume(self)
    for key, wish in suspends.items():
        if not wish and self.by_key[key].state is SequenceStatus.PENDING:
            self._scheduler.submit(self.by_key[key])


def ends_suspended_ones_without_the_scheduler(self, sequence, *, keep=True):
    if sequence.key not in self._suspended:
        remove_from(self, sequence, keep=keep)


def forgets_the_time_of_suspended_ones(self, now_s):
    held = {key: one for key, one in self.by_key.items() if one.state is SequenceStatus.SUSPENDED}
    for key in held:
        del self.by_key[key]
    end_overdue(self, now_s)
    self.by_key.update(held)


def spins_while_all_are_suspended(self):
    return False


class _Unfreeable:
    def __init__(self, slots):
        self._slots = slots

    def __getattr__(self, name):
        return getattr(self._slots, name)

    def free(self, handle):
        pass


free, match, index = Memory.free, Memory._match, Memory.index
preempt, schedule_chunk, fill_step = (
    StepScheduler._preempt,
    StepScheduler._schedule_chunk,
    StepScheduler._fill_step,
)
hold_slow = StepScheduler._hold_slow
commit = Engine.commit
remove, fail, end = RunningSequences.remove, LiveSequences.fail, LiveSequences._end
hold, allocate_rest = Memory.hold, Memory._allocate_rest
suspend, remove_from = StepScheduler.suspend, StepScheduler.remove
suspend_and_resume, end_overdue = LiveSequences.suspend_and_resume, LiveSequences.end_overdue

MUTANTS = [
    (Memory, "free", never_frees_blocks),
    (Memory, "free", frees_blocks_but_not_the_reservation),
    (Memory, "unreserved", uses_reserved_blocks),
    (Memory, "_match", finds_a_prefix_in_the_first_group_only),
    (Memory, "_match", starts_one_block_after_its_prefix),
    (Memory, "index", omits_indexed_blocks),
    (StepScheduler, "_preempt", omits_preempted_sequences),
    (RunningSequences, "newest_of_the_lowest_class", preempts_pinned_sequences_too),
    (StepScheduler, "_schedule_chunk", spends_the_budget_twice),
    (StepScheduler, "_fill_step", admits_more_rows_than_a_step_takes),
    (StepScheduler, "_hold_slow", waits_for_slow_masks),
    (StepScheduler, "_hold_slow", counts_held_sequences_as_stuck),
    (RunningSequences, "remove", keeps_the_slot),
    (LiveSequences, "end_overdue", ignores_the_clock),
    (LiveSequences, "fail", fails_without_a_report),
    (LiveSequences, "fail", ends_before_its_grammar_is_refused),
    (LiveSequences, "_end", ends_without_cancelling_its_grammar),
    (LiveSequences, "complete", continues_after_its_end),
    (LiveSequences, "cancel", aborts_without_freeing),
    (Engine, "commit", accepts_wrong_drafts),
    (Memory, "rewind", keeps_the_blocks_of_wrong_drafts),
    (Memory, "give_up", leaks_held_blocks),
    (Memory, "hold", frees_held_blocks),
    (Memory, "hold", holds_no_partial_block),
    (Memory, "_allocate_rest", resumes_a_token_late),
    (Memory, "_make_available", never_takes_held_blocks),
    (StepScheduler, "suspend", keeps_the_slot_of_suspended_ones),
    (StepScheduler, "suspend", keeps_the_suspended_one_queued),
    (StepScheduler, "resume", never_resumes),
    (StepScheduler, "remove", ends_suspended_ones_without_the_scheduler),
    (LiveSequences, "suspend_and_resume", resumes_twice),
    (LiveSequences, "end_overdue", forgets_the_time_of_suspended_ones),
    (LiveSequences, "rest", property(spins_while_all_are_suspended)),
]


# For mutants that take long to detect otherwise. Sequences that are preempted too often get reservations.
SCARCE = {
    "slots": 6,
    "batch": 6,
    "tokens": 12,
    "blocks": [12],
    "windows": (None,),
    "predictor": BlindPredictor(),
}
CONSTRAINED = {
    "grammar": "kept",
    "slots": 2,
    "batch": 2,
    "tokens": 12,
    "blocks": [16] * 3,
    "speculation": None,
}
DETECTED_WITH = {
    **dict.fromkeys((frees_blocks_but_not_the_reservation, uses_reserved_blocks), SCARCE),
    **dict.fromkeys((omits_preempted_sequences, preempts_pinned_sequences_too), SCARCE),
    **dict.fromkeys((waits_for_slow_masks, counts_held_sequences_as_stuck), CONSTRAINED),
    never_takes_held_blocks: SCARCE,
    admits_more_rows_than_a_step_takes: {"slots": 6, "batch": 2, "tokens": 12, "blocks": [16] * 3},
}


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    MUTANTS,
    ids=[getattr(mutant, "fget", mutant).__name__ for *_, mutant in MUTANTS],
)
def test_state_machine_detects_an_engine_that(monkeypatch, owner, name, mutant):
    monkeypatch.setattr(owner, name, mutant)
    run_machine = until_first_failure(MACHINE_SETTINGS, max_examples=4000)
    machine = type("Machine", (EngineMachine,), {"fixed_options": DETECTED_WITH.get(mutant, {})})
    with pytest.raises((AssertionError, LookupError, ValueError, RuntimeError, OutOfBlocks, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=run_machine)
