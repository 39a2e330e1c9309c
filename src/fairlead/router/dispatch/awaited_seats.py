"""Which seats a job for a model waits for, and which other jobs wait for them too. Pure."""

from collections.abc import Collection

from fairlead.router.dispatch.node_state import NodeState


class AwaitedSeats:
    """The seats of the `nodes` that have the model; of all nodes if none has it, because it must be loaded.

    `seats` leaves out free ones. A waiting job cannot have them: cache memory is short, the node drains or is
    full, or the job needs more than are free, and so waits for the others. `most` are the seats of the
    largest node, the most that one job can hold. `by_sequence`: all these nodes start the sequences of a job
    one by one.
    """

    def __init__(self, model: str, nodes: Collection[NodeState]) -> None:
        nodes = [node for node in nodes if not node.is_closed]
        awaited = [node for node in nodes if model in node.models] or nodes
        self.seats = sum(node.busy + min(node.free, 0) for node in awaited)
        self.most = max((node.limits.seats for node in awaited), default=1)
        self.by_sequence = bool(awaited) and all(node.limits.by_sequence for node in awaited)
        # None: every node, also those that went down with their jobs.
        self._node_ids = None if len(awaited) == len(nodes) else frozenset(node.id for node in awaited)
        of_awaited = {name for node in awaited for name in node.models}
        self._of_other_nodes = {name for node in nodes for name in node.models} - of_awaited

    def include(self, node_id: str) -> bool:
        """Return whether a seat on this node is one of them."""
        return self._node_ids is None or node_id in self._node_ids

    def of(self, seats: int) -> int:
        """Return how many seats a job holds at most that takes `seats` on a node that has as many."""
        return max(1, min(seats, self.most, self.seats))

    def needed_for(self, seats: int) -> int:
        """Return how many of them such a job needs to begin."""
        return 1 if self.by_sequence else self.of(seats)

    @property
    def are_awaited_by_all(self) -> bool:
        """Whether every waiting job may get one of them."""
        return not self._of_other_nodes

    def are_awaited_by(self, model: str) -> bool:
        """Return whether jobs for this model may get one of them, and do not wait for other seats only."""
        return model not in self._of_other_nodes
