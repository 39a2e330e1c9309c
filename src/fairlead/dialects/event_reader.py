"""What the readers of all dialects share: events of a stream, errors, token counts, whole responses.

Responses are passed on as their original bytes; only `without_beginning` writes an event anew. A member is
`Raw`, and decoded on its own, where a wrong type must not make the rest unreadable.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from fairlead.base.formats.server_sent_events import (
    END_MARK,
    EventSplitter,
    encode_event,
    event_data,
    event_error,
    is_comment,
    split_events,
)
from fairlead.base.reported import decoded, is_given, token_count
from fairlead.base.upstream_events import EVENTS, Splitter, UpstreamAnswer, UpstreamEvent
from fairlead.dialects.upstream_errors import error_of, is_error, unnamed_error

ABSENT = msgspec.Raw()
_NO_CONTENT = (ABSENT, msgspec.Raw(b"null"), msgspec.Raw(b"[]"))
NOTHING = UpstreamEvent(is_beginning=True)
UNKNOWN = UpstreamEvent(is_known=False)
NOISE = UpstreamEvent(is_noise=True)
DONE = UpstreamEvent(is_end=True)


class EventShape(msgspec.Struct, gc=False):
    """The members of an event that every dialect reads. Each of them may be absent.

    type: The kind of the event.
    usage: Token counts.
    error: An error in place of an answer.
    message: A piece of the answer, or the text of an error, by the dialect.
    """

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


_decode_usage = msgspec.json.Decoder(_Usage).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
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

    def _is_noise(self, shape: Shape) -> bool:  # noqa: ARG002  # of the interface
        """Return whether an event that reports no error says nothing of the answer."""
        return False

    @abstractmethod
    def _event(self, shape: Shape) -> UpstreamEvent:
        """Return the content of an event that is no error and no noise."""

    @abstractmethod
    def _texts(self, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the members of an event that have text: the object and the member's name."""

    def splitter(self, event_bytes: int) -> Splitter:
        """Return a splitter of one stream."""
        return EventSplitter(event_bytes)

    def split(self, events: bytes) -> list[bytes]:
        """Return the events in joined ones, each with its end."""
        return split_events(events)

    def read_plain(self, events: bytes) -> tuple[int, list[str]] | None:  # noqa: ARG002  # of the interface
        """Return the choice and the text of each event, if they are only text of one choice; else None."""
        return None

    def read_event(self, event: bytes) -> UpstreamEvent:
        """Return the content of an event of a stream, whatever it contains."""
        found = self.sort(event)
        return found if isinstance(found, UpstreamEvent) else self._event(found)

    def sort(self, event: bytes) -> Shape | UpstreamEvent:
        """Return the members of an event that is a part of the answer, else what it is instead.

        That is `NOTHING` for a comment, `DONE` for the end, `NOISE` if it says nothing, `UNKNOWN` if it
        cannot be read, or an error.
        """
        payload = self._payload(event)
        if payload is None:
            return self._without_data(event)
        if payload == END_MARK:
            return DONE
        shape: Shape | None = decoded(self._decode_event, payload)
        if shape is None:
            if not _says_nothing(payload, self.contents):
                return UNKNOWN
        elif shape.error and is_error(shape.error):  # nearly all have none
            return UpstreamEvent(error=error_of(shape.error, payload))
        elif shape.type == "error":
            return UpstreamEvent(error=error_of(payload))
        elif not self._is_noise(shape):
            return shape
        error = unnamed_error(event, payload)
        return NOISE if error is None else UpstreamEvent(error=error)

    def _payload(self, event: bytes) -> bytes | None:
        """Return the data of an event; None if it has none."""
        return event_data(event)

    def _without_data(self, event: bytes) -> UpstreamEvent:
        """Return what an event without data is: some clients try to read the data of all but comments."""
        if (text := event_error(event)) is not None:
            return UpstreamEvent(error=error_of(text))
        return NOTHING if is_comment(event) else NOISE

    def repair(self, event: bytes) -> list[bytes]:
        """Return an odd event as usual ones: each has one choice at most, and no unknown finish reason."""
        return [event]

    def without_end(self, event: bytes) -> bytes:
        """See `UpstreamReader`. Most dialects have an event of its own for the end of an answer."""
        return event

    def only_end(self, event: bytes) -> bytes:  # noqa: ARG002  # of the interface
        """Return an event like this one in which the choice ends: as it says, or else by itself."""
        return b""

    def read_response(self, body: bytes) -> UpstreamAnswer:
        """Return the content of a whole response."""
        shape = decoded(self._decode_response, body)
        if shape is None:
            raise ValueError("no JSON object")
        if is_error(shape.error) and shape.content in _NO_CONTENT:
            return UpstreamAnswer(error=error_of(shape.error, body))
        return UpstreamAnswer(generated_tokens(shape.usage), len(shape.content))

    def without_beginning(self, event: bytes, text: str) -> bytes:
        """Return an event with its text cut to `text`, its last part."""
        document = self._document(event)
        members = list(self._texts(document))
        if len(members) != 1:
            raise ValueError("several pieces of text in one event")
        holder, name = members[0]
        assert holder[name].endswith(text)
        holder[name] = text
        return self._write_anew(event, document)

    def _document(self, event: bytes) -> dict[str, Any]:
        """Return the data of an event as an object; an empty one if it is anything else."""
        document = decoded(_decode_any, self._payload(event) or b"{}")
        return document if isinstance(document, dict) else {}

    def _write_anew(self, event: bytes, document: dict[str, Any]) -> bytes:
        """Return an event with other data. Raises `ValueError` if it cannot be written."""
        try:
            return self._with_data(event, _encode(document))
        except (OverflowError, RecursionError) as error:
            raise ValueError("an event that cannot be written anew") from error

    def _with_data(self, event: bytes, data: bytes) -> bytes:
        return event[: max(0, event.find(b"data:"))] + encode_event(data)


class TypedReader(EventReader[Shape]):
    """A reader of events that have a `type`, all for one choice.

    prefixes: How the types of the dialect begin. Others without text are noise.
    beginnings: The types that precede all text.
    ends: The types that end the answer, with the reason.
    """

    prefixes: ClassVar[tuple[str, ...]]
    beginnings: ClassVar[frozenset[str]]
    ends: ClassVar[dict[str, str]]

    @abstractmethod
    def _text(self, shape: Shape) -> str:
        """Return all generated text in an event."""

    def _usage(self, shape: Shape) -> msgspec.Raw:
        return shape.usage

    def _is_noise(self, shape: Shape) -> bool:
        # What has text is relayed, whatever it is called.
        return shape.type is None or not (shape.type.startswith(self.prefixes) or self._text(shape))

    def _event(self, shape: Shape) -> UpstreamEvent:
        assert shape.type is not None
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


def _says_nothing(payload: bytes, members: tuple[str, ...]) -> bool:
    """Return whether the data of an event is no object, or an object without any of these members.

    An object that cannot be read is not noise: it may be a part of the answer.
    """
    if not payload.startswith(b"{"):
        return True
    given = decoded(_decode_members, payload)
    return given is not None and not any(is_given(given.get(name, ABSENT)) for name in members)
