"""Journeys are told of after what their tasks still had to do, each once, whatever goes wrong."""

import structlog
import trio
import trio.testing

from fairlead.telemetry.backlog import Backlog
from telemetry.sources import journey


async def test_who_adds_a_journey_sends_its_answer_first():
    events = []
    backlog = Backlog(lambda told: events.append(told.job.request_id))

    async def serve(name):
        backlog.add(journey(request_id=name))
        events.append(f"{name} sent")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(backlog.run)
        await trio.testing.wait_all_tasks_blocked()
        await serve("one")
        await trio.testing.wait_all_tasks_blocked()
        await serve("two")
        await serve("three")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert ["one sent", "one", "two sent", "three sent", "two", "three"] == events


async def test_the_last_ones_are_told_of_at_the_end():
    told = []
    backlog = Backlog(lambda each: told.append(each.job.request_id))
    backlog.add(journey(request_id="before it ran"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(backlog.run)
        await trio.testing.wait_all_tasks_blocked()
        backlog.add(journey(request_id="last"))
        nursery.cancel_scope.cancel()
    assert ["before it ran", "last"] == told


async def test_one_that_cannot_be_told_of_holds_up_no_other():
    told = []

    def tell(each):
        if each.job.request_id == "bad":
            raise ValueError("no such column")
        told.append(each.job.request_id)

    backlog = Backlog(tell)
    with structlog.testing.capture_logs() as logged:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(backlog.run)
            for name in ("good", "bad", "better"):
                backlog.add(journey(request_id=name))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert ["good", "better"] == told
    assert ["bad"] == [line["request_id"] for line in logged]
