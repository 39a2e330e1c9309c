"""Dispatchers and nodes with one common mistake each. The fuzz must catch them all.

Most wrap the real `Dispatcher.seat`, so changes to it do not affect them. `Honest` is the control: it hands
seats over in the same way as two of the mutants, but without a mistake, so it must pass.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import trio

from fairlead.base.errors import FairleadError
from fairlead.base.upstream_events import UpstreamReader
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.streams.attempt import retry_sink
from fairlead.nodes.streams.deltas import Deltas
from fairlead.nodes.streams.sink import Sink
from fairlead.router.dispatch.dispatcher import Dispatcher, Seat
from fairlead.router.dispatch.effects import PausedModel
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.ticket import Ticket
from fairlead.router.dispatch.waiter import SeatLoss, Waiter, WaitingTask
from fuzz.cancellation import Parts
from fuzz.crashing_node import CrashingNode


class _Wrapped(Dispatcher):
    """Enters and exits the real seat by hand. Seats that a mutant never exits are closed with the loop."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._entered: list[AbstractAsyncContextManager[Seat]] = []

    def _real_seat(self, job: JobSpec) -> AbstractAsyncContextManager[Seat]:
        real = super().seat(job)
        self._entered.append(real)
        return real


class CheckpointBeforeTry(_Wrapped):
    """A checkpoint between the grant and the `try`: when cancelled there, the seat is never given back."""

    @asynccontextmanager
    async def seat(self, job: JobSpec) -> AsyncIterator[Seat]:
        real = self._real_seat(job)
        seat = await real.__aenter__()
        await trio.lowlevel.checkpoint()
        try:
            yield seat
        finally:
            await real.__aexit__(None, None, None)


class UnshieldedFinally(_Wrapped):
    """The `finally` awaits before it gives the seat back. In a cancelled scope this raises at once."""

    @asynccontextmanager
    async def seat(self, job: JobSpec) -> AsyncIterator[Seat]:
        real = self._real_seat(job)
        seat = await real.__aenter__()
        try:
            yield seat
        finally:
            await trio.lowlevel.checkpoint()
            await real.__aexit__(None, None, None)


class CorrectHandOff(_Wrapped):
    """Hands seats over through a channel: a send succeeds only if a task waits to receive.

    A separate task waits in the real queue. It gives the seat back if the client has left.
    """

    buffer = 0

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._granted: set[str] = set()

    def grant(self, ticket: Ticket) -> None:
        self._granted.add(ticket.job.request_id)
        super().grant(ticket)

    @asynccontextmanager
    async def seat(self, job: JobSpec) -> AsyncIterator[Seat]:
        send_channel, take = trio.open_memory_channel[Seat | FairleadError](self.buffer)
        queue, done = trio.CancelScope(), trio.Event()
        trio.lowlevel.spawn_system_task(self._clerk, self._real_seat(job), send_channel, queue, done)
        try:
            seat = await take.receive()
        except trio.Cancelled:
            if job.request_id not in self._granted:
                queue.cancel()
            raise
        if isinstance(seat, FairleadError):
            raise seat
        try:
            yield seat
        finally:
            done.set()

    async def _clerk(
        self,
        real: AbstractAsyncContextManager[Seat],
        send_channel: trio.MemorySendChannel[Seat | FairleadError],
        queue: trio.CancelScope,
        done: trio.Event,
    ) -> None:
        with queue:
            try:
                seat = await real.__aenter__()
            except FairleadError as error:
                with suppress(trio.WouldBlock):
                    send_channel.send_nowait(error)
                return
            try:
                send_channel.send_nowait(seat)
            except trio.WouldBlock:
                await self._refused(done)
            else:
                await done.wait()
            finally:
                await real.__aexit__(None, None, None)

    async def _refused(self, done: trio.Event) -> None:
        """Return at once, so that a seat that was not received is given back."""


class IgnoredRefusal(CorrectHandOff):
    """A grant that was not received is treated like one that was."""

    async def _refused(self, done: trio.Event) -> None:
        await done.wait()


class BufferedHandOff(CorrectHandOff):
    """The channel has a buffer: a send succeeds even if the client left before it received the seat."""

    buffer = 1


class LeaveWithoutPump(_Wrapped):
    """A seat that is given back is not offered to waiting jobs until the next event."""

    @asynccontextmanager
    async def seat(self, job: JobSpec) -> AsyncIterator[Seat]:
        real = self._real_seat(job)
        seat = await real.__aenter__()
        try:
            yield seat
        finally:
            self.scheduler._pump = lambda: None
            await real.__aexit__(None, None, None)
            del self.scheduler._pump


