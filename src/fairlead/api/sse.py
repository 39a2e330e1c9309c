"""Server-sent events: a job's deltas, streamed as they arrive. Does not know dialects.

The stream only reads. The seat belongs to the gateway's task in the exchange's nursery, so a body that is
never iterated, or is stopped anywhere, blocks nothing.
"""

from collections.abc import Callable
from typing import Protocol

import trio

from fairlead.api.answers import is_large
from fairlead.api.errors import public_error
from fairlead.api.exchange import CutStream
from fairlead.api.pending import PendingAnswer
from fairlead.api.request import NO_SNIFFING, Reply
from fairlead.api.services import Waiting
from fairlead.errors import FairleadError
from fairlead.http.asgi import Direct
from fairlead.http.server_sent_events import encode_comment
from fairlead.job import Delta

HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # otherwise nginx buffers a page of events
    **NO_SNIFFING,
}
# The interval of comments in a stream that has no answer yet.
COMMENT_EVERY_S = 5.0


class Notices(Protocol):
    """The events of a stream that has no answer yet."""

    interval_s: float

    def write(self, waiting: Waiting | None) -> bytes:
        """Return the notice for now, once every `interval_s`; `waiting` is None if the job is not queued."""

    def end(self) -> bytes:
        """Return the end of the notices when the answer begins. Not called if none were written."""


class WaitingComments:
    """`Notices` as comments, which clients skip: the queue position and the estimated wait."""

    interval_s = COMMENT_EVERY_S

    def write(self, waiting: Waiting | None) -> bytes:
        """See `Notices`."""
        if waiting is None:
            return encode_comment("running")
        return encode_comment(f"queued position={waiting.position} estimated_wait={waiting.estimated_wait_s}")

    def end(self) -> bytes:
        """See `Notices`."""
        return b""


class Writer(Protocol):
    """A serializer of deltas as whole events."""

    def write(self, deltas: list[Delta]) -> bytes:
        """Return the events for these deltas; empty if they have nothing to show yet."""

    def end(self) -> bytes:
        """Return the events that end a complete answer; empty if it has ended already."""

    def error(self, error: FairleadError) -> bytes:
        """Return the event that ends an incomplete answer."""


class EventStream:
    """A response body: all deltas that have arrived are sent in one piece.

    With a `direct` way to the client, deltas are sent in the same event-loop turn as the engine's output,
    without waking the iterating task, as long as the client keeps up.

    While there is no answer yet, notices report the job's wait: one at once, so that a proxy has something to
    forward, then one every `interval_s`. By default they are `WaitingComments`.

    After the first byte the status cannot change. So an error becomes an event, and then `CutStream` ends the
    connection, because a clean end would look like a complete answer.
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
        except Exception as error:  # noqa: BLE001  # even our own bugs must not look like a complete answer
            self._failed = True
            return self._writer.error(public_error(error))
        raise StopAsyncIteration

    async def _notice(self) -> bytes:
        """Wait until a notice is due and return it; empty if the answer begins before."""
        with trio.move_on_at(self._next_notice_at):
            await self._pending.get()
            return b""
        self._next_notice_at = trio.current_time() + self._notices.interval_s
        self._has_notices = True
        return self._notices.write(self._waiting())

    async def _next(self) -> bytes:
        deltas = (await self._pending.get()).deltas
        on_delta = self._pour if self.direct is not None else None
        while taken := await deltas.take(on_delta):
            if is_large(taken):
                events = await trio.to_thread.run_sync(self._writer.write, taken, abandon_on_cancel=True)
            else:
                events = self._writer.write(taken)
            if events:
                return events
        self._ended = True
        return self._writer.end()

    def _pour(self, deltas: list[Delta]) -> bool:
        """Send these deltas if the client can take them now; return whether it could."""
        assert self.direct is not None
        if not self.direct.writable or deltas[0].prompt_logprobs:  # these may be many
            return False
        try:
            events = self._writer.write(deltas)
        except Exception:  # noqa: BLE001  # the iterator raises it too, and can report it
            return False
        if events:
            self.direct.send_now(events)
        return True


def event_reply(body: EventStream, headers: dict[str, str]) -> Reply:
    """Return the streamed response; `headers` are added to those that prevent buffering."""
    return Reply(body, 200, {**HEADERS, **headers})
