"""Effects that are only written down, and the small things a scheduler is driven with."""

from contextlib import AbstractAsyncContextManager
from random import Random

from fairlead.dispatch.scheduler import Scheduler
from fairlead.dispatch.ticket import Ticket
from fairlead.errors import FairleadError
from fairlead.job import Job, Sampling
from fairlead.nodes.deltas import Deltas
from fairlead.nodes.node import NodeLimits

MODEL = "m"


class FakeNode:
    def __init__(self, id: str = "node", *models: str) -> None:  # noqa: A002
        self.id = id
        self.models = frozenset(models or {MODEL})

    def generate(self, job: Job) -> AbstractAsyncContextManager[Deltas]:
        raise AssertionError("the scheduler never generates")


class RecordedEffects:
    def __init__(self) -> None:
        self.granted: list[Ticket] = []
        self.refused: dict[Ticket, FairleadError] = {}
        self.stopped: list[Ticket] = []
        self.swaps: list[tuple[str, frozenset[str]]] = []

    def grant(self, ticket: Ticket) -> None:
        self.granted.append(ticket)

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        assert ticket not in self.refused
        self.refused[ticket] = error

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        self.stopped.append(ticket)

    def start_swap(self, model: str, evict: frozenset[str]) -> None:
        self.swaps.append((model, evict))


def job(
    tenant: str = "A", *, prompt: int = 3, model: str = MODEL, cost: float = 1.0, tokens: int = 0, **options
) -> Ticket:
    """A ticket for a job of one prompt."""
    return Ticket(
        Job(
            id="r",
            tenant=tenant,
            model=model,
            prompts=(list(range(prompt)),),
            sampling=Sampling(max_tokens=1),
            **options,
        ),
        cost=cost,
        tokens=tokens,
    )


def limits(seats: int, *, longest: int = 100, cache_tokens: int | None = None) -> NodeLimits:
    return NodeLimits(seats=seats, max_model_len=longest, cache_tokens=cache_tokens)


def scheduler(capacity: int = 100, **options) -> tuple[Scheduler, RecordedEffects]:
    effects = RecordedEffects()
    return Scheduler(effects, capacity=capacity, random=Random(0), **options), effects


def submit(to: Scheduler, *tickets: Ticket) -> list[Ticket]:
    for ticket in tickets:
        to.submit(ticket)
    return list(tickets)
