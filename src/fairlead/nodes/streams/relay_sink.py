"""The sink of one job that is relayed to another server, for as long as that node is up.

Knows no server: the task that relays the job writes to it, and the node fails it when it goes down.
"""

from collections.abc import Callable
from math import inf

import trio

from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta
from fairlead.nodes.streams.sink import Backpressure, Sink

# A node that has sent all but the end of the body gets this long to send it, to keep the connection.
END_WAIT_S = 0.02
PROGRESS_S = 1.0


class RelaySink:
    """A `Sink` that drops what is put after `fail`: a task may have more data when its node goes down.

    The task runs in `scope`; `ended` is set when it has ended. `on_progress` is called when something is put,
    at most once in `PROGRESS_S`.
    """

    __slots__ = ("_is_over", "_progressed_at", "_sink", "ended", "on_progress", "scope")

    def __init__(self, sink: Sink) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self._sink = sink
        self._is_over = False
        self._progressed_at = -inf
        self.on_progress: Callable[[], None] = lambda: None

    def put(self, delta: Delta) -> None:
        """Add a piece of the answer."""
        if not self._is_over:
            self._sink.put(delta)
            if (now := trio.current_time()) - self._progressed_at >= PROGRESS_S:
                self._progressed_at = now
                self.on_progress()

    def backpressure(self) -> Backpressure | None:
        """Return what to wait for while the sink is full; None if it is not."""
        return self._sink.backpressure()

    def fail(self, error: FairleadError) -> None:
        """See `Sink`. Only the first error counts."""
        if not self._is_over:
            self._is_over = True
            self._sink.fail(error)

    async def wait_for_end(self) -> None:
        """Wait up to `END_WAIT_S` for the task to end by itself."""
        if not self.ended.is_set():
            with trio.move_on_after(END_WAIT_S):
                await self.ended.wait()
