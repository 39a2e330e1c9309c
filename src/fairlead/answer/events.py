"""Reads what accounting needs from other servers' responses: events of a stream, or a whole body.

Events are relayed as their original bytes; only `without_beginning` encodes one again.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from fairlead.answer.event_shapes import (
    ABSENT,
    EventChoice,
    EventPiece,
    EventShape,
    decode_any,
    decode_event,
    decode_events,
    decode_reason,
    decode_response,
    decode_text,
    decode_usage,
    decode_whole,
    encode,
)
from fairlead.answer.reported import EXCERPT_LENGTH, decoded, excerpt, is_given, token_count
from fairlead.http.server_sent_events import event_data

_BEGINNINGS = frozenset(
    {
        "message_start",
        "content_block_start",
        "ping",
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    }
)
_ENDS = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
_TRUNCATED = frozenset({"length", "max_tokens", "max_output_tokens", "response.incomplete"})


class Event(msgspec.Struct, frozen=True, gc=False):
    """The content of one event. `index` is its (first) choice, None if it has none.

    `text` is all generated text in it, of any kind. `finished` is why the choice ended: "length" if it was
    cut short, else "stop". `is_beginning`: it precedes all generated text, and need not be relayed at once.
    `is_end`: the answer is complete. `is_known`: the event could be read. `generated` is the reported number
    of tokens, unchecked; None if there is none.
    """

    index: int | None = None
    text: str = ""
    finished: str | None = None
    is_beginning: bool = False
    is_end: bool = False
    is_known: bool = True
    generated: int | None = None
    error: str | None = None


class WholeAnswer(msgspec.Struct, frozen=True, gc=False):
    """The content of a whole response. `generated` is the reported number of tokens, unchecked, or None.

    `content_bytes` is the size of the generated content as JSON; 0 if there is none, as for embeddings.
    `error` is the reason of a failure, if the response contains nothing else.
    """

    generated: int | None = None
    content_bytes: int = 0
    error: str | None = None


NOTHING = Event(is_beginning=True)
UNKNOWN = Event(is_known=False)
DONE = Event(is_end=True)


def read_plain(events: bytes) -> tuple[int, list[str]] | None:
    """Return the choice and the text of each event, if they are only text of one choice; else None.

    Nearly all reads of a stream are, and reading all events at once takes a third of the time.
    """
    if not (events.startswith(b"data: {") and events.endswith(b"}\n\n")):
        return None
    count = events.count(b"\n\ndata: ") + 1
    # JSON strings have no raw line ends. A separator inside one leads to invalid JSON or too few shapes.
    shapes = decoded(decode_events, b"[" + events[6:-2].replace(b"\n\ndata: ", b",") + b"]")
    if shapes is None or len(shapes) != count or not shapes[0].choices:
        return None
    index = shapes[0].choices[0].index
    texts = []
    for shape in shapes:
        text = _plain_text(shape, index)
        if not text:
            return None
        texts.append(text)
    return index, texts


def _plain_text(shape: EventShape, index: int) -> str | None:
    if shape.choices is None or len(shape.choices) != 1 or is_given(shape.usage) or is_given(shape.error):
        return None
    choice = shape.choices[0]
    if choice.index != index or choice.finish_reason is not None:
        return None
    piece = choice.delta
    if piece is None:
        return choice.text
    if piece.tool_calls or piece.reasoning or piece.reasoning_content or piece.refusal:
        return None
    return piece.content


def read_event(event: bytes) -> Event:
    """Return the content of an event; `NOTHING` for a comment, `UNKNOWN` if it cannot be read."""
    payload = event_data(event)
    if payload is None:
        return NOTHING
    if payload == b"[DONE]":
        return DONE
    shape = decoded(decode_event, payload)
    if shape is None:
        return UNKNOWN
    if is_given(shape.error) or shape.type == "error":
        return Event(error=_reason(shape.error if is_given(shape.error) else shape.message))
    if shape.choices is not None:
        return _chunk(shape, shape.choices)
    if shape.type is not None:
        return _typed(shape, shape.type)
    return UNKNOWN


def read_whole(body: bytes) -> WholeAnswer:
    """Return the content of a whole response. Raises `ValueError` if it is not a JSON object."""
    shape = decoded(decode_whole, body)
    if shape is None:
        raise ValueError("no JSON object")
    content_bytes = len(shape.choices) + len(shape.content) + len(shape.output)
    if is_given(shape.error) and not content_bytes:
        return WholeAnswer(error=_reason(shape.error))
    return WholeAnswer(_generated(shape.usage), content_bytes)


def without_beginning(event: bytes, text: str) -> bytes:
    """Return an event with its text cut to `text`, its last part. Everything else stays.

    Raises `ValueError` if its text is in several members, or if it cannot be encoded again.
    """
    document = decoded(decode_any, event_data(event) or b"{}")
    members = list(_texts(document)) if isinstance(document, dict) else []
    if len(members) != 1:
        raise ValueError("several pieces of text in one event")
    holder, name = members[0]
    assert holder[name].endswith(text)
    holder[name] = text
    name_line = event[: event.find(b"data:")]
    try:
        return name_line + b"data: " + encode(document) + b"\n\n"
    except (OverflowError, RecursionError) as error:
        raise ValueError("an event that cannot be encoded again") from error


def _chunk(shape: EventShape, choices: list[EventChoice]) -> Event:
    generated = _generated(shape.usage)
    if not choices:
        return Event(is_beginning=not generated, generated=generated)
    choice = choices[0]
    piece = choice.delta
    text = choice.text or ""
    if piece is not None:
        # Nearly all chunks have content and nothing else.
        text = piece.content or ""
        if not text or piece.tool_calls or piece.reasoning or piece.reasoning_content or piece.refusal:
            text = _generated_text(piece)
    finished = choice.finish_reason
    if finished is not None:
        finished = "length" if finished in _TRUNCATED else "stop"
    return Event(choice.index, text, finished, is_beginning=not text and not finished, generated=generated)


def _typed(shape: EventShape, kind: str) -> Event:
    piece, text = shape.delta, ""
    if isinstance(piece, str):
        text = piece
    elif piece is not None:
        text = _generated_text(piece)
    finished = None
    if kind in _ENDS:
        finished = "length" if kind in _TRUNCATED else "stop"
    return Event(
        0,
        text,
        finished,
        is_beginning=kind in _BEGINNINGS,
        is_end=kind in _ENDS,
        generated=None if kind in _BEGINNINGS else _generated(_usage_of(shape)),
    )


def _usage_of(shape: EventShape) -> msgspec.Raw:
    if is_given(shape.usage) or not is_given(shape.response):
        return shape.usage
    response = decoded(decode_response, shape.response)
    return ABSENT if response is None else response.usage


def _generated(usage: msgspec.Raw) -> int | None:
    """Return how many generated tokens `usage` reports; None if it reports none."""
    if not is_given(usage) or (shape := decoded(decode_usage, usage)) is None:
        return None
    of_openai = token_count(shape.completion_tokens)
    return token_count(shape.output_tokens) if of_openai is None else of_openai


def _generated_text(piece: EventPiece) -> str:
    calls = [call.function for call in piece.tool_calls or () if call.function is not None]
    texts = [piece.reasoning_content or piece.reasoning, piece.thinking, piece.content, piece.refusal]
    texts += [piece.text, piece.partial_json]
    texts += [part for function in calls for part in (function.name, function.arguments)]
    return "".join(part for part in texts if part)


def _texts(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the members of an event that have text: the object and the member's name."""
    if isinstance(document.get("delta"), str):
        yield document, "delta"
    holders = _objects([document.get("delta")])
    for choice in _objects(document.get("choices")):
        holders += [choice, *_objects([choice.get("delta")])]
    for holder in list(holders):
        holders += _objects([call.get("function") for call in _objects(holder.get("tool_calls"))])
    for holder in holders:
        for name in _TEXT_MEMBERS:
            if isinstance(holder.get(name), str) and holder[name]:
                yield holder, name


def _objects(members: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; empty if `members` is not a list."""
    return [member for member in members if isinstance(member, dict)] if isinstance(members, list) else []


_TEXT_MEMBERS = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "content",
    "refusal",
    "text",
    "partial_json",
    "name",
    "arguments",
)


def _reason(error: msgspec.Raw) -> str:
    """Return the message of an error, or the beginning of the error if it has none."""
    reason = decoded(decode_reason, error)
    text = decoded(decode_text, error) if reason is None else reason.message
    return excerpt(bytes(memoryview(error)[:EXCERPT_LENGTH]) if text is None else text)
