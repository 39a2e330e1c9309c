"""The nodes that are up, and their seats: which could take a job, which have jobs, which get no more.

Pure: independent of the queue, swaps and effects. One node's seats are a `NodeState`; `choose` selects among
several.
"""

from random import Random

from fairlead.dispatch.job_spec import JobSpec
from fairlead.dispatch.node_state import NodeState, choose
from fairlead.dispatch.ticket import Ticket
from fairlead.errors import ContextLengthExceeded
from fairlead.nodes.limits import NodeLimits


class NodePool(dict[str, NodeState]):
    """The `NodeState` of each node that is up, by the node's id. Only this class writes a ticket's `node`.

    A node that comes up again gets a new state, and jobs of the old one release seats that are not counted
    any more.
    """

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self._closed: set[str] = set()
        self._expected: dict[str, NodeState] = {}  # not up yet, with seats of jobs that were restored
        self._grants = 0

    # Nodes -------------------------------------------------------------------------------------------

    def add(self, node_id: str, models: frozenset[str], limits: NodeLimits) -> NodeState:
        """Add a node that is up; return its new state, which is leaving if the node is closed."""
        node = self._expected.pop(node_id, None) or NodeState(node_id, models, limits)
        node.models, node.limits = models, limits
        node.leaving = node_id in self._closed
        self[node_id] = node
        return node

    def remove(self, node_id: str) -> NodeState | None:
        """Remove a node, and return its state; None if it was not up."""
        self._expected.pop(node_id, None)
        return self.pop(node_id, None)

    def close(self, node_id: str) -> bool:
        """Give a node no more jobs, not even after it restarts. Return whether it is up."""
        self._closed.add(node_id)
        node = self.get(node_id)
        if node is not None:
            node.leaving = True
        return node is not None

    def reopen(self, node_id: str) -> None:
        """Allow a node of this name to get jobs the next time it comes up."""
        self._closed.discard(node_id)

    def is_current(self, node: NodeState) -> bool:
        """Return whether the node is up, and has no newer state."""
        return self.get(node.id) is node

    def idle_and_leaving(self) -> list[NodeState]:
        """Return the leaving nodes that have no jobs."""
        return [node for node in self.values() if node.leaving and not node.busy]

    # Candidates --------------------------------------------------------------------------------------

    def free(self) -> list[NodeState]:
        """Return the nodes with a free seat."""
        return [node for node in self.values() if node.free > 0]

    def with_several_seats(self) -> NodeState | None:
        """Return the only node, if it has several free seats for any job that fits its cache.

        Does not apply while limited cache memory is empty or overfull: an empty cache takes a first job of
        any size.
        """
        if len(self) != 1:
            return None
        node = next(iter(self.values()))
        if node.free < 2 or node.limits.needs_relay:
            return None
        left = node.tokens_left
        return node if left is None or (node.busy and left >= 0) else None

    def free_for(self, job: JobSpec) -> list[NodeState]:
        """Return the nodes where a job that arrived now would find a seat."""
        return [node for node in self.values() if node.accepts(job) and node.free > 0]

    def local(self) -> list[NodeState]:
        """Return the nodes with models that swaps load and evict."""
        return [node for node in self.values() if node.limits.evictable]

    def local_with(self, model: str) -> NodeState | None:
        """Return the node where a swap has loaded the model; None if it is not loaded here."""
        return next((node for node in self.local() if model in node.models), None)

    def with_model(self, model: str) -> list[NodeState]:
        """Return the nodes that have the model."""
        return [node for node in self.values() if model in node.models]

    def accepting(self, job: JobSpec) -> list[NodeState]:
        """Return the nodes that could run such a job at all."""
        return [node for node in self.values() if node.accepts(job)]

    def candidates(self, ticket: Ticket) -> list[NodeState]:
        """Return the nodes that may run the job: not where it failed last, unless there is no other."""
        accepting = self.accepting(ticket.job)
        if ticket.failed_at is None:
            return accepting
        return [node for node in accepting if node is not ticket.failed_at] or accepting

    def fits(self, ticket: Ticket) -> bool | None:
        """Return whether the job fits now: None without a free seat, False without cache memory."""
        fits = None
        for node in self.candidates(ticket):
            if node.free > 0:
                fits = node.has_cache_for(ticket.tokens)
                if fits:
                    break
        return fits

    def length_error(self, job: JobSpec) -> ContextLengthExceeded | None:
        """Return an error if the job is too long for all nodes that are up for it; None if none is up."""
        lengths = [node.limits.max_model_len for node in self.accepting(job)]
        if not lengths or job.longest_prompt + 1 <= max(lengths):
            return None
        this_one = f"this one has {job.longest_prompt}"
        return ContextLengthExceeded.of_prompt(max(lengths), this_one, param="prompt")

    # Seats -------------------------------------------------------------------------------------------

    def assign(self, ticket: Ticket) -> None:
        """Give a job that fits the best seat that it can have, at `ticket.node`."""
        node = ticket.node = self._best(ticket)
        node.acquire(ticket.tokens)
        self._grants += 1
        node.used = self._grants

    def restore(self, ticket: Ticket, node_id: str) -> None:
        """Count the seat that a job holds already, at `ticket.node`, which may come up later."""
        node = self.get(node_id) or self._expected.get(node_id)
        if node is None:
            node = self._expected[node_id] = NodeState(node_id, frozenset(), NodeLimits(0, max_model_len=0))
        ticket.node = node
        node.acquire(ticket.tokens)
        self._grants += 1
        node.used = self._grants

    def release(self, ticket: Ticket) -> NodeState:
        """Free a job's seat; return its node."""
        node, ticket.node = ticket.node, None
        assert node is not None
        node.release(ticket.tokens)
        if not node.busy and self._expected.get(node.id) is node:
            del self._expected[node.id]
        return node

    def _best(self, ticket: Ticket) -> NodeState:
        if len(self) == 1:
            return next(iter(self.values()))
        nodes = self.candidates(ticket)
        free = [node for node in nodes if node.free > 0 and node.has_cache_for(ticket.tokens)]
        # Needed even if only one node is free: what it gets now counts in later choices.
        node = choose(free, self._random, ticket.job)
        node.remember(ticket.job)
        return node
