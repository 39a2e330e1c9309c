"""Decides whether a job or a load request may wait. Pure: makes queries only.

Placement comes before queueing: a job with a free seat is admitted however many wait. Which job a newcomer
displaces from a full queue is the queue's decision.
"""

from fairlead.dispatch.node_pool import NodePool
from fairlead.dispatch.queue import Queue
from fairlead.dispatch.swaps import Swaps
from fairlead.dispatch.ticket import LoadRequest
from fairlead.errors import Draining, FairleadError, ModelLoading, ModelNotFound, NoQueue, QueueFull
from fairlead.job import Job

RETRY_S = 5


class JobAdmission:
    """The reasons to refuse a job or a load request at once, in the order in which they apply.

    With `rejects_loading` no job waits for a model to be loaded.
    """

    def __init__(
        self, queue: Queue, places: NodePool, swaps: Swaps, *, rejects_loading: bool = False
    ) -> None:
        self._queue = queue
        self._places = places
        self._swaps = swaps
        self._rejects_loading = rejects_loading
        self._draining = False

    def drain(self) -> None:
        """Admit nothing any more."""
        self._draining = True

    def refusal(self, job: Job, *, too_long: FairleadError | None = None) -> FairleadError | None:
        """Return why the job may not wait, if it has to. A full queue is not checked here.

        `too_long` is the error for an estimated wait that is too long; it applies if no other does.
        """
        if self._draining:
            return shutting_down()
        if (misfit := self._places.misfit(job)) is not None:
            return misfit
        if self._places.free_for(job):
            return None
        if self._rejects_loading and self.must_load(job):
            return ModelLoading(f"the model {job.model} is being loaded", retry_after_s=RETRY_S)
        if job.no_queue:
            return NoQueue("no seat is free, and the request does not want to wait")
        if not self._queue.has_bytes_for(job):
            return QueueFull("the queue is full: the requests that wait are too large together")
        return too_long

    def refusal_of_wish(self, wish: LoadRequest) -> FairleadError | None:
        """Return why a model that is not loaded will not be; None if it may be."""
        if self._draining:
            return shutting_down()
        if not self._swaps.is_loadable(wish.model):
            return ModelNotFound(f"{wish.model} is no model of this server")
        return None

    def must_load(self, job: Job) -> bool:
        """Return whether the job's model would have to be loaded for it."""
        return self._swaps.is_loadable(job.model) and not self._places.taking(job)


def shutting_down() -> Draining:
    """Return the error of jobs that arrive or wait while the server shuts down."""
    return Draining("the server is shutting down", retry_after_s=RETRY_S)
