"""A dispatcher and a front of a simulated server: the real parts of each process."""

from functools import partial
from random import Random
from typing import Any

import trio

from distributed.frontends.network import Process
from distributed.frontends.system import MODEL, limits, spec
from fairlead.base.config import ApiKey, KeyLimits, QueueConfig
from fairlead.base.errors import FairleadError, NodeFailed, NodeFull, StaleGrant
from fairlead.base.job import Job, Sampling
from fairlead.distributed.frontends.client import DispatchClient
from fairlead.distributed.frontends.server import FrontServer
from fairlead.distributed.frontends.shared_quotas import RemoteQuotas, SharedQuotas
from fairlead.distributed.supervisor.shared_counts import CountsView, SharedCounts
from fairlead.generation.metrics.job_metrics import FrontCounts, JobMetrics
from fairlead.generation.timeline import SUCCESS, RequestTimeline
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.waiter import SeatLoss
from fairlead.server.processes.dispatcher_role import cancel

COUNTS_S = 1.0  # between two reports
KEY = ApiKey(key="sk", limits=KeyLimits(concurrent=1000, requests_per_minute=1000))
QUEUE = QueueConfig(capacity=1000, timeout_s=300.0)


def ended_job():
    job = Job(id="x", tenant="A", model=MODEL, prompts=(b"",), sampling=Sampling(max_tokens=1))
    timeline = RequestTimeline(job, arrived_s=0.0, began_at_ns=0)
    timeline.granted_s, timeline.first_delta_s, timeline.ended_s = 0.5, 1.0, 2.0
    timeline.outcome = SUCCESS
    return timeline


class ObservedServer(FrontServer):
    """Reports to the simulation when it gives up a front, and when its grace time ends."""

    world: Any = None
    process: Any = None

    def end_front(self, name):
        self.world.gives_up(self, name)
        super().end_front(name)

    def _end_grace(self):
        self.world.grace_ends(self)
        super()._end_grace()
        self.world.check_order(self)


class DispatcherProcess:
    """One run of a dispatcher."""

    def __init__(self, world, epoch, expected, term):
        self.world = world
        self.epoch = epoch
        self.term = term
        self.process = Process(f"dispatcher {epoch}")
        self.began_at = trio.current_time()
        self.closed_at = {}
        self.streams = {}
        self.dispatcher = Dispatcher(QUEUE, random=Random(0), epoch=epoch)
        self.quotas, self.counts = SharedQuotas(), SharedCounts()
        self.server = ObservedServer(
            self.dispatcher,
            epoch=epoch,
            expected=expected,
            may_send=term.is_valid if world.plan.checks_term else lambda: True,
            questions={
                "cancel": partial(cancel, self.dispatcher),
                **self.quotas.questions,
                **self.counts.questions,
            },
            on_front_ended=self._front_ended,
        )
        self.server.world, self.server.process = world, self
        self.process.on_send = self._check_term
        self._grant = self.dispatcher.grant
        self.dispatcher.grant = partial(world.record_grant, self)
        self.runs = {}
        self.nursery = None
        for engine in world.engines:
            if engine.is_up:
                self.node_up(engine.node_id, engine.run, engine.seats)

    def grant(self, ticket):
        self._grant(ticket)

    def _check_term(self, kind):
        if not self.term.is_valid() and self.world.plan.checks_term:
            self.world.problems.append(f"late message: {kind} of {self.process.name}, which does not lead")

    def node_up(self, node_id, run, seats):
        self.runs[node_id] = run
        self.dispatcher.scheduler.node_up(node_id, frozenset({MODEL}), limits(seats))

    def node_down(self, node_id):
        self.dispatcher.scheduler.node_down(node_id)

    def _front_ended(self, name):
        self.quotas.end_front(name)
        self.counts.end_front(name)

    async def run(self):
        with self.process.scope:
            async with trio.open_nursery() as self.nursery:
                self.nursery.start_soon(self.dispatcher.run)
                await self.server.run()


class Front:
    """A front's process, its clients, and its connections to engines."""

    def __init__(self, world, name):
        self.name = name
        self.process = Process(name)
        self.world = world
        self.is_blocked = False  # it cannot connect to a dispatcher
        self.epoch = 0  # the highest that it has seen
        self.connection = None
        self.engines = {}
        self.on_death = []
        connects = [partial(world.connect, self, address) for address in range(len(world.addresses))]
        self.client = DispatchClient(connects, QUEUE)
        self.quotas = RemoteQuotas(self.client, timeout_s=QUEUE.timeout_s)
        self.counts = CountsView(self.client)
        self.metrics = JobMetrics()
        self.counts.own = lambda: FrontCounts(self.metrics.statistics())
        self.ended = 0

    async def run(self):
        with self.process.scope:
            async with trio.open_nursery() as self.nursery:
                self.nursery.start_soon(self.client.run)
                while True:
                    await self.process.running()
                    await self.counts.refresh()
                    await trio.sleep(COUNTS_S)

    def engine(self, node_id):
        """Return the connection to an engine. Raises `NodeFull`."""
        connection = self.engines.get(node_id)
        if connection is None or not connection.is_open:
            connection = self.engines[node_id] = self.world.by_id[node_id].attach(self)
        return connection

    async def serve(self, job):
        """Run a job as the gateway does. Returns how it ended."""
        with trio.move_on_after(job.leaves_after_s) as leaving:
            try:
                charge = await self.quotas.admit(KEY, prompt_tokens=1)
                try:
                    options = {"stream": job.stream, "priority": job.priority, "sequences": job.sequences}
                    async with self.client.seat(spec(job.tenant, job.name, owner="o", **options)) as seat:
                        await self._generate(job, seat)
                    charge.charge_answer(job.tokens, 0.0)
                finally:
                    charge.end()
                    self.ended += 1
                    self.metrics.add(ended_job())
            except FairleadError as error:
                return error.code
            return "served"
        assert leaving.cancelled_caught
        return "left"

    async def _generate(self, job, seat):
        rejections, has_begun = job.rejections, False
        while True:
            await self.process.running()
            try:
                if rejections:
                    rejections -= 1
                    raise NodeFull("full") if job.stream else NodeFailed("failed")
                with self.engine(seat.node_id).sequence(seat.grant, job) as sequence:
                    await self._wait(sequence, sequence.first)
                    if not has_begun:
                        has_begun = True
                        seat.begin(lambda: job.tokens)
                    await self._wait(sequence, sequence.over)
                return
            except (NodeFailed, NodeFull, StaleGrant) as error:
                if isinstance(error, StaleGrant):
                    await trio.sleep(0.05)  # until a dispatcher that was replaced has noticed it
                await seat.requeue(SeatLoss("full" if isinstance(error, NodeFull) else "failed"))

    async def _wait(self, sequence, event):
        await event.wait()
        await self.process.running()
        if sequence.error is not None:
            raise sequence.error
