"""Simulate fronts, the dispatcher and nodes on cores of their own: at how many fronts which part saturates.

    python bench/front_scaling.py [--json bench/results/front_scaling.json]

A simulation of costs, because this machine has too few cores to run it: every process is a core that works in
the order in which its work arrives, and each piece of work takes the CPU time that another benchmark has
measured (`Costs.measured`). The node answers at once and without limit. For each number of fronts, the result
is the highest rate (of some) at which 99 % of the requests wait for their seat, and their tokens for a front,
at most `LIMIT_S` longer than without load; and which process had the least time left then.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from simulation.clock import Clock
from simulation.measures import percentile
from simulation.workload import poisson

RESULTS = Path(__file__).parent / "results"
FRONTS = (1, 2, 4, 8, 16, 32)
LIMIT_S = 0.01
ARRIVALS_S = 3.0
SLICES = 4  # the tokens of a stream are written in so many pieces of work
STREAM_S = 1.0
UTILIZATIONS = (0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TOKENS = 200


class Costs(NamedTuple):
    """CPU microseconds: of a front and of the dispatcher for a request, and of a front for each token."""

    front_us: float
    token_us: float
    dispatcher_us: float

    @classmethod
    def measured(cls) -> "dict[str, Costs]":
        """Return the costs by kind of request, from the kept results of other benchmarks.

        A request costs a front what it costs a single process (`router.json`), which includes the scheduling,
        and the messages to the dispatcher. A token that is relayed is a chunk there, and one of our engine is
        an event of `http.json`.
        """
        router = _kept("router.json")["served"]
        event_us = _kept("http.json")["results"]["fan_out_256"]["ours"]["cpu_us_per_event"]
        dispatching = _kept("dispatch_socket.json")["results"]
        dispatcher_us = dispatching["16 nodes, 1024 under way"]["dispatcher_cpu_us_per_cycle"]
        message_us = dispatching["16 nodes, 2000 a second"]["front_cpu_us_per_job"]
        front_us = router["request_cpu_us"] + message_us
        return {
            "relayed, whole": cls(front_us, 0.0, dispatcher_us),
            f"relayed, a stream of {TOKENS} tokens": cls(front_us, router["chunk_cpu_us"], dispatcher_us),
            f"own engine, a stream of {TOKENS} tokens": cls(front_us, event_us, dispatcher_us),
        }


class Core:
    """A process with a core of its own, which does one piece of work at a time."""

    def __init__(self, clock: Clock) -> None:
        self.busy_s = 0.0
        self._clock = clock
        self._free_at_s = 0.0

    def work(self, work_us: float, then: Callable[[], None]) -> None:
        """Call `then` when the work is done, after all that came before."""
        self._free_at_s = max(self._free_at_s, self._clock.now_s) + work_us / 1e6
        self.busy_s += work_us / 1e6
        self._clock.at(self._free_at_s, then)


class Fleet:
    """Fronts and a dispatcher, and requests that arrive at random at `rate` a second."""

    def __init__(self, costs: Costs, fronts: int, rate: float) -> None:
        self.clock = Clock()
        self.fronts = [Core(self.clock) for _ in range(fronts)]
        self.dispatcher = Core(self.clock)
        self.delays_s: list[float] = []
        self._costs = costs
        random = Random(1)
        for number, time_s in enumerate(poisson(rate, ARRIVALS_S, random)):
            self.clock.at(time_s, partial(self._arrive, self.fronts[number % fronts]))
        self.clock.run(ARRIVALS_S + STREAM_S + 10.0)

    def _arrive(self, front: Core) -> None:
        """Parse the request, get a seat, send it to the node, write its tokens, and give the seat back."""
        costs, began_s = self._costs, self.clock.now_s
        least_s = (0.7 * costs.front_us + 0.6 * costs.dispatcher_us) / 1e6

        def started() -> None:
            self.delays_s.append(self.clock.now_s - began_s - least_s)
            if costs.token_us:
                for number in range(1, SLICES + 1):
                    self.clock.after(STREAM_S * number / SLICES, partial(write, number, self.clock.now_s))
            else:
                end()

        def write(number: int, started_s: float) -> None:
            work_us = costs.token_us * TOKENS / SLICES
            due_s = started_s + STREAM_S * number / SLICES + work_us / 1e6

            def written() -> None:
                self.delays_s.append(self.clock.now_s - due_s)
                if number == SLICES:
                    end()

            front.work(work_us, written)

        def end() -> None:
            front.work(
                0.3 * costs.front_us, lambda: self.dispatcher.work(0.4 * costs.dispatcher_us, _nothing)
            )

        front.work(
            0.5 * costs.front_us,
            lambda: self.dispatcher.work(
                0.6 * costs.dispatcher_us, lambda: front.work(0.2 * costs.front_us, started)
            ),
        )


def saturation(costs: Costs, fronts: int) -> dict[str, Any]:
    """Return the highest rate within the limit, and how busy each part is then."""
    of_front = 1e6 / (costs.front_us + TOKENS * costs.token_us)
    bound = min(fronts * of_front, 1e6 / costs.dispatcher_us)
    low = 0.0
    for utilization in UTILIZATIONS:
        fleet = Fleet(costs, fronts, utilization * bound)
        if percentile(fleet.delays_s, 0.99) <= LIMIT_S:
            low = utilization * bound
            break
    front_busy, dispatcher_busy = low / fronts / of_front, low * costs.dispatcher_us / 1e6
    return {
        "fronts": fronts,
        "requests_per_s": round(low),
        "front_utilization": round(front_busy, 2),
        "dispatcher_utilization": round(dispatcher_busy, 2),
        "saturated": "dispatcher" if dispatcher_busy > front_busy else "fronts",
    }


def _nothing() -> None:
    """The end of a request."""


def _kept(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def main() -> None:
    """Simulate all numbers of fronts, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps_us = _kept("engine_fronts.json")["step_us"]
    result = {
        "limit_s": LIMIT_S,
        "cases": {
            name: {
                "costs_us": costs._asdict(),
                "dispatcher_saturates_at_fronts": math.ceil(
                    (costs.front_us + TOKENS * costs.token_us) / costs.dispatcher_us
                ),
                "by_fronts": [saturation(costs, fronts) for fronts in FRONTS],
            }
            for name, costs in Costs.measured().items()
        },
        "engine_step_of_1024_sequences": {
            name: {
                "host_us": step_us,
                "share_of_a_step_of_20_ms": round(step_us / 20_000, 3),
                "steps_per_s_without_a_model": round(1e6 / step_us),
            }
            for name, step_us in steps_us.items()
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
