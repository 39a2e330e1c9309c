"""Many connections without a handshake, and those that have the key."""

import pytest
import trio
import trio.testing

from fairlead.distributed.ipc import handshakes
from fairlead.distributed.ipc.handshake import HANDSHAKE_TIMEOUT_S, HandshakeFailed, shake_hands
from fairlead.distributed.ipc.handshakes import PendingHandshakes

KEY = b"k" * 32


@pytest.fixture
def pending(monkeypatch):
    monkeypatch.setattr(handshakes, "MAX_PENDING", 3)
    return PendingHandshakes(name="dispatcher", key=KEY)


async def connect(nursery, pending, failures):
    """Return the client's end of a connection whose handshake has begun."""
    ours, theirs = trio.testing.memory_stream_pair()

    async def serve():
        try:
            await pending.authenticate(theirs)
        except HandshakeFailed as error:
            failures.append(str(error))

    nursery.start_soon(serve)
    await trio.testing.wait_all_tasks_blocked()
    return ours


async def test_silent_connections_are_bounded_and_keep_no_front_out(autojump_clock, nursery, pending):
    failures = []
    for _ in range(10):
        await connect(nursery, pending, failures)
    assert len(pending) == 3
    assert failures == ["too many connections have not finished their handshakes"] * 7
    front = await connect(nursery, pending, failures)
    assert await shake_hands(front, name="front", key=KEY, is_client=True) == "dispatcher"
    assert len(pending) == 2


async def test_connection_that_sends_slowly_ends_in_time(autojump_clock, nursery, pending):
    failures = []
    began = trio.current_time()
    slow = await connect(nursery, pending, failures)
    while len(pending):
        await slow.send_all(b"\x01")
        await trio.sleep(1.9)
    assert trio.current_time() - began < HANDSHAKE_TIMEOUT_S + 2
    assert len(failures) == 1


async def test_failed_handshake_leaves_nothing(autojump_clock, nursery, pending):
    failures = []
    front = await connect(nursery, pending, failures)
    with pytest.raises(HandshakeFailed):
        await shake_hands(front, name="front", key=b"x" * 32, is_client=True)
    await trio.testing.wait_all_tasks_blocked()
    assert failures == ["the keys differ"]
    assert len(pending) == 0
