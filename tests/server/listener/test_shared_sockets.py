"""Which front accepts a connection when all have the sockets of all."""

import socket
from contextlib import AsyncExitStack, asynccontextmanager

import trio
import trio.testing

from fairlead.server.listener.listener import bind
from fairlead.server.listener.shared_sockets import SharedSockets


class Front:
    """Accepts what it may, from the sockets of both fronts."""

    def __init__(self, sockets, number):
        self.shared = SharedSockets([[sock.dup()] for sock in sockets], number)
        self.accepted = []

    async def accept(self, sock):
        while True:
            await self.shared.wait_for_connection(sock)
            try:
                connection, _ = sock.accept()
            except BlockingIOError:
                continue
            self.accepted.append(self.shared._number_of[sock])
            connection.close()

    async def run(self):
        async with trio.open_nursery() as nursery:
            for sock in self.shared.all:
                nursery.start_soon(self.accept, sock)


@asynccontextmanager
async def two_fronts():
    """Return sockets bound to one port, and two fronts that have them, of which none runs yet."""
    async with AsyncExitStack() as stack:
        sockets = [stack.enter_context(bind("127.0.0.1", 0, is_shared=True)[0])]
        port = sockets[0].getsockname()[1]
        sockets.append(stack.enter_context(bind("127.0.0.1", port, is_shared=True)[0]))
        fronts = [Front(sockets, number) for number in (0, 1)]
        for sock in (sock for front in fronts for sock in front.shared.all):
            stack.enter_context(sock)
        yield port, fronts


async def connect(port, count=40):
    """Open and close connections; return when those that can be accepted were. None is refused."""
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port)):
            pass
    await trio.testing.wait_all_tasks_blocked(0.05)


async def test_connections_to_an_absent_front_wait_until_another_stands_in():
    async with two_fronts() as (port, (zero, one)), trio.open_nursery() as nursery:
        nursery.start_soon(zero.run)
        zero.shared.listen()
        await connect(port)
        assert set(zero.accepted) == {0}
        waiting = 40 - len(zero.accepted)
        zero.shared.stand_in((1,))
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert zero.accepted.count(1) == waiting
        await connect(port)
        assert len(zero.accepted) == 80
        zero.shared.stand_in(())
        zero.accepted.clear()
        nursery.start_soon(one.run)
        await connect(port)
        assert (set(zero.accepted), set(one.accepted)) == ({0}, {1})
        assert len(zero.accepted) + len(one.accepted) == 40
        nursery.cancel_scope.cancel()


async def test_connections_wait_while_all_fronts_are_away():
    async with two_fronts() as (port, (zero, one)):
        zero.shared.listen()  # it has ended since
        await connect(port)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.run)
            one.shared.listen()
            one.shared.stand_in((0,))
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert len(one.accepted) == 40
            nursery.cancel_scope.cancel()
