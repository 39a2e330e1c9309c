"""The crowd of queue_live.py: clients in a process of their own, so that their work is in no figure.

    python bench/queue_live_crowd.py PORT

Reads orders from its standard input, a line each, and answers each with a line; sockets and epoll, no more.

    streams N      open N streams and read them; "streaming" when all have begun
    hang up        close the oldest stream without a word: "TIME", of the system's monotonic clock, in seconds
    again          open another in its place: "streaming" when it has begun
    flood N        send N requests at once from one address and see what becomes of them: "sent SECONDS"
    count          what has become of the flood so far: a JSON object from status to number
"""

import json
import os
import select
import socket
import sys
import time
from collections import Counter
from random import Random

STREAM_TOKENS = 50_000  # longer than anybody looks on: slots come free only by leaving
TOKENS, SIGMA = 20, 0.6  # of all other answers: the median, and sigma of the logarithm
FLOOD_ADDRESS = "127.0.2.1"


class Crowd:
    """All its clients, by descriptor."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._epoll = select.epoll()
        self._epoll.register(sys.stdin.fileno(), select.EPOLLIN)
        self._streams: dict[int, socket.socket] = {}
        self._beginning: set[int] = set()
        self._flood: dict[int, socket.socket] = {}
        self._statuses: Counter[str] = Counter()
        self._orders = b""
        self._number = 0

    def run(self) -> None:
        """Obey until the input ends."""
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == sys.stdin.fileno():
                    data = os.read(descriptor, 4096)
                    if not data:
                        return
                    *orders, self._orders = (self._orders + data).split(b"\n")
                    for order in orders:
                        self._obey(order.decode().split())
                elif descriptor in self._streams:
                    self._read_stream(descriptor)
                elif descriptor in self._flood:
                    self._read_flood(descriptor)

    def _obey(self, order: list[str]) -> None:
        match order:
            case ["streams", number]:
                self._beginning.update(self._open_stream() for _ in range(int(number)))
            case ["hang", "up"]:
                oldest = next(iter(self._streams))
                now = time.monotonic()
                self._streams.pop(oldest).close()
                say(f"{now:.6f}")
            case ["again"]:
                self._beginning.add(self._open_stream())
            case ["flood", number]:
                self._send_flood(int(number))
            case ["count"]:
                say(json.dumps({**self._statuses, "open": len(self._flood)}))

    def _open_stream(self) -> int:
        self._number += 1
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.sendall(request(f"user {self._number % 50}", STREAM_TOKENS, stream=True))
        self._streams[sock.fileno()] = sock
        self._epoll.register(sock, select.EPOLLIN)
        return sock.fileno()

    def _read_stream(self, descriptor: int) -> None:
        assert self._streams[descriptor].recv(1 << 16), "a stream has ended"
        if descriptor in self._beginning:
            self._beginning.discard(descriptor)
            if not self._beginning:
                say("streaming")

    def _send_flood(self, number: int) -> None:
        """Connect all at once, each with its request behind it: the kernel does the rest."""
        began = time.monotonic()
        random = Random(number)
        for _ in range(number):
            sock = socket.socket()
            sock.bind((FLOOD_ADDRESS, 0))
            sock.connect(("127.0.0.1", self._port))
            sock.sendall(request("heavy", draw_tokens(random)))
            self._flood[sock.fileno()] = sock
            self._epoll.register(sock, select.EPOLLIN)
        say(f"sent {time.monotonic() - began:.3f}")

    def _read_flood(self, descriptor: int) -> None:
        data = self._flood[descriptor].recv(1 << 16)
        if data:
            self._statuses[data[9:12].decode()] += 1
        self._flood.pop(descriptor).close()


def request(tenant: str, tokens: int, *, stream: bool = False) -> bytes:
    """Return a request for a completion of so many tokens."""
    asked = {"prompt": [5, 6, 7], "ignore_eos": True, "user": tenant, "max_tokens": tokens, "stream": stream}
    content = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def draw_tokens(random: Random) -> int:
    """Draw the length of an answer, in tokens: lognormal."""
    return max(1, round(random.lognormvariate(0, SIGMA) * TOKENS))


def say(line: str) -> None:
    """Answer an order."""
    print(line, flush=True)


if __name__ == "__main__":
    Crowd(int(sys.argv[1])).run()
