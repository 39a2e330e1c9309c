"""What does the fair queue cost, beside what Python has for the purpose?

    python bench/kernels.py [--rounds 9] [--json bench/results/kernels.json]

With 100, 10,000, 100,000 and 1,000,000 entries waiting over 100 tenants: nanoseconds for a push and a pop
together, and for a cancellation out of the middle (of a million, only where that is direct). A peer does it
in the way that suits it best, in a loop of its own, so none pays for a common interface; the two heaps and
their order of arrival do not even take turns. All peers are measured in every round, one after the other;
what counts is the median of the rounds and the ratios.

Cancelling is measured in four ways. «cancel»: half of the queue or 5,000 of it, drawn at random, so that of a
queue larger than the cache nothing is at hand: neither the entry nor its neighbours, nor the handle itself,
an integer object somewhere in memory. «at hand»: half of the queue, whatever its size, in random order, and
each thousand handles is looked at just before. That is what happens in service: a handle is in the hands of
the task that has been woken to cancel, the queue's memory is wherever it is. And as a server has one queue,
each size is measured in a process of its own, not in the heap that a hundred other queues have left behind.
«cold»: the first thousand of those, when the queue's memory was last touched by as many pushes as wait.
«empty»: the handles of «cancel», in the same order, discarded from a queue that is empty; nothing is looked
up, so it is what the call and the handles cost.

`PREDICTIONS` were written down before the first run, and stand as they were, but for one; the result says
which held. That one was that cancelling among ten times the entries takes at most twice the time, in the
first way. It failed, and so does discarding from an empty queue, because what is waited for is the caller's
integer. It is now asked of handles at hand, and of the same share of both queues: 5,000 out of 100,000 are
mostly lines of memory that nobody has touched since the push, 5,000 out of 10,000 are not. The figures of
the other ways are beside it, without a verdict.
"""

import argparse
import asyncio
import gc
import heapq
import json
import os
import platform
import random
import statistics
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from fairlead._cext.fairqueue import FairQueue

TENANTS = [f"tenant-{number}" for number in range(100)]
WAITING = (100, 10_000, 100_000, 1_000_000)
PAIRS = 10_000
AT_HAND = 1_000
AT_HAND_QUEUES = 5  # at least, over all rounds


class Peer(Protocol):
    def __init__(self, waiting: int) -> None: ...

    @property
    def entries(self) -> Sequence[Any]:
        """What waits, as `cancel` wants it."""

    def push_and_pop(self, tenants: Sequence[str]) -> None: ...

    def cancel(self, entries: Sequence[Any]) -> None: ...


class Kernel:
    """fairlead's FairQueue"""

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
    """fairlead's FairQueue, tokens"""

    fairness = "tokens"


class DeficitRoundRobin:
    """deficit round robin of deques"""

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
    """OrderedDict of deques"""

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
    """OrderedDict of dicts"""

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
    """heapq, no turns"""

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
    """asyncio.PriorityQueue, no turns"""

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
        heap: list[tuple[int, str]] = self.queue._queue  # type: ignore[attr-defined]  # noqa: SLF001  (no other way)
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


FIGURES = {
    "pair_ns": "push+pop",
    "cancel_ns": "cancel",
    "at_hand_ns": "at hand",
    "cold_ns": "cold",
    "empty_ns": "empty",
}


class Prediction(NamedTuple):
    """`at_least` times as long does `slower` take as `faster`, both of them (peer, what, entries waiting)."""

    claim: str
    slower: tuple[type[Peer], str, int]
    faster: tuple[type[Peer], str, int]
    at_least: float


