"""A job's place in the queue, then its seat; and a model that is wanted without a job."""

from enum import StrEnum

from fairlead.dispatch.placement import Place
from fairlead.errors import QueueTimeout
from fairlead.job import Job


class TicketState(StrEnum):
    """QUEUED ⇄ GRANTED → DONE; back only when a node gives a job back. A refusal skips GRANTED."""

    NEW = "new"
    QUEUED = "queued"
    GRANTED = "granted"
    DONE = "done"


class Ticket:
    """`cost` is the estimate that fairness charges at the grant, in weighted tokens; `tokens` what it is
    likely to take of a node's cache. `attempts` counts grants. `has_begun`: its first delta is on its way.
    `late` is the error of its deadline, once that is over. `failed_at`: the place that failed it last. Only
    the scheduler writes to it, through its queue (`handle`, `charged`) and its places (`place`).
    """

    __slots__ = (
        "attempts",
        "charged",
        "cost",
        "failed_at",
        "handle",
        "has_begun",
        "job",
        "late",
        "place",
        "starved",
        "state",
        "tokens",
    )

    def __init__(self, job: Job, *, cost: float = 1.0, tokens: int = 0) -> None:
        self.job = job
        self.cost = cost
        self.tokens = tokens
        self.state = TicketState.NEW
        self.handle = -1
        self.place: Place | None = None
        self.failed_at: Place | None = None
        self.attempts = 0
        self.charged = 0.0
        self.has_begun = False
        self.late: QueueTimeout | None = None
        self.starved = False


class Wish:
    """A model that somebody wants to be loaded, as a job would. `spare`: only if that evicts none.

    `starved`: it has waited so long that its turn comes first. Only the scheduler writes to it.
    """

    __slots__ = ("model", "spare", "starved")

    def __init__(self, model: str, *, spare: bool = False) -> None:
        self.model = model
        self.spare = spare
        self.starved = False
