"""What a response that is kept adds to its dialect: its object is also given to the store."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fairlead.api.dialects.dialect import AnswerContext, GenerationRequest
from fairlead.api.dialects.openai_responses import ResponsesDialect
from fairlead.api.dialects.openai_responses_events import ResponseEvents
from fairlead.config import Limits
from fairlead.errors import FairleadError
from fairlead.job import Delta

_DATA = b"\ndata: "


class _LastEvent(msgspec.Struct):
    response: msgspec.Raw


_decode_event = msgspec.json.Decoder(_LastEvent).decode


def document_of(events: bytes) -> bytes:
    """Return the response object in the last one of these events."""
    return bytes(_decode_event(events[events.rindex(_DATA) + len(_DATA) :]).response)


class KeepingDialect(ResponsesDialect):
    """The dialect of one request. `keep` gets the response object when a stream of it ends."""

    def __init__(self, keep: Callable[[bytes], None], history: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(history=history)
        self._keep = keep

    def stream_writer(self, context: AnswerContext) -> "KeepingEvents":
        """See `StreamingDialect`."""
        return KeepingEvents(context, self._keep)


class KeepingEvents(ResponseEvents):
    """A writer of a stream whose last event has the response object to keep."""

    def __init__(self, context: AnswerContext, keep: Callable[[bytes], None]) -> None:
        super().__init__(context)
        self._keep = keep

    def end(self) -> bytes:
        """See `StreamWriter`."""
        events = super().end()
        self._keep(document_of(events))
        return events