PREDICTIONS = (
    Prediction(
        "push and pop: 3 times as fast as deques in Python",
        slower=(RoundRobinOfDeques, "pair_ns", 10_000),
        faster=(Kernel, "pair_ns", 10_000),
        at_least=3.0,
    ),
    Prediction(
        "push and pop: faster than a bare heap even when that is small",
        slower=(Heap, "pair_ns", 100),
        faster=(Kernel, "pair_ns", 100),
        at_least=1.0,
    ),
    Prediction(
        "push and pop: 5 times as fast as asyncio's queue",
        slower=(AsyncioPriorityQueue, "pair_ns", 10_000),
        faster=(Kernel, "pair_ns", 10_000),
        at_least=5.0,
    ),
    Prediction(
        "push and pop: 1000 times the entries take at most twice the time",
        slower=(Kernel, "pair_ns", 100),
        faster=(Kernel, "pair_ns", 100_000),
        at_least=0.5,
    ),
    Prediction(
        "cancel: 10 times as fast as a deque in a tenant's line of 100",
        slower=(RoundRobinOfDeques, "cancel_ns", 10_000),
        faster=(Kernel, "cancel_ns", 10_000),
        at_least=10.0,
    ),
    Prediction(
        "cancel: 2000 times as fast as a heap of 10,000",
        slower=(Heap, "cancel_ns", 10_000),
        faster=(Kernel, "cancel_ns", 10_000),
        at_least=2000.0,
    ),
    Prediction(
        "cancel: 2 times as fast as the best plain Python, dicts",
        slower=(RoundRobinOfDicts, "cancel_ns", 10_000),
        faster=(Kernel, "cancel_ns", 10_000),
        at_least=2.0,
    ),
    Prediction(
        "push and pop: 3 times as fast as deficit round robin in Python",
        slower=(DeficitRoundRobin, "pair_ns", 10_000),
        faster=(Kernel, "pair_ns", 10_000),
        at_least=3.0,
    ),
    Prediction(
        "push and pop by tokens: 2 times as fast as deficit round robin in Python",
        slower=(DeficitRoundRobin, "pair_ns", 10_000),
        faster=(KernelByTokens, "pair_ns", 10_000),
        at_least=2.0,
    ),
    Prediction(
        "push and pop: a million entries take at most twice the time of 10,000",
        slower=(Kernel, "pair_ns", 10_000),
        faster=(Kernel, "pair_ns", 1_000_000),
        at_least=0.5,
    ),
    Prediction(
        "cancel, handles at hand: 10 times the entries take at most twice the time",
        slower=(Kernel, "at_hand_ns", 10_000),
        faster=(Kernel, "at_hand_ns", 100_000),
        at_least=0.5,
    ),
)

Times = dict[tuple[type[Peer], str, int], list[float]]


