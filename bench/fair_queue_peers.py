"""The fair queue's kernel and implementations in Python, as `fair_queue.py` measures them.

Each runs in a loop of its own, without a common interface. The two heaps keep the order of arrival and do not
alternate between tenants.
"""

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import count
from typing import Any, Literal, Protocol

from fairlead._cext.fairqueue import FairQueue

TENANTS = [f"tenant-{number}" for number in range(100)]


def arrivals(waiting: int) -> list[str]:
    return [TENANTS[number % len(TENANTS)] for number in range(waiting)]


class Peer(Protocol):
    label: str  # a key of the result

    def __init__(self, waiting: int) -> None: ...

    @property
    def entries(self) -> Sequence[Any]:
        """The waiting entries, as arguments of `cancel`."""

    def push_and_pop(self, tenants: Sequence[str]) -> None: ...

    def cancel(self, entries: Sequence[Any]) -> None: ...


class Kernel:
    """The kernel with round robin."""

    label = "fairlead's FairQueue"

    fairness: Literal["roundRobin", "tokens"] = "roundRobin"

    def __init__(self, waiting: int) -> None:
        self.queue = FairQueue(capacity=waiting + 1, fairness=self.fairness)
        self.entries = [self.queue.push(tenant) for tenant in arrivals(waiting)]

    def push_and_pop(self, tenants: Sequence[str]) -> None:
        push, pop = self.queue.push, self.queue.pop
        for tenant in tenants:
            push(tenant)
            pop()

    def cancel(self, entries: Sequence[int]) -> None:
        discard = self.queue.discard
        for entry in entries:
            discard(entry)

    def empty(self) -> None:
        self.queue.clear()


class KernelByTokens(Kernel):
    """The kernel with token fairness."""

    label = "fairlead's FairQueue, tokens"

    fairness = "tokens"


class DeficitRoundRobin:
    """Deficit round robin: a deque and a deficit for each tenant."""

    label = "deficit round robin of deques"

    quantum = 1.0

    def __init__(self, waiting: int) -> None:
        self.number = count()
        self.lines: dict[str, deque[tuple[int, float]]] = {}
        self.deficits: dict[str, float] = {}
        self.ring: deque[str] = deque()
        self.entries = []
        for tenant in arrivals(waiting):
            entry = (next(self.number), 1.0)
            if tenant not in self.lines:
                self.lines[tenant] = deque()
                self.deficits[tenant] = 0.0
                self.ring.append(tenant)
            self.lines[tenant].append(entry)
            self.entries.append((tenant, entry))

    def push_and_pop(self, tenants: Sequence[str]) -> None:
        lines, deficits, ring, number = self.lines, self.deficits, self.ring, self.number
        quantum = self.quantum
        for tenant in tenants:
            line = lines.get(tenant)
            if line is None:
                line = lines[tenant] = deque()
                deficits[tenant] = 0.0
                ring.append(tenant)
            line.append((next(number), 1.0))

            while True:
                served = ring[0]
                line = lines[served]
                cost = line[0][1]
                if deficits[served] >= cost:
                    break
                deficits[served] += quantum
                if deficits[served] >= cost:
                    break
                ring.rotate(-1)
            line.popleft()
            if line:
                deficits[served] -= cost
                ring.rotate(-1)
            else:
                ring.popleft()
                del lines[served], deficits[served]

    def cancel(self, entries: Sequence[tuple[str, tuple[int, float]]]) -> None:
        lines = self.lines
        for tenant, entry in entries:
            line = lines[tenant]
            line.remove(entry)
            if not line:
                self.ring.remove(tenant)
                del lines[tenant], self.deficits[tenant]


