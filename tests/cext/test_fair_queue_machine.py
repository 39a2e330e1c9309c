"""The kernel behaves like the oracle, and the state machine detects queues with one fault each."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from cext.fair_queue_machine import MACHINE_SETTINGS, FairQueueMachine
from cext.fair_queue_oracle import FairQueueOracle, Team, check_arguments
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
            group, member = self.path(tenant)[-1]
            line = group.lines[priority][member]
            line.insert(0, line.pop())
        return handle


class ServedTenantStaysInFront(FairQueueOracle):
    def take_turn(self, group, member, priority):
        before = group.lines[priority].copy()
        super().take_turn(group, member, priority)
        after = group.lines[priority]
        group.lines[priority] = {other: after[other] for other in before}


class ReturningTenantGoesToTheFront(FairQueueOracle):
    def join(self, group, member, priority):
        super().join(group, member, priority)
        lines = group.lines[priority]
        group.lines[priority] = {member: lines.pop(member)} | lines


class RoundsNeverEnd(FairQueueOracle):
    detected_with = {"fairness": "roundRobin", "capacity": 1000}  # noqa: RUF012

    def take_turn(self, group, member, priority):
        served = group.served[priority].copy()
        super().take_turn(group, member, priority)
        group.served[priority] |= served


class DiscardCountsAsATurn(FairQueueOracle):
    detected_with = {"fairness": "roundRobin", "capacity": 1000}  # noqa: RUF012

    def discard(self, handle):
        entry = self.entries.get(handle)
        discarded = super().discard(handle)
        if discarded and self.is_in_line(entry.tenant):
            for group, member in self.path(entry.tenant):
                self.take_turn(group, member, entry.priority)
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

    def line_to_shorten(self, tenant, priority, slack):
        line = super().line_to_shorten(tenant, priority, slack)
        return line and line[::-1]


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
            self.charge(entry.tenant, entry.cost)


class RetryTakesATurn(FairQueueOracle):
    def serve(self, handle):
        entry = self.entries[handle]
        super().serve(handle)
        if entry.retried and not self.by_tokens:
            for group, member in self.path(entry.tenant):
                self.take_turn(group, member, entry.priority)


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
    def line_in_order(self, member, priority):
        return super().line_in_order(member, priority)[:1]


class KindsAreIgnored(FairQueueOracle):
    def pop(self, fits=None, *, kinds=None):
        return super().pop(fits)


class KindOfTheFirstCountsForItsLine(FairQueueOracle):
    """As if a line noted only the kind of its first entry."""

    def pop(self, fits=None, *, kinds=None):
        for lines in self.top.lines:
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

    def lift(self, group, member):
        group.lifts[member] = group.level()
        group.counters.setdefault(member, 0.0)


class LiftForgetsUsage(FairQueueOracle):
    def lift(self, group, member):
        group.lifts[member] = group.counters[member] = group.level()


class TheLastFloorIsForgotten(FairQueueOracle):
    def leave(self, handle):
        super().leave(handle)
        self.top.floor = 0.0


class TiesGoToTheFirstTenant(FairQueueOracle):
    def take_turn(self, group, member, priority):
        super().take_turn(group, member, priority)
        group.turns[member] = 1


class RefundGoesBelowTheLift(FairQueueOracle):
    detected_with = {"fairness": "tokens", "capacity": 1000}  # noqa: RUF012

    def lift(self, group, member):
        super().lift(group, member)
        group.lifts[member] = 0.0


class RefundDoesNothing(FairQueueOracle):
    def refund(self, tenant, cost, *, team_cost=None):
        check_arguments(tenant, cost, team_cost=team_cost)


# Teams ---------------------------------------------------------------------------------------------

IN_TEAMS = {"teams": "all", "capacity": 1000}
IN_TEAMS_BY_TOKENS = IN_TEAMS | {"fairness": "tokens"}


class TeamsAreIgnored(FairQueueOracle):
    detected_with = {"teams": "some", "capacity": 1000}  # noqa: RUF012

    def path(self, tenant):
        return [(self.top, tenant)]


class MembersLeaveInOrderOfArrival(FairQueueOracle):
    detected_with = IN_TEAMS

    def line_in_order(self, member, priority):
        return sorted(super().line_in_order(member, priority))


class RoundsOfATeamNeverEnd(FairQueueOracle):
    detected_with = IN_TEAMS | {"fairness": "roundRobin"}

    def take_turn(self, group, member, priority):
        served = group.served[priority].copy()
        super().take_turn(group, member, priority)
        if group is not self.top:
            group.served[priority] |= served


class TeamIsNotCharged(FairQueueOracle):
    detected_with = IN_TEAMS_BY_TOKENS

    def add(self, group, member, cost):
        if group is not self.top:
            super().add(group, member, cost)


class MemberIsNotCharged(FairQueueOracle):
    detected_with = IN_TEAMS_BY_TOKENS

    def add(self, group, member, cost):
        if group is self.top:
            super().add(group, member, cost)


class TeamPaysWhatItsMemberPays(FairQueueOracle):
    detected_with = IN_TEAMS_BY_TOKENS

    def charges(self, tenant, cost, team_cost):
        return super().charges(tenant, cost, cost)


class MembersAreLiftedToTheLevelOfAll(FairQueueOracle):
    detected_with = IN_TEAMS_BY_TOKENS

    def lift(self, group, member):
        super().lift(group, member)
        group.counters[member] = max(group.counters[member], self.top.level())


class TeamIsLiftedAtEachOfItsMembers(FairQueueOracle):
    detected_with = {"teams": "some", "capacity": 1000, "fairness": "tokens"}  # noqa: RUF012

    def join(self, group, member, priority):
        super().join(group, member, priority)
        if group is not self.top:
            team = self.path(member)[0][1]
            self.top.counters[team] = max(self.top.counters.values())


class TeamGetsNoRefund(FairQueueOracle):
    detected_with = IN_TEAMS_BY_TOKENS

    def subtract(self, group, member, cost):
        if group is not self.top:
            super().subtract(group, member, cost)


class TeamOfAForgottenMemberGetsNoRefund(FairQueueOracle):
    detected_with = IN_TEAMS_BY_TOKENS

    def refund(self, tenant, cost, *, team_cost=None):
        if tenant in self.path(tenant)[-1][0].counters:
            super().refund(tenant, cost, team_cost=team_cost)


class TeamIsForgottenWithMembersAboveItsLevel(FairQueueOracle):
    detected_with = IN_TEAMS_BY_TOKENS

    def forget_idle(self, changed):
        super().forget_idle(changed)
        for member in list(self.top.counters):
            if isinstance(member, Team) and not self.waiting_in(member):
                self.forget(self.top, member)


class TeamIsDisplacedByItsLongestLine(FairQueueOracle):
    """As if the lines of tenants were compared across teams."""

    detected_with = {"teams": "some", "capacity": 6}  # noqa: RUF012

    def waiting_in(self, member):
        found = [self.waiting(tenant) for tenant in {entry.tenant for entry in self.entries.values()}]
        return max(found, default=0) if isinstance(member, Team) else super().waiting_in(member)


class MembersNeverMakeRoomForOneAnother(FairQueueOracle):
    detected_with = {"teams": "all", "capacity": 6}  # noqa: RUF012

    def line_to_shorten(self, tenant, priority, slack):
        line = super().line_to_shorten(tenant, priority, slack)
        shares_team = line and self.path(self.entries[line[-1]].tenant)[0] == self.path(tenant)[0]
        return None if shares_team and slack > 0 else line


MUTANTS = FairQueueOracle.__subclasses__()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_state_machine_detects_each_mutant(mutant):
    with pytest.raises(AssertionError):
        run_machine(mutant, until_first_failure(MACHINE_SETTINGS, max_examples=4000))
