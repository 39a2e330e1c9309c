"""A job's entry in the scheduler, and a request to load a model without a job. Pure."""

from enum import StrEnum

from fairlead.base.errors import FairleadError
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.node_state import NodeState


class TicketState(StrEnum):
    """A ticket's state: QUEUED waits for a seat, GRANTED has one, DONE is final."""

    NEW = "new"
    QUEUED = "queued"
    GRANTED = "granted"
    DONE = "done"


# Tuples, because a search in them by identity is faster than hashing a state.
TRANSITIONS: dict[TicketState, tuple[TicketState, ...]] = {
    TicketState.NEW: (
        TicketState.QUEUED,
        TicketState.GRANTED,  # holds a seat from an earlier dispatcher
        TicketState.DONE,  # refused at once
    ),
    TicketState.QUEUED: (
        TicketState.GRANTED,
        TicketState.DONE,  # refused, displaced, or its client disconnected
    ),
    TicketState.GRANTED: (
        TicketState.QUEUED,  # requeued after its node failed or rejected it
        TicketState.DONE,
    ),
    TicketState.DONE: (),
}


class Ticket:
    """A job in the scheduler. Only the scheduler writes to it: `handle` and `charged` in its queue, `node`
    and `seats` in its node pool.

    `cost` is the estimate that fairness charges at the grant, in weighted tokens; `tokens` the expected use
    of a node's KV cache. `kind` is the number of its `JobKind`. `attempts` counts grants. `has_begun`: its
    first delta has arrived. `late` is the error of its deadline, once that has passed. `failed_at`: where it
    failed last. `unsuited`: nodes that refused it because of their set-up. `needs_local_node`: no remote
    server can run it, or all of them are unsuited. `is_trial`: it tries whether a full node has room.
    `seats`: how many it holds at `node`. `overtaken`: how many jobs behind it have got seats that it waits
    for, while it was the first of its kind and did not fit.
    """

    __slots__ = (
        "_state",
        "attempts",
        "charged",
        "cost",
        "failed_at",
        "handle",
        "has_begun",
        "is_trial",
        "job",
        "kind",
        "late",
        "needs_local_node",
        "node",
        "overtaken",
        "seats",
        "starved",
        "tokens",
        "unsuited",
    )

    def __init__(self, job: JobSpec, *, cost: float = 1.0, tokens: int = 0) -> None:
        self.job = job
        self.cost = cost
        self.tokens = tokens
        self.kind = 0
        self.handle = -1
        self.node: NodeState | None = None
        self.failed_at: NodeState | None = None
        self.unsuited: tuple[NodeState, ...] = ()
        self.needs_local_node = job.needs_local_node
        self.is_trial = False
        self.seats = 0
        self.overtaken = 0
        self.attempts = 0
        self.charged = 0.0
        self.has_begun = False
        self.late: FairleadError | None = None
        self.starved = False
        self._state = TicketState.NEW

    @property
    def state(self) -> TicketState:
        """Its state, which `become` changes."""
        return self._state

    def become(self, state: TicketState) -> None:
        """Change to `state`. Raises AssertionError for a transition not in the table, which is a bug."""
        if state not in TRANSITIONS[self._state]:
            raise AssertionError(f"ticket {self.job.request_id} cannot go from {self._state} to {state}")
        self._state = state


class LoadRequest:
    """A request to load a model without a job. `only_if_free`: only if that evicts no model.

    `starved`: it has waited so long that it goes first. Only the scheduler writes to it.
    """

    __slots__ = ("model", "only_if_free", "starved")

    def __init__(self, model: str, *, only_if_free: bool = False) -> None:
        self.model = model
        self.only_if_free = only_if_free
        self.starved = False
