"""The kernel behaves like the oracle, and the state machine detects queues with one fault each."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from cext.fair_queue_machine import MACHINE_SETTINGS, FairQueueMachine
from cext.fair_queue_oracle import FairQueueOracle, check_arguments
from fairlead._cext.fairqueue import FairQueue, QueueFullError
from first_failure import until_first_failure


def run_machine(new_queue, machine_settings=MACHINE_SETTINGS):
    """Run the state machine; return how often the queue was compared with the oracle."""
    fixed_options = getattr(new_queue, "detected_with", {})
    attributes = {"new_queue": new_queue, "fixed_options": fixed_options}
    machine = type(f"{new_queue.__name__}Machine", (FairQueueMachine,), attributes)
    run_state_machine_as_test(machine, settings=machine_settings)
    return machine.comparisons


def test_kernel_passes_the_state_machine():
    assert run_machine(FairQueue) >= MACHINE_SETTINGS.max_examples


def test_oracle_passes_the_state_machine():
    """Otherwise the mutants below could fail because of a fault in the state machine."""
    assert run_machine(FairQueueOracle, settings(MACHINE_SETTINGS, max_examples=50)) >= 50


# Lines and turns -----------------------------------------------------------------------------------


class LastInFirstOut(FairQueueOracle):
    def push(self, tenant, cost=1.0, *, priority=1, retried=False, **options):
        handle = super().push(tenant, cost, priority=priority, retried=retried, **options)
        if not retried:
            line = self.lines[priority][tenant]
            line.insert(0, line.pop())
        return handle


class ServedTenantStaysInFront(FairQueueOracle):
    def take_turn(self, entry):
        before = self.lines[entry.priority].copy()
        super().take_turn(entry)
        after = self.lines[entry.priority]
        self.lines[entry.priority] = {tenant: after[tenant] for tenant in before}


class ReturningTenantGoesToTheFront(FairQueueOracle):
    def join(self, tenant, priority):
        super().join(tenant, priority)
        lines = self.lines[priority]
        self.lines[priority] = {tenant: lines.pop(tenant)} | lines


class RoundsNeverEnd(FairQueueOracle):
    detected_with = {"fairness": "roundRobin", "capacity": 1000}  # noqa: RUF012

    def take_turn(self, entry):
        served = self.served[entry.priority].copy()
        super().take_turn(entry)
        self.served[entry.priority] |= served


class DiscardCountsAsATurn(FairQueueOracle):
    detected_with = {"fairness": "roundRobin", "capacity": 1000}  # noqa: RUF012

    def discard(self, handle):
        entry = self.entries.get(handle)
        discarded = super().discard(handle)
        if discarded and entry.tenant in self.lines[entry.priority]:
            self.take_turn(entry)
        return discarded


class AheadIsOrderOfArrival(FairQueueOracle):
    def ahead(self, handle):
        return sorted(super().ahead(handle))


# Classes -------------------------------------------------------------------------------------------


class LowestClassFirst(FairQueueOracle):
    def class_next(self):
        return max(self.classes_waiting(), default=None)


class SharesAreIgnored(FairQueueOracle):
    detected_with = {"min_share": 0.4, "capacity": 1000}  # noqa: RUF012

    def class_next(self):
        return min(self.classes_waiting(), default=None)


class CreditIsNotSpent(FairQueueOracle):
    detected_with = {"min_share": 0.4, "capacity": 1000}  # noqa: RUF012

    def accrue(self, popped):
        before = self.credits[popped]
        super().accrue(popped)
        self.credits[popped] = max(self.credits[popped], before)


class CreditOutlastsTheWait(FairQueueOracle):
    detected_with = {"min_share": 0.4, "capacity": 1000}  # noqa: RUF012

    def leave(self, handle):
        before = self.credits.copy()
        super().leave(handle)
        self.credits = before


# Capacity, handles, displacement -------------------------------------------------------------------


class OneMoreThanCapacity(FairQueueOracle):
    def push(self, tenant, *arguments, **options):
        self.capacity += 1
        try:
            return super().push(tenant, *arguments, **options)
        finally:
            self.capacity -= 1


class OneLessThanCapacity(FairQueueOracle):
    def push(self, tenant, *arguments, **options):
        self.capacity -= 1
        try:
            return super().push(tenant, *arguments, **options)
        finally:
            self.capacity += 1


class DiscardRemovesNothing(FairQueueOracle):
    def discard(self, handle):
        return handle in self.entries


class StaleHandleDiscardsAnother(FairQueueOracle):
    def discard(self, handle):
        if handle not in self.entries and self.entries:
            handle = min(self.entries)
        return super().discard(handle)


class HandleIsReused(FairQueueOracle):
    def new_entry(self, entry):
        super().new_entry(entry)
        handle = len(self.entries) - 1
        self.entries[handle] = self.entries.pop(self.pushed - 1)
        return handle


class LongWaitingHandleIsForgotten(FairQueueOracle):
    def __contains__(self, handle):
        return super().__contains__(handle) and self.pushed - handle <= 128


class StaleHandleBecomesValidAgain(FairQueueOracle):
    def __contains__(self, handle):
        return any((waiting - handle) % 128 == 0 for waiting in self.entries)


class DisplacesWithoutSlack(FairQueueOracle):
    detected_with = {"capacity": 6}  # noqa: RUF012

    def displace(self, tenant, *, priority=1):
        self.slack -= 1
        try:
            return super().displace(tenant, priority=priority)
        finally:
            self.slack += 1


class DisplacesAHigherClass(FairQueueOracle):
    detected_with = {"capacity": 6}  # noqa: RUF012

    def displace(self, tenant, *, priority=1):
        return super().displace(tenant, priority=max(priority - 1, 0))


class DisplacesTheOldest(FairQueueOracle):
    detected_with = {"capacity": 6}  # noqa: RUF012

    def displace(self, tenant, *, priority=1):
        self.turn_lines_round()
        try:
            return super().displace(tenant, priority=priority)
        finally:
            self.turn_lines_round()

    def turn_lines_round(self):
        for line in [line for lines in self.lines for line in lines.values()]:
            line.reverse()


# Retries -------------------------------------------------------------------------------------------


class RetryGoesToTheEnd(FairQueueOracle):
    def push(self, tenant, cost=1.0, *, priority=1, retried=False, **options):
        handle = super().push(tenant, cost, priority=priority, retried=retried, **options)
        if retried:
            line = self.retried[priority]
            line.append(line.pop(0))
        return handle


class RetryIsRefused(FairQueueOracle):
    def push(self, tenant, cost=1.0, *, retried=False, **options):
        check_arguments(tenant, cost, **options)
        if retried and len(self) >= self.capacity:
            raise QueueFullError
        return super().push(tenant, cost, retried=retried, **options)


class RetryIsChargedAgain(FairQueueOracle):
    def serve(self, handle):
        entry = self.entries[handle]
        super().serve(handle)
        if entry.retried:
            self.add(entry.tenant, entry.cost)


class RetryTakesATurn(FairQueueOracle):
    def serve(self, handle):
        entry = self.entries[handle]
        super().serve(handle)
        if entry.retried and not self.by_tokens:
            self.take_turn(entry)


# Bypass and budget ---------------------------------------------------------------------------------


class BypassHasNoBound(FairQueueOracle):
    def pop(self, fits=None, *, kinds=None):
        self.bypass = 10**9
        return super().pop(fits, kinds=kinds)


class BypassIsOneTooMany(FairQueueOracle):
    def pop(self, fits=None, *, kinds=None):
        self.bypass += 1
        try:
            return super().pop(fits, kinds=kinds)
        finally:
            self.bypass -= 1


class SkippedIsPassed(FairQueueOracle):
    detected_with = {"bypass": 1, "capacity": 1000}  # noqa: RUF012

    def pop(self, fits=None, *, kinds=None):
        return super().pop(fits and (lambda handle: bool(fits(handle))), kinds=kinds)


class OnlyTheFirstOfALineIsChecked(FairQueueOracle):
    def order(self):
        lines = [line for lines in self.lines for line in lines.values()]
        yield from (handle for handle in super().order() if all(handle not in line[1:] for line in lines))


class KindsAreIgnored(FairQueueOracle):
    def pop(self, fits=None, *, kinds=None):
        return super().pop(fits)


class KindOfTheFirstCountsForItsLine(FairQueueOracle):
    """As if a line noted only the kind of its first entry."""

    def pop(self, fits=None, *, kinds=None):
        for lines in self.lines:
            for line in lines.values():
                for handle in line:
                    self.entries[handle].kind = self.entries[line[0]].kind
        return super().pop(fits, kinds=kinds)


class BudgetAppliesToEachEntry(FairQueueOracle):
    def pop_many(self, max_count, memory_budget):
        return [
            handle for _ in range(max_count) for handle in super(type(self), self).pop_many(1, memory_budget)
        ]


# Tokens --------------------------------------------------------------------------------------------


class NoTenantIsLifted(FairQueueOracle):
    detected_with = {"fairness": "tokens", "capacity": 1000}  # noqa: RUF012

    def lift(self, tenant):
        self.lifts[tenant] = self.level()
        self.counters.setdefault(tenant, 0.0)


class LiftForgetsUsage(FairQueueOracle):
    def lift(self, tenant):
        self.lifts[tenant] = self.counters[tenant] = self.level()


class TheLastFloorIsForgotten(FairQueueOracle):
    def leave(self, handle):
        super().leave(handle)
        self.floor = 0.0


class TiesGoToTheFirstTenant(FairQueueOracle):
    def take_turn(self, entry):
        super().take_turn(entry)
        self.turns[entry.tenant] = 1


class RefundGoesBelowTheLift(FairQueueOracle):
    detected_with = {"fairness": "tokens", "capacity": 1000}  # noqa: RUF012

    def lift(self, tenant):
        super().lift(tenant)
        self.lifts[tenant] = 0.0


class RefundDoesNothing(FairQueueOracle):
    def refund(self, tenant, cost):
        check_arguments(tenant, cost)


MUTANTS = FairQueueOracle.__subclasses__()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_state_machine_detects_each_mutant(mutant):
    with pytest.raises(AssertionError):
        run_machine(mutant, until_first_failure(MACHINE_SETTINGS, max_examples=4000))
