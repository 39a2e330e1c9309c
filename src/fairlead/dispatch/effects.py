"""The actions of a scheduler (`Effects`), and the counts that it reports."""

from typing import Protocol

import msgspec

from fairlead.dispatch.node_state import NodeState
from fairlead.dispatch.ticket import LoadRequest, Ticket
from fairlead.errors import FairleadError
from fairlead.swap.policy import SwapReason


class Effects(Protocol):
    """Called synchronously, at most once for each event; must not call back into the scheduler.

    The first three concern jobs, the others models and the nodes that have them.
    """

    def grant(self, ticket: Ticket) -> None:
        """Report that the ticket has a seat, at `ticket.place`."""

    def refuse(self, ticket: Ticket, error: FairleadError) -> None:
        """Report that the ticket will get no seat (again)."""

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        """End the ticket's job with this error; `finished` follows when it has ended."""

    def start_swap(self, model: str, evict: frozenset[str], reason: SwapReason) -> None:
        """Unload the models of `evict`, which are idle and get no more jobs, then load `model`.

        Some of them may be stopping already; their memory is free only when they are gone. `reason` is for
        the log.
        """

    def stop_model(self, model: str) -> None:
        """Unload the model, which is idle and gets no more jobs, or cancel its load."""

    def wish_ended(self, wish: LoadRequest, error: FairleadError | None) -> None:
        """Report that the requested model is loaded, or the error because of which it will not be."""

    def closed(self, node_id: str) -> None:
        """Report that the closed node has no jobs (any more)."""

    def idle(self, place: NodeState) -> None:
        """Report that a place, whose models can be loaded again, has no jobs until its next grant."""


class SchedulerStatistics(msgspec.Struct, frozen=True):
    """Counts: jobs waiting and running, the queue's capacity, and all seats of the nodes that are up."""

    waiting: int
    running: int
    capacity: int
    seats: int


class ModelHost(Protocol):
    """Starts and stops the processes of models. Called synchronously; must not call back at once.

    It reports results by `node_up` or `load_failed`, and by `gone` when processes have ended.
    """

    def start_swap(self, model: str, evict: frozenset[str]) -> None:
        """Stop the models in `evict`, which are idle or stopping already; load `model` when they are gone."""

    def stop_model(self, model: str) -> None:
        """Stop an idle model, or cancel its load."""
