"""A small world on a virtual clock: nodes, the real hand-off before them, and visitors with one job each.

`World` is the only place that puts the real parts together. In a plan that is `swapping`, visitors want two
models, nodes hold one of them at a time, and the scheduler decides which: then a node that comes up has what
the scheduler asked for last.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import trio

from fairlead.api.exchange import unwrap
from fairlead.config import QueueConfig
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.dispatch.swaps import Swaps
from fairlead.errors import FairleadError
from fairlead.gateway import Gateway
from fuzz.mortal_node import MortalNode
from fuzz.plan import MODEL, OTHER_MODEL, Plan, Visit


class OneAtATime:
    """The eviction policy of plans that swap: whatever runs makes room."""

    def eviction_for(self, target: str, running: frozenset[str]) -> frozenset[str]:
        return running - {target}


class World:
    """The hand-off between visitors and nodes. What nodes notice going wrong is added to `problems`.

    `outcomes` by visitor: the text of the answer or the type of the error; none for who was made to leave.
    `doors` are the scopes of those who are here, `cancelled_at` and `left_at` the times when others cancelled
    their jobs and when they left.
    """

    def __init__(
        self,
        plan: Plan,
        problems: list[str],
        dispatcher_type: type[Dispatcher] = Dispatcher,
        node_type: type[MortalNode] = MortalNode,
    ) -> None:
        self.plan = plan
        self.outcomes: dict[str, str | type[FairleadError]] = {}
        self.doors: dict[str, trio.CancelScope] = {}
        self.cancelled_at: dict[str, float] = {}
        self.left_at: dict[str, float] = {}
        self.model = MODEL
        queue = QueueConfig(
            capacity=plan.capacity,
            timeout_s=plan.queue_timeout_s,
            starvation_bound_s=plan.starvation_s,
        )
        self.dispatcher = dispatcher_type(queue, random=Random(plan.seed))
        if plan.swapping:
            # No configuration of the dispatcher swaps models, so it is not told of policies.
            both = frozenset({MODEL, OTHER_MODEL})
            self.dispatcher._scheduler._swaps = Swaps(OneAtATime(), both)
            self.dispatcher.start_swap = self._start_swap
        self.gateway = Gateway(self.dispatcher, request_timeout_s=plan.request_timeout_s)
        self.nodes = [
            node_type(f"{number}", plan, self.dispatcher, problems, lambda: self.model)
            for number in range(len(plan.seats))
        ]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Run the nodes."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.dispatcher.run)
            for node in self.nodes:
                nursery.start_soon(node.run)
            yield
            nursery.cancel_scope.cancel()

    async def receive(self, visit: Visit) -> None:
        """Let a visitor come, ask and leave, as an exchange does: one nursery for the job and its reader."""
        with trio.CancelScope() as self.doors[visit.name]:
            await trio.sleep(visit.arrives_s)
            try:
                async with trio.open_nursery() as exchange:
                    answer = await exchange.start(self.gateway.serve, visit.job)
                    text = ""
                    while taken := await answer.deltas.take():
                        text += "".join(delta.text for delta in taken)
                    self.outcomes[visit.name] = text
            except* FairleadError as group:
                self.outcomes[visit.name] = type(unwrap(group))
        del self.doors[visit.name]
        self.left_at[visit.name] = trio.current_time()

    def cancel(self, name: str) -> None:
        """Have somebody else end a visitor's job, by its request id."""
        if self.gateway.cancel(name, owner=""):
            self.cancelled_at.setdefault(name, trio.current_time())

    def _start_swap(self, model: str, evict: frozenset[str]) -> None:
        """Do what the scheduler asks for; nodes that are away come back with the new model, too."""
        self.model = model
        for node in self.nodes:
            if node.models & evict:
                node.make_room()
