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


class RunState(StrEnum):
    """A run's state: RUNNING holds seats, SUSPENDED waits in the queue to get one again."""

    RUNNING = "running"
    SUSPENDED = "suspended"


class Run:
    """What holds seats: one sequence of a job, or all of them on a node that does not start them one by one.

    ticket: the job.
    index: the sequence's number in the job; 0: the first, or all.
    is_whole: it is all of them.
    seats: how many it holds while it runs.
    tokens: the expected use of the node's KV cache, while it runs.
    number: orders runs by when they have started or gone on.
    state: a run is suspended only where sequences start one by one.
    is_ripe: it has run for a quantum since then, so that it may be suspended.
    suspensions: how often it was, since its tenant has held more than its share.
    handle: that of its entry in the queue, while it is suspended.
    """

    __slots__ = (
        "handle",
        "index",
        "is_ripe",
        "is_whole",
        "number",
        "seats",
        "state",
        "suspensions",
        "ticket",
        "tokens",
    )

    def __init__(self, ticket: "Ticket", index: int, *, is_whole: bool, seats: int, tokens: int) -> None:
        self.ticket = ticket
        self.index = index
        self.is_whole = is_whole
        self.seats = seats
        self.tokens = tokens
        self.number = 0
        self.state = RunState.RUNNING
        self.is_ripe = False
        self.suspensions = 0
        self.handle = -1


class Ticket:
    """A job in the scheduler. Only the scheduler writes to it: `handle`, `left`, `paid` and `charged` in its
    queue, `node` and `runs` in its node pool.

    job: the job.
    cost: the estimate that fairness charges at the grants, in weighted tokens, for all its sequences.
    tokens: the expected use of a node's KV cache, by all its sequences.
    left: how many of its sequences have had no seat yet at its node.
    paid: how many sequences were charged, also at earlier nodes.
    charged: what was charged for the job.
    node: where it runs; None: it waits.
    runs: by index, what holds seats there, or is suspended.
    kind: the number of its `JobKind`.
    attempts: how often it has begun at a node.
    has_begun: its first delta has arrived.
    late: the error of its deadline, once that has passed.
    failed_at: where it failed last.
    unsuited: nodes that refused it because of their set-up.
    needs_local_node: no remote server can run it, or all of them are unsuited.
    is_trial: it tries whether a full node has room.
    overtaken: how many jobs behind it have got seats that it waits for, while it was the first of its kind
        and did not fit.
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
        "left",
        "needs_local_node",
        "node",
        "overtaken",
        "paid",
        "runs",
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
        self.left = job.turns
        self.paid = 0
        self.runs: dict[int, Run] = {}
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

    @property
    def seats(self) -> int:
        """How many seats it holds at `node`."""
        return sum(run.seats for run in self.runs.values() if run.state is RunState.RUNNING)

    @property
    def share(self) -> float:
        """What one of its sequences is charged."""
        return self.cost / self.job.turns

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
