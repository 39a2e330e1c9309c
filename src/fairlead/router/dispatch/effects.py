"""The actions of a scheduler (`Effects`), and the counts that it reports."""

from typing import NamedTuple, Protocol

import msgspec

from fairlead.base.errors import FairleadError
from fairlead.router.dispatch.ticket import LoadRequest, Ticket
from fairlead.router.swap.policy import SwapReason


class PausedModel(NamedTuple):
    """A model of a node that is full: for all tenants (None), or for one."""

    node_id: str
    model: str
    tenant: str | None


class ModelEffects(Protocol):
    """Actions that concern models; see `Effects`."""

    def start_swap(self, model: str, evict: frozenset[str], reason: SwapReason) -> None:
        """Unload the models of `evict`, which are idle and get no more jobs, then load `model`.

        Some of them may be stopping already; their memory is free only when they have stopped. `reason` is
        for the log.
        """

    def stop_model(self, model: str) -> None:
        """Unload the model, which is idle and gets no more jobs, or cancel its load."""

    def load_ended(self, request: LoadRequest, error: FairleadError | None) -> None:
        """Report that the requested model is loaded, or the error because of which it will not be."""

    def idle(self, node_id: str, models: frozenset[str], used: int) -> None:
        """Report that a node with models that can be loaded again has no jobs until its next grant.

        `used` changes with each grant, and is passed back with `expired`.
        """


class Effects(Protocol):
    """Called synchronously; must not call back into the scheduler.

    The methods concern jobs and the nodes that run them, `models` the models.
    """

    @property
    def models(self) -> ModelEffects:
        """Executes the decisions about models."""

    def grant(self, ticket: Ticket) -> None:
        """Report that the ticket has a seat for its first sequence, or all its seats, at `ticket.node`."""

    def start(self, ticket: Ticket, index: int) -> None:
        """Report that another sequence of the ticket has a seat there."""

    def suspend(self, ticket: Ticket, index: int) -> None:
        """Have a sequence of the ticket pause: its seat is given to another job."""

    def resume(self, ticket: Ticket, index: int) -> None:
        """Have a suspended sequence go on: it has a seat again."""

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """Report that the ticket will get no seat (again)."""

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        """End the ticket's job with this error; `finished` follows when it has ended."""

    def seats_freed(self, node_id: str, number: int) -> None:
        """Call the scheduler's `seats_rested` with these arguments after a quantum."""

    def pause(self, pause: PausedModel, pause_s: float) -> None:
        """Call the scheduler's `resume` after this time. A later call for the same pause replaces it."""

    def node_closed(self, node_id: str) -> None:
        """Report that the closed node has no jobs (any more)."""


class SchedulerStatistics(msgspec.Struct, frozen=True):
    """Counts of the present state.

    waiting: jobs that wait.
    running: jobs that run.
    capacity: how many may wait.
    seats: all seats of the nodes that are up.
    """

    waiting: int
    running: int
    capacity: int
    seats: int


class NodeCounts(msgspec.Struct, frozen=True):
    """The scheduler's view of a node that is up: the seats that jobs hold, and whether it gets no more."""

    busy: int
    draining: bool
