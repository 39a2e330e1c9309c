"""The journal beside a plain oracle: whatever fails at any write, no count is lost or added twice."""

from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fairlead.store.journal import MAX_BATCH_ROWS, OTHER, USERS_AT_MOST, UsageJournal
from fairlead.store.records import NO_MINUTE, UsageBatch, UsageCounts, UsageKey

NAMES = [UsageKey(3600, key=f"key-{number}") for number in range(4)]
ONE = UsageCounts(1, 2, 1, 3, 4, 5, 6)


class PlainStore:
    """What `Database` promises: the batches of a writer count once, in the order of their numbers."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.last: Counter[str] = Counter()

    def write(self, batch: UsageBatch) -> None:
        if batch.number <= self.last[batch.writer]:
            return
        self.last[batch.writer] = batch.number
        for key, counts in batch.rows:
            self.requests[key.key] += counts.requests


class JournalMachine(RuleBasedStateMachine):
    """Jobs end, and writes succeed, fail before or after the commit, or are cut by the end of the process."""

    journal_class = UsageJournal
    max_rows = 3

    def __init__(self) -> None:
        super().__init__()
        self.journal = self.journal_class("run 1", max_rows=self.max_rows)
        self.store = PlainStore()
        self.runs = 1
        self.added: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.here: Counter[str] = Counter()

    @rule(key=st.sampled_from(NAMES))
    def job_ends(self, key):
        if self.journal.add(key, ONE):
            self.added[key.key] += 1
            self.here[key.key] += 1

    @rule()
    def write_succeeds(self):
        if (batch := self.journal.seal()) is not None:
            self.store.write(batch)
            self.journal.written()
            self.here.subtract({key.key: counts.requests for key, counts in batch.rows})

    @rule()
    def write_fails_before_the_commit(self):
        self.journal.seal()

    @rule()
    def answer_is_lost_after_the_commit(self):
        if (batch := self.journal.seal()) is not None:
            self.store.write(batch)

    @precondition(lambda self: self.runs < 5)
    @rule(is_committed=st.booleans())
    def process_is_killed(self, is_committed):
        batch = self.journal.seal()
        if batch is not None and is_committed:
            self.store.write(batch)
        self.lost.update(self.added - self.store.requests - self.lost)
        self.runs += 1
        self.journal = self.journal_class(f"run {self.runs}", max_rows=self.max_rows)
        self.here.clear()

    @invariant()
    def nothing_is_counted_twice(self):
        assert all(self.store.requests[name] <= count for name, count in self.added.items())

    @invariant()
    def nothing_is_lost_without_a_kill(self):
        statistics = self.journal.statistics()
        assert statistics.waiting == sum((+self.here).values())

    def teardown(self):
        while (batch := self.journal.seal()) is not None:
            self.store.write(batch)
            self.journal.written()
        assert +self.store.requests == +(self.added - self.lost)


TestJournal = JournalMachine.TestCase


class ResealsWithNewNumber(UsageJournal):
    def seal(self):
        self._number += self._sealed is not None
        if self._sealed is not None:
            self._sealed = UsageBatch(self._sealed.writer, self._number, self._sealed.rows)
        return super().seal()


class AddsToSealedBatch(UsageJournal):
    def add(self, key, counts):
        if self._sealed is not None and key not in self._rows:
            self._added += counts.requests
            rows = (*self._sealed.rows, (key, counts))
            self._sealed = UsageBatch(self._sealed.writer, self._sealed.number, rows)
            return True
        return super().add(key, counts)


class KeepsItsNumber(UsageJournal):
    def seal(self):
        batch = super().seal()
        self._number = 0
        return batch


@pytest.mark.parametrize("mutant", [ResealsWithNewNumber, AddsToSealedBatch, KeepsItsNumber])
def test_machine_catches_mutants(mutant):
    class Broken(JournalMachine):
        journal_class = mutant

    Broken.TestCase.settings = settings(phases=[Phase.generate])
    with pytest.raises(Exception):  # noqa: B017 - an assertion, perhaps in a group
        Broken.TestCase("runTest").runTest()


def test_full_journal_drops_further_keys_and_counts_them():
    journal = UsageJournal(max_rows=2)
    assert [journal.add(key, ONE) for key in [*NAMES[:3], NAMES[0]]] == [True, True, False, True]
    assert (journal.statistics().waiting, journal.statistics().dropped) == (3, 1)


def test_journal_that_is_half_full_counts_further_jobs_by_the_hour_only():
    journal = UsageJournal(max_rows=4)
    for minute in range(6):
        journal.add(UsageKey(3600, key="a", minute=minute), ONE)
    journal.add(UsageKey(3600, key="a", minute=0), ONE)
    rows = {key.minute: counts.requests for key, counts in journal._rows.items()}
    assert rows == {0: 2, 1: 1, NO_MINUTE: 4}


def test_batch_is_bounded_and_the_rest_follows():
    journal = UsageJournal()
    for number in range(MAX_BATCH_ROWS + 1):
        journal.add(UsageKey(3600, model=str(number)), ONE)
    assert len(journal.seal().rows) == MAX_BATCH_ROWS
    journal.written()
    assert len(journal.seal().rows) == 1


def test_refused_batch_is_dropped():
    journal = UsageJournal()
    journal.add(NAMES[0], ONE)
    journal.seal()
    journal.refused()
    assert journal.seal() is None
    assert journal.statistics().dropped == 1


def test_tenant_with_many_users_takes_no_room_of_others():
    journal = UsageJournal()
    for number in range(USERS_AT_MOST + 5):
        journal.add(UsageKey(3600, key="portal", user=f"portal/{number}"), ONE)
    journal.add(UsageKey(3600, key="other", user="ana"), ONE)
    journal.add(UsageKey(7200, key="portal", user="portal/late"), ONE)
    rows = dict(journal._rows)
    assert rows[UsageKey(3600, key="portal", user=OTHER)].requests == 5
    assert rows[UsageKey(3600, key="other", user="ana")] == ONE
    assert rows[UsageKey(7200, key="portal", user="portal/late")] == ONE
