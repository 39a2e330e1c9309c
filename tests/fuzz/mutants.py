"""Hand-offs that lose seats, each by one mistake that is easily made. The fuzz has to catch them all.

Most are wrapped around the real `Dispatcher.seat`, so they need not follow its changes. `Honest` is the
control: it hands over the same way as two of them do, but makes no mistake, so it has to survive.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any

import trio

from fairlead.dispatch.dispatcher import Dispatcher, Seat
from fairlead.dispatch.placement import Place
from fairlead.dispatch.ticket import Ticket
from fairlead.errors import FairleadError
from fairlead.job import Job
from fairlead.nodes.attempt import again
from fairlead.nodes.deltas import Deltas
from fairlead.nodes.node import Node, NodeLimits
from fairlead.nodes.sink import Sink
from fuzz.cancellation import Parts
from fuzz.mortal_node import MortalNode


class _Wrapped(Dispatcher):
    """Enters and leaves the real seat by hand. What a mutant forgets to leave is closed with the loop."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._entered: list[AbstractAsyncContextManager[Seat]] = []

    def _real_seat(self, job: Job) -> AbstractAsyncContextManager[Seat]:
        real = super().seat(job)
        self._entered.append(real)
        return real


class CheckpointBeforeTry(_Wrapped):
    """There is a checkpoint between the grant and the `try`: cancelled there, nobody gives the seat back."""

    @asynccontextmanager
    async def seat(self, job: Job) -> AsyncIterator[Seat]:
        real = self._real_seat(job)
        seat = await real.__aenter__()
        await trio.lowlevel.checkpoint()
        try:
            yield seat
        finally:
            await real.__aexit__(None, None, None)


class UnshieldedFinally(_Wrapped):
    """The `finally` awaits before it gives the seat back. In a cancelled scope that raises at once."""

    @asynccontextmanager
    async def seat(self, job: Job) -> AsyncIterator[Seat]:
        real = self._real_seat(job)
        seat = await real.__aenter__()
        try:
            yield seat
        finally:
            await trio.lowlevel.checkpoint()
            await real.__aexit__(None, None, None)


class Honest(_Wrapped):
    """Seats are handed over through a channel: a send succeeds only if somebody is there to receive it.

    A clerk waits in the real queue. What the visitor does not take, because it has left, goes back.
    """

    buffer = 0

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._granted: set[str] = set()

    def grant(self, ticket: Ticket) -> None:
        self._granted.add(ticket.job.id)
        super().grant(ticket)

    @asynccontextmanager
    async def seat(self, job: Job) -> AsyncIterator[Seat]:
        give, take = trio.open_memory_channel[Seat | FairleadError](self.buffer)
        queue, done = trio.CancelScope(), trio.Event()
        trio.lowlevel.spawn_system_task(self._clerk, self._real_seat(job), give, queue, done)
        try:
            seat = await take.receive()
        except trio.Cancelled:
            if job.id not in self._granted:
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
        give: trio.MemorySendChannel[Seat | FairleadError],
        queue: trio.CancelScope,
        done: trio.Event,
    ) -> None:
        with queue:
            try:
                seat = await real.__aenter__()
            except FairleadError as error:
                with suppress(trio.WouldBlock):
                    give.send_nowait(error)
                return
            try:
                give.send_nowait(seat)
            except trio.WouldBlock:
                await self._refused(done)
            else:
                await done.wait()
            finally:
                await real.__aexit__(None, None, None)

    async def _refused(self, done: trio.Event) -> None:
        """Nobody took the seat: it goes back at once."""


class IgnoredRefusal(Honest):
    """A grant that nobody took is counted like one that somebody did."""

    async def _refused(self, done: trio.Event) -> None:
        await done.wait()


class BufferedHandOff(Honest):
    """The channel has room for a seat: sending always succeeds, and who left before receiving never knows."""

    buffer = 1


class LeaveWithoutPump(_Wrapped):
    """A seat that is given back is offered to nobody; it waits for the next event."""

    @asynccontextmanager
    async def seat(self, job: Job) -> AsyncIterator[Seat]:
        real = self._real_seat(job)
        seat = await real.__aenter__()
        try:
            yield seat
        finally:
            self._scheduler._pump = lambda: None
            await real.__aexit__(None, None, None)
            del self._scheduler._pump


