"""The kernel lives as the oracle does; and queues that are wrong in one way each are found out."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cext.fair_queue_machine import MACHINE_SETTINGS, FairQueueMachine
from cext.fair_queue_oracle import FairQueueOracle, check_arguments
from fairlead._cext.fairqueue import FairQueue, Full


def run_machine(new_queue, **changes):
    machine = type(f"{new_queue.__name__}Machine", (FairQueueMachine,), {"new_queue": new_queue})
    run_state_machine_as_test(machine, settings=settings(MACHINE_SETTINGS, **changes))


def test_the_kernel_lives_as_the_oracle_does():
    run_machine(FairQueue)


def test_the_oracle_agrees_with_itself():
    """Or the mutants below could be failing for a fault of the machine."""
    run_machine(FairQueueOracle, max_examples=100)


class LastInFirstOut(FairQueueOracle):
    def push(self, tenant, cost=1.0, *, priority=1):
        handle = super().push(tenant, cost, priority=priority)
        line = self.rings[priority][tenant]
        line.insert(0, line.pop())
        return handle


class RetryGoesToTheEnd(FairQueueOracle):
    def push_front(self, tenant, cost=1.0, *, priority=1):
        handle = super().push_front(tenant, cost, priority=priority)
        line = self.rings[priority][tenant]
        line.append(line.pop(0))
        return handle


class RetryIsRefused(FairQueueOracle):
    def push_front(self, tenant, cost=1.0, *, priority=1):
        check_arguments(tenant, cost, priority)
        if len(self) >= self.capacity:
            raise Full
        return super().push_front(tenant, cost, priority=priority)


class ServedTenantStaysInFront(FairQueueOracle):
    def turn(self, ring, tenant):
        if not ring[tenant]:
            del ring[tenant]


class ReturningTenantGoesToTheFront(FairQueueOracle):
    def push(self, tenant, cost=1.0, *, priority=1):
        handle = super().push(tenant, cost, priority=priority)
        ring = self.rings[priority]
        if len(ring[tenant]) == 1:
            self.rings[priority] = {tenant: ring.pop(tenant)} | ring
        return handle


class LowestClassFirst(FairQueueOracle):
    def pop(self):
        self.rings.reverse()
        try:
            return super().pop()
        finally:
            self.rings.reverse()


class OneMoreThanCapacity(FairQueueOracle):
    def push(self, tenant, cost=1.0, *, priority=1):
        self.capacity += 1
        try:
            return super().push(tenant, cost, priority=priority)
        finally:
            self.capacity -= 1


class OneLessThanCapacity(FairQueueOracle):
    def push(self, tenant, cost=1.0, *, priority=1):
        self.capacity -= 1
        try:
            return super().push(tenant, cost, priority=priority)
        finally:
            self.capacity += 1


class DiscardRemovesNothing(FairQueueOracle):
    def discard(self, handle):
        return handle in self.entries


class DiscardCountsAsATurn(FairQueueOracle):
    def discard(self, handle):
        if handle not in self.entries:
            return False
        tenant, _cost, priority = self.entries[handle]
        super().discard(handle)
        if tenant in self.rings[priority]:
            self.turn(self.rings[priority], tenant)
        return True


class StaleHandleHitsAnother(FairQueueOracle):
    def discard(self, handle):
        if handle not in self.entries and self.entries:
            handle = min(self.entries)
        return super().discard(handle)


class HandleIsUsedAgain(FairQueueOracle):
    def new_entry(self, tenant, cost, priority):
        super().new_entry(tenant, cost, priority)
        handle = len(self.entries) - 1
        self.entries[handle] = self.entries.pop(self.pushed - 1)
        return handle


class PositionIsOrderOfArrival(FairQueueOracle):
    def position(self, handle):
        if handle not in self.entries:
            raise KeyError(handle)
        return sorted(self.entries).index(handle)


class RefusalLeavesTheTenantBehind(FairQueueOracle):
    def push(self, tenant, cost=1.0, *, priority=1):
        if len(self) >= self.capacity:
            self.rings[priority].setdefault(tenant, [])
        return super().push(tenant, cost, priority=priority)


@pytest.mark.parametrize("mutant", FairQueueOracle.__subclasses__(), ids=lambda mutant: mutant.__name__)
def test_a_broken_queue_is_found_out(mutant):
    with pytest.raises(AssertionError):
        # That there is a failure is enough; how small it could be is not asked.
        run_machine(mutant, phases=[Phase.generate], report_multiple_bugs=False)
