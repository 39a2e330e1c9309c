"""One job's way through a node elsewhere to its sink, for as long as the node is there.

Knows no server: whoever relays writes through it, and whoever knows that the node is gone ends it.
"""

import trio

from fairlead.errors import FairleadError
from fairlead.job import Delta
from fairlead.nodes.sink import Room, Sink

# A node that has sent everything but the body's end mark gets this long, so that its connection can stay.
LEAVE_WAIT_S = 0.02


class Passage:
    """A `Sink` that ends with `fail`: a task may have more in hand when its node goes down.

    `scope` is what the task works in, `over` is set when it is done.
    """

    __slots__ = ("_into", "_is_over", "over", "scope")

    def __init__(self, into: Sink) -> None:
        self.scope = trio.CancelScope()
        self.over = trio.Event()
        self._into = into
        self._is_over = False

    def put(self, delta: Delta) -> None:
        """See `Sink`."""
        if not self._is_over:
            self._into.put(delta)

    def room(self) -> Room | None:
        """See `Sink`."""
        return self._into.room()

    def fail(self, error: FairleadError) -> None:
        """See `Sink`. The first error counts."""
        if not self._is_over:
            self._is_over = True
            self._into.fail(error)

    async def left(self) -> None:
        """Wait a moment for the task to come to its own end."""
        if not self.over.is_set():
            with trio.move_on_after(LEAVE_WAIT_S):
                await self.over.wait()