class CancelledOnPaper(Dispatcher):
    """Who is cancelled is noted down, and told at the end."""

    def stop(self, ticket: Ticket, error: FairleadError) -> None:
        waiter = self._waiters[ticket]
        waiter.error = waiter.error or error


class RememberedSeat(Dispatcher):
    """A part of the dispatcher does not forget who is over. All counts are right; only memory is lost."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._outlook.over = lambda _: None


class EndlessSwap(Dispatcher):
    """A model that has been loaded goes on being loaded, so it can never make room for another."""

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        swaps = self._scheduler._swaps
        loading = swaps._loading.copy()
        super().node_up(node, limits)
        swaps._loading |= loading


class SwapUnderWork(Dispatcher):
    """Whether anybody works is not asked before a swap."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        real = self._scheduler._start_swaps
        self._scheduler._start_swaps = partial(self._start_swaps, real)

    def _start_swaps(self, real: Callable[[], None]) -> None:
        places = list(self._scheduler._places.values())
        busy = [place.busy for place in places]
        for place in places:
            place.busy = 0
        real()
        for place, count in zip(places, busy, strict=True):
            place.busy = count


class KeptSeat(Dispatcher):
    """A job gets its second seat without giving the first one back."""

    async def another_seat(self, waiter: Any, *, is_full: bool, full_for_s: float | None = None) -> Node:
        waiter.ticket.place.take(waiter.ticket.tokens)
        return await super().another_seat(waiter, is_full=is_full, full_for_s=full_for_s)


class ChargedTwice(Dispatcher):
    """A job that comes back stands in line like any other, and pays for each time that it leaves."""

    async def another_seat(self, waiter: Any, *, is_full: bool, full_for_s: float | None = None) -> Node:
        line = self._scheduler._queue._line
        line.push_front = line.push
        return await super().another_seat(waiter, is_full=is_full, full_for_s=full_for_s)


class DeafSecondWait(Dispatcher):
    """Who waits for a second seat cannot leave."""

    async def another_seat(self, waiter: Any, *, is_full: bool, full_for_s: float | None = None) -> Node:
        with trio.CancelScope(shield=True):
            return await super().another_seat(waiter, is_full=is_full, full_for_s=full_for_s)


class ForeverFull(Dispatcher):
    """A node that turned a job away is never looked at again, unless one of its jobs ends."""

    def _look_again(self, place: Place, after_s: float) -> None:
        """Do not."""


def from_the_start(deltas: Deltas) -> Sink | None:
    """Have an answer told again from its start to whoever has heard the beginning."""
    return None if again(deltas) is None else deltas


def never_again(deltas: Deltas) -> Sink | None:
    """Leave it at one attempt."""
    del deltas
    return None


class DeafNode(MortalNode):
    """An abort is not sent: the node goes on working for nobody."""

    def abort(self, work: trio.CancelScope) -> None:
        """Do not say anything."""


FOUR = {
    "a grant whose refusal is ignored": Parts(IgnoredRefusal),
    "a buffered hand-off": Parts(BufferedHandOff),
    "a checkpoint between grant and try": Parts(CheckpointBeforeTry),
    "an unshielded await in finally": Parts(UnshieldedFinally),
}
MORE = {
    "a leave that forgets to pump": Parts(LeaveWithoutPump),
    "an abort that is not sent": Parts(node_type=DeafNode),
    "a cancel that only takes a note": Parts(CancelledOnPaper),
    "a seat that is remembered": Parts(RememberedSeat),
}
OF_SWAPS = {
    "a swap that is never over": Parts(EndlessSwap),
    "a swap that does not ask who works": Parts(SwapUnderWork),
}
OF_FAILOVER = {
    "a first seat that is not given back": Parts(KeptSeat),
    "a second charge": Parts(ChargedTwice),
    "a second wait that cannot be left": Parts(DeafSecondWait),
    "a node that is full for ever": Parts(ForeverFull),
    "a beginning that is told twice": Parts(again=from_the_start),
    "no second attempt": Parts(again=never_again),
}
