"""Decides whether a job or a load request may wait. Pure.

Placement comes before queueing: a job with a free seat is admitted however many wait. Which job a newcomer
displaces from a full queue is the queue's decision.
"""

from fairlead.base.errors import (
    Draining,
    FairleadError,
    ModelLoading,
    ModelNotFound,
    NodesFull,
    NodesLimited,
    NoQueue,
    QueueFull,
)
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.queue import Queue
from fairlead.router.dispatch.swaps import Swaps
from fairlead.router.dispatch.ticket import LoadRequest

RETRY_S = 5


class JobAdmission:
    """The reasons to refuse a job or a load request at once, in the order in which they apply.

    queue: what waits.
    nodes: what can run jobs.
    swaps: what can be loaded.
    rejects_loading: whether no job waits for a model to be loaded.
    """

    def __init__(self, queue: Queue, nodes: NodePool, swaps: Swaps, *, rejects_loading: bool = False) -> None:
        self._queue = queue
        self._nodes = nodes
        self._swaps = swaps
        self._rejects_loading = rejects_loading
        self._draining = False

    def drain(self) -> None:
        """Admit nothing any more."""
        self._draining = True

    def refusal(self, job: JobSpec, *, too_long: FairleadError | None = None) -> FairleadError | None:
        """Return why the job may not wait, if it has to. A full queue is not checked here.

        `too_long` is the error for an estimated wait that is too long; it applies if no other does.
        """
        if self._draining:
            return shutting_down()
        if (too_long_prompt := self._nodes.length_error(job)) is not None:
            return too_long_prompt
        if self._nodes.has_seat_for(job):
            return None
        if self._rejects_loading and self.must_load(job):
            return ModelLoading(f"the model {job.model} is being loaded", retry_after_s=RETRY_S)
        if job.no_queue:
            no_queue = NoQueue("no seat is free, and the request must not be queued")
            return full_error(self._nodes, job) or no_queue
        if not self._queue.has_bytes_for(job):
            return QueueFull("the queue is full: the requests that wait are too large together")
        return too_long

    def load_refusal(self, request: LoadRequest) -> FairleadError | None:
        """Return why a model that is not loaded may not be loaded; None if it may."""
        if self._draining:
            return shutting_down()
        if not self._swaps.is_loadable(request.model):
            return ModelNotFound(f"this server has no model {request.model}")
        return None

    def must_load(self, job: JobSpec) -> bool:
        """Return whether the job's model would have to be loaded for it."""
        return self._swaps.is_loadable(job.model) and not self._nodes.accepting(job)


def full_error(nodes: NodePool, job: JobSpec) -> NodesFull | None:
    """Return the error of a job if all nodes that could run it are full; None if one is not."""
    pause = nodes.is_full_for(job)
    if pause is None:
        return None
    kind = NodesLimited if pause.is_limit else NodesFull
    return kind(f"every server of {job.model} is full")


def shutting_down() -> Draining:
    """Return the error of jobs that arrive or wait while the server shuts down."""
    return Draining("the server is shutting down", retry_after_s=RETRY_S)