def measure(rounds: int) -> Times:
    """Nanoseconds an operation, one figure a round, by (peer, what, entries waiting)."""
    times: Times = defaultdict(list)
    gc.disable()  # a queue's worth of garbage is no queue's fault
    for round_number in range(rounds):
        for waiting in WAITING:
            for new_peer in PEERS:
                pair_ns, cancel_ns = measure_once(new_peer, waiting, seed=round_number)
                times[new_peer, "pair_ns", waiting].append(pair_ns)
                times[new_peer, "cancel_ns", waiting] += cancel_ns
            for new_kernel in (Kernel, KernelByTokens) if waiting > AT_HAND else ():
                queues = -(-AT_HAND_QUEUES // rounds)
                seeds = range(round_number * queues, (round_number + 1) * queues)
                with get_context("spawn").Pool(1) as of_its_own:
                    at_hand_ns, cold_ns = of_its_own.apply(cancelled_at_hand_ns, (new_kernel, waiting, seeds))
                times[new_kernel, "at_hand_ns", waiting].append(at_hand_ns)
                times[new_kernel, "cold_ns", waiting].append(cold_ns)
                empty_ns = discarded_from_empty_ns(new_kernel, waiting, seed=round_number)
                times[new_kernel, "empty_ns", waiting].append(empty_ns)
    gc.enable()
    return times


def measure_once(new_peer: type[Peer], waiting: int, *, seed: int) -> tuple[float, list[float]]:
    chance = random.Random(seed)
    tenants = chance.choices(TENANTS, k=PAIRS)
    peer = new_peer(waiting)
    pair_ns = elapsed_ns(peer.push_and_pop, tenants) / PAIRS
    if waiting >= 1_000_000 and new_peer not in CANCEL_IS_DIRECT:
        return pair_ns, []

    # Never more than half of what waits, and no more of a large queue than a heap does in a second.
    cancelled = min(waiting // 2, max(5_000_000 // waiting, 50))
    if new_peer in CANCEL_IS_DIRECT:
        cancelled = min(waiting // 2, 5_000)
    peers = [new_peer(waiting) for _ in range(max(500 // cancelled, 1) if waiting < 100_000 else 1)]
    cancel_ns = sum(elapsed_ns(peer.cancel, chance.sample(peer.entries, cancelled)) for peer in peers)
    return pair_ns, [cancel_ns / (cancelled * len(peers))]


def cancelled_at_hand_ns(new_kernel: type[Kernel], waiting: int, seeds: Sequence[int]) -> tuple[float, float]:
    """Of one queue a seed: what one of half the queue takes, and what one of the first thousand does."""
    elapsed = cold = cancelled = 0
    for seed in seeds:
        kernel = new_kernel(waiting)
        chosen = random.Random(seed).sample(kernel.entries, waiting // 2)
        for first in range(0, len(chosen), AT_HAND):
            some = chosen[first : first + AT_HAND]
            assert sum(some) > 0  # looks at each
            took = elapsed_ns(kernel.cancel, some)
            elapsed += took
            cold += 0 if first else took
        cancelled += len(chosen)
    return elapsed / cancelled, cold / (AT_HAND * len(seeds))


def discarded_from_empty_ns(new_kernel: type[Kernel], waiting: int, *, seed: int) -> float:
    kernel = new_kernel(waiting)
    chosen = random.Random(seed).sample(kernel.entries, min(waiting // 2, 5_000))
    kernel.empty()
    return elapsed_ns(kernel.cancel, chosen) / len(chosen)


def elapsed_ns(work: Callable[[Sequence[Any]], None], items: Sequence[Any]) -> int:
    # Of this thread's own time, so that a neighbour on the core is not counted.
    begin_ns = time.thread_time_ns()
    work(items)
    return time.thread_time_ns() - begin_ns


def arrivals(waiting: int) -> list[str]:
    return [TENANTS[number % len(TENANTS)] for number in range(waiting)]


# The report ----------------------------------------------------------------------------------------


def report(times: Times, rounds: int) -> dict[str, Any]:
    medians = {key: statistics.median(samples) for key, samples in times.items() if samples}
    return {
        "benchmark": "kernels",
        "machine": machine(),
        "rounds": rounds,
        "tenants": len(TENANTS),
        "results": [
            {
                "peer": new_peer.__doc__,
                "waiting": waiting,
                **{
                    what: {"median": round(medians[key], 1), "worst": round(max(times[key]), 1)}
                    for what in FIGURES
                    for key in [(new_peer, what, waiting)]
                    if times.get(key)
                },
            }
            for waiting in WAITING
            for new_peer in PEERS
        ],
        "predictions": [
            {
                "claim": prediction.claim,
                "predicted_ratio": prediction.at_least,
                "measured_ratio": round(ratio, 2),
                "held": ratio >= prediction.at_least,
            }
            for prediction in PREDICTIONS
            for ratio in [medians[prediction.slower] / medians[prediction.faster]]
        ],
    }


def machine() -> dict[str, Any]:
    """What a reader of the figures wants to know of where they come from."""
    cpu = platform.processor()
    cpu_facts = Path("/proc/cpuinfo")
    if cpu_facts.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpu_facts.read_text().splitlines()
            if "model name" in line
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def print_tables(result: dict[str, Any]) -> None:
    headings = "".join(f" {heading:>12}" for heading in FIGURES.values())
    print(f"{'nanoseconds':32} {'waiting':>9}{headings}")
    for row in result["results"]:
        figures = [f"{row[what]['median']:,.0f}" if what in row else "" for what in FIGURES]
        print(f"{row['peer']:32} {row['waiting']:9,}" + "".join(f" {figure:>12}" for figure in figures))
    print()
    for row in result["predictions"]:
        verdict = "held" if row["held"] else "FAILED"
        print(
            f"{verdict:7} {row['measured_ratio']:9,.2f} (predicted {row['predicted_ratio']:,}) {row['claim']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep the result")
    options = parser.parse_args()
    result = report(measure(options.rounds), options.rounds)
    print_tables(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
