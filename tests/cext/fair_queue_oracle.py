"""A fair queue in plain Python, written to be obviously correct. Slow on purpose."""

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

from fairlead._cext.fairqueue import FairQueueEntry, QueueFullError

CLASSES = 8
CREDIT_AT_MOST = 4.0
SLACK = 2
ONE_POP = 1 - 1e-9


@dataclass
class Entry:
    tenant: str | int | tuple
    cost: float
    priority: int
    size: int
    retried: bool
    kind: int
    team_cost: float
    left: int = 1  # pops until it leaves
    begun: bool = False
    passed: int = 0


class Team(NamedTuple):
    """A team as a member of the top group, where a tenant may have the same name."""

    name: str | int


class Group:
    """Members that take turns with each other: all teams and lone tenants, or the tenants of one team."""

    def __init__(self):
        # One of each per class. A tenant's line has its handles except retried ones, a team's those of all
        # members. A dict keeps the order of insertion, so under round robin its first has the next turn.
        self.lines = [{} for _ in range(CLASSES)]
        self.served = [set() for _ in range(CLASSES)]  # members served in this round, with or without a line
        # One entry for each known member.
        self.counters, self.lifts, self.turns = {}, {}, {}
        self.joined = {}  # (member, priority) -> when its line began
        self.floor = 0.0

    def in_line(self):
        return {member for lines in self.lines for member in lines}

    def level(self):
        return min((self.counters[member] for member in self.in_line()), default=self.floor)

    def counter(self, member):
        own = self.counters.get(member, 0.0)
        return own if member in self.in_line() else max(own, self.level())


