"""`RequestLog` records each finished job once, after its task has sent the response, despite failures."""

import structlog
import trio
import trio.testing

from fairlead.base.config import Config
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.generation.request_log import RequestLog
from generation.metrics.sources import timeline


def log_with(traces) -> RequestLog:
    """Return a request log with this function as its traces."""
    return RequestLog(TenantNames(Config(models=())), traces)


def appending(events: list) -> RequestLog:
    """Return a request log that appends each request's id, when it is recorded."""
    return log_with(lambda recorded, _load: events.append(recorded.job.request_id))


async def test_response_is_sent_before_the_request_is_recorded():
    events = []
    log = appending(events)

    async def serve(name):
        log.add(timeline(request_id=name), None)
        events.append(f"{name} sent")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        await trio.testing.wait_all_tasks_blocked()
        await serve("one")
        await trio.testing.wait_all_tasks_blocked()
        await serve("two")
        await serve("three")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert events == ["one sent", "one", "two sent", "three sent", "two", "three"]


async def test_remaining_requests_are_recorded_at_the_end():
    events = []
    log = appending(events)
    log.add(timeline(request_id="added before the start"), None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        await trio.testing.wait_all_tasks_blocked()
        log.add(timeline(request_id="last"), None)
        nursery.cancel_scope.cancel()
    assert events == ["added before the start", "last"]


async def test_failure_to_record_a_request_does_not_prevent_the_others():
    recorded = []

    def trace(request, load):
        if request.job.request_id == "bad":
            raise ValueError("no such column")
        recorded.append((request.job.request_id, load))

    log = log_with(trace)
    with structlog.testing.capture_logs() as logged:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.run)
            for number, name in enumerate(("good", "bad", "better")):
                log.add(timeline(request_id=name), (0.0, float(number)))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert recorded == [("good", (0.0, 0.0)), ("better", (0.0, 2.0))]
    lines = [(line["event"], line["request_id"]) for line in logged]
    assert lines == [
        ("request", "good"),
        ("request", "bad"),
        ("request not logged", "bad"),
        ("request", "better"),
    ]
