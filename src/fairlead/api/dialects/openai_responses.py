"""OpenAI's Responses: `POST /v1/responses`, for relayed models only."""

from collections.abc import Iterator
from typing import Any

import msgspec

from fairlead.answer.reported import decoded, is_given
from fairlead.api.body import BodyParser
from fairlead.api.dialects.dialect import RelayDialect
from fairlead.api.dialects.event_reader import (
    ABSENT,
    UNKNOWN,
    EventReader,
    EventShape,
    WholeShape,
    generated_tokens,
    text_members,
)
from fairlead.api.dialects.fields import Envelope
from fairlead.api.dialects.openai import OpenAIErrors
from fairlead.upstream_events import UpstreamEvent

_BEGINNINGS = frozenset(
    {
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    }
)
# The last events, and why the answer ended.
_ENDS = {"response.completed": "stop", "response.failed": "stop", "response.incomplete": "length"}


class ResponsesEnvelope(Envelope, frozen=True, kw_only=True):
    """What is read of every body."""

    max_output_tokens: int | None = None

    @property
    def token_limits(self) -> tuple[int | None, ...]:
        """See `Envelope`."""
        return (self.max_output_tokens,)


class ResponsesEvent(EventShape, gc=False):
    delta: str | None = None
    response: msgspec.Raw = ABSENT


class ResponsesWhole(WholeShape, gc=False):
    content: msgspec.Raw = msgspec.field(name="output", default=ABSENT)


class _Response(msgspec.Struct, gc=False):
    usage: msgspec.Raw = ABSENT


_decode_response = msgspec.json.Decoder(_Response).decode


class ResponsesReader(EventReader[ResponsesEvent]):
    """The reader of other servers' responses. All text is of choice 0."""

    shape = ResponsesEvent
    whole_shape = ResponsesWhole

    def _event(self, shape: ResponsesEvent) -> UpstreamEvent:
        kind = shape.type
        if kind is None:
            return UNKNOWN
        is_beginning, finished = kind in _BEGINNINGS, _ENDS.get(kind)
        return UpstreamEvent(
            0,
            shape.delta or "",
            finished,
            is_beginning=is_beginning,
            is_end=finished is not None,
            generated=None if is_beginning else generated_tokens(_usage(shape)),
        )

    def _texts(self, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        return text_members(document, ("delta",))


class ResponsesDialect(OpenAIErrors, RelayDialect):
    """Responses."""

    path = "/v1/responses"
    read_envelope = BodyParser(ResponsesEnvelope)
    reader = ResponsesReader()


def _usage(shape: ResponsesEvent) -> msgspec.Raw:
    if is_given(shape.usage) or not is_given(shape.response):
        return shape.usage
    response = decoded(_decode_response, shape.response)
    return ABSENT if response is None else response.usage
