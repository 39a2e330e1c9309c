"""How fast are refusals, timeouts and cancels while 500 streams run, and what does a flood do to the others?

    python bench/queue_live.py [--json bench/results/queue_live.json]

A real server process and its real child, which pretends to be a model (queue_live_server.py): so the figures
are those of the queue, the listener and the frames, and not of a network. Raw sockets on the client's side,
so that its own work does not count. Bounded: a few rounds, about two minutes.

Goals: 429 within 10 ms p99, 504 within 100 ms of the deadline, cancel to free slot within 50 ms p99; in a
flood of 1,000 at once at most 0.1 % of nine light tenants' requests refused, and their p99 within 1.2 times.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import trio

STREAMS = 500
STEP_MS = 30
TIMEOUT_S = 2.0
CAPACITY = 50


class Server:
    """The server process and how to ask it."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def send(self, connection: trio.SocketStream, tenant: str, **body: Any) -> None:
        """Ask for a completion of `max_tokens`."""
        content = json.dumps({"prompt": [5, 6, 7], "ignore_eos": True, "user": tenant, **body}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        await connection.send_all(head.encode() + content)

    async def status(self, connection: trio.SocketStream) -> int:
        """Wait for the answer's head."""
        return int((await connection.receive_some(65536))[9:12])

    async def running(self, connection: trio.SocketStream) -> dict[str, Any]:
        """Return what `GET /running` says of the model."""
        await connection.send_all(b"GET /running HTTP/1.1\r\nHost: bench\r\n\r\n")
        _, _, body = (await connection.receive_some(65536)).partition(b"\r\n\r\n")
        answer: list[dict[str, Any]] = json.loads(body)
        return answer[0]


@asynccontextmanager
async def server(
    slots: int, step_ms: int, capacity: int, timeout_s: float, fairness: str
) -> AsyncIterator[Server]:
    """Run one."""
    command = [sys.executable, str(Path(__file__).with_name("queue_live_server.py"))]
    arguments = [str(each) for each in (slots, step_ms, capacity, timeout_s, fairness)]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    try:
        assert process.stdout is not None
        yield Server(int(process.stdout.readline()))
    finally:
        process.terminate()
        process.wait(10)


class Streams:
    """So many clients that stream without end: when an answer is over, the next is asked for."""

    def __init__(self, to: Server) -> None:
        self._to = to
        self._scopes: list[trio.CancelScope] = []
        self._connections: list[trio.SocketStream] = []

    async def run(self, number: int, *, task_status: trio.TaskStatus[None]) -> None:
        """Keep one going, and report when its first answer has begun."""
        with trio.CancelScope() as scope:
            self._scopes.append(scope)
            while True:
                connection = await self._to.connect()
                self._connections.append(connection)
                try:
                    await self._to.send(connection, f"user {number % 50}", stream=True, max_tokens=1000)
                    await connection.receive_some(65536)
                    task_status.started()
                    task_status = trio.TASK_STATUS_IGNORED
                    while await connection.receive_some(1 << 18):
                        pass
                finally:
                    self._connections.remove(connection)
                    await trio.aclose_forcefully(connection)

    def hang_up(self) -> None:
        """Let the oldest go, without a word."""
        self._scopes.pop(0).cancel()


async def under_streams() -> dict[str, Any]:
    """Measure refusals, timeouts and cancels while 500 streams run."""
    freed: list[float] = []
    async with (
        server(STREAMS, STEP_MS, CAPACITY, TIMEOUT_S, "roundRobin") as to,
        trio.open_nursery() as nursery,
    ):
        streams = Streams(to)
        async with trio.open_nursery() as opening:
            for number in range(STREAMS):
                opening.start_soon(nursery.start, streams.run, number)
        refused, late = await refusals_and_timeouts(to)
        probe = await to.connect()
        for number in range(60):
            started = trio.current_time()
            streams.hang_up()
            while (await to.running(probe))["slots_free"] == 0:
                pass
            freed.append(trio.current_time() - started)
            await nursery.start(streams.run, number)
        nursery.cancel_scope.cancel()
    return {
        "streams": STREAMS,
        "step_ms": STEP_MS,
        "refused_429_ms": quantiles(refused),
        "timeout_504_late_ms": quantiles(late),
        "cancel_to_free_slot_ms": quantiles(freed),
    }


async def refusals_and_timeouts(to: Server) -> tuple[list[float], list[float]]:
    """Fill the queue three times; return how long a 429 took, and how late each 504 was."""
    refused: list[float] = []
    late: list[float] = []

    async def ask() -> tuple[int, float]:
        connection = await to.connect()
        started = trio.current_time()
        await to.send(connection, "waits", max_tokens=5)
        status = await to.status(connection)
        await connection.aclose()
        return status, trio.current_time() - started

    async def wait_in_vain() -> None:
        status, took_s = await ask()
        if status == 504:
            late.append(took_s - TIMEOUT_S)

    for _ in range(3):
        async with trio.open_nursery() as waiting:
            for _ in range(CAPACITY):
                waiting.start_soon(wait_in_vain)
            await trio.sleep(0.5)
            for _ in range(100):
                status, took_s = await ask()
                if status == 429:
                    refused.append(took_s)
    return refused, late


async def flood(*, flooded: bool, fairness: str) -> dict[str, Any]:
    """Nine light tenants ask once a second for 20 s; perhaps a tenth sends 1,000 at once after 5 s."""
    waits: list[float] = []
    refusals = 0

    async with server(8, 10, 100, 60.0, fairness) as to, trio.open_nursery() as nursery:

        async def ask(tenant: str, *, counts: bool) -> None:
            nonlocal refusals
            connection = await to.connect()
            started = trio.current_time()
            await to.send(connection, tenant, max_tokens=20)
            status = await to.status(connection)
            if counts and status == 200:
                waits.append(trio.current_time() - started)
            elif counts:
                refusals += 1
            await connection.aclose()

        async def light(number: int) -> None:
            await trio.sleep(number / 9)
            for _ in range(20):
                nursery.start_soon(lambda: ask(f"light {number}", counts=True))
                await trio.sleep(1)

        async def heavy() -> None:
            await trio.sleep(5)
            for _ in range(1000):
                nursery.start_soon(lambda: ask("heavy", counts=False))

        for number in range(9):
            nursery.start_soon(light, number)
        if flooded:
            nursery.start_soon(heavy)
        await trio.sleep(27)
        nursery.cancel_scope.cancel()
    return {"asked": 180, "refused": refusals, "end_to_end_ms": quantiles(waits)}


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return count, median, p99 and maximum, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "p50": round(median(ordered) * 1e3, 2),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3, 2),
        "max": round(ordered[-1] * 1e3, 2),
    }


async def main() -> dict[str, Any]:
    """Run all, one after the other."""
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    result["under_500_streams"] = await under_streams()
    for fairness in ("roundRobin", "tokens"):
        calm = await flood(flooded=False, fairness=fairness)
        wild = await flood(flooded=True, fairness=fairness)
        ratio = round(wild["end_to_end_ms"]["p99"] / calm["end_to_end_ms"]["p99"], 3)
        result[f"flood_{fairness}"] = {"without": calm, "with": wild, "p99_ratio": ratio}
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = json.dumps(trio.run(main), indent=2)
    print(measured)
    if options.json:
        options.json.write_text(measured + "\n")
