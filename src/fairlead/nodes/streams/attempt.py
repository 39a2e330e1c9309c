"""One node's attempt at a job: the sink that the node writes to, which contains the node's failure.

A node that fails ends its attempt, not the answer. The gateway decides whether another attempt follows or the
client gets an error. Independent of seats and the queue.
"""

from collections.abc import Callable

import trio

from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta, Job
from fairlead.base.upstream_events import UpstreamReader, readers
from fairlead.nodes.streams.deltas import Deltas
from fairlead.nodes.streams.replay import RecordingSink, ReplaySink
from fairlead.nodes.streams.sink import Backpressure, Sink


class Attempt:
    """A `Sink` for one attempt. After `fail` or `close` it drops everything. `error` is what ended it.

    `put` is the target sink's own method, without a wrapper, because it is called for every token. A failure
    cancels `scope`, in which the caller waits for the answer.
    """

    __slots__ = ("backpressure", "error", "put", "scope")

    def __init__(self, sink: Sink) -> None:
        self.put: Callable[[Delta], None] = sink.put
        self.backpressure: Callable[[], Backpressure | None] = sink.backpressure
        self.scope = trio.CancelScope()
        self.error: FairleadError | None = None

    def fail(self, error: FairleadError) -> None:
        """See `Sink`. Only the first error counts."""
        if self.error is None:
            self.error = error
            self.close()
            self.scope.cancel()

    def close(self) -> None:
        """Drop everything from now on: the node may still put output into it."""
        self.put = _drop


def reader_of(job: Job) -> UpstreamReader | None:
    """Return the reader of other servers' responses to a job; None if they are not read."""
    relay = job.relay
    return None if relay is None or relay.passthrough is not None else readers.get(relay.path)


def retry_sink(deltas: Deltas, reader: UpstreamReader | None = None) -> Sink | None:
    """Return the sink for another attempt; None if the client would get parts of two different answers.

    `reader` reads the events of relayed answers. Call this as soon as an attempt has failed, before the
    client's task runs again.
    """
    if deltas.restart():
        return deltas
    if deltas.kept is None:
        return None
    deltas.seal()
    recorded = RecordingSink(deltas)
    for delta in deltas.kept:
        recorded.record(delta)
    return ReplaySink(recorded, reader)


def _drop(_delta: Delta) -> None:
    """Drop a delta that is put after the end of the attempt."""
