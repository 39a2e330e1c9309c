"""The jobs that get only seats that no other job waits for, such as the lines of a batch. Pure.

They wait here, outside of the queue, so that they are in nobody's way: they take no place in it, and no turn.
The scheduler does not know them. The dispatcher submits one for each seat that is free while no job waits for
its model, and stops them when a job has to wait:

    seats of m: batch batch batch     a chat for m arrives → seats of m: batch batch chat

A stopped job fails with `Displaced`; its owner may submit it again.
"""

from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.scheduling import SchedulerQueries
from fairlead.router.dispatch.waiter import Waiter


class IdleJobs:
    """The jobs for idle seats: those that wait, and those that were submitted. Both from the oldest on.

    scheduler: says what waits and which seats are free.
    """

    def __init__(self, scheduler: SchedulerQueries) -> None:
        self._scheduler = scheduler
        self._waiting: dict[Waiter, None] = {}
        self._submitted: dict[Waiter, None] = {}
        self._stopped: set[Waiter] = set()  # the submitted ones that were told to end

    def __len__(self) -> int:
        """Return the number of jobs."""
        return len(self._waiting) + len(self._submitted)

    def add(self, waiter: Waiter) -> None:
        """Add a job that waits."""
        self._waiting[waiter] = None

    def restore(self, waiter: Waiter) -> None:
        """Add a job that holds a seat from an earlier dispatcher."""
        self._submitted[waiter] = None

    def discard(self, waiter: Waiter) -> None:
        """Remove a job that has ended; do nothing with any other job."""
        self._waiting.pop(waiter, None)
        self._submitted.pop(waiter, None)
        self._stopped.discard(waiter)

    def next(self) -> Waiter | None:
        """Return the oldest job that may be submitted now, and count it as submitted; None: there is none."""
        if not self._waiting:
            return None
        wanted = {job.model for job in self._scheduler.waiting_jobs()}
        answers: dict[tuple[str, int], bool] = {}  # most jobs are alike
        for waiter in self._waiting:
            job = waiter.ticket.job
            kind = job.model, job.seats
            if kind not in answers:
                answers[kind] = self._may_submit(job, wanted)
            if answers[kind]:
                del self._waiting[waiter]
                self._submitted[waiter] = None
                return waiter
        return None

    def displace(self, job: JobSpec) -> list[Waiter]:
        """Return the jobs to stop for a job that waits: the newest ones in seats that it could have.

        If its model must be loaded, that is all jobs of models that may be unloaded for it.
        """
        running = [
            (waiter, node)
            for waiter in reversed(self._submitted)
            if waiter not in self._stopped and (node := waiter.ticket.node) is not None
        ]
        if self._scheduler.must_load(job):
            found = [waiter for waiter, node in running if node.limits.evictable]
        else:
            leaving = sum(
                waiter.ticket.node is not None and job.model in waiter.ticket.node.models
                for waiter in self._stopped
            )
            wanted = max(0, self._seats_wanted(job.model) - leaving)
            found = [waiter for waiter, node in running if job.model in node.models][:wanted]
        self._stopped.update(found)
        return found

    def _seats_wanted(self, model: str) -> int:
        return sum(job.seats for job in self._scheduler.waiting_jobs() if job.model == model)

    def _may_submit(self, job: JobSpec, wanted: set[str]) -> bool:
        """Return whether the job takes nothing that another job waits for, those of `wanted` models.

        A model is loaded for it only if nothing waits, and no other idle seat is in use: batches for two
        models that do not fit together would evict each other with every line.
        """
        if job.model in wanted:
            return False
        if self._scheduler.must_load(job):
            return not wanted and not self._submitted
        return self._scheduler.has_free_seat(job.model, job.seats)
