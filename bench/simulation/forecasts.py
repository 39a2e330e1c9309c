"""How right the forecasts of a wait come out, over hours of work that comes in bursts."""

from functools import partial
from random import Random
from statistics import median
from typing import NamedTuple

from fairlead.dispatch.estimate import Forecast, JobSize, MeanEstimate, QuantileEstimate, RunningJob
from simulation.clock import Clock
from simulation.desk import MODEL, Desk, Order
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
LEARNING = 0.2  # the part of the run in which forecasts are made and learned from, but not judged
WORTH_TELLING_S = 1.0


class Forecasts(NamedTuple):
    """Median of |foretold - waited| ÷ waited over the waits of a second and more, and P90's coverage."""

    by_arrival: float
    by_fair_position: float
    quantile: float
    p90_coverage: float
    waits: int


class _Told(NamedTuple):
    number: int
    by_arrival: float
    by_fair_position: float
    forecast: Forecast


def forecasts(order: Order, *, length_s: float = 4 * 3600.0, load: float = 0.85, seed: int = 1) -> Forecasts:
    """Six tenants, each with lengths of its own, send bursts of 1 to 30 requests, for an equal part each."""
    clock, random = Clock(), Random(seed)
    oracle = _Oracle(clock, order)
    for number, shape in enumerate(SHAPES):
        work_s = shape.mean_service_s(oracle.desk.speed) * (1 + LARGEST_BURST) / 2
        for time_s in poisson(load * SEATS / len(SHAPES) / work_s, length_s, random):
            for _ in range(random.randint(1, LARGEST_BURST)):
                clock.at(time_s, partial(oracle.submit, shape.request(f"tenant-{number}", random)))
    clock.run(length_s)
    learned = LEARNING * len(oracle.desk.requests)
    return _judge([(told, waited_s) for told, waited_s in oracle.outcomes if told.number > learned])


class _Oracle:
    """A desk that tells everybody who has to wait how long, and remembers how long it was."""

    def __init__(self, clock: Clock, order: Order) -> None:
        self.desk = Desk(
            clock, order=order, seats=SEATS, capacity=1000, granted=self._granted, ended=self._ended
        )
        self.outcomes: list[tuple[_Told, float]] = []
        self._told: dict[Request, _Told] = {}
        self._mean = MeanEstimate()
        self._quantile = QuantileEstimate()

    def submit(self, request: Request) -> None:
        desk = self.desk
        waiting = len(desk.waiting)
        desk.submit(request)
        if request not in desk.waiting:
            return
        ahead = [self._size(other) for other in desk.ahead_of(request)]
        running = [self._running(other) for other in desk.running]
        running_s = sorted((job.running_s for job in running), reverse=True)
        self._told[request] = _Told(
            number=len(desk.requests),
            by_arrival=self._mean.wait_s(ahead=waiting, seats=SEATS, running_s=running_s),
            by_fair_position=self._mean.wait_s(ahead=len(ahead), seats=SEATS, running_s=running_s),
            forecast=self._quantile.forecast(ahead=ahead, running=running, seats=SEATS),
        )

    def _granted(self, request: Request) -> None:
        if (told := self._told.pop(request, None)) is not None:
            assert request.waited_s is not None
            self._quantile.granted(told.forecast, request.waited_s)
            self.outcomes.append((told, request.waited_s))

    def _ended(self, request: Request) -> None:
        service_s = self.desk.speed.service_s(request)
        self._mean.finished(service_s)
        self._quantile.finished(JobSize(request.prompt_tokens, request.output_tokens), service_s)

    def _size(self, request: Request, so_far: int = 0) -> JobSize:
        tokens = self.desk.lengths.predict(request.tenant, MODEL, so_far=so_far, max_tokens=MAX_TOKENS)
        return JobSize(request.prompt_tokens, tokens)

    def _running(self, request: Request) -> RunningJob:
        assert request.granted_s is not None
        running_s = self.desk.clock.now_s - request.granted_s
        _, so_far = self.desk.speed.progress(request, running_s)
        return RunningJob(self._size(request, so_far), running_s, so_far)


def _judge(judged: list[tuple[_Told, float]]) -> Forecasts:
    long = [(foretold, waited_s) for foretold, waited_s in judged if waited_s >= WORTH_TELLING_S]

    def error(pairs: list[tuple[float, float]]) -> float:
        return median(abs(foretold_s - waited_s) / waited_s for foretold_s, waited_s in pairs)

    return Forecasts(
        by_arrival=error([(foretold.by_arrival, waited_s) for foretold, waited_s in long]),
        by_fair_position=error([(foretold.by_fair_position, waited_s) for foretold, waited_s in long]),
        quantile=error([(foretold.forecast.wait_s, waited_s) for foretold, waited_s in long]),
        p90_coverage=sum(waited_s <= told.forecast.p90_s for told, waited_s in judged) / len(judged),
        waits=len(judged),
    )
