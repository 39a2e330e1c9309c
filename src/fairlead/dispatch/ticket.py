"""A job's entry in the queue and its seat; and a request to load a model without a job."""

from enum import StrEnum

from fairlead.dispatch.node_state import NodeState
from fairlead.errors import QueueTimeout
from fairlead.job import Job


class TicketState(StrEnum):
    """QUEUED ⇄ GRANTED → DONE; back to QUEUED only when a node returns a job. A refusal skips GRANTED."""

    NEW = "new"
    QUEUED = "queued"
    GRANTED = "granted"
    DONE = "done"


class Ticket:
    """A job in the scheduler, which writes `handle` and `charged` in its queue and `place` in its places.

    `cost` is the estimate that fairness charges at the grant, in weighted tokens; `tokens` the expected use
    of a node's KV cache. `attempts` counts grants. `has_begun`: its first delta has arrived. `late` is the
    error of its deadline, once that has passed. `failed_at`: where it failed last. Only the scheduler writes
    to it.
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
        self.place: NodeState | None = None
        self.failed_at: NodeState | None = None
        self.attempts = 0
        self.charged = 0.0
        self.has_begun = False
        self.late: QueueTimeout | None = None
        self.starved = False


class LoadRequest:
    """A request to load a model without a job. `spare`: only if that evicts no model.

    `starved`: it has waited so long that it goes first. Only the scheduler writes to it.
    """

    __slots__ = ("model", "spare", "starved")

    def __init__(self, model: str, *, spare: bool = False) -> None:
        self.model = model
        self.spare = spare
        self.starved = False
