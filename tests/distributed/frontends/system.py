"""Dispatchers and fronts in one process, connected by streams in memory that can be cut."""

from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from random import Random

import trio
import trio.testing

from fairlead.base.config import QueueConfig
from fairlead.distributed.frontends.client import DispatchClient
from fairlead.distributed.frontends.server import FrontServer
from fairlead.distributed.frontends.shared_quotas import SharedQuotas
from fairlead.distributed.supervisor.shared_counts import SharedCounts
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.job_spec import JobSpec

MODEL = "m"


def spec(tenant="A", request_id="", **options):
    return JobSpec(request_id=request_id or f"{tenant}-request", tenant=tenant, model=MODEL, **options)


def limits(seats):
    return NodeLimits(seats, max_model_len=1000)


class System:
    """One dispatcher at a time, with `nodes` (seats by id), and fronts by number.

    `granted` has the grants of all dispatchers in their order: tenant, node. `held` counts the seats that
    tasks of fronts use now, by node.
    """

    def __init__(self, nursery, nodes=None, *, queue=None, server=FrontServer):
        self.nursery = nursery
        self.nodes = {"node": 1} if nodes is None else nodes
        self.queue = queue or QueueConfig(capacity=1000, timeout_s=60.0)
        self.epoch = 0
        self.granted = []
        self.held = Counter()
        self.fronts = {}
        self.make_server = server
        self.blocked = set()  # fronts that cannot connect
        self.scope = None
        self.serving = None

    @property
    def is_up(self):
        """Whether there is a dispatcher, which may not take connections yet."""
        return self.scope is not None and not self.scope.cancel_called

    def start_dispatcher(self, *, queue=None, expected=(), epoch=None, term=None):
        """Start one with the next epoch, or with this one; with a `term` it may raise it."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self.dispatcher = Dispatcher(queue or self.queue, random=Random(0), epoch=self.epoch)
        self._record_grants(self.dispatcher)
        self.quotas = SharedQuotas()
        self.counts = SharedCounts()
        self.server = self.make_server(
            self.dispatcher,
            epoch=self.epoch,
            expected=expected,
            raise_epoch=(lambda _epoch: False) if term is None else term.raise_epoch,
            questions={
                "statistics": lambda _front: self.dispatcher.statistics().running,
                **self.quotas.questions,
                **self.counts.questions,
            },
            on_front_ended=self._front_ended,
        )
        for node, seats in self.nodes.items():
            self.dispatcher.scheduler.node_up(node, frozenset({MODEL}), limits(seats))
        self.scope, self.serving = trio.CancelScope(), None
        self.nursery.start_soon(self._run_dispatcher, self.dispatcher, self.server, self.scope)

    def kill_dispatcher(self):
        self.scope.cancel()

    def _front_ended(self, name):
        self.quotas.end_front(name)
        self.counts.end_front(name)

    async def _run_dispatcher(self, dispatcher, server, scope):
        with scope:
            async with trio.open_nursery() as serving:
                if self.scope is scope:
                    self.serving = serving
                serving.start_soon(dispatcher.run)
                await server.run()

    def _record_grants(self, dispatcher):
        grant = dispatcher.grant

        def record(ticket):
            self.granted.append((ticket.job.tenant, ticket.node.id))
            grant(ticket)

        dispatcher.grant = record

    def start_front(self, number):
        front = self.fronts[number] = DispatchClient([partial(self._connect, number)], self.queue)
        front.scopes, front.streams = [], []
        self.spawn(front, front.run)
        return front

    def spawn(self, front, task, *arguments):
        """Start a task that ends with the front."""
        scope = trio.CancelScope()
        front.scopes.append(scope)
        self.nursery.start_soon(self._run_within, scope, task, *arguments)

    def kill_front(self, number):
        front = self.fronts.pop(number)
        self.cut(front)
        for scope in front.scopes:
            scope.cancel()

    def cut(self, front):
        """End the connection of a front, with all that is under way in it."""
        for stream in front.streams:
            for half in (stream.send_stream, stream.receive_stream):
                half.close()

    async def _run_within(self, scope, task, *arguments):
        with scope:
            await task(*arguments)

    async def _connect(self, number):
        if not self.is_up or self.serving is None or number in self.blocked:
            raise OSError("no dispatcher")
        ours, theirs = trio.testing.memory_stream_pair()
        if number not in self.fronts:
            raise OSError("the front was killed")
        self.fronts[number].streams = [ours, theirs]
        self.serving.start_soon(self.server.serve, theirs, f"front {number}")
        return ours

    @asynccontextmanager
    async def seat(self, front, job):
        """Use a seat, counted in `held` while the block runs."""
        async with front.seat(job) as seat:
            node = seat.node_id
            self.held[node] += 1
            try:
                yield seat
            finally:
                self.held[node] -= 1


async def settle():
    await trio.testing.wait_all_tasks_blocked()
