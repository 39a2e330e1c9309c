"""Remote servers on Trio's virtual clock, which crash, hang, slow down, refuse jobs and lose connections.

A `Wire` is a link of the connection pool, so everything above the sockets is the real code. A server answers
chats without optional fields. Its answers contain the request id, and a number that is different for each
request if the job is not repeatable.
"""

import json
from random import Random
from typing import Any

import trio

WORD_S = 0.2
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n%s\r\n\r\n"
FULL = b"HTTP/1.1 429 Full\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
UNKNOWN = b"HTTP/1.1 404 Unknown\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def words_of(request_id: str, salt: str, count: int) -> list[str]:
    """Return the words of an answer."""
    return [f"{request_id}/{salt}/{number} " for number in range(count)]


class Wire:
    """The client's end of a connection; implements `fairlead.nodes.http.links.Link`."""

    def __init__(self, server: "RemoteServer") -> None:
        self.is_open = True
        self._server = server
        self._inbox = bytearray()
        self._is_broken = False
        self._arrival = trio.Event()

    async def send(self, data: bytes) -> None:
        """See `Link`."""
        if self._is_broken:
            raise ConnectionResetError("the server is dead")
        self._server.handle(self, data)

    async def receive(self) -> bytes:
        """See `Link`."""
        await trio.lowlevel.checkpoint()
        while not self._inbox:
            if self._is_broken:
                raise ConnectionResetError("the server is dead")
            self._arrival = trio.Event()
            await self._arrival.wait()
        data = bytes(self._inbox)
        self._inbox.clear()
        return data

    def is_stale(self) -> bool:
        """See `Link`."""
        return self._is_broken or bool(self._inbox)

    def close(self) -> None:
        """See `Link`."""
        self.is_open = False
        self._server.remove(self)

    def deliver(self, data: bytes) -> None:
        """Receive data from the server."""
        self._inbox += data
        self._arrival.set()

    def break_off(self) -> None:
        """Break the connection; received data can still be read."""
        self._is_broken = True
        self._arrival.set()


class RemoteServer:
    """A server with `seats`. It adds to `problems` if it gets more jobs at once.

    `refusals` counts its 429s by request; `wires` are the open connections.
    """

    def __init__(
        self, name: str, seats: int, random: Random, nursery: trio.Nursery, problems: list[str]
    ) -> None:
        self._delay = 1.0
        self._is_full = False
        self.wires: set[Wire] = set()
        self.refusals: dict[str, int] = {}
        self._name = name
        self._seats = seats
        self._random = random
        self._nursery = nursery
        self._problems = problems
        self._is_down = False
        self._running = trio.Event()
        self._running.set()
        self._words_a_chunk = random.choice([1, 1, 2, 3])
        self._working: dict[Wire, trio.CancelScope] = {}
        self._answers = 0

    # Faults ------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Crash: break and refuse all connections."""
        self._is_down = True
        for wire in list(self.wires):
            wire.break_off()
            self._end_work(wire)

    def hang(self) -> None:
        """Hang: send nothing more, but keep and accept connections."""
        self._running = trio.Event()

    def recover(self) -> None:
        """Continue after `hang`, or start again after `crash`."""
        self._is_down = False
        self._running.set()

    def slow_down(self, delay: float) -> None:
        """Multiply all delays."""
        self._delay = delay

    def refuse_jobs(self) -> None:
        """Refuse every job with 429."""
        self._is_full = True

    def accept_jobs(self) -> None:
        """Accept jobs again."""
        self._is_full = False

    def drop_connections(self) -> None:
        """Break all connections, but accept new ones."""
        self.crash()
        self._is_down = False

    # Connections -------------------------------------------------------------------------------------

    def connect(self) -> Wire:
        """Accept a connection. Raises `ConnectionRefusedError`."""
        if self._is_down:
            raise ConnectionRefusedError(111, "refused")
        wire = Wire(self)
        self.wires.add(wire)
        return wire

    def handle(self, wire: Wire, data: bytes) -> None:
        """Handle a request, which the client sends in one piece."""
        head, _, body = data.partition(b"\r\n\r\n")
        if head.startswith(b"POST") and len(self._working) >= self._seats:
            self._problems.append("overbooked: a server has more jobs than seats")
        scope = trio.CancelScope()
        if head.startswith(b"POST"):
            self._working[wire] = scope
        self._nursery.start_soon(self._answer, wire, scope, head, body)

    def remove(self, wire: Wire) -> None:
        """Forget a connection that the client has closed."""
        self.wires.discard(wire)
        self._end_work(wire)

    def _end_work(self, wire: Wire) -> None:
        if (scope := self._working.pop(wire, None)) is not None:
            scope.cancel()

    # Answers -----------------------------------------------------------------------------------------

    async def _answer(self, wire: Wire, scope: trio.CancelScope, head: bytes, body: bytes) -> None:
        with scope:
            if head.startswith(b"GET"):
                is_health = head.startswith(b"GET /health ")
                await self._send(wire, _whole(b"{}") if is_health else UNKNOWN)
            else:
                await self._chat(wire, json.loads(body))

    async def _chat(self, wire: Wire, request: dict[str, Any]) -> None:
        await self._running.wait()
        if self._is_full:
            self.refusals[request["id"]] = self.refusals.get(request["id"], 0) + 1
            self._working.pop(wire, None)
            await self._send(wire, FULL)
            return
        self._answers += 1
        salt = "" if request["repeatable"] else f"{self._name}-{self._answers}"
        words = words_of(request["id"], salt, request["words"])
        if request["stream"]:
            await self._stream(wire, words)
            return
        await trio.sleep(WORD_S * len(words) * self._delay)
        message = {"role": "assistant", "content": "".join(words)}
        answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        await self._send_last(wire, _whole(json.dumps(answer).encode()))

    async def _stream(self, wire: Wire, words: list[str]) -> None:
        await self._send(wire, HEAD % (b"text/event-stream", b"Transfer-Encoding: chunked"))
        await self._send(wire, _event({"role": "assistant", "content": ""}))
        for start in range(0, len(words), self._words_a_chunk):
            part = words[start : start + self._words_a_chunk]
            await trio.sleep(WORD_S * len(part) * self._delay)
            await self._send(wire, _event({"content": "".join(part)}))
        await self._send_last(wire, _event({}, "stop") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def _send_last(self, wire: Wire, data: bytes) -> None:
        """Send the end of an answer; its reader may use the seat at once."""
        await self._running.wait()
        self._working.pop(wire, None)
        await self._send(wire, data)

    async def _send(self, wire: Wire, data: bytes) -> None:
        """Send data, occasionally in two pieces, between which the server may stop."""
        at = self._random.randrange(1, len(data)) if self._random.random() < 0.2 else len(data)
        for piece in (data[:at], data[at:]):
            await self._running.wait()
            if piece:
                wire.deliver(piece)
                await trio.sleep(0.01 * self._delay if len(piece) < len(data) else 0)


def _whole(body: bytes) -> bytes:
    return HEAD % (b"application/json", b"Content-Length: %d" % len(body)) + body


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return _chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
