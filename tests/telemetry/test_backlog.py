"""`Backlog` reports each ended journey once, after its task has sent the response, despite failures."""

import structlog
import trio
import trio.testing

from fairlead.telemetry.backlog import Backlog
from telemetry.sources import journey


async def test_response_is_sent_before_the_journey_is_reported():
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
    assert events == ["one sent", "one", "two sent", "three sent", "two", "three"]


async def test_remaining_journeys_are_reported_at_the_end():
    told = []
    backlog = Backlog(lambda each: told.append(each.job.request_id))
    backlog.add(journey(request_id="before it ran"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(backlog.run)
        await trio.testing.wait_all_tasks_blocked()
        backlog.add(journey(request_id="last"))
        nursery.cancel_scope.cancel()
    assert told == ["before it ran", "last"]


async def test_failed_report_does_not_prevent_the_others():
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
    assert told == ["good", "better"]
    assert [line["request_id"] for line in logged] == ["bad"]
