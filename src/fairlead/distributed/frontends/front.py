"""A front as the dispatcher sees it: its connection, and its jobs."""

import structlog

from fairlead.base.errors import FairleadError
from fairlead.base.frame_link import FrameLink
from fairlead.base.grant import Grant
from fairlead.distributed.frontends import wire
from fairlead.router.dispatch.ticket import RunState, Ticket, TicketState
from fairlead.router.dispatch.waiter import Waiter

logger = structlog.get_logger("fairlead.distributed.frontends")


class FrontJob(Waiter):
    """A job of a front. What happens to it is sent to the front, if that is connected."""

    __slots__ = ("front", "grants", "number", "tokens")

    def __init__(self, front: "Front", number: int, ticket: Ticket, tokens: int = 0) -> None:
        super().__init__(ticket)
        self.front = front
        self.number = number
        self.tokens = tokens
        self.grants: dict[int, Grant] = {}  # of its sequences that have begun after the first, at its node

    @property
    def has_seat(self) -> bool:
        """Whether it holds a seat."""
        return self.ticket.state is TicketState.GRANTED

    def generated(self) -> int:
        """Return the number of tokens so far."""
        return self.tokens

    def update_generated(self) -> None:
        """Ask the front for the number of tokens."""
        self.front.ask_for_tokens()

    def granted(self) -> None:
        """Receive a seat, at `ticket.node`, with the number `grant`."""
        self.front.served.add(self.ticket.job.line)
        self.grants.clear()
        self._send_seat()

    def started(self, index: int, grant: Grant) -> None:
        """Receive a seat for another sequence, at the same node."""
        self.front.served.add(self.ticket.job.line)
        self.grants[index] = grant
        self.front.send(wire.SequenceGranted(self.number, index, grant))

    def paused(self, index: int, *, is_paused: bool) -> None:
        """Suspend a sequence, or let it go on."""
        self.front.send(wire.SequencePaused(self.number, index, is_paused))

    def report_paused(self) -> None:
        """Send which sequences are suspended, because the front may not know."""
        for index, run in self.ticket.runs.items():
            self.paused(index, is_paused=run.state is RunState.SUSPENDED)

    def _send_seat(self) -> None:
        assert self.ticket.node is not None
        assert self.grant is not None
        is_whole = not self.ticket.node.limits.by_sequence
        seat = wire.SeatGranted(self.number, self.ticket.node.id, self.grant, self.waited_s or 0.0, is_whole)
        self.front.send(seat)

    def refused(self, error: FairleadError) -> None:
        """Receive the error because of which there will be no seat (again)."""
        self.front.send(wire.JobRefused(self.number, wire.ErrorValue.of(error)))

    def stopped(self, error: FairleadError) -> None:
        """Receive the error that ends the job now, wherever it is."""
        self.front.send(wire.JobStopped(self.number, wire.ErrorValue.of(error)))

    def report_again(self) -> None:
        """Send what has happened to it, because the front may not have received it."""
        if self.error is not None:
            kind = wire.JobRefused if self.ticket.state is TicketState.DONE else wire.JobStopped
            self.front.send(kind(self.number, wire.ErrorValue.of(self.error)))
        elif self.has_seat:
            self._send_seat()
            for index in sorted(self.grants):
                self.front.send(wire.SequenceGranted(self.number, index, self.grants[index]))
            self.report_paused()


class Front:
    """A front: its jobs by number, and its connection, None while it is away.

    `served`: the lines of tenants with counters that may have changed since the last heartbeat; one set for
    all fronts. `has_counters`: whether all counters were sent over this connection. `is_counting`: it
    was asked for the tokens of its jobs.
    """

    def __init__(self, name: str, served: set[str]) -> None:
        self.name = name
        self.jobs: dict[int, FrontJob] = {}
        self.link: FrameLink[wire.ToDispatcher] | None = None
        self.undeclared: set[int] = set()
        self.served = served
        self.has_counters = False
        self.is_counting = False
        self.connections = 0  # so far
        self.orders = 0  # that are being executed

    def send(self, message: wire.ToFront) -> None:
        """Send a message; a front that is away gets it when it has connected again."""
        if self.link is not None:
            self.link.send(message)

    def ask_for_tokens(self) -> None:
        """Ask for the tokens of its jobs, once until the answer has come."""
        if not self.is_counting:
            self.is_counting = True
            self.send(wire.CountTokens())

    def refuse(self, reason: str, error: Exception | None = None) -> None:
        """End the connection after a message that a correct front does not send."""
        logger.error("front sent an invalid message", front=self.name, reason=reason, exc_info=error)
        if self.link is not None:
            self.link.close()
