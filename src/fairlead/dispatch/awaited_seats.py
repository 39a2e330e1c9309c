"""Which seats a job for a model waits for, and which other jobs wait for them too. Pure."""

from collections.abc import Collection

from fairlead.dispatch.node_state import NodeState
from fairlead.job import Job


class AwaitedSeats:
    """The seats of the `places` that have the model; of all places if none has it, for it must be loaded.

    `seats` leaves out free ones. A waiting job cannot have them: cache memory is short, or the node drains or
    is full.
    """

    def __init__(self, model: str, places: Collection[NodeState]) -> None:
        holding = [place for place in places if model in place.node.models] or list(places)
        self.seats = sum(place.busy + min(place.free, 0) for place in holding)
        # None: every place, also of nodes that went down with their jobs.
        self._places = None if len(holding) == len(places) else frozenset(holding)
        here = {name for place in holding for name in place.node.models}
        self._elsewhere = {name for place in places for name in place.node.models} - here

    def include(self, place: NodeState | None) -> bool:
        """Return whether a seat at this place is one of them."""
        return self._places is None or place in self._places

    @property
    def are_awaited_by_all(self) -> bool:
        """Whether every waiting job may get one of them."""
        return not self._elsewhere

    def are_awaited_by(self, job: Job) -> bool:
        """Return whether a waiting job may get one of them, and does not wait for other seats only."""
        return job.model not in self._elsewhere
