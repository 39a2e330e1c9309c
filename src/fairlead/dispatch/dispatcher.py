"""The scheduler on Trio: tasks that wait for a seat, and the timer that measures their waits.

A waiter stays registered until its own synchronous `finally` runs. So a grant to a task that was just
cancelled is never lost: the queue entry or seat that the task holds is released.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from random import Random

import msgspec
import trio

from fairlead.config import QueueConfig, SwapConfig
from fairlead.dispatch.effects import ModelHost
from fairlead.dispatch.forecast import Forecast
from fairlead.dispatch.model_lifecycle import ModelLifecycle
from fairlead.dispatch.node_state import NodeState
from fairlead.dispatch.outlook import Outlook
from fairlead.dispatch.schedulers import SCHEDULERS
from fairlead.dispatch.scheduling import SchedulingOptions
from fairlead.dispatch.seat import Seat, Waiter
from fairlead.dispatch.swaps import PATIENCE
from fairlead.dispatch.ticket import LoadRequest, Ticket, TicketState
from fairlead.dispatch.timer import Alarm, Timer
from fairlead.errors import FairleadError, ModelLoading, QueueFull, QueueTimeout
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeCounts, NodeLimits
from fairlead.supervision import contain
from fairlead.swap.gpus import Gpus
from fairlead.swap.policies import policy_for
from fairlead.swap.policy import SwapReason

METER_INTERVAL_S = 1.0
# How long a node counts as full after it rejected a job, unless one of its jobs finishes earlier.
FULL_FOR_S = 1.0
# The longest time for which a node may report itself full.
FULL_AT_MOST_S = 10.0


class DispatchStatistics(msgspec.Struct, frozen=True):
    """The body of `GET /queue`: totals only."""

    waiting: int
    running: int
    capacity: int
    seats: int
    mean_wait_s: float
    mean_service_s: float


class Dispatcher:
    """Assigns seats to jobs, and receives the reports of nodes (`NodeListener`). `run` runs its timer.

    `rejects_loading`: a job whose model is not loaded is refused, but its model is loaded all the same.
    `scheduler` is a name in `SCHEDULERS`. Raises `ConfigError` if that name is unknown.
    """

    def __init__(
        self,
        queue: QueueConfig,
        *,
        random: Random | None = None,
        rejects_loading: bool = False,
        scheduler: str = "default",
    ) -> None:
        self._queue = queue
        random = random or Random()  # noqa: S311  # spreads load and retries, guards nothing
        make_scheduler = SCHEDULERS.find(scheduler, "scheduler")
        self._scheduler = make_scheduler(self, SchedulingOptions(queue, random, rejects_loading))
        self._timer = Timer()
        # Must be below the queue timeout, or jobs expire before they count as starving.
        self._starvation_s = PATIENCE * min(queue.starvation_bound_s, queue.timeout_s)
        self._upkeep = ModelLifecycle(self._scheduler, self._timer, starvation_s=self._starvation_s)
        self._outlook = Outlook(self._scheduler, queue, random)
        self._waiters: dict[Ticket, Waiter] = {}
        self._by_id: dict[str, Waiter] = {}
        self._full: dict[NodeState, Alarm] = {}  # full nodes, each with the alarm that ends this

    async def run(self) -> None:
        """Run the timer and charge for generated tokens, until cancelled. A failing alarm stops no other."""
        self._timer.at(trio.current_time() + METER_INTERVAL_S, self._read_meters)
        while True:
            await contain("deadlines", self._timer.run)

    @asynccontextmanager
    async def seat(self, job: Job) -> AsyncIterator[Seat]:
        """Wait for a seat, hold it during the block, and release it however the block ends.

        Raises at once: `QueueFull`, `NoQueue`, `ModelLoading`, `ContextLengthExceeded`, `Draining`. Raises
        while waiting: `Displaced`, `LoadFailed`, `ContextLengthExceeded`, `Draining`, and what `unload` or
        `forget` was given. Raises `QueueTimeout` while waiting, and for a stream until `Seat.begin`. Raises
        what `cancel` was given at any time.
        """
        arrived = trio.current_time()
        waiter = Waiter(self._outlook.ticket(job))
        ticket = waiter.ticket
        self._waiters[ticket] = self._by_id[job.request_id] = waiter
        with waiter.scope:
            try:
                self._scheduler.submit(ticket, too_long=self._too_long(job))
                if ticket.state is TicketState.QUEUED:
                    waiter.forecast = self._outlook.on_arrival(ticket)
                self._set_alarms(waiter, arrived)
                self._want_all_the_same(waiter)
                node = await waiter.granted()
                waited_s = trio.current_time() - arrived
                self._outlook.waited(ticket, waited_s)
                yield Seat(self, waiter, node, waited_s)
            finally:
                for alarm in waiter.alarms:
                    alarm.drop()
                self._over(waiter)
        if waiter.error is not None:
            raise waiter.error

    def begin(self, waiter: Waiter, generated: Callable[[], int]) -> None:
        """See `Seat.begin`."""
        waiter.generated = generated
        self._scheduler.first_delta(waiter.ticket)

    async def another_seat(self, waiter: Waiter, *, is_full: bool, full_for_s: float | None = None) -> Node:
        """Return the node of the next seat; see `Seat.another`."""
        ticket, place = waiter.ticket, waiter.ticket.place
        assert place is not None
        self._outlook.unseated(waiter)
        waiter.event = trio.Event()
        if is_full:
            self._look_again(place, FULL_FOR_S if full_for_s is None else min(full_for_s, FULL_AT_MOST_S))
            self._scheduler.turned_away(ticket)
        else:
            self._scheduler.returned(ticket)
        if ticket.state is TicketState.QUEUED:
            self._set_starving(waiter, trio.current_time())
        return await waiter.granted()

    def waiting(self, request_id: str) -> Forecast | None:
        """Return the current forecast of a waiting job; None if it does not wait (any more)."""
        waiter = self._by_id.get(request_id)
        if waiter is None or waiter.ticket.state is not TicketState.QUEUED:
            return None
        return self._outlook.now(waiter.ticket)

    def cancel(self, request_id: str, owner: str, error: FairleadError) -> bool:
        """End this waiting or running job with `error`. Return False if the owner has no such job."""
        waiter = self._by_id.get(request_id)
        if waiter is None or waiter.ticket.job.owner != owner:
            return False
        self.stop(waiter.ticket, error)
        return True

    def forecast(self, model: str, tenant: str, priority: int) -> Forecast:
        """Return the forecast for a job of this tenant and class if it arrived now."""
        return self._outlook.for_newcomer(model, tenant, priority)

    def drain(self) -> None:
        """Accept no more jobs and refuse those that wait; running jobs continue."""
        self._scheduler.drain()

    def statistics(self) -> DispatchStatistics:
        """Return the totals now."""
        counts = self._scheduler.statistics()
        return DispatchStatistics(
            waiting=counts.waiting,
            running=counts.running,
            capacity=counts.capacity,
            seats=counts.seats,
            mean_wait_s=self._outlook.mean_wait_s,
            mean_service_s=self._outlook.mean_service_s,
        )

    # What nodes report (NodeListener) ----------------------------------------------------------------

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """Add a node and its seats."""
        self._scheduler.node_up(node, limits)

    def seats_changed(self, node: Node, limits: NodeLimits) -> None:
        """Apply a node's new limits or models."""
        self._scheduler.seats_changed(node, limits)

    def node_down(self, node: Node) -> None:
        """Remove a node and its seats."""
        self._scheduler.node_down(node)

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """End what waits for a node that could not load its models."""
        self._scheduler.load_failed(node, error)

    # Requests from the fleet (Desk) ------------------------------------------------------------------

    def arrange(
        self,
        garage: ModelHost,
        swap: SwapConfig,
        ttl_s: Mapping[str, float],
        memory_mb: Mapping[str, float],
        gpus: Gpus | None = None,
    ) -> None:
        """Load and unload models through `garage`; `swap` says which models are evicted for which.

        `ttl_s` maps each model that can be loaded to the seconds it stays loaded without a job (0: for ever).
        `memory_mb` is the memory of models, where known, and `gpus` their GPUs; each decision reads both.
        """
        self._upkeep.arrange(garage, policy_for(swap, memory_mb, gpus), ttl_s)

    def prefer(self, priorities: Mapping[str, int]) -> None:
        """Load requested models with a higher number first; a model without a number has 0."""
        self._scheduler.prefer(priorities)

    async def load(self, model: str, *, spare: bool = False) -> None:
        """Request that a model be loaded, in the turn of a job that arrived now; return when it is loaded.

        `spare`: only without evictions. Raises `LoadFailed`, `ModelNotFound`, `ModelUnloaded` or `Draining`.
        """
        await self._upkeep.load(model, spare=spare)

    def unload(
        self, model: str, error: FairleadError | None = None, *, waiting: FairleadError | None = None
    ) -> None:
        """Stop a model once its running jobs have finished; with `error`, end those jobs with it at once.

        Jobs and load requests that wait for it end with `waiting`; None: they wait for its next load.
        """
        if error is not None:
            for ticket in self._outlook.running():
                place = ticket.place
                if place is not None and place.limits.evictable and model in place.node.models:
                    self.stop(ticket, error)
        self._scheduler.unload(model, waiting)

    def forget(self, model: str, error: FairleadError | None = None) -> None:
        """Stop serving a model; see `ModelEvents.forget`."""
        self._scheduler.forget(model, error)

    def gone(self, models: frozenset[str]) -> None:
        """Note that no processes of these models are left."""
        self._scheduler.gone(models)

    def close(self, node_id: str) -> trio.Event:
        """Give a remote node no more jobs; return an event that is set when it has none."""
        return self._upkeep.close(node_id)

    def reopen(self, node_id: str) -> None:
        """Allow a node of this name to get jobs the next time it comes up."""
        self._scheduler.reopen(node_id)

    def counts(self, node_id: str) -> NodeCounts | None:
        """Return the scheduler's counts for a node; None if it is not up."""
        place = self._scheduler.place(node_id)
        return None if place is None else NodeCounts(place.busy, place.draining or place.leaving)

    # Requests from the scheduler (Effects) -----------------------------------------------------------

    def grant(self, ticket: Ticket) -> None:
        """Wake the task that waits with this ticket."""
        waiter = self._waiters[ticket]
        self._outlook.seated(waiter)
        waiter.event.set()

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """Wake it with an error. An error that a retry may avoid gets a retry time."""
        self._waiters[ticket].end(self._outlook.with_estimate(error, ticket.job.model))

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        """Cancel the task, wherever it is, and have `seat` raise the error."""
        waiter = self._waiters[ticket]
        waiter.end(self._outlook.with_estimate(error, ticket.job.model))
        waiter.scope.cancel()

    def start_swap(self, model: str, evict: frozenset[str], reason: SwapReason) -> None:
        """See `ModelLifecycle.start_swap`."""
        self._upkeep.start_swap(model, evict, reason)

    def stop_model(self, model: str) -> None:
        """See `Effects`."""
        self._upkeep.stop_model(model)

    def wish_ended(self, wish: LoadRequest, error: FairleadError | None) -> None:
        """See `Effects`."""
        self._upkeep.wish_ended(wish, error)

    def closed(self, node_id: str) -> None:
        """See `Effects`."""
        self._upkeep.closed(node_id)

    def idle(self, place: NodeState) -> None:
        """See `Effects`."""
        self._upkeep.idle(place)

    # Clocks and costs --------------------------------------------------------------------------------

    def _too_long(self, job: Job) -> QueueFull | None:
        """Return an error if the estimate of the job's wait exceeds `queue.maxEstimatedWait`.

        A 429 now is better than a 504 in a minute. The estimate follows the tenant's turn: a tenant that
        floods the queue is refused, while other tenants still get in.
        """
        most_s = self._queue.max_estimated_wait_s
        if not most_s:
            return None
        forecast = self.forecast(job.model, job.tenant, job.priority)
        wait_s = forecast.estimated_wait_s
        if wait_s <= most_s:
            return None
        message = f"the wait would be about {wait_s} s, and nobody is let in for more than {most_s:g} s"
        return QueueFull(message, estimated_wait_s=wait_s, queue_position=forecast.position)

    def _set_alarms(self, waiter: Waiter, arrived: float) -> None:
        ticket = waiter.ticket
        if ticket.state is TicketState.DONE:
            return
        timeout_s = self._queue.timeout_s
        late = QueueTimeout(f"the request waited longer than {timeout_s:g} s for its turn")
        waiter.alarms.append(
            self._timer.at(arrived + timeout_s, partial(self._scheduler.deadline, ticket, late))
        )
        if ticket.state is TicketState.QUEUED:
            self._set_starving(waiter, arrived)

    def _set_starving(self, waiter: Waiter, since: float) -> None:
        starved = partial(self._scheduler.starved, waiter.ticket)
        waiter.alarms.append(self._timer.at(since + self._starvation_s, starved))

    def _want_all_the_same(self, waiter: Waiter) -> None:
        """Start the load although the job is refused; without a queue nothing would ever load."""
        may_not = isinstance(waiter.error, ModelLoading)
        may_not |= isinstance(waiter.error, QueueFull) and not self._queue.capacity
        job = waiter.ticket.job
        if may_not and self._scheduler.must_load(job):
            self._upkeep.wish(job.model)

    def _look_again(self, place: NodeState, after_s: float) -> None:
        """Count a full node as having room after `after_s`; another rejection restarts the delay."""
        if (earlier := self._full.pop(place, None)) is not None:
            earlier.drop()

        def is_over() -> None:
            del self._full[place]
            self._scheduler.has_room(place)

        self._full[place] = self._timer.at(trio.current_time() + after_s, is_over)

    def _read_meters(self) -> None:
        self._timer.at(trio.current_time() + METER_INTERVAL_S, self._read_meters)
        for waiter in self._waiters.values():
            self._scheduler.charge(waiter.ticket, self._outlook.spent(waiter))

    def _over(self, waiter: Waiter) -> None:
        """Release all that an ended job holds. Synchronous, so that no other task runs in between."""
        ticket, job = waiter.ticket, waiter.ticket.job
        del self._waiters[ticket]
        if self._by_id.get(job.request_id) is waiter:
            del self._by_id[job.request_id]
        self._outlook.over(waiter)
        self._scheduler.finished(ticket, cost=self._outlook.spent(waiter))
