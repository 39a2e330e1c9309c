"""Measure refusals, timeouts and cancels while 500 streams run, and the effect of a flood on other tenants.

    python bench/queue_live.py [--minutes 1] [--only streams|flood|once] [--json FILE]

A real server process runs with a real child and a simulated model (queue_live_child.py), so the figures are
those of the queue, the HTTP server and the frames. The server has one core. The child, the clients that
stream and flood (queue_live_clients.py) and this process, which measures, share another. All times are
measured by clients over sockets, except the end of a cancel: it is the time at which the server counts a free
slot, checked every 2 ms. Linux only: each tenant uses its own loopback address.

The flood is measured as in `bench/fairness.py`. Nine tenants send one request a second each, which is 57 % of
the capacity of 8 seats. Their requests and times are the same in every run. The runs: `alone`, without other
tenants; `greedy`, with a tenth tenant that always has ten requests and repeats refused ones at once; `flood`,
where the tenth tenant also sends 1,000 requests at once in the middle; `flood alone`, where it sends only
those. A wait is the time to the first token. The goal compares `flood` with `greedy`, because next to idle
seats any additional work causes waits. `GET /health` on new connections measures the HTTP server's part.

`--only once --minutes 15` compares `flood alone` with `alone`: seats are busy while a flood is processed, but
this should not last long enough to change the p99 of 15 minutes.
"""

import argparse
import json
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import trio

from queue_live_clients import FLOOD_ADDRESS, draw_tokens
from queue_live_parts import Process, Timing, ask, health, quantiles_ms, running

STREAMS = 500
STEP_MS = 30
TIMEOUT_S = 2.0
CAPACITY = 50
ROUNDS = 4
REFUSALS_A_ROUND = 100
CANCELS = 150

SEATS = 8
FLOOD_STEP_MS = 20
OTHERS = 9
FLOOD = 1000
GREEDY = SEATS + 2
AFTER_S = 5.0

SERVER_CORE, OTHER_CORE = {0}, {1}


# While streams run ---------------------------------------------------------------------------------


async def measure_under_streams() -> dict[str, Any]:
    """Measure refusals, timeouts and cancels while 500 streams run."""
    settings = (STREAMS, STEP_MS, CAPACITY, TIMEOUT_S, "roundRobin")
    async with running("queue_live_server.py", *settings, cores=SERVER_CORE) as server:
        port = int(await server.line())
        async with running("queue_live_clients.py", port, cores=OTHER_CORE, niceness=5) as clients:
            assert await clients.ask(f"streams {STREAMS}") == "streaming"
            await trio.sleep(2)
            started, used, waited = trio.current_time(), server.cpu_s(), server.waited_s()
            await trio.sleep(5)
            load = (server.cpu_s() - used) / (trio.current_time() - started)
            refused, late = await refusals_and_timeouts(port)
            cancelled = await cancels(server, clients)
            without_core = (server.waited_s() - waited) / (trio.current_time() - started)
    return {
        "streams": STREAMS,
        "step_ms": STEP_MS,
        "server_cpu_of_a_core": round(load, 3),
        "server_waited_for_a_core": round(without_core, 3),
        "refused_429_ms": with_goal(quantiles_ms(refused), 10),
        "timeout_504_late_ms": with_goal(quantiles_ms(late), 100),
        "cancel_to_free_slot_ms": with_goal(quantiles_ms(cancelled), 50),
    }


async def refusals_and_timeouts(port: int) -> tuple[list[float], list[float]]:
    """Fill the queue several times; return the times of the 429s, and how late the 504s were."""
    refused: list[float] = []
    late: list[float] = []

    async def time_out() -> None:
        timing = await ask(port, "waits", 5, address="127.0.1.1")
        if timing.status == 504:
            late.append(timing.head_s - TIMEOUT_S)

    for _ in range(ROUNDS):
        async with trio.open_nursery() as waiting:
            for _ in range(CAPACITY):
                waiting.start_soon(time_out)
            await trio.sleep(0.3)
            for _ in range(REFUSALS_A_ROUND):
                timing = await ask(port, "waits", 5, address="127.0.1.1")
                if timing.status == 429:
                    refused.append(timing.head_s)
                await trio.sleep(0.007)  # so that requests arrive at any point of a step
    return refused, late


async def cancels(server: Process, clients: Process) -> list[float]:
    """Disconnect clients one after another; return the times until the slot was free."""
    times_s: list[float] = []
    random = Random(2)
    while (await server.line()).split()[1] != "0":
        pass  # the streams occupy the slots one by one
    for _ in range(CANCELS):
        await trio.sleep(random.uniform(0.05, 0.1))  # so that it happens at any point of a step
        closed_at = float(await clients.ask("hang up"))
        _, free, at = (await server.line()).split()
        assert free == "1"
        times_s.append(float(at) - closed_at)
        assert await clients.ask("again") == "streaming"
        _, free, _ = (await server.line()).split()
        assert free == "0"
    return times_s


# The flood -----------------------------------------------------------------------------------------


