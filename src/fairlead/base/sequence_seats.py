"""The seats of one job's sequences at a node: the dispatcher grants them, the node starts the sequences.

All methods are synchronous. A seat that is granted before the node follows is passed on when it does.
"""

from collections.abc import Callable
from typing import Protocol

from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant


class SequenceRunner(Protocol):
    """Runs the sequences of one job."""

    def start(self, index: int, grant: Grant) -> None:
        """Start a sequence, which has a seat now. Raises a `FairleadError` if it cannot."""

    def suspend(self, index: int) -> None:
        """Pause a sequence, whose seat another one has now."""

    def resume(self, index: int) -> None:
        """Let a suspended sequence go on, which has a seat again."""

    def failed(self, error: FairleadError) -> None:
        """End the job with this error."""


class SequenceSeats:
    """Which sequences of a job have seats at its node. For one attempt: another one has its own.

    `on_end` is called with the index of each sequence that gives its seat back before the job ends.

    grants: by index, the grant of each sequence that has begun and not ended.
    suspended: the indexes of those of them that have no seat now.
    begun: how many have had one, in the order of their indexes.
    """

    def __init__(self, on_end: Callable[[int], None] = lambda _index: None) -> None:
        self.grants: dict[int, Grant] = {}
        self.suspended: set[int] = set()
        self.begun = 0
        self._on_end: Callable[[int], None] | None = on_end
        self._runner: SequenceRunner | None = None

    def grant(self, index: int, grant: Grant) -> None:
        """Give a sequence a seat."""
        if self._on_end is None or index < self.begun:  # a message that was repeated
            return
        self.grants[index] = grant
        self.begun = index + 1
        if self._runner is not None:
            try:
                self._runner.start(index, grant)
            except FairleadError as error:
                self._runner.failed(error)  # whoever granted the seat is not to blame

    def pause(self, index: int, *, is_paused: bool) -> None:
        """Suspend a sequence, or let it go on; one that has ended or not begun is ignored."""
        if index not in self.grants or (index in self.suspended) == is_paused:
            return
        if is_paused:
            self.suspended.add(index)
        else:
            self.suspended.discard(index)
        if self._runner is not None:
            (self._runner.suspend if is_paused else self._runner.resume)(index)

    def follow(self, runner: SequenceRunner) -> None:
        """Tell the runner which sequences have seats, now and from now on. Raises what `start` raises now."""
        self._runner = runner
        for index, grant in list(self.grants.items()):
            runner.start(index, grant)
            if index in self.suspended:
                runner.suspend(index)

    def end(self, index: int) -> None:
        """Give the seat of a sequence back that has ended."""
        self.suspended.discard(index)
        if self.grants.pop(index, None) is not None and self._on_end is not None:
            self._on_end(index)

    def close(self) -> None:
        """Drop the callbacks at the end of the attempt."""
        self._runner = self._on_end = None


def all_at_once(grant: Grant, sequences: int) -> SequenceSeats:
    """Return seats for all sequences of a job that has no dispatcher."""
    seats = SequenceSeats()
    for index in range(sequences):
        seats.grant(index, grant)
    return seats
