"""Grants through 1 to 4 fronts have the order of one process that gets the same events in the same order."""

from math import inf
from random import Random

import pytest
import trio

from distributed.frontends.system import MODEL, System, limits, settle, spec
from fairlead.base.config import QueueConfig
from fairlead.base.errors import FairleadError
from fairlead.distributed.frontends import wire
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.ticket import TicketState
from fairlead.router.dispatch.waiter import SeatLoss, Waiter

NODES = {"x": 1, "y": 3}
SCHEDULES = 60
SCHEDULES_OF_A_NIGHT = 10_000
KINDS = ("submit", "submit", "submit", "end", "end", "begin", "requeue", "node", "charge", "time")


def schedule(random):
    """Return the number of fronts, and events, each with a number that selects its job or node."""
    events = []
    for _ in range(random.randint(6, 24)):
        job = (
            random.choice("ABC"),
            random.choice([0, 1, 1]),
            random.random() < 0.5,
            random.randrange(1, 300),
            random.choice([1, 1, 2, 5]),
        )
        events.append((random.choice(KINDS), random.randrange(1000), job))
    return random.randint(1, 4), events


def queue(random):
    return QueueConfig(
        capacity=random.choice([3, 100]),
        fairness=random.choice(["roundRobin", "tokens"]),
        timeout_s=random.choice([4.0, 60.0]),
    )


class Recorded:
    """A dispatcher's grants in their order: number of the job, node, number of seats."""

    def __init__(self, dispatcher):
        self.granted = []
        self._grant = dispatcher.grant
        dispatcher.grant = self

    def __call__(self, ticket):
        self.granted.append((ticket.job.request_id, ticket.node.id, ticket.seats))
        self._grant(ticket)


class Job(Waiter):
    """A job of the one process, which is ended after it was refused or stopped, as a front does."""

    def __init__(self, ticket, over):
        super().__init__(ticket)
        self.tokens = 0
        self._over = over

    def generated(self):
        return self.tokens

    def granted(self):
        """Nothing follows."""

    def refused(self, _error):
        self._over.send_nowait(self)

    def stopped(self, _error):
        self._over.send_nowait(self)


class OneProcess:
    """Gets the events directly."""

    def __init__(self, nursery, config, _fronts):
        self.dispatcher = Dispatcher(config, random=Random(0))
        self.jobs = []
        self._over, over = trio.open_memory_channel(inf)
        for node, seats in NODES.items():
            self.dispatcher.scheduler.node_up(node, frozenset({MODEL}), limits(seats))
        nursery.start_soon(self.dispatcher.run)
        nursery.start_soon(self._end, over)

    async def _end(self, over):
        async for job in over:
            if job in self.dispatcher._waiters.values():
                self.dispatcher.end(job)

    def submit(self, job, _front):
        waiter = Job(self.dispatcher.new_ticket(job), self._over)
        self.jobs.append(waiter)
        self.dispatcher.submit(waiter)

    def state(self, number):
        job = self.jobs[number]
        if job not in self.dispatcher._waiters.values() or job.error is not None:
            return None
        return job.ticket.state

    def end(self, number):
        self.dispatcher.end(self.jobs[number])

    def begin(self, number, tokens):
        self.jobs[number].tokens = tokens
        self.dispatcher.scheduler.first_delta(self.jobs[number].ticket)

    def requeue(self, number, *, is_full):
        self.dispatcher.requeue(self.jobs[number], SeatLoss("full" if is_full else "failed"))


class ThroughFronts:
    """Gets the events through fronts."""

    def __init__(self, nursery, config, fronts):
        self._nursery = nursery
        self._system = System(nursery, NODES, queue=config)
        self._system.start_dispatcher()
        for number in range(fronts):
            self._system.start_front(number)
        self.dispatcher = self._system.dispatcher
        self.jobs = []
        self._clients = []

    def submit(self, job, front):
        client = Client()
        self._clients.append(client)
        self.jobs.append(job)
        fronts = self._system.fronts
        self._nursery.start_soon(client.run, fronts[front % len(fronts)], job)

    def state(self, number):
        return self._clients[number].state

    def end(self, number):
        self._clients[number].scope.cancel()

    def begin(self, number, tokens):
        client = self._clients[number]
        client.tokens = tokens
        # Otherwise sent every second. In the one process the tokens are known at once.
        client.seat._client.send(wire.Progress({client.seat._job.number: tokens}))
        client.seat.begin(lambda: client.tokens)

    def requeue(self, number, *, is_full):
        self._clients[number].requeue(is_full=is_full)


class Client:
    """A job's client, which does what the test says."""

    def __init__(self):
        self.scope = trio.CancelScope()
        self.state = TicketState.QUEUED
        self.seat = None
        self.tokens = 0
        self._is_full = None
        self._changed = trio.Event()

    def requeue(self, *, is_full):
        self._is_full, self.state = is_full, TicketState.QUEUED
        self._changed.set()

    async def run(self, front, job):
        try:
            with self.scope:
                async with front.seat(job) as self.seat:
                    while True:
                        self.state = TicketState.GRANTED
                        await self._changed.wait()
                        self._changed = trio.Event()
                        await self.seat.requeue(SeatLoss("full" if self._is_full else "failed"))
        except FairleadError:
            """Refused or stopped."""
        finally:
            self.state = None


async def play(kind, config, fronts, events):
    """Return the grants of the events, and how long it took them."""
    async with trio.open_nursery() as nursery:
        system = kind(nursery, config, fronts)
        await trio.sleep(0.5)
        dispatcher, recorded = system.dispatcher, Recorded(system.dispatcher)
        up = set(NODES)
        for event, number, (tenant, priority, stream, tokens, sequences) in events:
            job = number % len(system.jobs) if system.jobs else None
            state = None if job is None else system.state(job)
            if event == "submit":
                options = {
                    "priority": priority,
                    "stream": stream,
                    "prompt_tokens": tokens,
                    "sequences": sequences,
                }
                system.submit(spec(tenant, f"{len(system.jobs)}", max_tokens=50, **options), number)
            elif event == "node":
                node = sorted(NODES)[number % 2]
                if node in up:
                    dispatcher.scheduler.node_down(node)
                else:
                    dispatcher.scheduler.node_up(node, frozenset({MODEL}), limits(NODES[node]))
                up ^= {node}
            elif event == "time":
                await trio.sleep(number % 3 + 0.6)
            elif event == "charge":
                dispatcher.charge_running()
            elif event == "end" and state is not None:
                system.end(job)
            elif event == "begin" and state is TicketState.GRANTED:
                system.begin(job, tokens)
            elif event == "requeue" and state is TicketState.GRANTED:
                system.requeue(job, is_full=stream)
            await settle()
            await trio.sleep(0.01)  # no two deadlines are at the same time
        nursery.cancel_scope.cancel()
    return recorded.granted


async def compare(seeds):
    for seed in seeds:
        random = Random(seed)
        config, (fronts, events) = queue(random), schedule(random)
        through_fronts = await play(ThroughFronts, config, fronts, events)
        assert through_fronts == await play(OneProcess, config, fronts, events), seed


async def test_grants_through_fronts_have_the_order_of_one_process(autojump_clock):
    await compare(range(SCHEDULES))


@pytest.mark.nightly
@pytest.mark.timeout(0)
async def test_grants_of_10000_schedules_have_the_order_of_one_process(autojump_clock):
    await compare(range(SCHEDULES_OF_A_NIGHT))