class CancellationOnlyRecorded(Dispatcher):
    """A cancellation is only recorded, and takes effect when the wait ends."""

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        waiter = self._waiters[ticket]
        waiter.error = waiter.error or error


class EndedJobsAreRetained(Dispatcher):
    """A part of the dispatcher keeps jobs that have ended. All counts are right; only memory leaks."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.estimator.ended = lambda _: None


class EndlessSwap(Dispatcher):
    """A model that has loaded still counts as loading, so it can never be evicted for another."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._real_node_up = self.scheduler.node_up
        self.scheduler.node_up = self._node_up

    def _node_up(self, node_id: str, models: frozenset[str], limits: NodeLimits) -> None:
        swaps = self.scheduler._swaps
        loading = swaps._loading.copy()
        self._real_node_up(node_id, models, limits)
        swaps._loading |= loading


class SwapUnderWork(Dispatcher):
    """A swap starts without a check that its nodes are idle."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        swaps = self.scheduler._swaps
        swaps.start = partial(self._start_swaps, swaps.start)

    def _start_swaps(self, real: Callable[[], bool]) -> bool:
        busy = {node: node.jobs for node in self.scheduler._nodes.values()}
        for node in busy:
            node.jobs = 0
        has_more_seats = real()
        for node, count in busy.items():
            node.jobs = count
        return has_more_seats


class KeptSeat(Dispatcher):
    """A job gets its second seat without giving the first one back."""

    def requeue(self, waiter: Waiter, loss: SeatLoss) -> None:
        node = waiter.ticket.node
        assert node is not None
        node.acquire(waiter.ticket.tokens)
        super().requeue(waiter, loss)


class ChargedPerGrant(Dispatcher):
    """A job that returns to the queue is queued like a new one, and is charged at each grant."""

    def requeue(self, waiter: Waiter, loss: SeatLoss) -> None:
        queue: Any = self.scheduler._queue
        queue.requeue = queue.push
        super().requeue(waiter, loss)


class ShieldedEvent:
    """An event on which a task waits even if it is cancelled."""

    def __init__(self) -> None:
        event = trio.Event()
        self.is_set, self.set, self._wait = event.is_set, event.set, event.wait

    async def wait(self) -> None:
        """Wait until it is set."""
        with trio.CancelScope(shield=True):
            await self._wait()


class UncancellableSecondWait(Dispatcher):
    """A job that waits for a second seat cannot be cancelled."""

    def requeue(self, waiter: Waiter, loss: SeatLoss) -> None:
        assert isinstance(waiter, WaitingTask)
        waiter.event = cast(trio.Event, ShieldedEvent())
        super().requeue(waiter, loss)


class FullUntilAJobEnds(Dispatcher):
    """A node that has rejected a job stays full when no other job of it ends: its pauses never end."""

    def pause(self, pause: PausedModel, pause_s: float) -> None:
        """Set no alarm."""


def from_the_start(deltas: Deltas, reader: UpstreamReader | None = None) -> Sink | None:
    """Send a repeated answer from its start, although the client has the beginning already."""
    return None if retry_sink(deltas, reader) is None else deltas


def never_again(deltas: Deltas, reader: UpstreamReader | None = None) -> Sink | None:
    """Refuse every second attempt."""
    del deltas, reader
    return None


class NodeIgnoringAborts(CrashingNode):
    """An abort is not sent, so the node continues to work on jobs that are over."""

    def abort(self, work: trio.CancelScope) -> None:
        """Do nothing."""


FOUR = {
    "a refused grant that is not undone": Parts(IgnoredRefusal),
    "a buffered hand-off": Parts(BufferedHandOff),
    "a checkpoint between grant and try": Parts(CheckpointBeforeTry),
    "an unshielded await in finally": Parts(UnshieldedFinally),
}
MORE = {
    "a leave that forgets to pump": Parts(LeaveWithoutPump),
    "an abort that is not sent": Parts(node_type=NodeIgnoringAborts),
    "a cancel that only takes a note": Parts(CancellationOnlyRecorded),
    "a seat that is remembered": Parts(EndedJobsAreRetained),
}
OF_SWAPS = {
    "a swap that is never over": Parts(EndlessSwap),
    "a swap of a busy model": Parts(SwapUnderWork),
}
OF_FAILOVER = {
    "a first seat that is not given back": Parts(KeptSeat),
    "a second charge": Parts(ChargedPerGrant),
    "a second wait that cannot be left": Parts(UncancellableSecondWait),
    "a node that is full for ever": Parts(FullUntilAJobEnds),
    "a beginning that is sent twice": Parts(retry_sink=from_the_start),
    "no second attempt": Parts(retry_sink=never_again),
}
