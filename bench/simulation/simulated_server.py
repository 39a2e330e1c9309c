"""The real scheduler and queue with simulated seats, in virtual time.

Does what the dispatcher does around the scheduler: costs from predicted lengths, charges for generated
tokens, and deadlines.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Literal

from fairlead.base.errors import FairleadError, QueueFull, QueueTimeout
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.effects import PausedModel
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.lengths import LengthPredictor, TokenWeights
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import LoadRequest, Ticket
from fairlead.router.swap.policy import SwapReason
from simulation.clock import Clock
from simulation.workload import MAX_TOKENS, Request, Speed

MODEL = "model"
PRIORITY = 1  # the default of a job
METER_S = 0.25
WEIGHTS = TokenWeights()

# "arrival" treats all tenants as one, so jobs are served first come, first served.
Order = Literal["arrival", "roundRobin", "tokens"]


class SimulatedServer:
    """Queues requests, grants them seats and ends them.

    Calls `granted` for each request that gets a seat, and `ended` once for every request, whatever its
    outcome. `granted` must not submit a request. With `displacing=False` a full queue refuses every new
    request, as if there were no displacement.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        order: Order,
        nodes: int = 1,
        seats: int = 8,
        capacity: int = 100,
        displacing: bool = True,
        timeout_s: float | None = None,
        granted: Callable[[Request], None] = lambda _: None,
        ended: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self.clock = clock
        self.speed = Speed()
        self.seats = nodes * seats
        self.lengths = LengthPredictor()
        self.requests: list[Request] = []
        self.running: dict[Request, Ticket] = {}
        self.waiting: dict[Request, Ticket] = {}
        self.granted_to_idle = 0
        self.granted_while_idle = 0
        self._served: dict[str, float] = {}
        self._as_one = order == "arrival"
        self._displacing = displacing
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._granted = granted
        self._ended = ended
        self._requests: dict[Ticket, Request] = {}
        self._by_id: dict[str, Request] = {}
        self._busy = dict.fromkeys(range(nodes), 0)
        self._node_of: dict[Request, int] = {}
        fairness: Literal["roundRobin", "tokens"] = "tokens" if order == "tokens" else "roundRobin"
        self._scheduler = Scheduler(
            self, capacity=capacity, random=Random(1), fairness=fairness, suspends=False
        )
        for number in range(nodes):
            limits = NodeLimits(seats=seats, max_model_len=10 * MAX_TOKENS)
            self._scheduler.node_up(str(number), frozenset({MODEL}), limits)
        if order == "tokens":
            clock.every(METER_S, self._meter)

    # What a client does ------------------------------------------------------------------------------

    def submit(self, request: Request, *, model: str = MODEL, too_long: QueueFull | None = None) -> None:
        """Submit a request. If it had to wait, it is refused with `too_long` if that is given."""
        request.submitted_s = self.clock.now_s
        self.requests.append(request)
        ticket = self._ticket(request, model)
        self._requests[ticket] = request
        self._by_id[ticket.job.request_id] = request
        self.waiting[request] = ticket
        if not self._displacing and len(self.waiting) > self._capacity and len(self.running) == self.seats:
            self._refused(request, "queue_full")
            return
        self._scheduler.submit(ticket, too_long=too_long)
        if self._timeout_s is not None and request in self.waiting:
            self.clock.after(self._timeout_s, partial(self._deadline, request))

    # What clients can observe ------------------------------------------------------------------------

    def ahead_of(self, request: Request) -> list[Request]:
        """Return the waiting requests that leave before this one, in that order."""
        return [self._by_id[job.request_id] for job in self._scheduler.jobs_ahead(self.waiting[request])]

    def ahead_of_newcomer(self, tenant: str) -> int:
        """Return how many jobs would leave before a new request of this tenant."""
        return len(self._scheduler.jobs_ahead_of_newcomer(MODEL, tenant, PRIORITY) or ())

    def service(self) -> dict[str, float]:
        """Return the weighted tokens that each tenant has received so far."""
        served = self._served.copy()
        for request in self.running:
            assert request.granted_s is not None
            done = self.speed.progress(request, self.clock.now_s - request.granted_s)
            served[request.tenant] = served.get(request.tenant, 0.0) + WEIGHTS.cost(*done)
        return served

    # The scheduler's effects -------------------------------------------------------------------------

    @property
    def models(self) -> "SimulatedServer":
        """See `Effects`."""
        return self

    def start(self, ticket: Ticket, index: int) -> None:
        """Never called: the node runs all sequences of a request at once."""
        raise NotImplementedError

    suspend = resume = start

    def grant(self, ticket: Ticket) -> None:
        """Start the request; it ends after its service time."""
        request = self._requests[ticket]
        del self.waiting[request]
        self.running[request] = ticket
        request.granted_s = self.clock.now_s
        assert ticket.node is not None
        self._count(request, int(ticket.node.id))
        self.clock.after(self.speed.service_s(request), partial(self._finish, request))
        self._granted(request)

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """End the request with an error."""
        self._refused(self._requests[ticket], error.code)

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        """Not called: only streams are stopped, and there are none."""
        raise AssertionError(ticket, error)

    def start_swap(self, model: str, evict: frozenset[str], reason: SwapReason) -> None:
        """Not called: only loadable models are swapped, and there are none."""
        raise AssertionError(model, evict, reason)

    def stop_model(self, model: str) -> None:
        """See `start_swap`."""
        raise AssertionError(model)

    def load_ended(self, request: LoadRequest, error: FairleadError | None) -> None:
        """See `start_swap`."""
        raise AssertionError(request, error)

    def idle(self, node_id: str, models: frozenset[str], used: int) -> None:
        """See `start_swap`."""
        raise AssertionError(node_id, models, used)

    def pause(self, pause: PausedModel, pause_s: float) -> None:
        """Do nothing: no node is full."""

    def seats_freed(self, node_id: str, number: int) -> None:
        """Do nothing: no seats are kept."""

    def node_closed(self, node_id: str) -> None:
        """Not called: no node is closed."""
        raise AssertionError(node_id)

    # Internals ---------------------------------------------------------------------------------------

    def _ticket(self, request: Request, model: str) -> Ticket:
        tenant = "everybody" if self._as_one else request.tenant
        output_tokens = self.lengths.predict(request.tenant, MODEL, max_tokens=MAX_TOKENS)
        number = str(len(self.requests))
        job = JobSpec(
            request_id=number,
            tenant=tenant,
            model=model,
            priority=PRIORITY,
            prompt_tokens=request.prompt_tokens,
            longest_prompt=request.prompt_tokens,
            max_tokens=MAX_TOKENS,
        )
        return Ticket(job, cost=WEIGHTS.cost(request.prompt_tokens, output_tokens))

    def _finish(self, request: Request) -> None:
        ticket = self.running.pop(request)
        self._busy[self._node_of.pop(request)] -= 1
        request.finished_s = self.clock.now_s
        self.lengths.observe(request.tenant, MODEL, request.output_tokens)
        cost = WEIGHTS.cost(request.prompt_tokens, request.output_tokens)
        self._served[request.tenant] = self._served.get(request.tenant, 0.0) + cost
        self._scheduler.finished(ticket, cost=cost)
        self._end(request, ticket)

    def _deadline(self, request: Request) -> None:
        if (ticket := self.waiting.get(request)) is not None:
            self._scheduler.deadline(ticket, QueueTimeout("waited too long"))

    def _refused(self, request: Request, code: str) -> None:
        request.refused = code
        self._end(request, self.waiting.pop(request))

    def _end(self, request: Request, ticket: Ticket) -> None:
        del self._requests[ticket], self._by_id[ticket.job.request_id]
        # Deferred, because an effect must not call the scheduler.
        self.clock.after(0.0, partial(self._ended, request))

    def _meter(self) -> None:
        for request, ticket in self.running.items():
            assert request.granted_s is not None
            done = self.speed.progress(request, self.clock.now_s - request.granted_s)
            self._scheduler.charge(ticket, WEIGHTS.cost(*done))

    def _count(self, request: Request, node: int) -> None:
        if 0 in self._busy.values():
            self.granted_while_idle += 1
            self.granted_to_idle += self._busy[node] == 0
        self._busy[node] += 1
        self._node_of[request] = node
