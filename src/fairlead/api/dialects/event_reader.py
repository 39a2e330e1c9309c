"""What the readers of all dialects share: events of a stream, errors, token counts, whole responses.

Responses are passed on as their original bytes; only `without_beginning` writes an event anew. A member is
`Raw`, and decoded on its own, where a wrong type must not make the rest unreadable.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from fairlead.answer.reported import EXCERPT_LENGTH, decoded, excerpt, is_given, token_count
from fairlead.http.server_sent_events import EventSplitter, event_data, split_events
from fairlead.upstream_events import EVENTS, Splitter, UpstreamAnswer, UpstreamEvent

ABSENT = msgspec.Raw()
NOTHING = UpstreamEvent(is_beginning=True)
UNKNOWN = UpstreamEvent(is_known=False)
DONE = UpstreamEvent(is_end=True)


class EventShape(msgspec.Struct, gc=False):
    """The members of an event that every dialect reads."""

    type: str | None = None
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    message: msgspec.Raw = ABSENT


class ResponseShape(msgspec.Struct, gc=False):
    """A response that is not streamed; `content` is the member with its generated content."""

    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: msgspec.Raw = ABSENT
    output_tokens: msgspec.Raw = ABSENT


class _Reason(msgspec.Struct):
    message: str


_decode_usage = msgspec.json.Decoder(_Usage).decode
_decode_reason = msgspec.json.Decoder(_Reason).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

Shape = TypeVar("Shape", bound=EventShape)


class EventReader(ABC, Generic[Shape]):
    """An `UpstreamReader`. `shape` is the type of an event, `response_shape` that of a whole response."""

    shape: ClassVar[type[Any]]
    response_shape: ClassVar[type[ResponseShape]] = ResponseShape
    stream_type: ClassVar[str] = EVENTS

    def __init__(self) -> None:
        self._decode_event = msgspec.json.Decoder(self.shape).decode
        self._decode_response = msgspec.json.Decoder(self.response_shape).decode

    @abstractmethod
    def _event(self, shape: Shape) -> UpstreamEvent:
        """Return the content of an event that reports no error."""

    @abstractmethod
    def _texts(self, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the members of an event that have text: the object and the member's name."""

    def splitter(self, event_bytes: int) -> Splitter:
        """See `UpstreamReader`."""
        return EventSplitter(event_bytes)

    def split(self, events: bytes) -> list[bytes]:
        """See `UpstreamReader`."""
        return split_events(events)

    def read_plain(self, events: bytes) -> tuple[int, list[str]] | None:  # noqa: ARG002  # of the interface
        """See `UpstreamReader`."""
        return None

    def read_event(self, event: bytes) -> UpstreamEvent:
        """Return the content of an event; `NOTHING` for a comment, `UNKNOWN` if it cannot be read."""
        payload = event_data(event)
        if payload is None:
            return NOTHING
        if payload == b"[DONE]":
            return DONE
        shape = decoded(self._decode_event, payload)
        if shape is None:
            return UNKNOWN
        if is_given(shape.error) or shape.type == "error":
            return UpstreamEvent(error=error_reason(shape.error if is_given(shape.error) else shape.message))
        return self._event(shape)

    def read_response(self, body: bytes) -> UpstreamAnswer:
        """See `UpstreamReader`."""
        shape = decoded(self._decode_response, body)
        if shape is None:
            raise ValueError("no JSON object")
        if is_given(shape.error) and not len(shape.content):
            return UpstreamAnswer(error=error_reason(shape.error))
        return UpstreamAnswer(generated_tokens(shape.usage), len(shape.content))

    def without_beginning(self, event: bytes, text: str) -> bytes:
        """See `UpstreamReader`."""
        document = decoded(_decode_any, event_data(event) or b"{}")
        members = list(self._texts(document)) if isinstance(document, dict) else []
        if len(members) != 1:
            raise ValueError("several pieces of text in one event")
        holder, name = members[0]
        assert holder[name].endswith(text)
        holder[name] = text
        name_line = event[: event.find(b"data:")]
        try:
            return name_line + b"data: " + _encode(document) + b"\n\n"
        except (OverflowError, RecursionError) as error:
            raise ValueError("an event that cannot be written anew") from error


class TypedReader(EventReader[Shape]):
    """A reader of events that have a `type`, all for one choice.

    `beginnings` are the types that precede all text, and `ends` those that end the answer, with the reason.
    """

    beginnings: ClassVar[frozenset[str]]
    ends: ClassVar[dict[str, str]]

    @abstractmethod
    def _text(self, shape: Shape) -> str:
        """Return all generated text in an event."""

    def _usage(self, shape: Shape) -> msgspec.Raw:
        return shape.usage

    def _event(self, shape: Shape) -> UpstreamEvent:
        if shape.type is None:
            return UNKNOWN
        is_beginning, finished = shape.type in self.beginnings, self.ends.get(shape.type)
        return UpstreamEvent(
            0,
            self._text(shape),
            finished,
            is_beginning=is_beginning,
            is_end=finished is not None,
            generated=None if is_beginning else generated_tokens(self._usage(shape)),
        )


def generated_tokens(usage: msgspec.Raw) -> int | None:
    """Return how many generated tokens `usage` reports; None if it reports none."""
    if not is_given(usage) or (shape := decoded(_decode_usage, usage)) is None:
        return None
    of_openai = token_count(shape.completion_tokens)
    return token_count(shape.output_tokens) if of_openai is None else of_openai


def text_members(holder: Any, names: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield those of the members of an object that are text and not empty; none of anything else."""
    if isinstance(holder, dict):
        for name in names:
            if isinstance(holder.get(name), str) and holder[name]:
                yield holder, name


def objects(members: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; empty if `members` is not a list."""
    return [member for member in members if isinstance(member, dict)] if isinstance(members, list) else []


def error_reason(error: msgspec.Raw) -> str:
    """Return the message of an error, or the beginning of the error if it has none."""
    reason = decoded(_decode_reason, error)
    text = decoded(_decode_text, error) if reason is None else reason.message
    return excerpt(bytes(memoryview(error)[:EXCERPT_LENGTH]) if text is None else text)
