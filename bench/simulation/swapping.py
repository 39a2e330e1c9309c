"""Swaps between three models of which one fits in memory: their number, and the waits for the rare models.

Six clients send requests for the first model without pauses. Each of the other two is requested about once a
minute. Compares the real scheduler with a strict first come, first served queue on the same requests.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import NamedTuple

from fairlead.base.errors import FairleadError
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.effects import PausedModel
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.swaps import STARVATION_SHARE
from fairlead.router.dispatch.ticket import LoadRequest, Ticket
from fairlead.router.swap.lru import LruPolicy
from fairlead.router.swap.policy import SwapReason
from simulation.clock import Clock

BUSY, RARE = "busy", ("rare-1", "rare-2")
MODELS = (BUSY, *RARE)
CLIENTS = 6
SEATS = 4
SERVICE_S = 5.0
LONGEST_S = 20.0
LOAD_S = 8.0
BOUND_S = 60.0  # queue.starvationBound


class Swapping(NamedTuple):
    """Swaps per hour, the number of served requests, and the waits for the rare models."""

    swaps_an_hour: float
    served: int
    rare_waits_s: list[float]


def swapping(*, strict: bool, length_s: float = 3600.0, seed: int = 1) -> Swapping:
    """Run the clients with the real scheduler, or with a `strict` queue."""
    clock, random = Clock(), Random(seed)
    served = 0
    waits: list[float] = []

    def ended(request: "ModelRequest") -> None:
        nonlocal served
        served += 1
        if request.model == BUSY:
            clock.after(0.0, partial(submit, BUSY))

    def granted(request: "ModelRequest") -> None:
        if request.model != BUSY:
            waits.append(clock.now_s - request.submitted_s)

    def submit(model: str) -> None:
        service_s = min(LONGEST_S, random.expovariate(1 / SERVICE_S))
        server.submit(ModelRequest(model, service_s, clock.now_s))

    def request_rarely(model: str) -> None:
        clock.after(random.expovariate(1 / 60.0), partial(request_rarely, model))
        submit(model)

    server = StrictServer(clock, granted, ended) if strict else SchedulerServer(clock, granted, ended)
    for _ in range(CLIENTS):
        submit(BUSY)
    for model in RARE:
        clock.after(random.expovariate(1 / 60.0), partial(request_rarely, model))
    clock.run(length_s)
    return Swapping(server.swaps * 3600 / length_s, served, waits)


class ModelRequest:
    """One request."""

    def __init__(self, model: str, service_s: float, submitted_s: float) -> None:
        self.model = model
        self.service_s = service_s
        self.submitted_s = submitted_s


Callback = Callable[[ModelRequest], None]


class StrictServer:
    """A first come, first served queue: the next request's model is loaded when all seats are free."""

    def __init__(self, clock: Clock, granted: Callback, ended: Callback) -> None:
        self.swaps = 0
        self._clock = clock
        self._granted, self._ended = granted, ended
        self._queue: deque[ModelRequest] = deque()
        self._loaded: str | None = None
        self._busy = 0

    def submit(self, request: ModelRequest) -> None:
        """Queue a request."""
        self._queue.append(request)
        self._pump()

    def _pump(self) -> None:
        while self._queue and self._loaded is not None and self._busy < SEATS:
            request = self._queue[0]
            if request.model != self._loaded:
                break
            self._queue.popleft()
            self._busy += 1
            self._granted(request)
            self._clock.after(request.service_s, partial(self._finish, request))
        is_loading = self.swaps and self._loaded is None
        if self._queue and not self._busy and not is_loading and self._queue[0].model != self._loaded:
            self.swaps += 1
            self._loaded = None
            self._clock.after(LOAD_S, partial(self._load, self._queue[0].model))

    def _load(self, model: str) -> None:
        self._loaded = model
        self._pump()

    def _finish(self, request: ModelRequest) -> None:
        self._busy -= 1
        self._ended(request)
        self._pump()


class SchedulerServer:
    """The real scheduler with simulated loads and seats."""

    def __init__(self, clock: Clock, granted: Callback, ended: Callback) -> None:
        self.swaps = 0
        self._clock = clock
        self._granted, self._ended = granted, ended
        self._requests: dict[Ticket, ModelRequest] = {}
        self._scheduler = Scheduler(
            self,
            capacity=100,
            random=Random(1),
            policy=LruPolicy(max_loaded=1),
            loadable=frozenset(MODELS),
        )

    @property
    def models(self) -> "SchedulerServer":
        """See `Effects`."""
        return self

    def submit(self, request: ModelRequest) -> None:
        """Queue a request."""
        ticket = Ticket(JobSpec(request_id="r", tenant=request.model, model=request.model))
        self._requests[ticket] = request
        self._scheduler.submit(ticket)
        self._clock.after(STARVATION_SHARE * BOUND_S, partial(self._scheduler.starved, ticket))

    def start(self, ticket: Ticket, index: int) -> None:
        """Never called: the node runs all sequences of a request at once."""
        raise NotImplementedError

    suspend = resume = start

    def grant(self, ticket: Ticket) -> None:
        """See `Effects`."""
        self._granted(self._requests[ticket])
        self._clock.after(self._requests[ticket].service_s, partial(self._finish, ticket))

    def start_swap(self, model: str, evict: frozenset[str], reason: SwapReason) -> None:
        """See `Effects`."""
        del reason
        self.swaps += 1
        self._clock.after(LOAD_S, partial(self._load, model, evict))

    def idle(self, node_id: str, models: frozenset[str], used: int) -> None:
        """Do nothing: idle models stay loaded."""

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """Not called: the queue has room for all requests."""
        raise AssertionError(ticket, error)

    stop = refuse

    def stop_model(self, model: str) -> None:
        """Not called."""
        raise AssertionError(model)

    def load_ended(self, request: LoadRequest, error: FairleadError | None) -> None:
        """See `stop_model`."""
        raise AssertionError(request, error)

    def pause(self, pause: PausedModel, pause_s: float) -> None:
        """Do nothing: no node is full."""

    def seats_freed(self, node_id: str, number: int) -> None:
        """Do nothing: no seats are kept."""

    def node_closed(self, node_id: str) -> None:
        """See `stop_model`."""
        raise AssertionError(node_id)

    def _load(self, model: str, evicted: Iterable[str]) -> None:
        self._scheduler.stopped(frozenset(evicted))
        limits = NodeLimits(seats=SEATS, max_model_len=100)
        self._scheduler.node_up(f"engine:{model}", frozenset({model}), limits)

    def _finish(self, ticket: Ticket) -> None:
        request = self._requests.pop(ticket)
        self._scheduler.finished(ticket, cost=1.0)
        self._ended(request)
