"""A fair queue in plain Python, written to be obviously correct. Slow on purpose."""

import copy
import math
from dataclasses import dataclass

from fairlead._cext.fairqueue import FairQueueEntry, QueueFullError

CLASSES = 8
CREDIT_AT_MOST = 4.0
SLACK = 2
ONE_POP = 1 - 1e-9


@dataclass
class Entry:
    tenant: str | int
    cost: float
    priority: int
    size: int
    retried: bool
    kind: int
    passed: int = 0


class FairQueueOracle:
    """The interface of `FairQueue`; its handles are 0, 1, 2, …

    It remembers every tenant. The kernel remembers the 2048 that matter most.
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
        # One of each per class. A tenant's line has its handles except retried ones. A dict keeps the order
        # of insertion, so under round robin its first tenant has the next turn.
        self.lines = [{} for _ in range(CLASSES)]
        self.retried = [[] for _ in range(CLASSES)]
        self.credits = [0.0] * CLASSES
        self.served = [set() for _ in range(CLASSES)]  # tenants served in this round, with or without a line
        # One entry for each known tenant.
        self.counters, self.lifts, self.turns = {}, {}, {}
        self.joined = {}  # (tenant, priority) -> when its line began
        self.moment = 0
        self.floor = 0.0

    # Adding entries

    def push(self, tenant, cost=1.0, *, priority=1, size=0, kind=0, retried=False):
        check_arguments(tenant, cost, priority, size, kind)
        if len(self) >= self.capacity and not retried:
            self.refused += 1
            raise QueueFullError
        handle = self.new_entry(Entry(tenant, cost, priority, size, retried, kind))
        if retried:
            self.retried[priority].insert(0, handle)
        else:
            self.line(tenant, priority).append(handle)
        return handle

    def new_entry(self, entry):
        handle = self.pushed
        self.entries[handle] = entry
        self.pushed += 1
        return handle

    def line(self, tenant, priority):
        if tenant not in self.lines[priority]:
            self.join(tenant, priority)
        return self.lines[priority][tenant]

    def join(self, tenant, priority):
        if tenant not in self.in_line():
            self.lift(tenant)
        self.moment += 1
        self.joined[tenant, priority] = self.moment
        lines, served = self.lines[priority], self.served[priority]
        lines[tenant] = []
        order = sorted(lines, key=lambda member: member in served)  # a stable sort: served tenants come last
        self.lines[priority] = {member: lines[member] for member in order}

    def lift(self, tenant):
        self.lifts[tenant] = self.level()
        self.counters[tenant] = max(self.counters.get(tenant, 0.0), self.level())

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
        before = self.counters.get(entry.tenant, 0.0)
        if not entry.retried:
            self.add(entry.tenant, entry.cost)  # before `leave`, after which `counter` could lift it
        self.leave(handle)
        if not self.in_line() and not entry.retried:
            self.floor = before
        self.popped += 1
        if not entry.retried:
            self.take_turn(entry)
        self.forget_idle(entry.tenant)

    def take_turn(self, entry):
        served, lines = self.served[entry.priority], self.lines[entry.priority]
        if entry.tenant in served:  # a second turn starts the next round
            served.clear()
        served.add(entry.tenant)
        if entry.tenant in lines:
            lines[entry.tenant] = lines.pop(entry.tenant)
        self.moment += 1
        self.turns[entry.tenant] = self.moment

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
            order = self.tenants_in_order(other)
            if not order:
                continue
            longest = max(reversed(order), key=lambda member: len(self.lines[other][member]))
            line = self.lines[other][longest]
            if other > priority or len(line) >= self.waiting(tenant) + self.slack:
                handle = line[-1]
                self.leave(handle)
                self.forget_idle(longest)
                self.displaced += 1
                return handle
        return None

    def leave(self, handle):
        entry = self.entries.pop(handle)
        if entry.retried:
            self.retried[entry.priority].remove(handle)
        else:
            line = self.lines[entry.priority][entry.tenant]
            line.remove(handle)
            if not line:
                del self.lines[entry.priority][entry.tenant]
            if not self.in_line():
                self.floor = self.counters[entry.tenant]
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
            for tenant in self.tenants_in_order(priority):
                yield from list(self.lines[priority][tenant])

    def tenants_in_order(self, priority):
        if not self.by_tokens:
            return list(self.lines[priority])
        return sorted(
            self.lines[priority],
            key=lambda tenant: (
                self.counters[tenant],
                self.turns.get(tenant, 0),
                self.joined[tenant, priority],
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

    def charge(self, tenant, cost):
        check_arguments(tenant, cost)
        self.add(tenant, cost)
        self.forget_idle(tenant)

    def refund(self, tenant, cost):
        check_arguments(tenant, cost)
        if self.by_tokens and tenant in self.counters:
            least = self.lifts[tenant] if tenant in self.in_line() else self.level()
            after = max(self.counter(tenant) - cost, least)
            self.counters[tenant] = min(self.counters[tenant], after)
            self.forget_idle(tenant)

    def counter(self, tenant):
        check_arguments(tenant)
        own = self.counters.get(tenant, 0.0)
        return own if tenant in self.in_line() else max(own, self.level())

    def add(self, tenant, cost):
        if self.by_tokens:
            self.counters[tenant] = min(self.counter(tenant) + cost, 1e300)

    def level(self):
        return min((self.counters[tenant] for tenant in self.in_line()), default=self.floor)

    def in_line(self):
        return {tenant for lines in self.lines for tenant in lines}

    def forget_idle(self, changed):
        waiting = {entry.tenant for entry in self.entries.values()}
        if changed in waiting:
            return
        for tenant in self.counters.keys() - waiting:
            if (self.counters[tenant], self.turns.get(tenant, 0)) <= (self.level(), 0):
                self.counters.pop(tenant)
                self.turns.pop(tenant, None)

    # Queries

    def ahead(self, handle):
        if handle not in self.entries and handle is not None:
            raise KeyError(handle)
        future = copy.deepcopy(self)
        if handle is None:
            return [future.pop() for _ in range(len(self))]
        handles = iter(future.pop, handle)
        return list(handles)

    def entry(self, handle):
        entry = self.entries[handle]
        return FairQueueEntry(entry.tenant, entry.cost, entry.priority, entry.size, entry.kind, entry.retried)

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
    """Return how many entries a queue has accepted."""
    return len(queue) + queue.popped + queue.discarded + queue.displaced


def check(condition):
    if not condition:
        raise ValueError


def check_arguments(tenant, cost=1.0, priority=1, size=0, kind=0):
    if type(tenant) not in (str, int):
        raise TypeError("tenant")
    if not isinstance(cost, (int, float)) or not isinstance(priority, int) or not isinstance(size, int):
        raise TypeError("cost, priority or size")
    if not isinstance(kind, int):
        raise TypeError("kind")
    check(0 <= kind < 64)
    check(math.isfinite(cost) and cost >= 0 and 0 <= priority < CLASSES and 0 <= size < 2**48)
