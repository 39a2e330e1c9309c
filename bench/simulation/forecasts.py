"""The accuracy of wait estimates over hours of load in bursts."""

from functools import partial
from random import Random
from statistics import median
from typing import NamedTuple

from fairlead.router.dispatch.estimates import (
    JobSize,
    MeanEstimate,
    QuantileEstimate,
    QuantilePrediction,
    RunningJob,
)
from simulation.clock import Clock
from simulation.simulated_server import MODEL, Order, SimulatedServer
from simulation.workload import MAX_TOKENS, Request, Shape, poisson

SHAPES = [
    Shape(200, 80, 0.5),
    Shape(400, 150, 0.5),
    Shape(800, 250, 0.6),
    Shape(1500, 300, 0.6),
    Shape(300, 600, 0.6),
    Shape(100, 40, 0.5),
]
LARGEST_BURST = 30
SEATS = 8
LEARNING = 0.2  # the first part of the run, which does not count
LONG_WAIT_S = 1.0


class Forecasts(NamedTuple):
    """The median of |estimate - wait| ÷ wait over waits of at least a second, and the coverage of P90."""

    by_arrival: float
    by_fair_position: float
    quantile: float
    p90_coverage: float
    waits: int


class _Estimate(NamedTuple):
    number: int
    by_arrival: float
    by_fair_position: float
    prediction: QuantilePrediction


def forecasts(order: Order, *, length_s: float = 4 * 3600.0, load: float = 0.85, seed: int = 1) -> Forecasts:
    """Return the errors for six tenants with different lengths, which send bursts of 1 to 30 requests."""
    clock, random = Clock(), Random(seed)
    estimating = _EstimatingServer(clock, order)
    for number, shape in enumerate(SHAPES):
        work_s = shape.mean_service_s(estimating.server.speed) * (1 + LARGEST_BURST) / 2
        for time_s in poisson(load * SEATS / len(SHAPES) / work_s, length_s, random):
            for _ in range(random.randint(1, LARGEST_BURST)):
                clock.at(time_s, partial(estimating.submit, shape.request(f"tenant-{number}", random)))
    clock.run(length_s)
    learned = LEARNING * len(estimating.server.requests)
    return _errors(
        [(estimate, waited_s) for estimate, waited_s in estimating.outcomes if estimate.number > learned]
    )


class _EstimatingServer:
    """A server that estimates the wait of every queued request, and records the actual wait."""

    def __init__(self, clock: Clock, order: Order) -> None:
        self.server = SimulatedServer(
            clock, order=order, seats=SEATS, capacity=1000, granted=self._granted, ended=self._ended
        )
        self.outcomes: list[tuple[_Estimate, float]] = []
        self._estimates: dict[Request, _Estimate] = {}
        self._mean = MeanEstimate()
        self._quantile = QuantileEstimate()

    def submit(self, request: Request) -> None:
        server = self.server
        waiting = len(server.waiting)
        server.submit(request)
        if request not in server.waiting:
            return
        ahead = [self._size(other) for other in server.ahead_of(request)]
        running = [self._running(other) for other in server.running]
        running_s = sorted((job.running_s for job in running), reverse=True)
        self._estimates[request] = _Estimate(
            number=len(server.requests),
            by_arrival=self._mean.wait_s(ahead=waiting, seats=SEATS, running_s=running_s),
            by_fair_position=self._mean.wait_s(ahead=len(ahead), seats=SEATS, running_s=running_s),
            prediction=self._quantile.predict(ahead=ahead, running=running, seats=SEATS),
        )

    def _granted(self, request: Request) -> None:
        if (estimate := self._estimates.pop(request, None)) is not None:
            assert request.waited_s is not None
            self._quantile.granted(estimate.prediction, request.waited_s)
            self.outcomes.append((estimate, request.waited_s))

    def _ended(self, request: Request) -> None:
        service_s = self.server.speed.service_s(request)
        self._mean.finished(service_s)
        self._quantile.finished(JobSize(request.prompt_tokens, request.output_tokens), service_s)

    def _size(self, request: Request, so_far: int = 0) -> JobSize:
        tokens = self.server.lengths.predict(request.tenant, MODEL, so_far=so_far, max_tokens=MAX_TOKENS)
        return JobSize(request.prompt_tokens, tokens)

    def _running(self, request: Request) -> RunningJob:
        assert request.granted_s is not None
        running_s = self.server.clock.now_s - request.granted_s
        _, so_far = self.server.speed.progress(request, running_s)
        return RunningJob(self._size(request, so_far), running_s, so_far)


def _errors(waits: list[tuple[_Estimate, float]]) -> Forecasts:
    long = [(estimate, waited_s) for estimate, waited_s in waits if waited_s >= LONG_WAIT_S]

    def error(pairs: list[tuple[float, float]]) -> float:
        return median(abs(estimate_s - waited_s) / waited_s for estimate_s, waited_s in pairs)

    return Forecasts(
        by_arrival=error([(estimate.by_arrival, waited_s) for estimate, waited_s in long]),
        by_fair_position=error([(estimate.by_fair_position, waited_s) for estimate, waited_s in long]),
        quantile=error([(estimate.prediction.wait_s, waited_s) for estimate, waited_s in long]),
        p90_coverage=sum(waited_s <= estimate.prediction.p90_s for estimate, waited_s in waits) / len(waits),
        waits=len(waits),
    )
