"""Server-sent events: how an answer's deltas leave as they come. Knows no dialect but that of its errors.

The stream only reads. The seat belongs to the gateway's task in the exchange's nursery, so a body that is
never iterated, or stopped anywhere, holds nothing up.
"""

from typing import Protocol

from quart import Response

from fairlead.api.errors import openai_error, public_error
from fairlead.api.exchange import CutStream
from fairlead.job import Delta
from fairlead.nodes.deltas import Deltas

HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # or nginx keeps events until it has a page of them
}


class Writer(Protocol):
    """Turns deltas into events, whole ones, ready to send."""

    def write(self, deltas: list[Delta]) -> bytes:
        """Return the events for these deltas; empty if they have nothing to show yet."""

    def end(self) -> bytes:
        """Return the events that close a good answer."""


class EventStream:
    """A response body: all deltas that are there go out in one piece.

    An error after the first byte can have no status any more: it becomes an event, and then `CutStream`
    ends the connection, because a clean end would look like a whole answer.
    """

    def __init__(self, deltas: Deltas, writer: Writer) -> None:
        self._deltas = deltas
        self._writer = writer
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
            return await self._next()
        except Exception as error:  # noqa: BLE001  # our own bugs too must not look like the end of an answer
            self._failed = True
            return b"data: " + openai_error(public_error(error)) + b"\n\n"

    async def _next(self) -> bytes:
        while taken := await self._deltas.take():
            if events := self._writer.write(taken):
                return events
        self._ended = True
        return self._writer.end()


def event_response(deltas: Deltas, writer: Writer, headers: dict[str, str]) -> Response:
    """Return the streamed answer, with `headers` beside those that keep it flowing."""
    body = EventStream(deltas, writer)
    return Response(body, 200, {**HEADERS, **headers}, content_type="text/event-stream")
