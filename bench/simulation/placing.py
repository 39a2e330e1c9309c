"""Placement on sixteen nodes: with own counts and one queue, or with old reports and a queue at each node."""

from collections import deque
from functools import partial
from random import Random
from typing import NamedTuple

from simulation.clock import Clock
from simulation.measures import percentile, waits_s
from simulation.simulated_server import SimulatedServer
from simulation.workload import Request, Shape, Speed, poisson

NODES = 16
SHAPE = Shape(400, 200)
REPORT_EVERY_S = 1.0


class Placing(NamedTuple):
    """How often a request got an idle node if there was one, and the p99 of the waits."""

    idle_hit: float
    p99_s: float


def by_own_counts(*, load: float = 0.8, seats: int = 1, length_s: float = 3600.0, seed: int = 1) -> Placing:
    """Measure the real scheduler, which sends a request to a node when a seat is free."""
    clock, random = Clock(), Random(seed)
    server = SimulatedServer(clock, order="roundRobin", nodes=NODES, seats=seats, capacity=1000)
    for number, time_s in enumerate(_arrivals(load * seats, length_s, random)):
        clock.at(time_s, partial(server.submit, SHAPE.request(f"tenant-{number % 10}", random)))
    clock.run(length_s)
    return Placing(
        server.granted_to_idle / server.granted_while_idle, percentile(waits_s(server.requests), 0.99)
    )


def by_old_reports(*, load: float = 0.8, length_s: float = 3600.0, seed: int = 1) -> Placing:
    """Measure the usual method: a request goes at once to the node with the lowest reported score."""
    clock, random = Clock(), Random(seed)
    nodes = [_QueueingNode(clock) for _ in range(NODES)]
    for node in nodes:  # once a second, at different times
        clock.after(random.random() * REPORT_EVERY_S, partial(clock.every, REPORT_EVERY_S, node.report))
    requests: list[Request] = []
    hits = chances = 0

    def submit(request: Request) -> None:
        nonlocal hits, chances
        least = min(node.score for node in nodes)
        node = random.choice([node for node in nodes if node.score == least])
        if any(other.jobs == 0 for other in nodes):
            chances += 1
            hits += node.jobs == 0
        requests.append(request)
        node.submit(request)

    for time_s in _arrivals(load, length_s, random):
        clock.at(time_s, partial(submit, SHAPE.request("tenant", random)))
    clock.run(length_s)
    return Placing(hits / chances, percentile(waits_s(requests), 0.99))


class _QueueingNode:
    """A node with one seat and a queue. `score` is 0.3·load + 0.7·jobs per seat, at its last report."""

    def __init__(self, clock: Clock) -> None:
        self.score = 0.0
        self._clock = clock
        self._queue: deque[Request] = deque()
        self._running = False

    @property
    def jobs(self) -> int:
        """The number of running and waiting requests."""
        return len(self._queue) + self._running

    def submit(self, request: Request) -> None:
        """Queue a request."""
        request.submitted_s = self._clock.now_s
        self._queue.append(request)
        self._start()

    def report(self) -> None:
        """Update the score."""
        self.score = 0.3 * min(self.jobs, 1) + 0.7 * self.jobs

    def _start(self) -> None:
        if self._queue and not self._running:
            self._running = True
            request = self._queue.popleft()
            request.granted_s = self._clock.now_s
            self._clock.after(Speed().service_s(request), self._finish)

    def _finish(self) -> None:
        self._running = False
        self._start()


def _arrivals(load: float, length_s: float, random: Random) -> list[float]:
    return list(poisson(load * NODES / SHAPE.mean_service_s(Speed()), length_s, random))
