"""What the readers of all dialects share: events of a stream, errors, token counts, whole responses.

Responses are passed on as their original bytes; only `without_beginning` writes an event anew. A member is
`Raw`, and decoded on its own, where a wrong type must not make the rest unreadable.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from fairlead.answer.reported import EXCERPT_LENGTH, decoded, excerpt, is_given, token_count
from fairlead.http.server_sent_events import EventSplitter, event_data, split_events
from fairlead.upstream_events import EVENTS, Splitter, UpstreamAnswer, UpstreamError, UpstreamEvent

ABSENT = msgspec.Raw()
NOTHING = UpstreamEvent(is_beginning=True)
UNKNOWN = UpstreamEvent(is_known=False)
NOISE = UpstreamEvent(is_noise=True)
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


class _Error(msgspec.Struct):
    """An error as an object: OpenAI's, Anthropic's, or one of the many that resemble them."""

    message: msgspec.Raw = ABSENT
    code: msgspec.Raw = ABSENT
    status: msgspec.Raw = ABSENT
    status_code: msgspec.Raw = ABSENT
    type: msgspec.Raw = ABSENT


_decode_usage = msgspec.json.Decoder(_Usage).decode
_decode_error = msgspec.json.Decoder(_Error).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

Shape = TypeVar("Shape", bound=EventShape)


class EventReader(ABC, Generic[Shape]):
    """An `UpstreamReader`. `shape` is the type of an event, `response_shape` that of a whole response."""

    shape: ClassVar[type[Any]]
    response_shape: ClassVar[type[ResponseShape]] = ResponseShape
    stream_type: ClassVar[str] = EVENTS
    contents: ClassVar[tuple[str, ...]] = ("type",)
    """The members of which an event has one, if it says anything of the answer."""

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
            return NOISE if is_noise(payload, self.contents) else UNKNOWN
        if is_given(shape.error) or shape.type == "error":
            return UpstreamEvent(error=error_of(shape.error if is_given(shape.error) else payload))
        return self._event(shape)

    def without_end(self, event: bytes) -> bytes:
        """See `UpstreamReader`. Most dialects have an event of its own for the end of an answer."""
        return event

    def only_end(self, event: bytes) -> bytes:
        """See `UpstreamReader`."""
        return event

    def read_response(self, body: bytes) -> UpstreamAnswer:
        """See `UpstreamReader`."""
        shape = decoded(self._decode_response, body)
        if shape is None:
            raise ValueError("no JSON object")
        if is_given(shape.error) and not len(shape.content):
            return UpstreamAnswer(error=error_of(shape.error))
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
        return _written_anew(event, document)


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
            return NOISE
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


def rewrite_choice(event: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return an event with its first choice changed in place; as it is if it cannot be written anew."""
    document = decoded(_decode_any, event_data(event) or b"{}")
    choices = objects(document.get("choices")) if isinstance(document, dict) else []
    if not choices:
        return event
    change(choices[0])
    try:
        return _written_anew(event, document)
    except ValueError:
        return event


def _written_anew(event: bytes, document: Any) -> bytes:
    """Return an event with other data. Raises `ValueError` if it cannot be written."""
    try:
        return event[: event.find(b"data:")] + b"data: " + _encode(document) + b"\n\n"
    except (OverflowError, RecursionError) as error:
        raise ValueError("an event that cannot be written anew") from error


def is_noise(payload: bytes, members: tuple[str, ...]) -> bool:
    """Return whether the data of an event is no object, or an object without any of these members.

    An object that cannot be read is not noise: it may be a part of the answer.
    """
    if not payload.startswith(b"{"):
        return True
    given = decoded(_decode_members, payload)
    return given is not None and not any(is_given(given.get(name, ABSENT)) for name in members)


_LONGEST_WORD = 64
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "context_length_exceeded": 400,
    "exceed_context_size_error": 400,
    "authentication_error": 401,
    "invalid_api_key": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "model_not_found": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "overloaded_error": 529,
    "unavailable_error": 503,
}
"""What servers call their errors instead of, or beside, a number: OpenAI, Anthropic and llama.cpp."""


def error_of(error: msgspec.Raw | bytes) -> UpstreamError:
    """Return an error that a server has sent with the status 200.

    It is a text, or an object with a message and a `code`, `status` or `type`, perhaps as its own `error`.
    """
    fields = decoded(_decode_error, error)
    if fields is None:
        text = decoded(_decode_text, error)
        return UpstreamError(excerpt(bytes(memoryview(error)[:EXCERPT_LENGTH]) if text is None else text))
    text = decoded(_decode_text, fields.message)
    message = excerpt(bytes(memoryview(error)[:EXCERPT_LENGTH]) if text is None else text)
    for member in (fields.code, fields.status, fields.status_code, fields.type):
        word = bytes(memoryview(member)[:_LONGEST_WORD]).strip(b'"').decode(errors="replace")
        status = int(word) if word.isascii() and word.isdigit() else _STATUS_OF_TYPE.get(word)
        if status is not None and 400 <= status < 600:
            return UpstreamError(message, status)
    return UpstreamError(message)
