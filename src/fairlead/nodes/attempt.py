"""One node's try at a job: where the node writes, and where its failure stops.

A node that fails has ended its attempt, not the answer: whether there is another attempt, or an error for the
client, is for the gateway to say. Knows no seat and no queue.
"""

from collections.abc import Callable, Sequence

import trio

from fairlead.errors import FairleadError
from fairlead.job import Delta
from fairlead.nodes.deltas import Deltas
from fairlead.nodes.replay import Recorded, Replay
from fairlead.nodes.sink import Room, Sink


class Attempt:
    """A `Sink` for one attempt. `error` is what ended it; then, and once it is closed, nothing passes.

    `put` is the method of the sink behind it, not one that calls it: it is called for every token. `scope` is
    cancelled by a failure: whoever waits for the answer waits within it.
    """

    __slots__ = ("error", "put", "room", "scope")

    def __init__(self, into: Sink) -> None:
        self.put: Callable[[Delta], None] = into.put
        self.room: Callable[[], Room | None] = into.room
        self.scope = trio.CancelScope()
        self.error: FairleadError | None = None

    def fail(self, error: FairleadError) -> None:
        """See `Sink`. The first error counts."""
        if self.error is None:
            self.error = error
            self.close()
            self.scope.cancel()

    def close(self) -> None:
        """Let nothing pass any more: the node may not know yet that it is over."""
        self.put = _drop


def again(deltas: Deltas) -> Sink | None:
    """Return where another attempt is to write; None if the client would get an answer made of two.

    To be asked as soon as an attempt has failed, before its reader has another turn.
    """
    if deltas.restart():
        return deltas
    if deltas.kept is None:
        return None
    deltas.seal()
    return _replay(deltas, deltas.kept)


def _replay(deltas: Deltas, kept: Sequence[Delta]) -> Replay:
    gate = _Gate(deltas)
    recorded = Recorded(gate)
    for delta in kept:
        recorded.put(delta)
    gate.is_open = True
    return Replay(recorded)


class _Gate:
    """What comes before it is open is in the channel already."""

    def __init__(self, deltas: Deltas) -> None:
        self.is_open = False
        self._deltas = deltas

    def put(self, delta: Delta) -> None:
        if self.is_open:
            self._deltas.put(delta)

    def room(self) -> Room | None:
        return self._deltas.room()

    def fail(self, error: FairleadError) -> None:
        self._deltas.fail(error)


def _drop(_delta: Delta) -> None:
    """The attempt is over."""
