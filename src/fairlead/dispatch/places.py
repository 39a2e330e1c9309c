"""The nodes that are up, and their seats: who could sit where, who sits, who is not to come any more.

Pure: knows no queue, no swap and no effect. One node's seats are a `Place`; which of several a job is given
is the choice of `placement`.
"""

from collections.abc import Iterator, Mapping, ValuesView
from random import Random

from fairlead.dispatch.placement import Place, choose
from fairlead.dispatch.prefixes import prefixes_of
from fairlead.dispatch.ticket import Ticket
from fairlead.errors import ContextLengthExceeded
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeLimits


class Places(Mapping[str, Place]):
    """The place of each node that is up, by the node's id. Of a ticket it alone writes `place`.

    Of a node there is one place at a time: a new life is a new one, and who sat in the old one gives back a
    seat that nobody counts any more.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._by_id: dict[str, Place] = {}
        self._closed: set[str] = set()
        self._seatings = 0

    def __getitem__(self, node_id: str) -> Place:
        """Return the place of a node that is up."""
        return self._by_id[node_id]

    def __iter__(self) -> Iterator[str]:
        """Go through the ids of the nodes that are up."""
        return iter(self._by_id)

    def __len__(self) -> int:
        """Return how many nodes are up."""
        return len(self._by_id)

    def values(self) -> ValuesView[Place]:
        """Return the places. `Mapping` would look each of them up, and every event goes through them."""
        return self._by_id.values()

    # Nodes that come and go --------------------------------------------------------------------------

    def add(self, node: Node, limits: NodeLimits) -> Place:
        """A node is up: return its new place. One that was closed finds itself leaving."""
        place = self._by_id[node.id] = Place(node, limits)
        place.leaving = node.id in self._closed
        return place

    def remove(self, node_id: str) -> Place | None:
        """A node has no seats to give any more: return the place that it had."""
        return self._by_id.pop(node_id, None)

    def close(self, node_id: str) -> bool:
        """Give a node no more jobs, in its next lives neither. Return whether it is up, and may have some."""
        self._closed.add(node_id)
        place = self._by_id.get(node_id)
        if place is not None:
            place.leaving = True
        return place is not None

    def reopen(self, node_id: str) -> None:
        """A node of this name may have jobs again, from its next life on."""
        self._closed.discard(node_id)

    def is_current(self, place: Place) -> bool:
        """Whether this is the place of a node that is up, and not one of an earlier life."""
        return self._by_id.get(place.node.id) is place

    def idle_and_leaving(self) -> list[Place]:
        """Return those that are to go, and can."""
        return [place for place in self._by_id.values() if place.leaving and not place.busy]

    # Who could sit where -----------------------------------------------------------------------------

    def free(self) -> list[Place]:
        """Return those that have a seat for somebody."""
        return [place for place in self._by_id.values() if place.free > 0]

    def with_several_seats(self) -> Place | None:
        """Return the only place there is, if jobs of its models need nothing but its seats and its memory.

        Where memory counts, not while it is empty or overfull: the first job fits whatever its size.
        """
        if len(self._by_id) != 1:
            return None
        place = next(iter(self._by_id.values()))
        if place.free < 2 or place.limits.needs_relay:
            return None
        left = place.tokens_left
        return place if left is None or (place.busy and left >= 0) else None

    def free_for(self, job: Job) -> list[Place]:
        """Return those where a job that came now would find a seat."""
        return [place for place in self._by_id.values() if place.takes(job) and place.free > 0]

    def ours(self) -> list[Place]:
        """Return those whose models swaps load and evict."""
        return [place for place in self._by_id.values() if place.limits.evictable]

    def of_ours(self, model: str) -> Place | None:
        """Return where a swap has loaded the model; None if it is not loaded here."""
        return next((place for place in self.ours() if model in place.node.models), None)

    def holding(self, model: str) -> list[Place]:
        """Return those whose nodes have the model."""
        return [place for place in self._by_id.values() if model in place.node.models]

    def taking(self, job: Job) -> list[Place]:
        """Return those that could run a job of this kind at all."""
        return [place for place in self._by_id.values() if place.takes(job)]

    def open_to(self, ticket: Ticket) -> list[Place]:
        """Return where the job may run: not again where it failed, unless there is nothing else."""
        taking = self.taking(ticket.job)
        if ticket.failed_at is None:
            return taking
        return [place for place in taking if place is not ticket.failed_at] or taking

    def fit(self, ticket: Ticket) -> bool | None:
        """Whether the job could be seated now: None when no seat is there, False when its memory is not."""
        fits = None
        for place in self.open_to(ticket):
            if place.free > 0:
                fits = place.holds(ticket.tokens)
                if fits:
                    break
        return fits

    def misfit(self, job: Job) -> ContextLengthExceeded | None:
        """Return why the job would wait for nothing: no node that is up for it could ever hold it."""
        longest = max(map(len, job.prompts), default=0) + 1
        lengths = [place.limits.max_model_len for place in self.taking(job)]
        if not lengths or longest <= max(lengths):
            return None
        return ContextLengthExceeded.of_prompt(max(lengths), f"this one has {longest - 1}", param="prompt")

    # Who sits ----------------------------------------------------------------------------------------

    def seat(self, ticket: Ticket) -> None:
        """Give a job that fits the best of the seats it could have, at `ticket.place`."""
        place = ticket.place = self._best(ticket)
        place.take(ticket.tokens)
        self._seatings += 1
        place.used = self._seatings

    def vacate(self, ticket: Ticket) -> Place:
        """Take a job's seat back; return where it was."""
        place, ticket.place = ticket.place, None
        assert place is not None
        place.give_back(ticket.tokens)
        return place

    def _best(self, ticket: Ticket) -> Place:
        if len(self._by_id) == 1:
            return next(iter(self._by_id.values()))
        free = [place for place in self.open_to(ticket) if place.free > 0 and place.holds(ticket.tokens)]
        # Also where there is only one free seat: what its node is given now counts when there are more.
        prefixes = prefixes_of(ticket.job)
        place = choose(free, self._random, ticket.job, prefixes)
        place.remember(ticket.job, prefixes)
        return place
