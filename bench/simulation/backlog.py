"""Two tenants with a constant backlog, one of large and one of small jobs, and eight with few requests."""

from collections import Counter
from functools import partial
from random import Random
from typing import NamedTuple

from simulation.clock import Clock
from simulation.measures import percentile, waits_s
from simulation.simulated_server import WEIGHTS, Order, SimulatedServer
from simulation.workload import Shape, poisson

LARGE, SMALL = "large", "small"
SHAPES = {LARGE: Shape(1000, 600, 0.4), SMALL: Shape(200, 60, 0.4)}
LIGHT_SHAPE = Shape(100, 40, 0.4)
LIGHT = [f"light-{number}" for number in range(8)]
BACKLOG = 30
EVERY_S = 10.0


class Backlog(NamedTuple):
    """The largest gap between the service of the two tenants, in weighted tokens, and other figures.

    `bound` is that of VTC [Sheng et al., OSDI'24]: twice the larger of the longest prompt and the most tokens
    that were in the seats at once, weighted. `served` has one entry a second.
    """

    gap: float
    bound: float
    throughput: float
    light_p99_s: float
    served: dict[str, list[float]]


def backlog(order: Order, *, length_s: float = 540.0, seed: int = 1) -> Backlog:
    """Keep `BACKLOG` jobs of both tenants waiting. Each light tenant sends a request every ten seconds."""
    clock, random = Clock(), Random(seed)
    most_in_seats = 0

    def refill() -> None:
        waiting = Counter(request.tenant for request in server.waiting)
        for target in range(1, BACKLOG + 1):  # alternately, or one tenant would get all seats at the start
            for tenant, shape in SHAPES.items():
                if waiting[tenant] < target:
                    server.submit(shape.request(tenant, random))

    server = SimulatedServer(clock, order=order, capacity=1000, ended=lambda _: refill())
    served: dict[str, list[float]] = {tenant: [] for tenant in (LARGE, SMALL, *LIGHT)}

    def sample() -> None:
        nonlocal most_in_seats
        in_seats = sum(request.prompt_tokens + request.output_tokens for request in server.running)
        most_in_seats = max(most_in_seats, in_seats)
        service = server.service()
        for tenant, history in served.items():
            history.append(service.get(tenant, 0.0))

    clock.at(0.0, refill)
    clock.every(1.0, sample)
    for tenant in LIGHT:
        for time_s in poisson(1 / EVERY_S, length_s, random):
            clock.at(time_s, partial(server.submit, LIGHT_SHAPE.request(tenant, random)))
    clock.run(length_s)
    longest_prompt = max(request.prompt_tokens for request in server.requests)
    light = [request for request in server.requests if request.tenant in LIGHT]
    return Backlog(
        gap=max(abs(large - small) for large, small in zip(served[LARGE], served[SMALL], strict=True)),
        bound=2 * max(WEIGHTS.prompt * longest_prompt, WEIGHTS.output * most_in_seats),
        throughput=sum(each[-1] for each in served.values()) / length_s,
        light_p99_s=percentile(waits_s(light), 0.99),
        served=served,
    )
