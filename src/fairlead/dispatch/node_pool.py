"""The nodes that are up, and their seats: which could take a job, which have jobs, which get no more.

Pure: knows no queue, swap or effect. One node's seats are a `NodeState`; `placement` chooses among several.
"""

from collections.abc import Iterator, Mapping, ValuesView
from random import Random

from fairlead.dispatch.node_state import NodeState, choose
from fairlead.dispatch.prefixes import prefixes_of
from fairlead.dispatch.ticket import Ticket
from fairlead.errors import ContextLengthExceeded
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeLimits


class NodePool(Mapping[str, NodeState]):
    """The `NodeState` of each node that is up, by the node's id. Only this class writes a ticket's `place`.

    A node has one place at a time. When it comes up again it gets a new one, and jobs of the old one give
    back seats that are not counted any more.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._by_id: dict[str, NodeState] = {}
        self._closed: set[str] = set()
        self._seatings = 0

    def __getitem__(self, node_id: str) -> NodeState:
        """Return the place of a node that is up."""
        return self._by_id[node_id]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the nodes that are up."""
        return iter(self._by_id)

    def __len__(self) -> int:
        """Return the number of nodes that are up."""
        return len(self._by_id)

    def values(self) -> ValuesView[NodeState]:
        """Return the places. Every event iterates over them, and `Mapping` would look each of them up."""
        return self._by_id.values()

    # Nodes -------------------------------------------------------------------------------------------

    def add(self, node: Node, limits: NodeLimits) -> NodeState:
        """Add a node that is up; return its new place, which is leaving if the node is closed."""
        place = self._by_id[node.id] = NodeState(node, limits)
        place.leaving = node.id in self._closed
        return place

    def remove(self, node_id: str) -> NodeState | None:
        """Remove a node, and return its place; None if it had none."""
        return self._by_id.pop(node_id, None)

    def close(self, node_id: str) -> bool:
        """Give a node no more jobs, not even after it restarts. Return whether it is up."""
        self._closed.add(node_id)
        place = self._by_id.get(node_id)
        if place is not None:
            place.leaving = True
        return place is not None

    def reopen(self, node_id: str) -> None:
        """Allow a node of this name to get jobs the next time it comes up."""
        self._closed.discard(node_id)

    def is_current(self, place: NodeState) -> bool:
        """Return whether the place's node is up, and has no newer place."""
        return self._by_id.get(place.node.id) is place

    def idle_and_leaving(self) -> list[NodeState]:
        """Return the leaving places that have no jobs."""
        return [place for place in self._by_id.values() if place.leaving and not place.busy]

    # Candidates --------------------------------------------------------------------------------------

    def free(self) -> list[NodeState]:
        """Return the places with a free seat."""
        return [place for place in self._by_id.values() if place.free > 0]

    def with_several_seats(self) -> NodeState | None:
        """Return the only place, if it has several free seats for any job that fits its cache.

        Not while limited cache memory is empty or overfull: an empty cache takes a first job of any size.
        """
        if len(self._by_id) != 1:
            return None
        place = next(iter(self._by_id.values()))
        if place.free < 2 or place.limits.needs_relay:
            return None
        left = place.tokens_left
        return place if left is None or (place.busy and left >= 0) else None

    def free_for(self, job: Job) -> list[NodeState]:
        """Return the places where a job that arrived now would find a seat."""
        return [place for place in self._by_id.values() if place.takes(job) and place.free > 0]

    def ours(self) -> list[NodeState]:
        """Return the places whose models swaps load and evict."""
        return [place for place in self._by_id.values() if place.limits.evictable]

    def of_ours(self, model: str) -> NodeState | None:
        """Return the place where a swap has loaded the model; None if it is not loaded here."""
        return next((place for place in self.ours() if model in place.node.models), None)

    def holding(self, model: str) -> list[NodeState]:
        """Return the places whose nodes have the model."""
        return [place for place in self._by_id.values() if model in place.node.models]

    def taking(self, job: Job) -> list[NodeState]:
        """Return the places that could run such a job at all."""
        return [place for place in self._by_id.values() if place.takes(job)]

    def open_to(self, ticket: Ticket) -> list[NodeState]:
        """Return the places that may run the job: not where it failed last, unless there is no other."""
        taking = self.taking(ticket.job)
        if ticket.failed_at is None:
            return taking
        return [place for place in taking if place is not ticket.failed_at] or taking

    def fit(self, ticket: Ticket) -> bool | None:
        """Return whether the job fits now: None without a free seat, False without cache memory."""
        fits = None
        for place in self.open_to(ticket):
            if place.free > 0:
                fits = place.holds(ticket.tokens)
                if fits:
                    break
        return fits

    def misfit(self, job: Job) -> ContextLengthExceeded | None:
        """Return an error if the job is too long for all nodes that are up for it; None if none is up."""
        longest = max(map(len, job.prompts), default=0) + 1
        lengths = [place.limits.max_model_len for place in self.taking(job)]
        if not lengths or longest <= max(lengths):
            return None
        return ContextLengthExceeded.of_prompt(max(lengths), f"this one has {longest - 1}", param="prompt")

    # Seats -------------------------------------------------------------------------------------------

    def seat(self, ticket: Ticket) -> None:
        """Give a job that fits the best seat that it can have, at `ticket.place`."""
        place = ticket.place = self._best(ticket)
        place.take(ticket.tokens)
        self._seatings += 1
        place.used = self._seatings

    def vacate(self, ticket: Ticket) -> NodeState:
        """Release a job's seat; return its place."""
        place, ticket.place = ticket.place, None
        assert place is not None
        place.give_back(ticket.tokens)
        return place

    def _best(self, ticket: Ticket) -> NodeState:
        if len(self._by_id) == 1:
            return next(iter(self._by_id.values()))
        free = [place for place in self.open_to(ticket) if place.free > 0 and place.holds(ticket.tokens)]
        # Needed even if only one place is free: what its node gets now counts in later choices.
        prefixes = prefixes_of(ticket.job)
        place = choose(free, self._random, ticket.job, prefixes)
        place.remember(ticket.job, prefixes)
        return place
