"""What a FairQueue does, in Python so plain that it is obviously right. Slow on purpose."""

import copy
import math

from fairlead._cext.fairqueue import Full, Statistics

CLASSES = 8


class FairQueueOracle:
    """The interface of `FairQueue`; its handles are 0, 1, 2, …"""

    def __init__(self, *, capacity):
        if capacity < 0:
            raise ValueError("capacity")
        self.capacity = capacity
        # One ring a class: tenant -> handles in its line. A dict is in the order of insertion, so its
        # first tenant is the one whose turn it is, and one that was served goes to the back.
        self.rings = [{} for _ in range(CLASSES)]
        # One a class: the tenants that the round has served, whether they still have a line or not.
        self.served = [set() for _ in range(CLASSES)]
        self.entries = {}  # handle -> (tenant, cost, priority)
        self.pushed = self.popped = self.discarded = self.refused = 0

    def push(self, tenant, cost=1.0, *, priority=1):
        check_arguments(tenant, cost, priority)
        if len(self) >= self.capacity:
            self.refused += 1
            raise Full
        handle = self.new_entry(tenant, cost, priority)
        self.line(tenant, priority).append(handle)
        return handle

    def push_front(self, tenant, cost=1.0, *, priority=1):
        check_arguments(tenant, cost, priority)
        handle = self.new_entry(tenant, cost, priority)
        self.line(tenant, priority).insert(0, handle)
        return handle

    def pop(self):
        for ring, served in zip(self.rings, self.served, strict=True):
            for tenant, line in ring.items():
                if tenant in served:  # and so all behind it: a new round
                    served.clear()
                served.add(tenant)
                handle = line.pop(0)
                del self.entries[handle]
                self.popped += 1
                self.turn(ring, tenant)
                return handle
        raise IndexError("empty")

    def discard(self, handle):
        if handle not in self.entries:
            return False
        tenant, _cost, priority = self.entries.pop(handle)
        line = self.rings[priority][tenant]
        line.remove(handle)
        if not line:
            del self.rings[priority][tenant]
        self.discarded += 1
        return True

    def clear(self):
        for handle in list(self.entries):
            self.discard(handle)
        for served in self.served:
            served.clear()

    def position(self, handle):
        if handle not in self.entries:
            raise KeyError(handle)
        future = copy.deepcopy(self)
        position = 0
        while future.pop() != handle:
            position += 1
        return position

    def tenant(self, handle):
        return self.entries[handle][0]

    def cost(self, handle):
        return self.entries[handle][1]

    def waiting(self, tenant):
        check_arguments(tenant)
        return sum(owner == tenant for owner, _cost, _priority in self.entries.values())

    def statistics(self):
        return Statistics(
            length=len(self),
            capacity=self.capacity,
            tenants=len({tenant for tenant, _cost, _priority in self.entries.values()}),
            pushed=self.pushed,
            popped=self.popped,
            discarded=self.discarded,
            refused=self.refused,
        )

    def __len__(self):
        return len(self.entries)

    def __contains__(self, handle):
        return handle in self.entries

    def new_entry(self, tenant, cost, priority):
        handle = self.pushed
        self.entries[handle] = (tenant, cost, priority)
        self.pushed += 1
        return handle

    def line(self, tenant, priority):
        ring, served = self.rings[priority], self.served[priority]
        if tenant not in ring:
            ring[tenant] = []
            order = sorted(ring, key=lambda member: member in served)  # a stable sort: the served stay behind
            self.rings[priority] = {member: ring[member] for member in order}
        return self.rings[priority][tenant]

    def turn(self, ring, tenant):
        line = ring.pop(tenant)
        if line:
            ring[tenant] = line


def check_arguments(tenant, cost=1.0, priority=1):
    if type(tenant) not in (str, int):
        raise TypeError("tenant")
    if not isinstance(cost, (int, float)) or not isinstance(priority, int):
        raise TypeError("cost or priority")
    if not (math.isfinite(cost) and cost >= 0 and 0 <= priority < CLASSES):
        raise ValueError("cost or priority")
