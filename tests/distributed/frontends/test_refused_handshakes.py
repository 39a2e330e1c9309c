"""How a front tries dispatchers that refuse it, and what a bad message of one does to the front."""

from itertools import pairwise

import pytest
import structlog.testing
import trio
import trio.testing

from distributed.frontends.scripted import scripted_dispatcher
from distributed.frontends.system import System, spec
from fairlead.base.config import QueueConfig
from fairlead.base.frames import encode_frame
from fairlead.distributed.frontends import wire
from fairlead.distributed.frontends.client import LONGEST_PAUSE_S, DispatchClient
from fairlead.distributed.ipc.handshake import HandshakeFailed
from fairlead.distributed.ipc.limited_log import INTERVAL_S
from fairlead.router.dispatch.tenant_counters import TenantCounters

QUEUE = QueueConfig(capacity=100, timeout_s=60.0)
BAD = TenantCounters(1.0, {"A": 9.0})


async def test_refused_handshakes_are_tried_again_after_a_growing_pause_and_logged_at_a_bounded_rate(
    autojump_clock, nursery
):
    system, tries = System(nursery), []
    system.start_dispatcher()
    is_refused = True

    async def connect():
        tries.append(trio.current_time())
        if is_refused:
            # The reasons alternate, as those of two processes that answer at one address would.
            raise HandshakeFailed(("the keys differ", "the peer closed the connection")[len(tries) % 2])
        return await system._connect(0)

    front = system.fronts[0] = DispatchClient([connect], QUEUE)
    front.scopes, front.streams = [], []
    with structlog.testing.capture_logs() as logs:
        nursery.start_soon(front.run)
        await trio.sleep(100)
    gaps = [round(after - before, 6) for before, after in pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 0.5
    assert gaps[-1] == LONGEST_PAUSE_S
    assert len([each for each in logs if each["event"] == "no dispatcher"]) <= 2 * (100 / INTERVAL_S + 1)
    is_refused = False
    await trio.sleep(LONGEST_PAUSE_S + 0.1)
    assert front.is_connected
    system.cut(front)  # the next dispatcher is tried at once
    await trio.sleep(0.2)
    assert front.is_connected


async def test_message_that_fails_on_each_connection_is_not_received_all_the_time(
    autojump_clock, nursery, monkeypatch
):
    tries = []

    async def connect():
        ours, theirs = trio.testing.memory_stream_pair()
        tries.append(theirs)
        await theirs.send_all(encode_frame(wire.Welcome(1, "run")) + encode_frame(wire.Heartbeat(BAD)))
        return ours

    def fail(_counters):
        raise ZeroDivisionError("a bug")

    front = DispatchClient([connect], QUEUE)
    monkeypatch.setattr(front._counters, "update", fail)
    nursery.start_soon(front.run)
    await trio.sleep(100)
    assert 20 <= len(tries) <= 30


async def test_dispatcher_that_does_not_run_is_tried_often(autojump_clock, nursery):
    system = System(nursery)
    front = system.start_front(0)
    await trio.sleep(100)
    system.start_dispatcher()
    await trio.sleep(0.2)
    assert front.is_connected


@pytest.mark.parametrize("failure", [ZeroDivisionError("a bug"), ValueError("invalid")])
async def test_message_that_a_front_cannot_handle_does_not_end_the_front(
    autojump_clock, nursery, monkeypatch, failure
):
    client, dispatcher = await scripted_dispatcher(nursery, lambda found: DispatchClient(found, QUEUE))

    async def use():
        async with client.seat(spec()):
            await trio.sleep_forever()

    nursery.start_soon(use)

    def fail(_counters):
        raise failure

    monkeypatch.setattr(client._counters, "update", fail)
    await dispatcher.send(wire.Heartbeat(client._counters.whole()))
    assert dispatcher.has_ended
    assert not client.is_connected
    assert len(client) == 1  # its jobs are declared to the next dispatcher
