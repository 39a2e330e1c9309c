"""Compare one front of this version with an earlier one: the CPU time and the latency of a request.

    git archive COMMIT src | tar -x -C /tmp/earlier     # and build or copy its kernels
    python bench/fronts_one.py /tmp/earlier/src [--runs 5] [--out bench/results/fronts_one.json]

Both versions serve side by side, each in a process of its own, in front of a server with canned responses. So
a request takes HTTP, authentication, the queue, a seat and relaying. Single requests alternate between the
two, and so do bursts of concurrent ones, so that other work on the machine delays both alike. The figures of
several runs are kept, and the medians of the present version's divided by the earlier one's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from machine import loop_ns, machine
from router_parts import Address, Sockets, fairlead, process, serve

SINGLE = 1000  # requests to each version, of a run
BURSTS = 25
CLIENTS = 8
REQUESTS = 8  # of each client, in a burst


class Pipe:
    """The end of a pipe: prints what is sent."""

    def send(self, value: object) -> None:
        """Print a value."""
        print(value, flush=True)


@contextmanager
def server(source: str, upstream: str) -> Iterator[Address]:
    """Run the version of a source tree until the end of the block; yield its address."""
    command = [sys.executable, __file__, "--serve", upstream]
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{Path(__file__).parent}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as child:
        assert child.stdout is not None
        try:
            yield Address(child.stdout.readline().strip(), child.pid)
        finally:
            child.kill()


async def measure(addresses: dict[str, Address]) -> dict[str, dict[str, float]]:
    """Return the figures of each version."""
    names = list(addresses)
    routes = {name: Sockets(address.url) for name, address in addresses.items()}
    times_s: dict[str, list[float]] = {name: [] for name in names}
    bursts_s: dict[str, list[float]] = {name: [] for name in names}
    cpu_s = {name: address.cpu_s() for name, address in addresses.items()}

    async def client(route: Sockets) -> None:
        for _ in range(REQUESTS):
            await route.full()

    for number in range(SINGLE):
        for name in names if number % 2 else reversed(names):
            began = time.perf_counter()
            await routes[name].full()
            times_s[name].append(time.perf_counter() - began)
    for number in range(BURSTS):
        for name in names if number % 2 else reversed(names):
            began = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for _ in range(CLIENTS):
                    nursery.start_soon(client, routes[name])
            bursts_s[name].append(time.perf_counter() - began)
    requests = SINGLE + BURSTS * CLIENTS * REQUESTS
    for route in routes.values():
        route.close()
    return {
        name: {
            "cpu_us_per_request": round(1e6 * (addresses[name].cpu_s() - cpu_s[name]) / requests, 1),
            "p10_ms": round(1e3 * statistics.quantiles(times_s[name], n=10)[0], 3),
            "p50_ms": round(1e3 * statistics.median(times_s[name]), 3),
            "requests_per_s": round(CLIENTS * REQUESTS / statistics.median(bursts_s[name]), 1),
        }
        for name in names
    }


async def warm_up(addresses: dict[str, Address]) -> None:
    """Send each version some requests."""
    for address in addresses.values():
        route = Sockets(address.url)
        for _ in range(200):
            await route.full()
        route.close()


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("earlier", nargs="?", help="the folder with the earlier version's packages")
    parser.add_argument("--serve", metavar="URL", help="internal: serve in front of this server")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.serve:
        fairlead(Pipe(), options.serve)  # type: ignore[arg-type]
        return
    now = str(Path(__file__).parent.parent / "src")
    runs: list[dict[str, dict[str, float]]] = []
    for _ in range(options.runs):
        with (
            process(serve) as upstream,
            server(options.earlier, upstream.url) as earlier,
            server(now, upstream.url) as present,
        ):
            versions = {"earlier": earlier, "present": present}
            trio.run(warm_up, versions)
            runs.append(trio.run(measure, versions))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    ratios = [
        {figure: each["present"][figure] / each["earlier"][figure] for figure in each["present"]}
        for each in runs
    ]
    result: dict[str, Any] = {
        "machine": machine(),
        "loop_ns": round(loop_ns()),
        "present_to_earlier": {
            figure: round(statistics.median(ratio[figure] for ratio in ratios), 3) for figure in ratios[0]
        },
        "runs": runs,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
