"""Parts of queue_live.py: processes, and a client that measures."""

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import trio

from queue_live_clients import request

HERE = Path(__file__).parent


class Process:
    """A process that reads and writes lines."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._lines = b""

    async def line(self) -> str:
        """Return the next line of its output."""
        assert self.process.stdout is not None
        while b"\n" not in self._lines:
            data = await self.process.stdout.receive_some()
            assert data, "the process has ended"
            self._lines += data
        line, _, self._lines = self._lines.partition(b"\n")
        return line.decode()

    async def ignore(self) -> None:
        """Discard its output, so that it never blocks on a full pipe."""
        assert self.process.stdout is not None
        async for _ in self.process.stdout:
            pass

    async def send(self, line: str) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        await self.process.stdin.send_all(f"{line}\n".encode())

    async def ask(self, line: str) -> str:
        """Send it a line and return its answer."""
        await self.send(line)
        return await self.line()

    def cpu_s(self) -> float:
        """Return its CPU time."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def waited_s(self) -> float:
        """Return how long it was runnable without a core."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) / 1e9


@asynccontextmanager
async def running(
    script: str, *arguments: object, cores: set[int], niceness: int = 0
) -> AsyncIterator[Process]:
    """Run a script of this folder on some cores until the end of the block."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        os.sched_setaffinity(process.pid, cores)
        os.setpriority(os.PRIO_PROCESS, process.pid, os.nice(0) + niceness)
        yield Process(process)
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            await process.wait()


class Timing(NamedTuple):
    """The status of a response, when the request was sent, and the seconds to the head, token and end.

    `token_s` is None for a response that is not streamed.
    """

    status: int
    sent_at: float
    head_s: float
    token_s: float | None
    end_s: float


async def ask(port: int, tenant: str, tokens: int, *, address: str, stream: bool = False) -> Timing:
    """Send one request on a new connection from this address, and measure the response."""
    with trio.socket.socket() as sock:
        await sock.bind((address, 0))
        sent_at = time.monotonic()
        await sock.connect(("127.0.0.1", port))
        await sock.send(request(tenant, tokens, stream=stream))
        data = await sock.recv(1 << 16)
        status, head_s, token_s = int(data[9:12]), time.monotonic() - sent_at, None
        received = b""
        while data:
            if token_s is None:
                received += data
                if b"data: " in received:
                    token_s = time.monotonic() - sent_at
            data = await sock.recv(1 << 16)
        return Timing(status, sent_at, head_s, token_s, time.monotonic() - sent_at)


async def health(port: int, *, address: str) -> float:
    """Return how many seconds `GET /health` takes on a new connection from this address."""
    with trio.socket.socket() as sock:
        await sock.bind((address, 0))
        sent_at = time.monotonic()
        await sock.connect(("127.0.0.1", port))
        await sock.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await sock.recv(1 << 16))[9:12] == b"200"
        return time.monotonic() - sent_at


def quantiles_ms(seconds: list[float]) -> dict[str, float]:
    """Return count, median, p90, p99 and maximum, in milliseconds."""
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 2)

    return {
        "count": len(ordered),
        "p50": round(median(ordered) * 1e3, 2),
        "p90": at(0.9),
        "p99": at(0.99),
        "max": at(1.0),
    }
