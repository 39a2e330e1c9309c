"""Bounds the memory of queued request bodies. Pure: computes with lengths only.

A job for a remote server carries its client's request body. A queue bounds how many jobs wait, not how large
they are: a hundred of sixteen megabytes are more than many machines can spare.
"""

from fairlead.job import Job


class QueuedBytes:
    """The bytes of queued request bodies: at most `most_bytes` for `jobs` of them.

    Half of that is shared out evenly, so that one client's large requests never keep another's ordinary one
    from waiting. What a request takes above its part comes out of the other half, first come, first served.
    """

    def __init__(self, most_bytes: int, jobs: int) -> None:
        self._part = most_bytes // 2 // max(1, jobs)
        self._left = most_bytes - most_bytes // 2

    def have_room(self, job: Job) -> bool:
        """Return whether this job's body may wait, too."""
        above = self._above_its_part(job)
        return not above or above <= self._left

    def add(self, job: Job) -> None:
        """Count a job that waits. A job that a node returned is counted even without room."""
        self._left -= self._above_its_part(job)

    def remove(self, job: Job) -> None:
        """Stop counting a job that waited."""
        self._left += self._above_its_part(job)

    def _above_its_part(self, job: Job) -> int:
        return 0 if job.relay is None else max(0, len(job.relay.body) - self._part)
