"""A flood, a burst after an idle time, and overload: each tenant's share of a full queue."""

import math
from collections.abc import Iterable
from functools import partial
from itertools import islice
from random import Random
from typing import Literal, NamedTuple

from fairlead.base.errors import QueueFull
from fairlead.router.dispatch.estimates import MeanEstimate, retry_after_s
from simulation.clock import Clock
from simulation.measures import percentile, share_refused, waits_s
from simulation.simulated_server import SimulatedServer
from simulation.workload import Request, Shape, poisson

CHAT = Shape(100, 20)
TENTH = "tenth"
OTHERS = [f"other-{number}" for number in range(9)]
CALM_S = 120.0
RETRIES = 2  # as in the OpenAI and Anthropic SDKs


Tenth = Literal["nothing", "greedy", "flood", "stubborn"]


class Flood(NamedTuple):
    """The share of the others' requests that was refused, and the p99 wait of the rest."""

    refused: float
    p99_s: float


def flood(
    tenth: Tenth, *, displacing: bool = True, length_s: float = 120.0, seeds: Iterable[int] = (1, 2, 3)
) -> Flood:
    """Return the effect of a tenth tenant on nine others.

    The nine send one request a second each, which is 57 % of the capacity of 8 seats. After two minutes the
    tenth starts, and the following `length_s` are measured. `greedy`: it always has two more requests than
    there are seats. `flood`: it sends 1,000 requests at once. `stubborn`: the same, and it repeats each
    refused request after a second until it is served.
    """
    runs = [_flood(tenth, length_s, displacing=displacing, random=Random(seed)) for seed in seeds]
    others = [request for run in runs for request in run]
    return Flood(share_refused(others), percentile(waits_s(others), 0.99))


def _flood(tenth: Tenth, length_s: float, *, displacing: bool, random: Random) -> list[Request]:
    """Return the others' requests of the measured time."""
    clock = Clock()
    end_s = CALM_S + length_s

    def submit_tenth() -> None:
        server.submit(CHAT.request(TENTH, random))

    def ended(request: Request) -> None:
        if request.tenant != TENTH:
            return
        if tenth == "greedy":
            submit_tenth()
        elif tenth == "stubborn" and request.refused is not None:
            clock.after(1.0, submit_tenth)

    server = SimulatedServer(clock, order="roundRobin", displacing=displacing, ended=ended)
    for tenant in OTHERS:
        for time_s in poisson(1.0, end_s, random):
            clock.at(time_s, partial(server.submit, CHAT.request(tenant, random)))
    for _ in range({"nothing": 0, "greedy": server.seats + 2, "flood": 1000, "stubborn": 1000}[tenth]):
        clock.at(CALM_S, submit_tenth)
    clock.run(end_s)
    return [
        request for request in server.requests if request.tenant in OTHERS and request.submitted_s >= CALM_S
    ]


def share_after_idling(
    *, lifting: bool, idle_s: float = 300.0, burst_s: float = 60.0, seed: int = 1
) -> float:
    """Return the share of service that a tenant gets after an idle time, next to a busy tenant.

    Without a lift, the tenant's counter keeps its old value. The kernel has no option for this, but it lifts
    only tenants that join the queue. So without a lift, one more request of the tenant waits all the time,
    for a model that no node has.
    """
    clock, random = Clock(), Random(seed)
    shape = Shape(200, 100)
    server = SimulatedServer(clock, order="tokens", capacity=10_000)
    idle, busy = "idler", "worker"
    if not lifting:
        server.submit(shape.request(idle, random), model="a model that no node has")
    requests = round(2 * (idle_s + burst_s) * server.seats)
    for _ in range(requests):
        server.submit(shape.request(busy, random))
    clock.run(idle_s)
    before = server.service()
    for _ in range(requests):
        server.submit(shape.request(idle, random))
    clock.run(idle_s + burst_s)
    after = server.service()
    served = {tenant: after.get(tenant, 0.0) - before.get(tenant, 0.0) for tenant in (idle, busy)}
    return served[idle] / sum(served.values())


class Overload(NamedTuple):
    """Per intended request, with all its retries: the 504s, answers and refusals (429)."""

    timeouts: float
    answers: float
    refusals: float


def overload(
    *, retrying_timeouts: bool, refused_above_s: float = math.inf, length_s: float = 900.0, seed: int = 1
) -> Overload:
    """Run twenty tenants with 2.25 times the load that 8 seats can serve.

    Clients retry after `Retry-After`, with `retrying_timeouts` also after a 504, as without
    `x-should-retry: false`. A new request with an estimated wait above `refused_above_s` is refused at once
    (`queue.maxEstimatedWait`).
    """
    clock, random = Clock(), Random(seed)
    shape, timeout_s = Shape(500, 300), 60.0
    estimate = MeanEstimate()
    attempts: dict[Request, int] = {}
    intended = answers = timeouts = refusals = 0

    def estimated_s(ahead: int) -> int:
        now_s = clock.now_s
        running_s = [now_s - (request.granted_s or now_s) for request in islice(server.running, ahead + 1)]
        return estimate.wait_s(ahead=ahead, seats=server.seats, running_s=running_s)

    def submit(request: Request, attempt: int) -> None:
        attempts[request] = attempt
        is_too_long = estimated_s(server.ahead_of_newcomer(request.tenant)) > refused_above_s
        server.submit(request, too_long=QueueFull("the wait would be too long") if is_too_long else None)

    def ended(request: Request) -> None:
        nonlocal answers, timeouts, refusals
        attempt = attempts.pop(request)
        if request.refused is None:
            estimate.finished(server.speed.service_s(request))
            answers += 1
            return
        timed_out = request.refused == "queue_timeout"
        timeouts += timed_out
        refusals += not timed_out
        if attempt < RETRIES and (retrying_timeouts or not timed_out):
            retry = Request(request.tenant, request.prompt_tokens, request.output_tokens)
            after_s = retry_after_s(estimated_s(len(server.waiting)), random)
            clock.after(after_s, partial(submit, retry, attempt + 1))

    server = SimulatedServer(clock, order="roundRobin", timeout_s=timeout_s, ended=ended)
    rate = 2.25 * server.seats / shape.mean_service_s(server.speed)
    for number, time_s in enumerate(poisson(rate, length_s, random)):
        clock.at(time_s, partial(submit, shape.request(f"tenant-{number % 20}", random), 0))
        intended += 1
    clock.run(length_s + 4 * timeout_s)
    return Overload(timeouts / intended, answers / intended, refusals / intended)
