"""The jobs that are relayed to one server now, so that they can fail together when it goes down."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf

import trio

from fairlead.base.errors import FairleadError, NodeFailed
from fairlead.base.job import Job, Relay
from fairlead.base.supervision import FailureBoundary, described, log_failure
from fairlead.nodes.streams.relay_sink import RelaySink
from fairlead.nodes.streams.sink import Sink

Exchange = Callable[[Job, Relay, RelaySink], Awaitable[None]]


class RunningRelays:
    """Relays jobs to the node `node_id`. `exchange` sends a job's request and puts the answer into its sink.

    What `exchange` raises fails that job only, neither its client's task nor the node.
    """

    def __init__(self, node_id: str, exchange: Exchange) -> None:
        self._node_id = node_id
        self._exchange = exchange
        self._sinks: dict[RelaySink, float] = {}  # and when each job began

    def __len__(self) -> int:
        """Return the number of running jobs."""
        return len(self._sinks)

    @asynccontextmanager
    async def relay(self, job: Job, request: Relay, into: Sink) -> AsyncIterator[None]:
        """Relay a job; leaving the block ends it.

        Only an answer that is read as it arrives needs a task beside the caller's. Any other can be used only
        when it is complete, so the block is entered then.
        """
        sink = RelaySink(into)
        self._sinks[sink] = trio.current_time()
        try:
            if request.stream or request.passthrough is not None or request.media is not None:
                async with self._beside(job, request, sink):
                    yield
            else:
                await self._run(job, request, sink)
                yield
        finally:
            del self._sinks[sink]

    def fail_all(self, error: FairleadError, *, began_before: float = inf) -> None:
        """Fail every running job with the error, or those that began before a time."""
        for sink, began_at in list(self._sinks.items()):
            if began_at < began_before:
                sink.fail(error)
                sink.scope.cancel()

    @asynccontextmanager
    async def _beside(self, job: Job, request: Relay, sink: RelaySink) -> AsyncIterator[None]:
        """Relay in a task of its own while the block runs."""
        raised: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run, job, request, sink)
            try:
                yield
                await sink.wait_for_end()
            except Exception as error:  # noqa: BLE001  # raised below, outside the nursery's group
                raised = error
            nursery.cancel_scope.cancel()
        if raised is not None:
            raise raised

    async def _run(self, job: Job, request: Relay, sink: RelaySink) -> None:
        boundary = FailureBoundary()
        try:
            with boundary:
                await self._exchange(job, request, sink)
        finally:
            if boundary.failure is not None:
                log_failure(
                    "relaying failed", boundary.failure, node=self._node_id, request_id=job.request_id
                )
                sink.fail(NodeFailed(f"{self._node_id} failed: {described(boundary.failure)}"))
            sink.ended.set()
