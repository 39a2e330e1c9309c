"""Kept responses of clients that wait for them: the object of a stream is that of its last event."""

from collections.abc import Callable
from typing import Literal

import msgspec

from fairlead.base.errors import FairleadError
from fairlead.dialects.dialect import AnswerContext
from fairlead.dialects.responses.events import ResponseEvents
from fairlead.dialects.responses.responses import ResponsesDialect

Keep = Callable[[bytes], None]

_DATA = b"\ndata: "


class _LastEvent(msgspec.Struct):
    response: msgspec.Raw


_decode_event = msgspec.json.Decoder(_LastEvent).decode


def document_of(events: bytes) -> bytes:
    """Return the response object in the last one of these events."""
    return bytes(_decode_event(events[events.rindex(_DATA) + len(_DATA) :]).response)


class KeepingDialect(ResponsesDialect):
    """The dialect of one answer. `keep` is called with the response object at the end of its stream."""

    def __init__(self, keep: Keep) -> None:
        super().__init__(is_stored=True)
        self._keep = keep

    def stream_writer(self, context: AnswerContext) -> ResponseEvents:
        """Return the writer of a streamed response."""
        return _KeepingEvents(context, self._keep)


class _KeepingEvents(ResponseEvents):
    def __init__(self, context: AnswerContext, keep: Keep) -> None:
        super().__init__(context)
        self._keep = keep

    def end(self) -> bytes:
        events = super().end()
        self._keep(document_of(events))
        return events

    def fail(self, error: FairleadError, status: Literal["failed", "cancelled"] = "failed") -> bytes:
        events = super().fail(error, status)
        self._keep(document_of(events))
        return events
