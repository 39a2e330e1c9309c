"""The clients of queue_live.py, in their own process so that their work does not affect the measurements.

    python bench/queue_live_clients.py PORT

Reads commands from standard input, one a line, and answers each with a line. Uses only sockets and epoll.

    streams N      open N streams and read them; answers "streaming" when all have started
    hang up        close the oldest stream; answers with the time, in seconds of the monotonic clock
    again          open another stream; answers "streaming" when it has started
    flood N        send N requests at once from one address; answers "sent SECONDS"
    count          answers with the flood's responses so far: a JSON object from status to number
"""

import json
import os
import select
import socket
import sys
import time
from collections import Counter
from random import Random

# The queue timeout of a stream includes the time to its first token: of 500 that are opened at once, a slow
# server refuses some.
OPENED_AT_ONCE = 10
STREAM_TOKENS = 50_000  # longer than the measurement, so that slots become free only by disconnecting
TOKENS, SIGMA = 20, 0.6  # lognormal lengths of all other answers: median, and sigma of the logarithm
FLOOD_ADDRESS = "127.0.2.1"


class Clients:
    """All clients, by descriptor."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._epoll = select.epoll()
        self._epoll.register(sys.stdin.fileno(), select.EPOLLIN)
        self._streams: dict[int, socket.socket] = {}
        self._starting: set[int] = set()
        self._to_open = 0
        self._flood: dict[int, socket.socket] = {}
        self._statuses: Counter[str] = Counter()
        self._input = b""
        self._number = 0

    def run(self) -> None:
        """Run until standard input ends."""
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == sys.stdin.fileno():
                    data = os.read(descriptor, 4096)
                    if not data:
                        return
                    *commands, self._input = (self._input + data).split(b"\n")
                    for command in commands:
                        self._execute(command.decode().split())
                elif descriptor in self._streams:
                    self._read_stream(descriptor)
                elif descriptor in self._flood:
                    self._read_flood(descriptor)

    def _execute(self, command: list[str]) -> None:
        match command:
            case ["streams", number]:
                self._to_open = int(number)
                self._open_some()
            case ["hang", "up"]:
                oldest = next(iter(self._streams))
                now = time.monotonic()
                self._streams.pop(oldest).close()
                write(f"{now:.6f}")
            case ["again"]:
                self._to_open = 1
                self._open_some()
            case ["flood", number]:
                self._send_flood(int(number))
            case ["count"]:
                write(json.dumps({**self._statuses, "open": len(self._flood)}))

    def _open_some(self) -> None:
        """Open the next streams, or report that all have started."""
        if not self._to_open:
            write("streaming")
        opened = min(self._to_open, OPENED_AT_ONCE)
        self._to_open -= opened
        self._starting.update(self._open_stream() for _ in range(opened))

    def _open_stream(self) -> int:
        self._number += 1
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.sendall(request(f"user {self._number % 50}", STREAM_TOKENS, stream=True))
        self._streams[sock.fileno()] = sock
        self._epoll.register(sock, select.EPOLLIN)
        return sock.fileno()

    def _read_stream(self, descriptor: int) -> None:
        data = self._streams[descriptor].recv(1 << 16)
        assert data, "a stream has ended"
        if descriptor in self._starting:
            assert data.startswith(b"HTTP/1.1 200"), data
            self._starting.discard(descriptor)
            if not self._starting:
                self._open_some()

    def _send_flood(self, number: int) -> None:
        """Connect and send each request without waiting for the server."""
        began = time.monotonic()
        random = Random(number)
        for _ in range(number):
            sock = socket.socket()
            sock.bind((FLOOD_ADDRESS, 0))
            sock.connect(("127.0.0.1", self._port))
            sock.sendall(request("heavy", draw_tokens(random)))
            self._flood[sock.fileno()] = sock
            self._epoll.register(sock, select.EPOLLIN)
        write(f"sent {time.monotonic() - began:.3f}")

    def _read_flood(self, descriptor: int) -> None:
        data = self._flood[descriptor].recv(1 << 16)
        if data:
            self._statuses[data[9:12].decode()] += 1
        self._flood.pop(descriptor).close()


def request(tenant: str, tokens: int, *, stream: bool = False) -> bytes:
    """Return a request for a completion of `tokens` tokens."""
    body = {"prompt": [5, 6, 7], "ignore_eos": True, "user": tenant, "max_tokens": tokens, "stream": stream}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def draw_tokens(random: Random) -> int:
    """Return a random length of an answer in tokens."""
    return max(1, round(random.lognormvariate(0, SIGMA) * TOKENS))


def write(line: str) -> None:
    """Write a line to standard output."""
    print(line, flush=True)


if __name__ == "__main__":
    Clients(int(sys.argv[1])).run()
