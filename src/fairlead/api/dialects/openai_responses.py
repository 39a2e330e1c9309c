"""OpenAI's Responses: `POST /v1/responses`, for relayed models only."""

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from fairlead.answer.reported import decoded, is_given
from fairlead.api.dialects.dialect import RelayDialect
from fairlead.api.dialects.event_reader import ABSENT, EventShape, ResponseShape, TypedReader, text_members
from fairlead.api.dialects.openai import OpenAIErrors


class ResponsesEvent(EventShape, gc=False):
    delta: str | None = None
    response: msgspec.Raw = ABSENT


class ResponsesShape(ResponseShape, gc=False):
    content: msgspec.Raw = msgspec.field(name="output", default=ABSENT)


_decode_response = msgspec.json.Decoder(ResponseShape).decode


class ResponsesReader(TypedReader[ResponsesEvent]):
    """The reader of other servers' responses."""

    shape = ResponsesEvent
    response_shape = ResponsesShape
    beginnings = frozenset(
        f"response.{name}"
        for name in ("created", "queued", "in_progress", "output_item.added", "content_part.added")
    )
    ends: ClassVar = {
        "response.completed": "stop",
        "response.failed": "stop",
        "response.incomplete": "length",
    }

    def _text(self, shape: ResponsesEvent) -> str:
        return shape.delta or ""

    def _usage(self, shape: ResponsesEvent) -> msgspec.Raw:
        if is_given(shape.usage) or not is_given(shape.response):
            return shape.usage
        response = decoded(_decode_response, shape.response)
        return ABSENT if response is None else response.usage

    def _texts(self, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        return text_members(document, ("delta",))


class ResponsesDialect(OpenAIErrors, RelayDialect):
    """Responses."""

    name = "responses"
    path = "/v1/responses"
    reader = ResponsesReader()
