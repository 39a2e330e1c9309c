"""What does it cost to relay a job to another server, compared with asking that server directly?

The server is a process of its own that answers from memory. This process asks it in three ways, in
alternating rounds: *direct*, over bare sockets; *served*, over the same sockets through a Fairlead, which is
a process of its own, with all that it does for a client (HTTP, queue, log); and *node*, through nothing of
that but a `RemoteNode` in this process. Reported are medians over the rounds:

- of a request alone: time (p50, p99), and how much is added to asking directly;
- requests a second at 32 at a time;
- chunks a second of a stream that comes as fast as it can, and what is added to each;
- of a stream that comes a chunk every 5 ms: how long each chunk is under way (p50, p99), and what is added;
- what Fairlead's process computes for a request and for a chunk, which is true on a busy machine, too.

And what reading an answer costs, by our parser, by h11 and, where it is installed, by httptools. The goal is
the best that a proxy in Python was seen to do, within half as much again (`GOALS`).

    python bench/router.py [--rounds 5] [--out bench/results/router.json]
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

from fairlead.errors import FairleadError
from fairlead.job import Delta, Job, Relay, Sampling
from fairlead.nodes.node import Node, NodeLimits
from fairlead.nodes.remote_node import RemoteNode
from fairlead.nodes.sink import Room
from fairlead.nodes.upstream import Upstream
from router_parsers import parsers
from router_parts import CHUNKS, Address, Sockets, body_of, fairlead, process, serve

REQUESTS = 1500
CONCURRENT = 32

# What is added to a request alone, requests a second at 32, chunks a second: from 0.46 ms, 2,500 and 249,000.
GOALS = {"added_p50_ms": 0.69, "requests_per_s": 1_667, "chunks_per_s": 166_000}

# The ways ----------------------------------------------------------------------------------------------


class Way(Protocol):
    """How the server is asked."""

    async def whole(self) -> None:
        """Have one answer."""

    async def burst(self) -> None:
        """Have a stream that comes as fast as it can."""

    def close(self) -> None:
        """Close what is open."""


class AsNode:
    """A `RemoteNode`, asked as the gateway asks it."""

    def __init__(self, url: str) -> None:
        self._upstream = Upstream(url, name="bench")
        self._node = RemoteNode("bench", self._upstream, Nobody(), names={"m": "m"}, seats=CONCURRENT)
        self._node.came_up()

    async def whole(self) -> None:
        """See `Way`."""
        await self._ask("whole")

    async def burst(self) -> None:
        """See `Way`."""
        tokens = await self._ask("burst")
        assert tokens == CHUNKS + 1, tokens

    def close(self) -> None:
        """See `Way`."""
        self._upstream.close()

    async def _ask(self, kind: str) -> int:
        stream = kind != "whole"
        into = Counted()
        job = Job(
            id="chatcmpl-1",
            tenant="A",
            model="m",
            prompts=(),
            sampling=Sampling(max_tokens=100),
            stream=stream,
            request_id="bench",
            relay=Relay("/v1/chat/completions", body_of(kind), stream),
        )
        async with self._node.generate(job, into):
            await into.over.wait()
        assert into.error is None, into.error
        return into.tokens


class Counted:
    """A sink that keeps nothing but counts."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.tokens = 0
        self.error: FairleadError | None = None

    def put(self, delta: Delta) -> None:
        """See `Sink`."""
        b"".join(delta.raw)  # what is passed on is written in one piece
        self.tokens += delta.relayed_tokens
        if delta.finish_reason is not None:
            self.over.set()

    def room(self) -> Room | None:
        """See `Sink`."""
        return None

    def fail(self, error: FairleadError) -> None:
        """See `Sink`."""
        self.error = error
        self.over.set()


class Nobody:
    """A listener that does not care."""

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """See `NodeListener`."""

    def node_down(self, node: Node) -> None:
        """See `NodeListener`."""

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """See `NodeListener`."""

    def seats_changed(self, node: Node, limits: NodeLimits) -> None:
        """See `RemoteListener`."""


# Measuring -------------------------------------------------------------------------------------------

Measured = dict[str, float]


def percentiles(times_ms: list[float]) -> tuple[float, float]:
    """Return the median and the 99th of a hundred."""
    ordered = sorted(times_ms)
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]


async def one_by_one(ask: Callable[[], Awaitable[None]]) -> Measured:
    """Return the time of a request, alone, in ms."""
    times_ms = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        await ask()
        times_ms.append(1000 * (time.perf_counter() - began))
    p50_ms, p99_ms = percentiles(times_ms[50:])
    return {"p50_ms": p50_ms, "p99_ms": p99_ms}


async def together(ask: Callable[[], Awaitable[None]]) -> float:
    """Return requests a second at `CONCURRENT` at a time."""

    async def visitor() -> None:
        for _ in range(REQUESTS // CONCURRENT):
            await ask()

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(CONCURRENT):
            nursery.start_soon(visitor)
    return REQUESTS // CONCURRENT * CONCURRENT / (time.perf_counter() - began)


async def measure(server: Address, before_it: Address) -> dict[str, Measured]:
    """Run one round of each way: `server` and a Fairlead `before_it`."""
    results = {}
    ways: dict[str, Way] = {
        "direct": Sockets(server.url),
        "served": Sockets(before_it.url),
        "node": AsNode(server.url),
    }
    for name, way in ways.items():
        computed_s = before_it.cpu_s()
        result = await one_by_one(way.whole)
        result["requests_per_s"] = await together(way.whole)
        answered_s = before_it.cpu_s()
        began = time.perf_counter()
        await way.burst()
        result["chunks_per_s"] = CHUNKS / (time.perf_counter() - began)
        if name == "served":
            requests = REQUESTS + REQUESTS // CONCURRENT * CONCURRENT
            result["request_cpu_us"] = 1e6 * (answered_s - computed_s) / requests
            result["chunk_cpu_us"] = 1e6 * (before_it.cpu_s() - answered_s) / CHUNKS
        if isinstance(way, Sockets):
            p50_ms, p99_ms = percentiles(await way.paced())
            result |= {"chunk_p50_ms": p50_ms, "chunk_p99_ms": p99_ms}
        way.close()
        results[name] = result
    return results


def added(rounds: list[dict[str, Measured]], way: str) -> Measured:
    """Return what a way adds to asking directly: medians of the differences within each round."""
    differences: dict[str, list[float]] = {}
    for each in rounds:
        mine, direct = each[way], each["direct"]
        for name in (name for name in mine if name.endswith("_ms")):
            differences.setdefault(name, []).append(mine[name] - direct[name])
        chunk_us = 1e6 / mine["chunks_per_s"] - 1e6 / direct["chunks_per_s"]
        differences.setdefault("chunk_us", []).append(chunk_us)
    return {name: round(statistics.median(values), 4) for name, values in differences.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with process(serve) as server, process(fairlead, server.url) as before_it:
        rounds = [trio.run(measure, server, before_it) for _ in range(options.rounds)]
    medians = {
        way: {
            name: round(statistics.median(each[way][name] for each in rounds), 4) for name in rounds[0][way]
        }
        for way in rounds[0]
    }
    added_by = {way: added(rounds, way) for way in ("served", "node")}
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
