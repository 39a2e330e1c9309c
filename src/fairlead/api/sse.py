"""Server-sent events: how an answer's deltas leave as they come. Knows no dialect.

The stream only reads. The seat belongs to the gateway's task in the exchange's nursery, so a body that is
never iterated, or stopped anywhere, holds nothing up.
"""

from collections.abc import Callable
from typing import Protocol

import trio

from fairlead.api.answers import is_large
from fairlead.api.asgi import Direct
from fairlead.api.call import NO_SNIFFING, Reply
from fairlead.api.errors import public_error
from fairlead.api.exchange import CutStream
from fairlead.api.pending import PendingAnswer
from fairlead.api.services import Waiting
from fairlead.errors import FairleadError
from fairlead.job import Delta

HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # or nginx keeps events until it has a page of them
    **NO_SNIFFING,
}
# How often a stream without an answer yet says that it lives.
COMMENT_EVERY_S = 5.0


class Notices(Protocol):
    """What a stream says while there is no answer yet."""

    interval_s: float

    def write(self, waiting: Waiting | None) -> bytes:
        """Return what to say now, once every `interval_s`; `waiting` is None if the job does not wait."""

    def end(self) -> bytes:
        """Return what closes the notices when the answer is there. Not called if none were written."""


class WaitingComments:
    """`Notices` as comments, which clients skip: the place in the queue and the estimated wait."""

    interval_s = COMMENT_EVERY_S

    def write(self, waiting: Waiting | None) -> bytes:
        """See `Notices`."""
        if waiting is None:
            return b": running\n\n"
        return b": queued position=%d estimated_wait=%d\n\n" % (waiting.position, waiting.estimated_wait_s)

    def end(self) -> bytes:
        """See `Notices`."""
        return b""


class Writer(Protocol):
    """Turns deltas into events, whole ones, ready to send."""

    def write(self, deltas: list[Delta]) -> bytes:
        """Return the events for these deltas; empty if they have nothing to show yet."""

    def end(self) -> bytes:
        """Return the events that close a good answer; empty if it is closed already."""

    def error(self, error: FairleadError) -> bytes:
        """Return the event that ends an answer that is not whole."""


class EventStream:
    """A response body: all deltas that are there go out in one piece.

    With a `direct` way to the client, deltas go out in the engine's own turn, without waking whoever
    iterates, as long as the client keeps up.

    While there is no answer yet, notices say how it waits: one at once, so that a proxy has something to
    pass on, and then one every `interval_s`. By default they are `WaitingComments`.

    An error after the first byte can have no status any more: it becomes an event, and then `CutStream`
    ends the connection, because a clean end would look like a whole answer.
    """

    def __init__(
        self,
        pending: PendingAnswer,
        writer: Writer,
        waiting: Callable[[], Waiting | None],
        notices: Notices | None = None,
    ) -> None:
        self.direct: Direct | None = None
        self._pending = pending
        self._writer = writer
        self._waiting = waiting
        self._notices = notices or WaitingComments()
        self._has_notices = False
        self._next_notice_at = -float("inf")
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
            if not self._pending.is_there and (notice := await self._notice()):
                return notice
            if self._has_notices and self._pending.answer is not None:
                self._has_notices = False
                if end := self._notices.end():
                    return end
            if events := await self._next():
                return events
        except Exception as error:  # noqa: BLE001  # our own bugs too must not look like the end of an answer
            self._failed = True
            return self._writer.error(public_error(error))
        raise StopAsyncIteration

    async def _notice(self) -> bytes:
        """Wait until it is time for a notice and return it; nothing if the answer is there before."""
        with trio.move_on_at(self._next_notice_at):
            await self._pending.get()
            return b""
        self._next_notice_at = trio.current_time() + self._notices.interval_s
        self._has_notices = True
        return self._notices.write(self._waiting())

    async def _next(self) -> bytes:
        deltas = (await self._pending.get()).deltas
        tap = self._pour if self.direct is not None else None
        while taken := await deltas.take(tap):
            if is_large(taken):
                events = await trio.to_thread.run_sync(self._writer.write, taken, abandon_on_cancel=True)
            else:
                events = self._writer.write(taken)
            if events:
                return events
        self._ended = True
        return self._writer.end()

    def _pour(self, deltas: list[Delta]) -> bool:
        """Send these deltas now, if the client is ready for them."""
        assert self.direct is not None
        if not self.direct.writable or deltas[0].prompt_logprobs:  # of which there may be many
            return False
        try:
            events = self._writer.write(deltas)
        except Exception:  # noqa: BLE001  # whoever iterates meets it too, and can say so to the client
            return False
        if events:
            self.direct.send_now(events)
        return True


def event_reply(body: EventStream, headers: dict[str, str]) -> Reply:
    """Return the streamed answer, with `headers` beside those that keep it flowing."""
    return Reply(body, 200, {**HEADERS, **headers})
