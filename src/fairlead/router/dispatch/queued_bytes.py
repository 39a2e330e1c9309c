"""Bounds the memory of queued request bodies. Pure: computes with lengths only.

A job for a remote server carries its client's request body. A queue bounds how many jobs wait, not how large
they are: a hundred of sixteen megabytes are more than many machines can spare.
"""


class QueuedBytes:
    """The bytes of queued request bodies: at most `max_bytes` for `jobs` of them.

    Half of that is divided evenly, so that one client's large requests never cause another's ordinary one
    to be refused. What a request takes above its share comes out of the other half, first come, first served.
    Sizes are None for jobs without a body.
    """

    def __init__(self, max_bytes: int, jobs: int) -> None:
        self._share = max_bytes // 2 // max(1, jobs)
        self._left = max_bytes - max_bytes // 2

    def has_room(self, body_bytes: int | None) -> bool:
        """Return whether a body of this size may wait, too."""
        excess = self._excess(body_bytes)
        return not excess or excess <= self._left

    def add(self, body_bytes: int | None) -> None:
        """Count a body that waits. That of a requeued job is counted even without room."""
        self._left -= self._excess(body_bytes)

    def remove(self, body_bytes: int | None) -> None:
        """Stop counting a body that waited."""
        self._left += self._excess(body_bytes)

    def _excess(self, body_bytes: int | None) -> int:
        return 0 if body_bytes is None else max(0, body_bytes - self._share)
