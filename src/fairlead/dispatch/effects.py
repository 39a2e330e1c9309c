"""What a scheduler can do to the world, and the picture that it gives of itself."""

from typing import Protocol

import msgspec

from fairlead.dispatch.placement import Place
from fairlead.dispatch.ticket import Ticket, Wish
from fairlead.errors import FairleadError
from fairlead.swap.policy import SwapReason


class Effects(Protocol):
    """Called synchronously, at most once for each thing that happens; must not call back into the scheduler.

    The first three are about jobs, the others about models and the nodes that hold them.
    """

    def grant(self, ticket: Ticket) -> None:
        """The ticket has a seat at `ticket.place` now."""

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """The ticket will never have a seat (again)."""

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        """The ticket's job is to end with this error; it leaves when it has."""

    def start_swap(self, model: str, evict: frozenset[str], reason: SwapReason) -> None:
        """Unload the models of `evict`, which are idle and get no more jobs, then load `model`.

        Some of them may be on their way out already: what they hold is free only when they are gone.
        `reason` is for the log.
        """

    def stop_model(self, model: str) -> None:
        """Unload the model, which is idle and gets no more jobs, or end its load."""

    def wish_ended(self, wish: Wish, error: FairleadError | None) -> None:
        """The model that was wished for is loaded, or will not be."""

    def closed(self, node_id: str) -> None:
        """The node that was closed has no jobs (any more)."""

    def idle(self, place: Place) -> None:
        """A place whose models can be loaded again has no jobs from now on, until it is given one."""


class SchedulerStatistics(msgspec.Struct, frozen=True):
    """A picture of the counts: jobs waiting and running, and all seats of the nodes that are up."""

    waiting: int
    running: int
    capacity: int
    seats: int
