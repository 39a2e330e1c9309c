"""Grants through 1 to 4 fronts have the order of one process that gets the same events in the same order."""

from random import Random

import pytest
import trio

from fairlead.config import QueueConfig
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.dispatch.ticket import TicketState
from fairlead.dispatch.waiter import WaitingTask
from fairlead.errors import Displaced, QueueFull
from fronts.system import MODEL, System, limits, settle, spec

NODES = {"x": 1, "y": 2}
SCHEDULES = 100
SCHEDULES_OF_A_NIGHT = 10_000


def schedule(random):
    """Return events: a job with its tenant, class and front, or the number of a job that ends."""
    fronts, events, jobs = random.randint(1, 4), [], 0
    for _ in range(random.randint(4, 16)):
        if not jobs or random.random() < 0.6:
            events.append((random.choice("ABC"), random.choice([0, 1, 1]), random.randrange(fronts)))
            jobs += 1
        else:
            events.append(random.randrange(jobs))
    return fronts, events


def queue(random):
    return QueueConfig(capacity=random.choice([3, 100]), fairness=random.choice(["roundRobin", "tokens"]))


def in_one_process(config, events):
    """Return the grants of a dispatcher that gets the events directly: number of the job, node."""
    dispatcher = Dispatcher(config, random=Random(0))
    granted, waiters = [], []
    grant = dispatcher.grant

    def record(ticket):
        granted.append((ticket.job.request_id, ticket.node.id))
        grant(ticket)

    dispatcher.grant = record
    for node, seats in NODES.items():
        dispatcher.scheduler.node_up(node, frozenset({MODEL}), limits(seats))
    ended = set()
    for event in events:
        if isinstance(event, int):
            if event not in ended:
                ended.add(event)
                dispatcher.end(waiters[event])
            continue
        tenant, priority, _ = event
        job = spec(tenant, f"{len(waiters)}", priority=priority)
        waiter = WaitingTask(dispatcher.new_ticket(job))
        waiters.append(waiter)
        dispatcher.submit(waiter)
        for number, other in enumerate(waiters):  # a front ends a refused job at once
            if other.ticket.state is TicketState.DONE and number not in ended:
                ended.add(number)
                dispatcher.end(other)
    return granted


async def through_fronts(config, fronts, events):
    async with trio.open_nursery() as nursery:
        system = System(nursery, NODES, queue=config)
        system.start_dispatcher()
        for number in range(fronts):
            system.start_front(number)
        await trio.sleep(0.5)
        granted = []
        grant = system.dispatcher.grant

        def record(ticket):
            granted.append((ticket.job.request_id, ticket.node.id))
            grant(ticket)

        system.dispatcher.grant = record
        scopes = []

        async def run(front, job, scope):
            with scope:
                try:
                    async with front.seat(job):
                        await trio.sleep_forever()
                except (QueueFull, Displaced):
                    """Ended at once."""

        for event in events:
            if isinstance(event, int):
                scopes[event].cancel()
            else:
                tenant, priority, front = event
                job = spec(tenant, f"{len(scopes)}", priority=priority)
                scopes.append(trio.CancelScope())
                nursery.start_soon(run, system.fronts[front], job, scopes[-1])
            await settle()
        nursery.cancel_scope.cancel()
    return granted


async def compare(schedules):
    for seed in range(schedules):
        random = Random(seed)
        config, (fronts, events) = queue(random), schedule(random)
        assert await through_fronts(config, fronts, events) == in_one_process(config, events), seed


async def test_grants_through_fronts_have_the_order_of_one_process(autojump_clock):
    await compare(SCHEDULES)


@pytest.mark.nightly
async def test_grants_of_10000_schedules_have_the_order_of_one_process(autojump_clock):
    await compare(SCHEDULES_OF_A_NIGHT)
