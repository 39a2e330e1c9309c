"""How much the requests that wait may take of our memory. Pure: lengths in, yes or no out.

A job that a server elsewhere is to run carries its client's request. A queue bounds how many jobs wait, not
how large they are: a hundred of sixteen megabytes are more than many machines can spare.
"""

from fairlead.job import Job


class Bodies:
    """The requests that wait, as bytes: at most `most_bytes` for `jobs` of them.

    Half of that is shared out evenly, so that nobody's large requests keep another's ordinary one from
    waiting. What a request takes above its part comes out of the other half: whoever comes first.
    """

    def __init__(self, most_bytes: int, jobs: int) -> None:
        self._part = most_bytes // 2 // max(1, jobs)
        self._left = most_bytes - most_bytes // 2

    def have_room(self, job: Job) -> bool:
        """Whether this job's request may wait, too."""
        above = self._above_its_part(job)
        return not above or above <= self._left

    def add(self, job: Job) -> None:
        """A job waits. One that a node gave back does so whether there is room or not."""
        self._left -= self._above_its_part(job)

    def remove(self, job: Job) -> None:
        """A job does not wait any more."""
        self._left += self._above_its_part(job)

    def _above_its_part(self, job: Job) -> int:
        return 0 if job.relay is None else max(0, len(job.relay.body) - self._part)