class Schedule:
    """The requests of the nine tenants, the same in every run. `ask` fills `answers`."""

    def __init__(self, seconds: float) -> None:
        random = Random(1)
        self._requests: list[tuple[float, str, int]] = []
        for number in range(OTHERS):
            at = random.expovariate(1.0)
            while at < seconds:
                self._requests.append((at, f"other {number}", draw_tokens(random)))
                at += random.expovariate(1.0)
        self._requests.sort()
        self.answers: list[tuple[float, Timing]] = []

    async def ask(self, port: int) -> None:
        """Send each request at its time; return when all responses have been received."""
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for at, tenant, tokens in self._requests:
                await trio.sleep_until(began + at)
                nursery.start_soon(self._ask, port, at, tenant, tokens)

    async def _ask(self, port: int, at: float, tenant: str, tokens: int) -> None:
        address = f"127.0.1.{1 + int(tenant.split()[1])}"
        self.answers.append((at, await ask(port, tenant, tokens, address=address, stream=True)))

    def figures(self, flood_at: float) -> dict[str, Any]:
        """Return the refused share, all waits, and the waits of requests up to 5 s after the flood."""
        waits = [(at, timing.token_s) for at, timing in self.answers if timing.token_s is not None]
        after = [wait for at, wait in waits if flood_at <= at < flood_at + AFTER_S]
        return {
            "asked": len(self.answers),
            "refused_share": sum(timing.status != 200 for _, timing in self.answers) / len(self.answers),
            "wait_ms": quantiles_ms([wait for _, wait in waits]),
            "wait_within_5_s_of_the_flood_ms": quantiles_ms(after),
        }


async def run_tenants(fairness: str, seconds: float, *, greedy: bool, flooded: bool) -> dict[str, Any]:
    """Run the nine tenants for some seconds, with the tenth one's load; return the figures."""
    async with (
        running(
            "queue_live_server.py", SEATS, FLOOD_STEP_MS, 100, 60.0, fairness, cores=SERVER_CORE
        ) as server,
        trio.open_nursery() as nursery,
    ):
        port = int(await server.line())
        nursery.start_soon(server.ignore)
        async with running("queue_live_clients.py", port, cores=OTHER_CORE, niceness=5) as clients:
            schedule = Schedule(seconds)
            for number in range(GREEDY if greedy else 0):
                nursery.start_soon(send_repeatedly, port, number)
            if flooded:
                nursery.start_soon(flood, clients, seconds / 2)
            probes: list[float] = []
            nursery.start_soon(probe, port, seconds / 2, probes)
            await schedule.ask(port)
            figures = schedule.figures(seconds / 2)
            figures["health_within_2_s_ms"] = quantiles_ms(probes)
            if flooded:
                figures["flood"] = json.loads(await clients.ask("count"))
        nursery.cancel_scope.cancel()
    return figures


async def send_repeatedly(port: int, number: int) -> None:
    """Send requests without end as one of the tenth tenant's clients."""
    random = Random(number)
    while True:
        await ask(port, "heavy", draw_tokens(random), address=FLOOD_ADDRESS)


async def flood(clients: Process, after_s: float) -> None:
    """Send the flood after some seconds."""
    await trio.sleep(after_s)
    assert (await clients.ask(f"flood {FLOOD}")).startswith("sent")


async def probe(port: int, after_s: float, times_s: list[float]) -> None:
    """Request `/health` on new connections right after the flood: the HTTP server without the queue."""
    await trio.sleep(after_s)
    while len(times_s) < 100:
        times_s.append(await health(port, address="127.0.3.1"))
        await trio.sleep(0.02)


async def floods(seconds: float) -> dict[str, Any]:
    """Run every combination with both kinds of fairness; return the figures and goals."""
    result: dict[str, Any] = {"seconds": seconds}
    for fairness in ("roundRobin", "tokens"):
        run = partial(run_tenants, fairness, seconds)
        runs = {
            "alone": await run(greedy=False, flooded=False),
            "greedy": await run(greedy=True, flooded=False),
            "flood": await run(greedy=True, flooded=True),
            "flood alone": await run(greedy=False, flooded=True),
        }
        result[fairness] = {
            **runs,
            "refused_share": goal(runs["flood"]["refused_share"], 0.001),
            "p99_over_greedy": goal(ratio(runs, "flood", "greedy", "wait_ms"), 1.2),
            "p99_over_greedy_within_5_s": ratio(runs, "flood", "greedy", "wait_within_5_s_of_the_flood_ms"),
            "p99_flood_alone_over_alone": ratio(runs, "flood alone", "alone", "wait_ms"),
        }
    return result


async def flood_once(seconds: float) -> dict[str, Any]:
    """Compare a time with one flood with the same time without, with the default fairness."""
    run = partial(run_tenants, "roundRobin", seconds, greedy=False)
    runs = {"alone": await run(flooded=False), "flood alone": await run(flooded=True)}
    return {
        "seconds": seconds,
        **runs,
        "refused_share": goal(runs["flood alone"]["refused_share"], 0.001),
        "p99_over_alone": goal(ratio(runs, "flood alone", "alone", "wait_ms"), 1.2),
    }


# Verdicts ------------------------------------------------------------------------------------------


def ratio(runs: dict[str, Any], one: str, other: str, waits: str) -> float:
    """Return one run's p99 divided by another's."""
    return round(float(runs[one][waits]["p99"]) / float(runs[other][waits]["p99"]), 3)


def goal(measured: float, most: float) -> dict[str, Any]:
    """Return a figure with its goal."""
    return {"measured": measured, "most": most, "met": measured <= most}


def with_goal(quantiles: dict[str, float], most_p99: float) -> dict[str, Any]:
    """Return quantiles with the goal for their p99."""
    return {**quantiles, "most_p99": most_p99, "met": quantiles["p99"] <= most_p99}


async def main(only: str | None, minutes: float) -> dict[str, Any]:
    """Run the measurements one after another."""
    parts: dict[str, Callable[[], Any]] = {
        "streams": measure_under_streams,
        "flood": partial(floods, minutes * 60),
    }
    if only == "once":
        parts["once"] = partial(flood_once, minutes * 60)
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    for name, part in parts.items():
        if only in (None, name):
            result[name] = await part()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="duration of each flood run")
    parser.add_argument("--only", choices=["streams", "flood", "once"], help="run only this part")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    measured = json.dumps(trio.run(main, options.only, options.minutes), indent=2)
    print(measured)
    if options.json:
        options.json.write_text(measured + "\n")