class FairQueueOracle:
    """The interface of `FairQueue`; its handles are 0, 1, 2, …

    It remembers every tenant. The kernel remembers the 2048 that matter most of each group.
    """

    def __init__(self, *, capacity, fairness="roundRobin", min_share=0.0, bypass=8):
        check(capacity >= 0 and fairness in ("roundRobin", "tokens"))
        check(0 <= min_share < 1 and 0 <= bypass <= 255)
        self.capacity, self.min_share, self.bypass, self.slack = capacity, min_share, bypass, SLACK
        self.by_tokens = fairness == "tokens"
        self.entries = {}  # handle -> Entry
        self.pushed = self.popped = self.discarded = self.refused = self.displaced = 0
        self.begin()

    def begin(self):
        self.retried = [[] for _ in range(CLASSES)]
        self.credits = [0.0] * CLASSES
        self.top = Group()
        self.groups = {}  # team -> its members
        self.moment = 0

    def path(self, tenant):
        """Return the groups in which a tenant's entries take turns, each with the member that takes them."""
        if type(tenant) is not tuple:
            return [(self.top, tenant)]
        return [(self.top, Team(tenant[0])), (self.groups.setdefault(tenant[0], Group()), tenant)]

    def charges(self, tenant, cost, team_cost):
        """Return what each group on the path charges."""
        costs = [cost if team_cost is None else team_cost, cost]
        return list(zip(self.path(tenant), costs[-len(self.path(tenant)) :], strict=True))

    # Adding entries

    def push(
        self,
        tenant,
        cost=1.0,
        *,
        priority=1,
        size=0,
        kind=0,
        count=1,
        retried=False,
        begun=False,
        team_cost=None,
    ):
        check_arguments(tenant, cost, priority, size, kind, team_cost, count)
        if len(self) >= self.capacity and not (retried or begun):
            self.refused += 1
            raise QueueFullError
        team_cost = cost if team_cost is None else team_cost
        handle = self.new_entry(Entry(tenant, cost, priority, size, retried, kind, team_cost, count, begun))
        if retried:
            self.retried[priority].insert(0, handle)
        elif begun:
            for group, member in self.path(tenant):
                self.line(group, member, priority).insert(0, handle)
        else:
            for group, member in self.path(tenant):
                self.line(group, member, priority).append(handle)
        return handle

    def new_entry(self, entry):
        handle = self.pushed
        self.entries[handle] = entry
        self.pushed += 1
        return handle

    def line(self, group, member, priority):
        if member not in group.lines[priority]:
            self.join(group, member, priority)
        return group.lines[priority][member]

    def join(self, group, member, priority):
        if member not in group.in_line():
            self.lift(group, member)
        self.moment += 1
        group.joined[member, priority] = self.moment
        lines, served = group.lines[priority], group.served[priority]
        lines[member] = []
        order = sorted(lines, key=lambda other: other in served)  # a stable sort: served members come last
        group.lines[priority] = {other: lines[other] for other in order}

    def lift(self, group, member):
        group.lifts[member] = group.level()
        group.counters[member] = max(group.counters.get(member, 0.0), group.level())

    # Removing entries

    def pop(self, fits=None, *, kinds=None):
        head = None
        for handle in self.order():
            if kinds is not None and not kinds >> self.entries[handle].kind & 1:
                continue
            result = fits(handle) if fits else True
            if result:
                if head is not None:
                    self.entries[head].passed += 1
                self.serve(handle)
                return handle
            if result is False and head is None:
                head = handle
                if self.entries[head].passed >= self.bypass:
                    raise IndexError("passed often enough")
        raise IndexError("no entry may leave now")

    def pop_many(self, max_count, memory_budget):
        check(max_count >= 0 and memory_budget >= 0)
        sizes = {handle: entry.size for handle, entry in self.entries.items()}
        handles, taken = [], 0
        while len(handles) < max_count:
            left = memory_budget - taken
            try:
                handle = self.pop(lambda handle: sizes[handle] <= left)  # noqa: B023  (called at once)
            except IndexError:
                break
            taken += sizes[handle]
            handles.append(handle)
        return handles

    def serve(self, handle):
        entry = self.entries[handle]
        self.accrue(entry.priority)
        charges = self.charges(entry.tenant, entry.cost, entry.team_cost)
        before = [group.counters.get(member, 0.0) for (group, member), _ in charges]
        if not entry.retried:
            for (group, member), cost in charges:
                self.add(group, member, cost)  # before `leave`, after which `counter` could lift it
        entry.left, entry.begun, entry.passed = entry.left - 1, True, 0
        if not entry.left:
            self.leave(handle)
        self.popped += 1
        if not entry.retried:
            for (group, member), earlier in zip(self.path(entry.tenant), before, strict=True):
                if not group.in_line():
                    group.floor = earlier
                self.take_turn(group, member, entry.priority)
        self.forget_idle(entry.tenant)

    def take_turn(self, group, member, priority):
        served, lines = group.served[priority], group.lines[priority]
        if member in served:  # a second turn starts the next round
            served.clear()
        served.add(member)
        if member in lines:
            lines[member] = lines.pop(member)
        self.moment += 1
        group.turns[member] = self.moment

    def discard(self, handle):
        if handle not in self.entries:
            return False
        tenant = self.entries[handle].tenant
        self.leave(handle)
        self.forget_idle(tenant)
        self.discarded += 1
        return True

    def displace(self, tenant, *, priority=1):
        check_arguments(tenant, priority=priority)
        for other in reversed(range(priority, CLASSES)):
            line = self.line_to_shorten(tenant, other, self.slack if other == priority else -math.inf)
            begun = [handle for handle in line or () if self.entries[handle].begun]
            if line is not None and len(begun) < len(line):
                handle = next(handle for handle in reversed(line) if handle not in begun)
                displaced = self.entries[handle].tenant
                self.leave(handle)
                self.forget_idle(displaced)
                self.displaced += 1
                return handle
        return None

    def line_to_shorten(self, tenant, priority, slack):
        """Return the line of a class that loses its newest entry for a newcomer of this tenant, or None."""
        (top, own), *inner = self.path(tenant)
        unit = self.longest(top, priority)
        if unit is None or len(top.lines[priority][unit]) < self.waiting_in(own) + slack:
            unit = own
            if not inner or own not in top.lines[priority]:
                return None
        if not isinstance(unit, Team):
            return top.lines[priority][unit]
        group = self.groups[unit.name]
        line = group.lines[priority][self.longest(group, priority)]
        return None if unit == own and len(line) < self.waiting(tenant) + slack else line

    def longest(self, group, priority):
        order = self.in_order(group, priority)
        return max(reversed(order), key=lambda member: len(group.lines[priority][member]), default=None)

    def waiting_in(self, member):
        """Return how many entries wait of a member of the top group."""
        return sum(self.path(entry.tenant)[0][1] == member for entry in self.entries.values())

    def leave(self, handle):
        entry = self.entries.pop(handle)
        if entry.retried:
            self.retried[entry.priority].remove(handle)
        else:
            for group, member in self.path(entry.tenant):
                line = group.lines[entry.priority][member]
                line.remove(handle)
                if not line:
                    del group.lines[entry.priority][member]
                if not group.in_line():
                    group.floor = group.counters[member]
        if all(other.priority != entry.priority for other in self.entries.values()):
            self.credits[entry.priority] = 0.0

    def clear(self):
        self.discarded += len(self.entries)
        self.entries.clear()
        self.begin()

    # Pop order

    def order(self):
        urgent = self.class_next()
        for priority in sorted(range(CLASSES), key=lambda priority: (priority != urgent, priority)):
            yield from list(self.retried[priority])
            for member in self.in_order(self.top, priority):
                yield from self.line_in_order(member, priority)

    def line_in_order(self, member, priority):
        """Return the entries of a member of the top group in the order in which they are tried."""
        if not isinstance(member, Team):
            return list(self.top.lines[priority][member])
        group = self.groups[member.name]
        return [
            handle for tenant in self.in_order(group, priority) for handle in group.lines[priority][tenant]
        ]

    def in_order(self, group, priority):
        if not self.by_tokens:
            return list(group.lines[priority])
        return sorted(
            group.lines[priority],
            key=lambda member: (
                group.counters[member],
                group.turns.get(member, 0),
                group.joined[member, priority],
            ),
        )

    def classes_waiting(self):
        return sorted({entry.priority for entry in self.entries.values()})

    def class_next(self):
        classes = self.classes_waiting()
        due = [priority for priority in classes[1:] if self.credits[priority] >= ONE_POP]
        return max(due, key=lambda priority: self.credits[priority], default=min(classes, default=None))

    def accrue(self, popped):
        for priority in self.classes_waiting()[1:]:
            self.credits[priority] = min(self.credits[priority] + self.min_share, CREDIT_AT_MOST)
        self.credits[popped] = max(self.credits[popped] - 1, 0.0)

    # Counters

    def charge(self, tenant, cost, *, team_cost=None):
        check_arguments(tenant, cost, team_cost=team_cost)
        for (group, member), each in self.charges(tenant, cost, team_cost):
            self.add(group, member, each)
        self.forget_idle(tenant)

    def refund(self, tenant, cost, *, team_cost=None):
        check_arguments(tenant, cost, team_cost=team_cost)
        if self.by_tokens:
            is_known = tenant in self.path(tenant)[-1][0].counters
            for (group, member), each in self.charges(tenant, cost, team_cost):
                self.subtract(group, member, each)
            if is_known:
                self.forget_idle(tenant)

    def subtract(self, group, member, cost):
        if member in group.counters:
            least = group.lifts[member] if member in group.in_line() else group.level()
            after = max(group.counter(member) - cost, least)
            group.counters[member] = min(group.counters[member], after)

    def counter(self, tenant):
        check_arguments(tenant)
        group, member = self.path(tenant)[-1]
        return group.counter(member)

    def team_counter(self, team):
        check_arguments((team, team))
        return self.top.counter(Team(team))

    def add(self, group, member, cost):
        if self.by_tokens:
            group.counters[member] = min(group.counter(member) + cost, 1e300)

    def forget_idle(self, changed):
        if self.waiting(changed):
            return
        group, _ = self.path(changed)[-1]
        self.forget_in(group)
        if group is not self.top and not group.counters:
            self.forget_in(self.top)

    def forget_in(self, group):
        waiting = {member for entry in self.entries.values() for _, member in self.path(entry.tenant)}
        for member in group.counters.keys() - waiting:
            members = self.groups[member.name].counters if isinstance(member, Team) else ()
            if not members and (group.counters[member], group.turns.get(member, 0)) <= (group.level(), 0):
                self.forget(group, member)

    def forget(self, group, member):
        group.counters.pop(member)
        group.turns.pop(member, None)
        if isinstance(member, Team):
            self.groups.pop(member.name)

    # Queries

    def ahead(self, handle):
        if handle not in self.entries and handle is not None:
            raise KeyError(handle)
        future = copy.deepcopy(self)
        if handle is None:
            return [future.pop() for _ in range(sum(entry.left for entry in self.entries.values()))]
        handles = iter(future.pop, handle)
        return list(handles)

    def peek(self):
        return next(iter(self.ahead(None)), None)

    def entry(self, handle):
        entry = self.entries[handle]
        place = (entry.priority, entry.size, entry.kind, entry.retried)
        return FairQueueEntry(entry.tenant, entry.cost, *place, entry.left, entry.begun, entry.team_cost)

    def is_in_line(self, tenant):
        group, member = self.path(tenant)[-1]
        return member in group.in_line()

    def waiting(self, tenant):
        check_arguments(tenant)
        return sum(entry.tenant == tenant for entry in self.entries.values())

    @property
    def tenants(self):
        return len({entry.tenant for entry in self.entries.values()})

    def __len__(self):
        return len(self.entries)

    def __contains__(self, handle):
        return handle in self.entries


def counts(queue):
    """Return all that a queue, or an oracle, counts."""
    left = (queue.popped, queue.discarded, queue.displaced)
    return (len(queue), queue.capacity, queue.tenants, queue.refused, *left)


def pushed(queue):
    """Return how many entries a queue has accepted, if each was for one pop."""
    return len(queue) + queue.popped + queue.discarded + queue.displaced


def check(condition):
    if not condition:
        raise ValueError


def check_arguments(tenant, cost=1.0, priority=1, size=0, kind=0, team_cost=None, count=1):
    for name in tenant if type(tenant) is tuple and len(tenant) == 2 else [tenant]:
        if type(name) not in (str, int):
            raise TypeError("tenant")
    for amount in [cost] if team_cost is None else [cost, team_cost]:
        if not isinstance(amount, (int, float)):
            raise TypeError("cost")
        check(math.isfinite(amount) and amount >= 0)
    if not isinstance(kind, int) or not isinstance(priority, int) or not isinstance(size, int):
        raise TypeError("priority, size or kind")
    if not isinstance(count, int):
        raise TypeError("count")
    check(1 <= count < 2**31)
    check(0 <= kind < 64)
    check(0 <= priority < CLASSES and 0 <= size < 2**48)
