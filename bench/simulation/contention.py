"""A flood, a burst after idling, and more work than can be done: who gets what of a scarce queue."""

import math
from collections.abc import Iterable
from functools import partial
from itertools import islice
from random import Random
from typing import Literal, NamedTuple

from fairlead.dispatch.estimate import MeanEstimate, retry_after_s
from fairlead.errors import QueueFull
from simulation.clock import Clock
from simulation.desk import Desk
from simulation.measures import percentile, share_refused, waits_s
from simulation.workload import Request, Shape, poisson

CHAT = Shape(100, 20)
TENTH = "tenth"
OTHERS = [f"other-{number}" for number in range(9)]
CALM_S = 120.0
RETRIES = 2  # what the OpenAI and Anthropic SDKs do


Tenth = Literal["nothing", "greedy", "flood", "stubborn"]


class Flood(NamedTuple):
    """What the others saw of it: the share that was refused, and the rest's p99 wait."""

    refused: float
    p99_s: float


def flood(
    tenth: Tenth, *, displacing: bool = True, length_s: float = 120.0, seeds: Iterable[int] = (1, 2, 3)
) -> Flood:
    """Nine tenants send one request a second each, which is 57 % of what 8 seats can do.

    What the tenth does, when they have done so for two minutes, makes the difference to the `length_s` that
    follow. `greedy`: always has two more
    requests waiting, so it never lets a seat idle but crowds nobody out. `flood`: 1,000 at once.
    `stubborn`: 1,000 at once, and each that is refused comes back after a second until it is served.
    """
    runs = [_flood(tenth, length_s, displacing=displacing, random=Random(seed)) for seed in seeds]
    others = [request for run in runs for request in run]
    return Flood(share_refused(others), percentile(waits_s(others), 0.99))


def _flood(tenth: Tenth, length_s: float, *, displacing: bool, random: Random) -> list[Request]:
    """Return the others' requests of the time that is looked at."""
    clock = Clock()
    end_s = CALM_S + length_s

    def submit_tenth() -> None:
        desk.submit(CHAT.request(TENTH, random))

    def ended(request: Request) -> None:
        if request.tenant != TENTH:
            return
        if tenth == "greedy":
            submit_tenth()
        elif tenth == "stubborn" and request.refused is not None:
            clock.after(1.0, submit_tenth)

    desk = Desk(clock, order="roundRobin", displacing=displacing, ended=ended)
    for tenant in OTHERS:
        for time_s in poisson(1.0, end_s, random):
            clock.at(time_s, partial(desk.submit, CHAT.request(tenant, random)))
    for _ in range({"nothing": 0, "greedy": desk.seats + 2, "flood": 1000, "stubborn": 1000}[tenth]):
        clock.at(CALM_S, submit_tenth)
    clock.run(end_s)
    return [
        request for request in desk.requests if request.tenant in OTHERS and request.submitted_s >= CALM_S
    ]


def share_after_idling(
    *, lifting: bool, idle_s: float = 300.0, burst_s: float = 60.0, seed: int = 1
) -> float:
    """Return what part of the service one who was idle takes, beside one who was busy, when it comes back.

    Without a lift its counter stays where it was. The kernel cannot be told so, but it only lifts who joins:
    one more request of that tenant, for a model that nobody has, waits all the time.
    """
    clock, random = Clock(), Random(seed)
    shape = Shape(200, 100)
    desk = Desk(clock, order="tokens", capacity=10_000)
    idler, worker = "idler", "worker"
    if not lifting:
        desk.submit(shape.request(idler, random), model="a model that nobody has")
    requests = round(2 * (idle_s + burst_s) * desk.seats)
    for _ in range(requests):
        desk.submit(shape.request(worker, random))
    clock.run(idle_s)
    before = desk.service()
    for _ in range(requests):
        desk.submit(shape.request(idler, random))
    clock.run(idle_s + burst_s)
    after = desk.service()
    served = {tenant: after.get(tenant, 0.0) - before.get(tenant, 0.0) for tenant in (idler, worker)}
    return served[idler] / sum(served.values())


class Overload(NamedTuple):
    """Per request that a client wanted to make, with all its retries: 504s, answers, and refusals (429)."""

    timeouts: float
    answers: float
    refusals: float


def overload(
    *, retrying_timeouts: bool, refused_above_s: float = math.inf, length_s: float = 900.0, seed: int = 1
) -> Overload:
    """Twenty tenants ask for 2.25 times what 8 seats can do; clients come back when `Retry-After` says so.

    `retrying_timeouts`: also after a 504, as without `x-should-retry: false`. A newcomer whose estimated wait
    is above `refused_above_s` is refused at once (`queue.maxEstimatedWait`).
    """
    clock, random = Clock(), Random(seed)
    shape, timeout_s = Shape(500, 300), 60.0
    estimate = MeanEstimate()
    attempts: dict[Request, int] = {}
    wanted = answers = timeouts = refusals = 0

    def estimated_s(ahead: int) -> int:
        now_s = clock.now_s
        running_s = [now_s - (request.granted_s or now_s) for request in islice(desk.running, ahead + 1)]
        return estimate.wait_s(ahead=ahead, seats=desk.seats, running_s=running_s)

    def submit(request: Request, attempt: int) -> None:
        attempts[request] = attempt
        is_too_long = estimated_s(desk.ahead_of_newcomer(request.tenant)) > refused_above_s
        desk.submit(request, too_long=QueueFull("the wait would be too long") if is_too_long else None)

    def ended(request: Request) -> None:
        nonlocal answers, timeouts, refusals
        attempt = attempts.pop(request)
        if request.refused is None:
            estimate.finished(desk.speed.service_s(request))
            answers += 1
            return
        timed_out = request.refused == "queue_timeout"
        timeouts += timed_out
        refusals += not timed_out
        if attempt < RETRIES and (retrying_timeouts or not timed_out):
            again = Request(request.tenant, request.prompt_tokens, request.output_tokens)
            after_s = retry_after_s(estimated_s(len(desk.waiting)), random)
            clock.after(after_s, partial(submit, again, attempt + 1))

    desk = Desk(clock, order="roundRobin", timeout_s=timeout_s, ended=ended)
    rate = 2.25 * desk.seats / shape.mean_service_s(desk.speed)
    for number, time_s in enumerate(poisson(rate, length_s, random)):
        clock.at(time_s, partial(submit, shape.request(f"tenant-{number % 20}", random), 0))
        wanted += 1
    clock.run(length_s + 4 * timeout_s)
    return Overload(timeouts / wanted, answers / wanted, refusals / wanted)
