"""Free seats that are kept for the tenants that have just left them, where an answer cannot pause. Pure.

A tenant that sends one short job after the other must not wait for another's long answer each time. So when
the last job of a tenant leaves a seat and none of its jobs waits, the seat is kept for a quantum from the
tenants that hold their share or more, as long as the one that left holds less than its own. All others may
take it. Between tenants with jobs that wait no seats are kept: their turns decide, or their tokens.

Shares are those of `suspension.py`: the part by weight of the seats of all such nodes with the model, among
the tenants that hold seats there, wait for the model, or have left a seat that is kept.

Example: 4 seats, and A, which was alone, has four long jobs there and others that wait. B sends one short
job after the other.

    one of A's ends        B's job takes the seat
    B's job ends           A holds 3 and its share is 2, so the seat is kept, and B's next job finds it free
    B sends nothing        after a quantum A gets the seat, and B is not counted any more
"""

from collections import Counter

from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.node_state import NodeState
from fairlead.router.dispatch.queue import CLASSES, Queue


class KeptSeats:
    """Tells the nodes which tenants they have no seat for now.

    queue: what waits.
    nodes: what runs; this writes `NodeState.kept_from`.
    """

    def __init__(self, queue: Queue, nodes: NodePool) -> None:
        self._queue = queue
        self._nodes = nodes

    def update(self, newcomer: JobSpec | None = None) -> None:
        """Decide for each model that jobs wait for, and for that of a newcomer."""
        models = dict.fromkeys(self._queue.waiting)
        if newcomer is not None:
            models[newcomer.model] = None
        for node in self._nodes.with_fresh_seats():
            node.kept_from = {}
        for model in models:
            nodes = [node for node in self._nodes.with_model(model) if not node.limits.by_sequence]
            if any(0 < node.free <= len(node.fresh) for node in nodes):
                arriving = {newcomer.line} if newcomer is not None and newcomer.model == model else set()
                self._keep(model, nodes, arriving)

    def is_last(self, job: JobSpec) -> bool:
        """Return whether no other job of its tenant waits for the model."""
        waiting = self._queue.waiting.get(job.model)
        return waiting is None or all((job.line, priority) not in waiting for priority in range(CLASSES))

    def nobody_may_have(self, model: str) -> bool:
        """Return whether every free seat is kept from every tenant that waits for the model."""
        lines = self._queue.lines(model)
        for node in self._nodes.with_model(model):
            if node.room > 0:
                kept_from = node.kept_from.get(model, ())
                if len(lines) > len(kept_from) or not all(line in kept_from for line in lines):
                    return False
        return True

    def _keep(self, model: str, nodes: list[NodeState], arriving: set[str]) -> None:
        """Keep the seats of these nodes for the lines that have left them, from those above their share."""
        held: Counter[str] = Counter()
        for node in nodes:
            for run in node.runs:
                held[run.ticket.job.line] += run.seats
        left = {line for node in nodes for line in node.fresh.values()}
        parts = self._queue.parts(model, held.keys() | arriving | left)
        seats = sum(node.limits.seats for node in nodes)
        within = {line for line, part in parts.items() if held[line] < seats * part - 1e-9}
        above = frozenset(held.keys() - within)
        for node in nodes:
            kept = sum(line in within for line in node.fresh.values())
            if above and 0 < node.free <= kept:
                node.kept_from[model] = above
