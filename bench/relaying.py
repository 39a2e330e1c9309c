"""Measure the overhead of relaying a job to another server, compared with a direct request.

The upstream server runs in its own process and sends canned responses. This process sends requests to it in
three ways, in alternating rounds: *direct*, over bare sockets; *served*, over the same kind of sockets
through Fairlead in its own process, with everything it does for a client (HTTP, queue, log); and *node*,
through only a `RemoteNode` in this process. It reports medians over the rounds:

- sequential requests: time (p50, p99), and the time added to a direct request;
- requests/s with 32 concurrent requests;
- chunks/s of a stream without pauses, and the time added to each chunk;
- the latency of the chunks of a stream with a chunk every 5 ms (p50, p99), and the latency added;
- the CPU time of Fairlead's process for a request and for a chunk, which other load does not affect.

It also reports the cost of parsing a response: by Fairlead's parser, which uses httptools, by httptools
without Fairlead's bounds, and by h11. The goals (`GOALS`) are the best measured figures of a proxy in Python,
with a tolerance of 50 %.

    python bench/relaying.py [--rounds 5] [--out bench/results/router.json]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import trio

from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta, Job, Relay, Sampling
from fairlead.dialects.openai.chat import ChatDialect
from fairlead.nodes.http.client import Upstream
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.node import Node
from fairlead.nodes.remote_node import RemoteNode
from fairlead.nodes.streams.sink import Backpressure
from router_parsers import parsers
from router_parts import CHUNKS, Address, Sockets, body_of, fairlead, process, serve

REQUESTS = 1500
CONCURRENT = 32

# The best figures measured of a proxy in Python are 0.46 ms, 2,500 and 249,000.
GOALS = {"added_p50_ms": 0.69, "requests_per_s": 1_667, "chunks_per_s": 166_000}

# The routes to the server -------------------------------------------------------------------------------


class Route(Protocol):
    """A way to send requests to the server."""

    async def full(self) -> None:
        """Send a request and read its response."""

    async def burst(self) -> None:
        """Read a stream without pauses between its chunks."""

    def close(self) -> None:
        """Close all connections."""


class NodeRoute:
    """A `RemoteNode`, used as the gateway uses it."""

    def __init__(self, url: str) -> None:
        self._upstream = Upstream(url, name="bench")
        self._node = RemoteNode("bench", self._upstream, ignore_report, names={"m": "m"}, seats=CONCURRENT)
        self._node.came_up()

    async def full(self) -> None:
        """See `Route`."""
        await self._ask("full")

    async def burst(self) -> None:
        """See `Route`."""
        tokens = await self._ask("burst")
        assert tokens == CHUNKS + 1, tokens

    def close(self) -> None:
        """See `Route`."""
        self._upstream.close()

    async def _ask(self, kind: str) -> int:
        stream = kind != "full"
        sink = CountingSink()
        job = Job(
            id="chatcmpl-1",
            tenant="A",
            model="m",
            prompts=(),
            sampling=Sampling(max_tokens=100),
            stream=stream,
            request_id="bench",
            relay=Relay(ChatDialect.path, body_of(kind), stream),
        )
        async with self._node.generate(job, sink):
            await sink.ended.wait()
        assert sink.error is None, sink.error
        return sink.tokens


class CountingSink:
    """A sink that counts tokens and discards the rest."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.tokens = 0
        self.error: FairleadError | None = None

    def put(self, delta: Delta) -> None:
        """See `Sink`."""
        b"".join(delta.raw)  # as the server does before it writes the bytes
        self.tokens += delta.relayed_tokens
        if delta.finish_reason is not None:
            self.ended.set()

    def backpressure(self) -> Backpressure | None:
        """See `Sink`."""
        return None

    def fail(self, error: FairleadError) -> None:
        """See `Sink`."""
        self.error = error
        self.ended.set()


def ignore_report(node: Node, limits: NodeLimits | None) -> None:
    """Ignore that a node is up or down; see `NodeReport`."""


# Measuring -------------------------------------------------------------------------------------------