class RoundRobinOfDeques:
    """Round robin: an OrderedDict with a deque for each tenant."""

    label = "OrderedDict of deques"

    def __init__(self, waiting: int) -> None:
        self.number = count()
        self.ring: OrderedDict[str, deque[int]] = OrderedDict()
        self.entries = []
        for tenant in arrivals(waiting):
            entry = next(self.number)
            self.ring.setdefault(tenant, deque()).append(entry)
            self.entries.append((tenant, entry))

    def push_and_pop(self, tenants: Sequence[str]) -> None:
        ring, number = self.ring, self.number
        for tenant in tenants:
            line = ring.get(tenant)
            if line is None:
                line = ring[tenant] = deque()
            line.append(next(number))

            served, line = next(iter(ring.items()))
            line.popleft()
            if line:
                ring.move_to_end(served)
            else:
                del ring[served]

    def cancel(self, entries: Sequence[tuple[str, int]]) -> None:
        ring = self.ring
        for tenant, entry in entries:
            line = ring[tenant]
            line.remove(entry)
            if not line:
                del ring[tenant]


class RoundRobinOfDicts:
    """Round robin: an OrderedDict with a dict for each tenant, so that cancelling needs no search."""

    label = "OrderedDict of dicts"

    def __init__(self, waiting: int) -> None:
        self.number = count()
        self.ring: OrderedDict[str, OrderedDict[int, None]] = OrderedDict()
        self.entries = []
        for tenant in arrivals(waiting):
            entry = next(self.number)
            self.ring.setdefault(tenant, OrderedDict())[entry] = None
            self.entries.append((tenant, entry))

    def push_and_pop(self, tenants: Sequence[str]) -> None:
        ring, number = self.ring, self.number
        for tenant in tenants:
            line = ring.get(tenant)
            if line is None:
                line = ring[tenant] = OrderedDict()
            line[next(number)] = None

            served, line = next(iter(ring.items()))
            line.popitem(last=False)
            if line:
                ring.move_to_end(served)
            else:
                del ring[served]

    def cancel(self, entries: Sequence[tuple[str, int]]) -> None:
        ring = self.ring
        for tenant, entry in entries:
            line = ring[tenant]
            del line[entry]
            if not line:
                del ring[tenant]


class Heap:
    """A heap in order of arrival, without round robin."""

    label = "heapq, no turns"

    def __init__(self, waiting: int) -> None:
        self.number = count()
        self.heap = [(next(self.number), tenant) for tenant in arrivals(waiting)]
        self.entries = list(self.heap)

    def push_and_pop(self, tenants: Sequence[str]) -> None:
        heap, number, push, pop = self.heap, self.number, heapq.heappush, heapq.heappop
        for tenant in tenants:
            push(heap, (next(number), tenant))
            pop(heap)

    def cancel(self, entries: Sequence[tuple[int, str]]) -> None:
        for entry in entries:
            self.heap.remove(entry)
            heapq.heapify(self.heap)


class AsyncioPriorityQueue:
    """asyncio's priority queue in order of arrival, without round robin."""

    label = "asyncio.PriorityQueue, no turns"

    def __init__(self, waiting: int) -> None:
        self.number = count()
        self.queue: asyncio.PriorityQueue[tuple[int, str]] = asyncio.PriorityQueue(waiting + 1)
        self.entries = [(next(self.number), tenant) for tenant in arrivals(waiting)]
        for entry in self.entries:
            self.queue.put_nowait(entry)

    def push_and_pop(self, tenants: Sequence[str]) -> None:
        number, push, pop = self.number, self.queue.put_nowait, self.queue.get_nowait
        for tenant in tenants:
            push((next(number), tenant))
            pop()

    def cancel(self, entries: Sequence[tuple[int, str]]) -> None:
        heap: list[tuple[int, str]] = self.queue._queue  # type: ignore[attr-defined]  # noqa: SLF001  (there is no public method)
        for entry in entries:
            heap.remove(entry)
            heapq.heapify(heap)


PEERS: tuple[type[Peer], ...] = (
    Kernel,
    KernelByTokens,
    DeficitRoundRobin,
    RoundRobinOfDeques,
    RoundRobinOfDicts,
    Heap,
    AsyncioPriorityQueue,
)
CANCEL_IS_DIRECT = (Kernel, KernelByTokens, RoundRobinOfDicts)
