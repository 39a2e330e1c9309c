"""A server on a virtual clock: fake nodes, the real dispatcher and gateway, clients with one job each.

`SimulatedSystem` is the only place that assembles the real parts. In a `swapping` plan, clients request two
models, and nodes hold one of them at a time. The scheduler decides which. A node that comes up then has the
model that the scheduler requested last.
"""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import trio

from fairlead.base.config import QueueConfig
from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta
from fairlead.base.requester import Requester
from fairlead.base.supervision import unwrap
from fairlead.generation.gateway import Gateway
from fairlead.nodes.streams.deltas import Deltas
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.ticket import Ticket
from fairlead.router.fleet.node_registry import NodeRegistry
from fairlead.router.swap.lru import LruPolicy
from fuzz.crashing_node import CrashingNode, History
from fuzz.plan import MODEL, OTHER_MODEL, ClientPlan, Plan
from router.dispatch.recorded import Ledger


class SimulatedSystem:
    """The dispatcher and gateway between clients and nodes. Nodes add the errors that they see to `problems`.

    `outcomes` by client: the text of the answer or the type of the error; none if it had to disconnect.
    `client_scopes` has the cancel scopes of present clients. `cancelled_at`, `disconnected_at` and `left_at`
    are the times when a job was cancelled, and when a client had to disconnect and did. `histories` has all
    jobs; `ledger` has what each tenant was charged, and `costs` what its jobs have cost.
    """

    def __init__(
        self,
        plan: Plan,
        problems: list[str],
        dispatcher_type: type[Dispatcher] = Dispatcher,
        node_type: type[CrashingNode] = CrashingNode,
    ) -> None:
        self.plan = plan
        self.outcomes: dict[str, str | type[FairleadError]] = {}
        self.client_scopes: dict[str, trio.CancelScope] = {}
        self.cancelled_at: dict[str, float] = {}
        self.disconnected_at: dict[str, float] = {}
        self.left_at: dict[str, float] = {}
        self.model = MODEL
        self.histories: defaultdict[str, History] = defaultdict(History)
        self.costs: Counter[str] = Counter()
        queue = QueueConfig(
            capacity=plan.capacity,
            timeout_s=plan.queue_timeout_s,
            max_estimated_wait_s=plan.most_wait_s,
            starvation_bound_s=plan.starvation_s,
        )
        self.dispatcher = dispatcher_type(queue, random=Random(plan.seed))
        self.registry = NodeRegistry(self.dispatcher.scheduler)
        self._record_charges(self.dispatcher.scheduler)
        if plan.swapping:
            self.dispatcher.models.configure(
                LruPolicy(max_loaded=1),
                {MODEL: 0.0, OTHER_MODEL: 0.0},
                start_swap=self.start_swap,
                stop_model=self.stop_model,
            )
        self.gateway = Gateway(self.dispatcher, self.registry, request_timeout_s=plan.request_timeout_s)
        self.nodes = [
            node_type(
                f"{number}",
                plan,
                self.registry,
                self.dispatcher.scheduler,
                problems,
                lambda: self.model,
                self.histories,
            )
            for number in range(len(plan.seats))
        ]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Run the dispatcher and the nodes."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.dispatcher.run)
            for node in self.nodes:
                nursery.start_soon(node.run)
            yield
            nursery.cancel_scope.cancel()

    async def receive(self, client_plan: ClientPlan) -> None:
        """Run one client. As in an exchange, its job and its reader share a nursery."""
        with trio.CancelScope() as self.client_scopes[client_plan.name]:
            await trio.sleep(client_plan.arrives_s)
            try:
                async with trio.open_nursery() as exchange:
                    answer = await exchange.start(self.gateway.serve, client_plan.job)
                    self.outcomes[client_plan.name] = await _read(answer.deltas, stream=client_plan.stream)
            except* FairleadError as group:
                self.outcomes[client_plan.name] = type(unwrap(group))
        del self.client_scopes[client_plan.name]
        self.left_at[client_plan.name] = trio.current_time()

    def _record_charges(self, scheduler: Scheduler) -> None:
        queue = scheduler._queue
        self.ledger = queue._kernel = Ledger(queue._kernel)
        real = scheduler.finished

        def finished(ticket: Ticket, *, cost: float) -> None:
            self.costs[ticket.job.tenant] += cost if ticket.attempts else 0.0
            real(ticket, cost=cost)

        scheduler.finished = finished

    def disconnect_client(self, name: str) -> None:
        """Make a client disconnect."""
        if name in self.client_scopes:
            self.client_scopes[name].cancel()
            self.disconnected_at.setdefault(name, trio.current_time())

    def cancel(self, name: str) -> None:
        """Cancel a client's job from outside, by its request id."""
        if self.dispatcher.stop_job(name, Requester("somebody")):
            self.cancelled_at.setdefault(name, trio.current_time())

    def start_swap(self, model: str, evict: frozenset[str]) -> None:
        """Swap as the scheduler requests; nodes that are down come back with the new model as well."""
        self.model = model
        for node in self.nodes:
            if node.models & evict:
                node.make_room()

    def stop_model(self, model: str) -> None:
        """Fail: here a model is unloaded only to load another."""
        raise AssertionError(model)


async def _read(deltas: Deltas, *, stream: bool) -> str:
    """Return the text, read as the routes do: a stream as it arrives, anything else when it is complete."""
    texts: list[str] = []

    def copy_deltas(taken: list[Delta]) -> bool:
        texts.extend(delta.text for delta in taken)
        return True

    if not stream:
        await deltas.ended()
    while taken := await deltas.take(copy_deltas):
        copy_deltas(taken)
    return "".join(texts)