Measured = dict[str, float]


def percentiles(times_ms: list[float]) -> tuple[float, float]:
    """Return the 50th and the 99th percentile."""
    ordered = sorted(times_ms)
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]


async def measure_sequential(ask: Callable[[], Awaitable[None]]) -> Measured:
    """Return the time of sequential requests in milliseconds."""
    times_ms = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        await ask()
        times_ms.append(1000 * (time.perf_counter() - began))
    p50_ms, p99_ms = percentiles(times_ms[50:])
    return {"p50_ms": p50_ms, "p99_ms": p99_ms}


async def measure_concurrent(ask: Callable[[], Awaitable[None]]) -> float:
    """Return requests/s with `CONCURRENT` concurrent requests."""

    async def client() -> None:
        for _ in range(REQUESTS // CONCURRENT):
            await ask()

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(CONCURRENT):
            nursery.start_soon(client)
    return REQUESTS // CONCURRENT * CONCURRENT / (time.perf_counter() - began)


async def measure(server: Address, proxy: Address) -> dict[str, Measured]:
    """Run one round of each route; `proxy` is the Fairlead in front of `server`."""
    results = {}
    routes: dict[str, Route] = {
        "direct": Sockets(server.url),
        "served": Sockets(proxy.url),
        "node": NodeRoute(server.url),
    }
    for name, route in routes.items():
        cpu_before_s = proxy.cpu_s()
        result = await measure_sequential(route.full)
        result["requests_per_s"] = await measure_concurrent(route.full)
        cpu_between_s = proxy.cpu_s()
        began = time.perf_counter()
        await route.burst()
        result["chunks_per_s"] = CHUNKS / (time.perf_counter() - began)
        if name == "served":
            requests = REQUESTS + REQUESTS // CONCURRENT * CONCURRENT
            result["request_cpu_us"] = 1e6 * (cpu_between_s - cpu_before_s) / requests
            result["chunk_cpu_us"] = 1e6 * (proxy.cpu_s() - cpu_between_s) / CHUNKS
        if isinstance(route, Sockets):
            p50_ms, p99_ms = percentiles(await route.paced())
            result |= {"chunk_p50_ms": p50_ms, "chunk_p99_ms": p99_ms}
        route.close()
        results[name] = result
    return results


def added(rounds: list[dict[str, Measured]], route: str) -> Measured:
    """Return what a route adds to direct requests: medians of the differences within each round."""
    differences: dict[str, list[float]] = {}
    for each in rounds:
        relayed, direct = each[route], each["direct"]
        for name in (name for name in relayed if name.endswith("_ms")):
            differences.setdefault(name, []).append(relayed[name] - direct[name])
        chunk_us = 1e6 / relayed["chunks_per_s"] - 1e6 / direct["chunks_per_s"]
        differences.setdefault("chunk_us", []).append(chunk_us)
    return {name: round(statistics.median(values), 4) for name, values in differences.items()}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of which the median counts")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    options = parser.parse_args()
    with process(serve) as server, process(fairlead, server.url) as proxy:
        rounds = [trio.run(measure, server, proxy) for _ in range(options.rounds)]
    medians = {
        route: {
            name: round(statistics.median(each[route][name] for each in rounds), 4)
            for name in rounds[0][route]
        }
        for route in rounds[0]
    }
    added_by = {route: added(rounds, route) for route in ("served", "node")}
    served = medians["served"]
    result: dict[str, Any] = {
        **medians,
        "added": added_by,
        "goals": GOALS,
        "held": {
            "added_p50_ms": added_by["served"]["p50_ms"] <= GOALS["added_p50_ms"],
            "requests_per_s": served["requests_per_s"] >= GOALS["requests_per_s"],
            "chunks_per_s": served["chunks_per_s"] >= GOALS["chunks_per_s"],
        },
        "parsers": {
            name: {what: round(value, 3) for what, value in costs.items()}
            for name, costs in parsers().items()
        },
        "machine": {"python": platform.python_version(), "processor": platform.machine()},
    }
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
