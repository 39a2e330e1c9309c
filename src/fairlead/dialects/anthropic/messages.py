"""Anthropic's Messages: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from fairlead.base.config import Limits
from fairlead.base.errors import ContextLengthExceeded, FairleadError
from fairlead.base.job import Delta
from fairlead.dialects.anthropic.events import MessageEvents, MessagePings, whole_message
from fairlead.dialects.anthropic.requests import (
    CountTokensRequest,
    CreateMessageRequest,
    EnvelopeParser,
    MessagesEnvelope,
    count_request,
    message_request,
)
from fairlead.dialects.anthropic.shapes import AnthropicMessage, CountedTokens
from fairlead.dialects.dialect import (
    AnswerContext,
    CountingDialect,
    GenerationRequest,
    RelayDialect,
    StreamingDialect,
)
from fairlead.dialects.event_reader import EventShape, TypedReader, text_members
from fairlead.dialects.openai.common import full_message
from fairlead.dialects.unserved import MESSAGES

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
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
    prefixes = ("message_", "content_block_", "ping")
    beginnings = frozenset({"message_start", "content_block_start", "ping"})
    ends: ClassVar = {"message_stop": "stop"}

    def _text(self, shape: MessagesEvent) -> str:
        piece = shape.delta or MessagesPiece()
        return "".join(part for part in (piece.thinking, piece.text, piece.partial_json) if part)

    def _texts(self, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        return text_members(document.get("delta"), MessagesPiece.__struct_fields__)


class AnthropicDialect(RelayDialect):
    """What Anthropic's dialects share: the envelope and errors."""

    name = "messages"
    read_envelope = EnvelopeParser(MessagesEnvelope)
    reader = MessagesReader()
    request_id_headers = ("X-Request-Id", "request-id")
    header_prefix = "anthropic-"

    def error_body(self, error: FairleadError) -> bytes:
        """Return the body of an error response."""
        default = "api_error" if error.status >= 500 else "invalid_request_error"
        message = full_message(error)
        if isinstance(error, ContextLengthExceeded):  # by these words, clients know to shorten the chat
            message = f"prompt is too long: {message}"
        kind = _TYPES.get(error.status, default)
        members = {"type": kind, "message": message, "param": error.param, "code": error.code}
        return _encode({"type": "error", "error": members})

    def error_event(self, error: FairleadError) -> bytes:
        """Return the event of an error that ends a stream."""
        return b"event: error\n" + super().error_event(error)


class MessagesDialect(AnthropicDialect, StreamingDialect):
    """Messages. Their `options` are `MessageOptions`."""

    path = "/v1/messages"
    body_type = CreateMessageRequest
    answer_type = AnthropicMessage
    refused_fields = MESSAGES
    job_prefix = "msg"
    waiting_events = MessagePings()

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        return message_request(body, limits)

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the body of a response; `deltas` has one per choice, in order."""
        return whole_message(context, deltas[0])

    def stream_writer(self, context: AnswerContext) -> MessageEvents:
        """Return the writer of a streamed response."""
        return MessageEvents(context, self.error_event)


class CountTokensDialect(AnthropicDialect, CountingDialect):
    """The number of tokens of a message."""

    path = "/v1/messages/count_tokens"
    body_type = CountTokensRequest
    answer_type = CountedTokens

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body, as `Dialect.decode` does."""
        return count_request(body, limits)

    def write_count(self, tokens: int) -> bytes:
        """Return the body of a response."""
        return _encode(CountedTokens(tokens))
