"""The attack: requests and connections from several clients, and the faults found in the responses."""

import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio

from hostile_client.requests import Grammar
from hostile_client.spoiling import pieces
from hostile_client.wire import BrokenAnswer, Reply, Wire, fault_of

TIMEOUT_S = 90.0  # long enough for a busy machine with other requests in the queue
KEPT_OPEN = 0.7  # the probability that a connection is used for another request
MAX_FAULTS = 20

Address = tuple[str, int]


@dataclass(frozen=True)
class Fault:
    """A fault, and the request that reproduces it."""

    what: str
    kind: str
    seed: int
    sent: bytes

    def __str__(self) -> str:
        shown = (
            repr(self.sent) if len(self.sent) < 4000 else f"{self.sent[:4000]!r}… ({len(self.sent)} bytes)"
        )
        return f"{self.what}\n  {self.kind} {self.seed}: {shown}"


@dataclass
class Findings:
    """The result of an attack. `answers` counts responses by status and code."""

    answers: Counter[str] = field(default_factory=Counter)
    connections: int = 0
    faults: list[Fault] = field(default_factory=list)

    def shown(self) -> dict[str, Any]:
        """Return the result as values for JSON."""
        answers = dict(self.answers.most_common())
        return {"answers": answers, "connections": self.connections, "faults": list(map(str, self.faults))}

    def add(self, reply: Reply) -> None:
        """Count a response."""
        self.answers[f"{reply.status} {reply.code}".strip()] += 1


class Attack:
    """Sends the requests of `grammar` to a server from `at_once` clients, until `max_faults` are found.

    `source`: the address of the clients; None leaves the choice to the system.
    """

    def __init__(
        self,
        address: Address,
        grammar: Grammar,
        *,
        at_once: int = 8,
        max_faults: int = MAX_FAULTS,
        source: str | None = None,
    ) -> None:
        self.findings = Findings()
        self._address = address
        self._grammar = grammar
        self._at_once = at_once
        self._max_faults = max_faults
        self._source = source

    async def run(self, *, requests: range, connections: range) -> None:
        """Send the requests and open the connections of these seeds."""
        turns = iter(_mixed(requests, connections))
        async with trio.open_nursery() as nursery:
            for _ in range(self._at_once):
                nursery.start_soon(self._client, turns)

    async def send_again(self, kind: str, seed: int) -> None:
        """Send the request or connection of a fault again."""
        await self._client(iter([(kind, seed)]))

    async def _client(self, turns: Iterator[tuple[str, int]]) -> None:
        wire: Wire | None = None
        try:
            for kind, seed in turns:
                if len(self.findings.faults) >= self._max_faults:
                    return
                if kind == "connection":
                    await self._attack_once(seed)
                else:
                    wire = await self._send_and_receive(wire, seed)
        finally:
            if wire is not None:
                wire.socket.close()

    async def _connect(self) -> Wire:
        sock = trio.socket.socket()
        try:
            if self._source is not None:
                await sock.bind((self._source, 0))
            await sock.connect(self._address)
        except BaseException:
            sock.close()
            raise
        return Wire(sock)

    async def _send_and_receive(self, wire: Wire | None, seed: int) -> Wire | None:
        """Send a request, on the given connection if it is open. Return the connection if it stays open."""
        request = self._grammar.request(seed)
        fault: str | None
        reply = None
        again = wire is not None
        try:
            wire = wire or await self._connect()
            with trio.fail_after(TIMEOUT_S):
                async with trio.open_nursery() as sending:
                    sending.start_soon(
                        _send_ignoring_close, wire, request.data
                    )  # the server may refuse it before the end
                    reply = await wire.reply(request.method)
                    sending.cancel_scope.cancel()
            fault = fault_of(reply, request.method)
            self.findings.add(reply)
        except* trio.TooSlowError:
            fault = f"no answer in {TIMEOUT_S:g} s"
        except* BrokenAnswer as group:
            fault = str(group.exceptions[0])
        except* (EOFError, OSError) as group:
            fault = f"no answer: {group.exceptions[0]!r}"
        if reply is None and again and fault is not None and fault.startswith("no answer: "):
            assert wire is not None
            wire.socket.close()  # the server may have closed it, as after a refusal
            return await self._send_and_receive(None, seed)
        if fault is not None:
            self.findings.faults.append(Fault(fault, "request", seed, request.data))
        if wire is not None and (
            reply is None or reply.closes or request.is_last or Random(seed).random() > KEPT_OPEN
        ):
            wire.socket.close()
            return None
        return wire

    async def _attack_once(self, seed: int) -> None:
        """Send mutated bytes in pieces, perhaps read a little, and disconnect in one of several ways."""
        random = Random(f"visit {seed}")
        data = self._grammar.conversation(seed)
        self.findings.connections += 1
        received = b""
        with suppress(OSError):  # the server may close at any time
            wire = await self._connect()
            with wire.socket:
                for piece in pieces(random, data):
                    with trio.move_on_after(0.01):  # nor does it have to read
                        await wire.send(piece)
                if random.random() < 0.2:
                    wire.socket.shutdown(socket.SHUT_WR)
                with trio.move_on_after(random.choice((0, 0.005, 0.05))):
                    while len(received) < 1_000_000 and (got := await wire.socket.recv(65536)):
                        received += got
                if random.random() < 0.3:
                    reset = struct.pack("ii", 1, 0)
                    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        if b"HTTP/1.1 500 " in received or b'"internal_error"' in received:
            self.findings.faults.append(Fault("status 500", "connection", seed, data))


async def _send_ignoring_close(wire: Wire, data: bytes) -> None:
    with suppress(OSError):
        await wire.send(data)


def _mixed(requests: range, connections: range) -> Iterator[tuple[str, int]]:
    """Yield all seeds of both kinds, evenly mixed."""
    every = max(1, len(requests) // (len(connections) + 1))
    others = iter(connections)
    for number, seed in enumerate(requests):
        if number % every == 0:
            yield from (("connection", other) for other in [next(others, None)] if other is not None)
        yield "request", seed
    yield from (("connection", other) for other in others)
