"""Anthropic's Messages: `POST /v1/messages` and `/v1/messages/count_tokens`, for relayed models only."""

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from fairlead.api.dialects.dialect import RelayDialect
from fairlead.api.dialects.event_reader import EventShape, TypedReader, text_members
from fairlead.api.dialects.openai import full_message
from fairlead.errors import FairleadError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_encode = msgspec.json.Encoder().encode


class MessagesPiece(msgspec.Struct, gc=False):
    thinking: str | None = None
    text: str | None = None
    partial_json: str | None = None


class MessagesEvent(EventShape, gc=False):
    delta: MessagesPiece | None = None


class MessagesReader(TypedReader[MessagesEvent]):
    """The reader of other servers' messages."""

    shape = MessagesEvent
    beginnings = frozenset({"message_start", "content_block_start", "ping"})
    ends: ClassVar = {"message_stop": "stop"}

    def _text(self, shape: MessagesEvent) -> str:
        piece = shape.delta or MessagesPiece()
        return "".join(part for part in (piece.thinking, piece.text, piece.partial_json) if part)

    def _texts(self, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        return text_members(document.get("delta"), MessagesPiece.__struct_fields__)


class MessagesDialect(RelayDialect):
    """Messages."""

    name = "messages"
    path = "/v1/messages"
    reader = MessagesReader()

    def error_body(self, error: FairleadError) -> bytes:
        """See `RelayDialect`."""
        default = "api_error" if error.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(error.status, default)
        members = {"type": kind, "message": full_message(error), "param": error.param, "code": error.code}
        return _encode({"type": "error", "error": members})

    def error_event(self, error: FairleadError) -> bytes:
        """See `RelayDialect`."""
        return b"event: error\n" + super().error_event(error)


class CountTokensDialect(MessagesDialect):
    """The number of tokens of a message."""

    path = "/v1/messages/count_tokens"
    streams = False
