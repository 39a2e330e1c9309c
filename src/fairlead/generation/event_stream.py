"""Streamed answers: a job's deltas as events of its dialect, sent as they arrive.

The stream only reads. The seat belongs to the gateway's task in the caller's nursery, so a stream that is
never iterated, or is stopped anywhere, blocks nothing.
"""

from collections.abc import Awaitable, Callable
from math import inf
from typing import Protocol

import trio

from fairlead.base.job import Delta
from fairlead.base.supervision import hide_bug
from fairlead.base.unread import UnreadBytes
from fairlead.dialects.dialect import RelayDialect, StreamWriter, WaitingEvents
from fairlead.generation.pending import PendingAnswer
from fairlead.router.dispatch.estimates import WaitEstimate

# Above these, deltas are encoded in a thread, so that other streams' tokens are not delayed. A token with 20
# alternatives takes 25 µs.
LARGE_TEXT_CHARS = 1024 * 1024
LARGE_VECTORS_BYTES = 200_000
MANY_LOGPROBS = 200


Write = Callable[[list[Delta]], bytes]
WriteLarge = Callable[[Write, list[Delta]], Awaitable[bytes]]


class CutStream(Exception):  # not an error: a stream's signal that it is incomplete
    """Raised by a stream after its last piece: end the connection so that the client notices.

    A chunked response then lacks its end. (An HTTP/1.0 response has no end mark to leave out.)
    """


class DirectSender(Protocol):
    """A way to the client that does not wait."""

    @property
    def writable(self) -> bool:
        """Whether a piece of the stream can be sent now."""

    def send_now(self, data: bytes) -> None:
        """Send a piece, which must not be empty."""


class EventStream:
    """The events of an answer: all deltas that have arrived are sent in one piece.

    With a `direct` way to the client, deltas are sent in the same event-loop turn as the engine's output. The
    iterating task is not woken, as long as the client reads fast enough.

    While there is no answer yet, waiting events report the job's wait. The first is sent at once, so that a
    proxy has something to forward, and the next ones every `interval_s`. They are also sent whenever the
    answer has nothing to show for a while.

    After the first byte the status cannot change. So an error becomes an event, and then `CutStream` ends the
    connection, because a clean end would look like a complete answer.

    pending: The answer.
    dialect: Has the type of the stream, and the usual waiting events.
    writer: Writes the deltas.
    waiting: Returns the estimate of the job's wait; None: it is not queued.
    waiting_events: Report the wait until the answer begins; None: the dialect's.
    write_large: Calls the writer for a large piece, in a thread.
    model: The name of the job's model, for waiting events.
    keep_alive_s: How long the stream may be silent, in seconds.
    unread: Counts deltas that have not been taken; None: nothing does.

    `before_end` is awaited before the last events are sent.
    """

    def __init__(
        self,
        pending: PendingAnswer,
        dialect: RelayDialect,
        writer: StreamWriter,
        waiting: Callable[[], Awaitable[WaitEstimate | None]],
        waiting_events: WaitingEvents | None = None,
        *,
        write_large: WriteLarge,
        model: str = "",
        keep_alive_s: float = inf,
        unread: UnreadBytes | None = None,
    ) -> None:
        self.direct: DirectSender | None = None
        self.before_end: Callable[[], Awaitable[None]] = _nothing
        self._pending = pending
        self.dialect = dialect
        self._writer = writer
        self._waiting = waiting
        self._waiting_events = waiting_events or dialect.waiting_events
        self._unread = unread
        self._write_large = write_large
        self._has_waiting_events = False
        self._next_event_at = -inf
        self._model = model
        self._keep_alive_s = keep_alive_s
        # A timer for each token would be expensive. So sending only sets `_has_sent`, which is read and
        # cleared twice in `keep_alive_s`. A stream is silent if it is still clear the next time.
        self._has_sent = False
        self._next_check_at = trio.current_time() + keep_alive_s / 2
        self._ended = False
        self._failed = False

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> bytes:
        if self._failed:
            raise CutStream
        if self._ended:
            raise StopAsyncIteration
        try:
            if not self._pending.is_available and (event := await self._waiting_event()):
                return event
            if self._has_waiting_events and self._pending.answer is not None:
                self._has_waiting_events = False
                if end := self._waiting_events.end():
                    return end
            if events := await self._next():
                return events
        except Exception as error:  # noqa: BLE001  # even our own bugs must not look like a complete answer
            self._failed = True
            failure = self._writer.fail(hide_bug(error))
            await self.before_end()
            return failure
        raise StopAsyncIteration

    async def _waiting_event(self) -> bytes:
        """Wait until an event is due and return it; empty if the answer begins before."""
        with trio.move_on_at(self._next_event_at):
            await self._pending.get()
            return b""
        self._next_event_at = trio.current_time() + min(self._waiting_events.interval_s, self._keep_alive_s)
        self._has_waiting_events = self._has_sent = True
        return self._waiting_events.write(await self._waiting(), self._model)

    async def _next(self) -> bytes:
        deltas = (await self._pending.get()).deltas
        deltas.unread = self._unread
        on_delta = self._send_directly if self.direct is not None else None
        while not self._is_silent():
            with trio.move_on_at(self._next_check_at) as waiting:
                taken = await deltas.take(on_delta)
            if waiting.cancelled_caught:
                continue
            if not taken:
                self._ended = True
                end = self._writer.end()
                await self.before_end()
                return end
            if is_large(taken):
                events = await self._write_large(self._writer.write, taken)
            else:
                events = self._writer.write(taken)
            if events:
                self._has_sent = True
                return events
        self._has_sent = True
        return self.dialect.waiting_events.write(None, self._model)

    def _is_silent(self) -> bool:
        """Return whether nothing was sent since the last check, if it is time for another one."""
        now = trio.current_time()
        if now < self._next_check_at:
            return False
        self._next_check_at = now + self._keep_alive_s / 2
        is_silent, self._has_sent = not self._has_sent, False
        return is_silent

    def _send_directly(self, deltas: list[Delta]) -> bool:
        """Send these deltas if the client can take them now; return whether it could."""
        assert self.direct is not None
        if not self.direct.writable or deltas[0].prompt_logprobs:  # these may be many
            return False
        try:
            events = self._writer.write(deltas)
        except Exception:  # noqa: BLE001  # the iterator raises it too, and can report it
            return False
        if events:
            self._has_sent = True
            self.direct.send_now(events)
        return True


async def _nothing() -> None:
    pass


def is_large(deltas: list[Delta]) -> bool:
    """Return whether to encode these deltas in a thread. A slow client's may be a whole answer."""
    return (
        sum(len(delta.text) for delta in deltas) > LARGE_TEXT_CHARS
        or sum(len(delta.logprobs) + len(delta.prompt_logprobs) for delta in deltas) > MANY_LOGPROBS
        or sum(len(delta.vector) for delta in deltas) > LARGE_VECTORS_BYTES
    )
