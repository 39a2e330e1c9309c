"""Moves jobs into the queue, to their seats and to their end, and reports each step as an effect.

Pure. Does not decide when: the scheduler calls a method for each event.
"""

from collections.abc import Callable

from fairlead.base.errors import Displaced, FairleadError, QueueFull
from fairlead.router.dispatch.effects import Effects, PausedModel
from fairlead.router.dispatch.fullness import FORGOTTEN_S, FullModel
from fairlead.router.dispatch.held_sequences import HeldSequences
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.kept_seats import KeptSeats
from fairlead.router.dispatch.node_groups import WIDE
from fairlead.router.dispatch.node_pool import NodePool
from fairlead.router.dispatch.node_state import NodeState
from fairlead.router.dispatch.queue import Queue
from fairlead.router.dispatch.seat_search import LacksSeats, SeatSearch
from fairlead.router.dispatch.swaps import Swaps
from fairlead.router.dispatch.ticket import Run, RunState, Ticket, TicketState


class Tickets:
    """The tickets that wait in `queue` or hold a seat of `nodes`.

    effects: carries out what is decided.
    queue: the tickets that wait.
    nodes: the nodes with their seats.
    swaps: a queued job counts there as demand for its model.
    kept: which seats are kept from whom; None: no seats are.

    Only this class changes a ticket's state, and only this class grants and refuses.
    """

    def __init__(
        self, effects: Effects, queue: Queue, nodes: NodePool, swaps: Swaps, *, kept: KeptSeats | None = None
    ) -> None:
        self._effects = effects
        self._queue = queue
        self._nodes = nodes
        self._swaps = swaps
        self._kept = kept

    def make_room(self, job: JobSpec) -> QueueFull | None:
        """Displace a job if a newcomer must wait and the queue is full; return why the newcomer may not."""
        if not self._queue.is_full or self._nodes.has_seat_for(job):
            return None
        displaced = self._queue.displace(job)
        if displaced is None:
            nodes = "all nodes are busy" if self._nodes.with_model(job.model) else "no node is ready"
            return QueueFull(f"{nodes} and the queue is full ({len(self._queue)} waiting)")
        self._left_queue(displaced)
        self.refuse(
            displaced, Displaced("the queue is full, and a tenant with fewer jobs in it has precedence")
        )
        return None

    def enqueue(self, ticket: Ticket) -> None:
        """Queue a job: a new one, or one that lost its seat, which leaves before all others of its class."""
        ticket.become(TicketState.QUEUED)
        ticket.kind = self._nodes.kind(ticket.job).number
        if ticket.attempts:
            self._queue.requeue(ticket)
        else:
            self._queue.push(ticket)
        self._swaps.job_queued(ticket)

    def restore(self, ticket: Ticket, node_id: str, held: HeldSequences, *, charged: float) -> None:
        """Give a new job the seats that it holds already; its tenant was charged this much for it."""
        ticket.become(TicketState.GRANTED)
        ticket.attempts += 1
        ticket.kind = self._nodes.kind(ticket.job).number
        self._nodes.restore(ticket, node_id, held)
        self._queue.restore(ticket, ticket.job.turns if held.begun is None else held.begun)
        for run in ticket.runs.values():
            if run.state is RunState.SUSPENDED:
                self._queue.suspend(run)
        ticket.charged = max(ticket.paid * ticket.share, charged)

    def grant_seats(self) -> None:
        """Grant free seats to waiting jobs that fit them, in fair order."""
        if self._nodes.held:
            self._nodes.end_holds()
        while (waiting := self._queue.kinds) and (kinds := self._grantable(waiting)):
            search = SeatSearch(self._nodes, kinds) if waiting & WIDE else None
            entries = self._next(kinds) if search is None else self._search(search)
            if not entries:
                break
            for entry in entries:
                self._grant(entry, search)
            if self._nodes.held:
                self._nodes.end_holds()
        if self._queue.has_begun_jobs:
            self._finish_closing_nodes()

    def _grantable(self, waiting: int) -> int:
        """Return those of these kinds of jobs for which a node has a seat that is not kept from them all."""
        kinds = waiting & self._nodes.kinds_with_free_seat()
        if kinds and self._kept is not None and self._nodes.with_fresh_seats():
            self._kept.update()
            for model in self._queue.waiting:
                if self._kept.nobody_may_have(model):
                    kinds &= ~self._nodes.kinds_of(model)
        return kinds

    def _grant(self, entry: Ticket | Run, search: SeatSearch | None = None) -> None:
        """Give a job that was taken from the queue a seat for a sequence, or all its seats."""
        ticket = entry.ticket if isinstance(entry, Run) else entry
        if isinstance(entry, Run):
            self._nodes.resume(entry)
            if search is not None:
                search.count(ticket)
            self._effects.resume(ticket, entry.index)
            return
        if ticket.node is not None:
            index = ticket.job.turns - ticket.left - 1
            self._nodes.begin(ticket, index)
            if search is not None:
                search.count(ticket)
            self._effects.start(ticket, index)
            return
        self._left_queue(ticket)
        node = self._nodes.assign(ticket)
        ticket.become(TicketState.GRANTED)
        ticket.attempts += 1
        ticket.overtaken = 0
        self._begin_trial(ticket)
        if not node.limits.by_sequence:
            self._queue.take_rest(ticket)
        if search is not None:
            search.count(ticket)
        self._effects.grant(ticket)

    def _finish_closing_nodes(self) -> None:
        """Grant seats of nodes that get no new jobs to those that they have."""
        closing = {ticket.node for ticket in self._queue.begun() if ticket.node is not None}
        for node in [node for node in closing if node.leaving or node.draining]:

            def fits(ticket: Ticket, node: NodeState = node) -> bool | None:
                return self._nodes.fits(ticket) if ticket.node is node else None

            while (entry := self._queue.pop(fits)) is not None:
                self._grant(entry)

    def exchange(self, victim: Run, may_have: Callable[[Ticket], bool]) -> bool:
        """Suspend a sequence, and give its seat to the first job in fair order that may have it.

        Return False, without any change, if there is none.
        """
        number = victim.number
        self._nodes.suspend(victim)
        entry = self._queue.pop(lambda ticket: self._nodes.fits(ticket) if may_have(ticket) else None)
        if entry is None:
            self._nodes.resume(victim)
            victim.is_ripe, victim.number = True, number
            return False
        victim.suspensions += 1
        self._queue.suspend(victim)
        self._effects.suspend(victim.ticket, victim.index)
        self._grant(entry)
        return True

    def rejected(self, ticket: Ticket, named_s: float | None, *, is_limit: bool) -> None:
        """Pause a model of the job's node, which has rejected it as full."""
        node, model = ticket.node, ticket.job.model
        assert node is not None
        full = node.full.get(model)
        if full is None:
            full = node.full[model] = FullModel()
        self._pause(ticket, full.rejected(ticket, named_s, is_limit=is_limit))
        ticket.is_trial = False
        self._nodes.update_full(node)

    def succeeded(self, ticket: Ticket) -> None:
        """End the pause of a full model, because its node serves the job that tried."""
        node = ticket.node
        if ticket.is_trial and node is not None:
            ticket.is_trial = False
            if (full := node.full.get(ticket.job.model)) is not None:
                full.succeeded(ticket)
                self._nodes.update_full(node)

    def left_node(self, ticket: Ticket, node: NodeState) -> None:
        """Let jobs try the full models of a node after the end of a job there: there may be room."""
        if node.full:
            for full in node.full.values():
                full.job_ended()
            self._nodes.update_full(node)
            self.end_trial(ticket, node)

    def resume(self, node: NodeState, pause: PausedModel) -> None:
        """Let one job try a full model after a pause."""
        if node.full[pause.model].resume(pause.tenant):
            self._effects.pause(pause, FORGOTTEN_S)
        self._nodes.update_full(node)

    def end_trial(self, ticket: Ticket, node: NodeState) -> None:
        """Let another job try if this one has left without a result."""
        if not ticket.is_trial:
            return
        ticket.is_trial = False
        if (full := node.full.get(ticket.job.model)) is not None:
            full.trial_ended(ticket)
            self._nodes.update_full(node)

    def _begin_trial(self, ticket: Ticket) -> None:
        """Record that a job with a seat tries whether a full node has room, if it does."""
        node = ticket.node
        assert node is not None
        full = node.full.get(ticket.job.model)
        if full is not None and (begun := full.granted(ticket)):
            ticket.is_trial = True
            self._pause(ticket, begun)
            self._nodes.update_full(node)

    def _pause(self, ticket: Ticket, begun: list[tuple[str | None, float]]) -> None:
        assert ticket.node is not None
        for tenant, pause_s in begun:
            self._effects.pause(PausedModel(ticket.node.id, ticket.job.model, tenant), pause_s)

    def sequence_ended(self, ticket: Ticket, index: int) -> None:
        """Free the seat of a sequence that has ended."""
        if (run := ticket.runs.get(index)) is not None:
            self._queue.remove_run(run)
            self._nodes.end(run)

    def requeue(self, ticket: Ticket) -> NodeState:
        """Queue a job again that must leave its seats, unless its deadline has passed; return its node."""
        self._queue.remove(ticket)
        node = self._nodes.release(ticket)
        if ticket.late is None or ticket.has_begun:
            self.enqueue(ticket)
        else:
            self.refuse(ticket, ticket.late)
        return node

    def end(self, ticket: Ticket, cost: float) -> NodeState | None:
        """End a job in any state, and refund what was charged above its cost; return the node it ran on."""
        self.charge(ticket, cost)
        node = None
        if ticket.state is TicketState.QUEUED:
            self._dequeue(ticket)
        elif ticket.state is TicketState.GRANTED:
            self._queue.remove(ticket)
            seats = ticket.seats
            node = self._nodes.release(ticket)
            # On an idle node nobody is above its share.
            if self._kept is not None and node.busy and self._kept.is_last(ticket.job):
                self._nodes.leave_fresh(node, ticket.job.line, seats)
        self._queue.refund(ticket, down_to=cost)
        if ticket.state is not TicketState.DONE:
            ticket.become(TicketState.DONE)
        return node

    def charge(self, ticket: Ticket, cost: float) -> None:
        """Charge a job for its cost until now, as far as it exceeds what was charged already."""
        if ticket.attempts and ticket.state is not TicketState.DONE:
            self._queue.charge(ticket, cost)

    def withdraw(self, ticket: Ticket, error: FairleadError) -> None:
        """Refuse a waiting job."""
        self._dequeue(ticket)
        self.refuse(ticket, error)

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """End a job that is neither queued nor in a seat; refund it unless its answer has begun."""
        ticket.become(TicketState.DONE)
        if not ticket.has_begun:
            self._queue.refund(ticket, down_to=0.0)
        self._effects.refuse(ticket, error)

    def fail_waiting(self, model: str, error: FairleadError) -> None:
        """Refuse each job that waits for the model, unless a node that stays can run it."""
        for ticket in self._queue:
            job = ticket.job
            able = (node for node in self._nodes.accepting(job) if node not in ticket.unsuited)
            if job.model == model and all(node.leaving for node in able):
                self.withdraw(ticket, error)

    def _next(self, kinds: int) -> list[Ticket | Run]:
        """Dequeue the next job of these kinds that fits a free seat, or several if any seat suits each."""
        node = None if self._queue.has_begun_jobs else self._nodes.with_several_seats()
        if node is not None and self._swaps.requests_only(node.models):
            return self._queue.pop_many(node.free, node.tokens_left)
        entry = self._queue.pop(self._nodes.fits, kinds)
        return [] if entry is None else [entry]

    def _search(self, search: SeatSearch) -> list[Ticket | Run]:
        """Do as `_next`, and pass over jobs that need more seats than are free."""
        while search.kinds:
            try:
                entry = self._queue.pop(search.fits, search.kinds)
            except LacksSeats as lacking:
                search.pass_over(lacking.ticket)
            else:
                return [] if entry is None else [entry]
        return []

    def _dequeue(self, ticket: Ticket) -> None:
        self._queue.remove(ticket)
        self._left_queue(ticket)

    def _left_queue(self, ticket: Ticket) -> None:
        self._swaps.job_dequeued(ticket)
        ticket.starved = False
