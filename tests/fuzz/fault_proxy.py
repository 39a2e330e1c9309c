"""A TCP proxy that forwards a number of bytes of one connection, then injects a network fault.

It forwards between a client and a server on loopback, and does not parse the bytes. When either of them ends
the connection, the proxy ends it on both sides.
"""

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Literal, NamedTuple, get_args

import trio

Kind = Literal["none", "cut", "stall", "drip", "half-close", "reset"]
Way = Literal["to the server", "to the client"]
Address = tuple[str, int]

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset instead of a FIN
STREAM_ERRORS = (trio.BrokenResourceError, trio.ClosedResourceError)


class Fault(NamedTuple):
    """A fault that occurs after `after` bytes in one direction.

    cut: both ends see the connection end. reset: both see a reset. stall: no further byte is forwarded, and
    neither end is notified. drip: bytes are forwarded one at a time. half-close: the receiver gets a FIN.
    """

    kind: Kind
    way: Way
    after: int


def draw_fault(random: Random, *, request_bytes: int, answer_bytes: int) -> Fault:
    """Draw a fault at a random byte of the request, or of an answer of about that length."""
    way = random.choice(get_args(Way))
    length = request_bytes if way == "to the server" else answer_bytes
    return Fault(random.choice(get_args(Kind)), way, random.randint(0, length))


@asynccontextmanager
async def faulty(server: Address, fault: Fault) -> AsyncIterator[Address]:
    """Yield an address that leads to the server, for one connection with this fault."""
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(_serve, listener, server, fault)
        yield listener.socket.getsockname()
        nursery.cancel_scope.cancel()


async def _serve(listener: trio.SocketListener, server: Address, fault: Fault) -> None:
    async with listener:
        client = await listener.accept()
        async with client:
            await _relay(client, server, fault)


async def _relay(client: trio.SocketStream, server: Address, fault: Fault) -> None:
    async with await trio.open_tcp_stream(*server) as upstream:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or single bytes would be merged
        async with trio.open_nursery() as pumps:
            ways: dict[Way, tuple[trio.SocketStream, trio.SocketStream]] = {
                "to the server": (client, upstream),
                "to the client": (upstream, client),
            }
            for way, (source, sink) in ways.items():
                own = fault if fault.way == way else Fault("none", way, 0)
                pumps.start_soon(_Pump(source, sink, own).run, pumps.cancel_scope)


class _Pump:
    """Forwards one direction, up to its fault."""

    def __init__(self, source: trio.SocketStream, sink: trio.SocketStream, fault: Fault) -> None:
        self._source = source
        self._sink = sink
        self._fault = fault
        self._left = fault.after

    async def run(self, connection: trio.CancelScope) -> None:
        """Forward bytes and cause the fault, then end the connection on both sides."""
        with suppress(*STREAM_ERRORS):
            if await self._carry():
                await self._happen()
        connection.cancel()

    async def _carry(self) -> bool:
        """Forward bytes up to the fault; return False if the source ends first."""
        faultless = self._fault.kind == "none"
        while faultless or self._left:
            data = await self._source.receive_some(None if faultless else min(self._left, 65536))
            if not data:
                return False
            await self._sink.send_all(data)
            self._left -= len(data)
        return True

    async def _happen(self) -> None:
        if self._fault.kind == "reset":
            for stream in (self._source, self._sink):
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        elif self._fault.kind == "stall":
            await trio.sleep_forever()
        elif self._fault.kind == "drip":
            while data := await self._source.receive_some(1):
                await self._sink.send_all(data)
        elif self._fault.kind == "half-close":
            await self._sink.send_eof()
            while await self._source.receive_some():
                pass
