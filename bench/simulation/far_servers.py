"""Servers elsewhere, and the wires to them, on Trio's virtual clock: they die, stop, slow down and turn away.

A wire is what the pool of connections takes for a link, so everything above the sockets is the real thing.
A server answers chats in a dialect with nothing optional. What it says is told by who asks, and once more by
how often anybody asked, if the same request need not have the same answer.
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
    """Return a whole answer, word by word."""
    return [f"{request_id}/{salt}/{number} " for number in range(count)]


class Wire:
    """Our end of a connection: what `fairlead.nodes.links.Link` asks for."""

    def __init__(self, server: "FarServer") -> None:
        self.is_open = True
        self._server = server
        self._inbox = bytearray()
        self._is_broken = False
        self._news = trio.Event()

    async def send(self, data: bytes) -> None:
        """See `Link`."""
        if self._is_broken:
            raise ConnectionResetError("the server is dead")
        self._server.hear(self, data)

    async def receive(self) -> bytes:
        """See `Link`."""
        await trio.lowlevel.checkpoint()
        while not self._inbox:
            if self._is_broken:
                raise ConnectionResetError("the server is dead")
            self._news = trio.Event()
            await self._news.wait()
        data = bytes(self._inbox)
        self._inbox.clear()
        return data

    def is_stale(self) -> bool:
        """See `Link`."""
        return self._is_broken or bool(self._inbox)

    def close(self) -> None:
        """See `Link`."""
        self.is_open = False
        self._server.forget(self)

    def come(self, data: bytes) -> None:
        """The server has sent this."""
        self._inbox += data
        self._news.set()

    def snap(self) -> None:
        """The server is gone; what has come can still be read."""
        self._is_broken = True
        self._news.set()


class FarServer:
    """One server with `seats`. `problems` is told when it has more to do at once than that.

    `turned_away` counts its 429s, by request; `wires` are the open connections.
    """

    def __init__(
        self, name: str, seats: int, random: Random, nursery: trio.Nursery, problems: list[str]
    ) -> None:
        self._delay = 1.0
        self._is_full = False
        self.wires: set[Wire] = set()
        self.turned_away: dict[str, int] = {}
        self._name = name
        self._seats = seats
        self._random = random
        self._nursery = nursery
        self._problems = problems
        self._is_dead = False
        self._goes_on = trio.Event()
        self._goes_on.set()
        self._words_a_chunk = random.choice([1, 1, 2, 3])
        self._working: dict[Wire, trio.CancelScope] = {}
        self._salts = 0

    # What happens to it ------------------------------------------------------------------------------

    def die(self) -> None:
        """Be gone, and every connection with it."""
        self._is_dead = True
        for wire in list(self.wires):
            wire.snap()
            self._end_work(wire)

    def stop(self) -> None:
        """Do nothing any more, though the machine keeps the connections and accepts others."""
        self._goes_on = trio.Event()

    def come_back(self) -> None:
        """Go on after `stop`; begin anew after `die`."""
        self._is_dead = False
        self._goes_on.set()

    def slow_down(self, delay: float) -> None:
        """Take so many times as long for everything."""
        self._delay = delay

    def fill_up(self) -> None:
        """Turn every job away."""
        self._is_full = True

    def have_room(self) -> None:
        """Take jobs again."""
        self._is_full = False

    def drop(self) -> None:
        """Lose every connection, and live."""
        self.die()
        self._is_dead = False

    # Its connections ---------------------------------------------------------------------------------

    def connect(self) -> Wire:
        """Accept a connection. Raises `ConnectionRefusedError`."""
        if self._is_dead:
            raise ConnectionRefusedError(111, "refused")
        wire = Wire(self)
        self.wires.add(wire)
        return wire

    def hear(self, wire: Wire, data: bytes) -> None:
        """A request came, in one piece as we send them."""
        head, _, body = data.partition(b"\r\n\r\n")
        if head.startswith(b"POST") and len(self._working) >= self._seats:
            self._problems.append("overbooked: a server has more jobs than seats")
        scope = trio.CancelScope()
        if head.startswith(b"POST"):
            self._working[wire] = scope
        self._nursery.start_soon(self._answer, wire, scope, head, body)

    def forget(self, wire: Wire) -> None:
        """The other side has closed the connection."""
        self.wires.discard(wire)
        self._end_work(wire)

    def _end_work(self, wire: Wire) -> None:
        if (scope := self._working.pop(wire, None)) is not None:
            scope.cancel()

    # Its answers -------------------------------------------------------------------------------------

    async def _answer(self, wire: Wire, scope: trio.CancelScope, head: bytes, body: bytes) -> None:
        with scope:
            if head.startswith(b"GET"):
                is_health = head.startswith(b"GET /health ")
                await self._say(wire, _whole(b"{}") if is_health else UNKNOWN)
            else:
                await self._chat(wire, json.loads(body))

    async def _chat(self, wire: Wire, asked: dict[str, Any]) -> None:
        await self._goes_on.wait()
        if self._is_full:
            self.turned_away[asked["id"]] = self.turned_away.get(asked["id"], 0) + 1
            self._working.pop(wire, None)
            await self._say(wire, FULL)
            return
        self._salts += 1
        salt = "" if asked["repeatable"] else f"{self._name}-{self._salts}"
        words = words_of(asked["id"], salt, asked["words"])
        if asked["stream"]:
            await self._stream(wire, words)
            return
        await trio.sleep(WORD_S * len(words) * self._delay)
        message = {"role": "assistant", "content": "".join(words)}
        answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        await self._say_last(wire, _whole(json.dumps(answer).encode()))

    async def _stream(self, wire: Wire, words: list[str]) -> None:
        await self._say(wire, HEAD % (b"text/event-stream", b"Transfer-Encoding: chunked"))
        await self._say(wire, _event({"role": "assistant", "content": ""}))
        for start in range(0, len(words), self._words_a_chunk):
            part = words[start : start + self._words_a_chunk]
            await trio.sleep(WORD_S * len(part) * self._delay)
            await self._say(wire, _event({"content": "".join(part)}))
        await self._say_last(wire, _event({}, "stop") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def _say_last(self, wire: Wire, data: bytes) -> None:
        """Say the end of an answer: who reads it knows that a seat is free."""
        await self._goes_on.wait()
        self._working.pop(wire, None)
        await self._say(wire, data)

    async def _say(self, wire: Wire, data: bytes) -> None:
        """Send it, now and then in two pieces with something in between that may be the end of all."""
        at = self._random.randrange(1, len(data)) if self._random.random() < 0.2 else len(data)
        for piece in (data[:at], data[at:]):
            await self._goes_on.wait()
            if piece:
                wire.come(piece)
                await trio.sleep(0.01 * self._delay if len(piece) < len(data) else 0)


def _whole(body: bytes) -> bytes:
    return HEAD % (b"application/json", b"Content-Length: %d" % len(body)) + body


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return _chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
