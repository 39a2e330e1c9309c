"""What another server's answer says, as far as we must know: a stream's events, and what a whole body used.

One shape takes the chunks of chat and text completions, the events of Responses and of Anthropic's Messages.
What it does not know it passes by: an event's bytes are the truth, this is a look at them.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

_LINE_END = re.compile(rb"\r\n|\n|\r")

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
_CUT_SHORT = frozenset({"length", "max_tokens", "max_output_tokens", "response.incomplete"})


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, gc=False):
    function: _Function | None = None


class _Piece(msgspec.Struct, gc=False):
    """A chat chunk's `delta`, or the `delta` of a Messages event."""

    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    content: str | None = None
    refusal: str | None = None
    text: str | None = None
    partial_json: str | None = None
    tool_calls: list[_Call] | None = None
    stop_reason: str | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Piece | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def generated(self) -> int:
        return self.completion_tokens or self.output_tokens or 0


class _Response(msgspec.Struct, gc=False):
    usage: _Usage | None = None


class _Shape(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    type: str | None = None
    delta: str | _Piece | None = None
    usage: _Usage | None = None
    response: _Response | None = None
    error: Any = None
    message: Any = None


class Event(msgspec.Struct, frozen=True, gc=False):
    """What one event says. `index` is its (first) choice, None if it has none.

    `text` is all that was generated, of any kind. `finished` is why the choice ended ("stop" or "length", as
    far as we tell them apart). `is_beginning`: it comes before anything was generated and says nothing that
    has to be hurried on. `is_end`: the whole answer is there. `is_known`: we can tell what it says.
    """

    index: int | None = None
    text: str = ""
    finished: str | None = None
    is_beginning: bool = False
    is_end: bool = False
    is_known: bool = True
    generated: int = 0
    error: str | None = None


NOTHING = Event(is_beginning=True)
UNKNOWN = Event(is_known=False)
DONE = Event(is_end=True)

_decode = msgspec.json.Decoder(_Shape).decode
_decode_list = msgspec.json.Decoder(list[_Shape]).decode
_encode = msgspec.json.Encoder().encode


def read_plain(events: bytes) -> tuple[int, list[str]] | None:
    """Return the choice and what each event says, if they are nothing but text of one choice; else None.

    Nearly all reads of a stream are, and to read them at once takes a third of the time.
    """
    if not (events.startswith(b"data: {") and events.endswith(b"}\n\n")):
        return None
    count = events.count(b"\n\ndata: ") + 1
    try:
        # No string in JSON has a line end in it, so what is not between two events makes this no JSON.
        shapes = _decode_list(b"[" + events[6:-2].replace(b"\n\ndata: ", b",") + b"]")
    except msgspec.MsgspecError:
        return None
    if len(shapes) != count or not shapes[0].choices:
        return None
    index = shapes[0].choices[0].index
    texts = []
    for shape in shapes:
        text = _plain_text(shape, index)
        if not text:
            return None
        texts.append(text)
    return index, texts


def _plain_text(shape: _Shape, index: int) -> str | None:
    if shape.choices is None or len(shape.choices) != 1 or shape.usage is not None or shape.error is not None:
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
    """Return what an event says; `NOTHING` for a comment, `UNKNOWN` for what we cannot read."""
    payload = _payload(event)
    if payload is None:
        return NOTHING
    if payload == b"[DONE]":
        return DONE
    try:
        shape = _decode(payload)
    except msgspec.MsgspecError:
        return UNKNOWN
    if shape.error is not None or shape.type == "error":
        return Event(error=_error_message(shape))
    if shape.choices is not None:
        return _chunk(shape, shape.choices)
    if shape.type is not None:
        return _typed(shape, shape.type)
    return UNKNOWN


def read_usage(body: bytes) -> int:
    """Return how many tokens a whole answer says it generated, 0 if it does not. Raises `ValueError`."""
    try:
        shape = msgspec.json.decode(body, type=_WholeShape)
    except msgspec.ValidationError:
        return 0
    except msgspec.DecodeError as error:
        raise ValueError("no JSON") from error
    return shape.usage.generated if shape.usage is not None else 0


def without_beginning(event: bytes, text: str) -> bytes:
    """Return an event with `text` instead of what it says, which ends with it. All else stays.

    Raises `ValueError` if it says it in several pieces.
    """
    document = msgspec.json.decode(_payload(event) or b"{}")
    places = list(_texts(document))
    if len(places) != 1:
        raise ValueError("several pieces of text in one event")
    holder, name = places[0]
    assert holder[name].endswith(text)
    holder[name] = text
    name_line = event[: event.find(b"data:")]
    return name_line + b"data: " + _encode(document) + b"\n\n"


class _WholeShape(msgspec.Struct, gc=False):
    usage: _Usage | None = None


def _payload(event: bytes) -> bytes | None:
    """Return the data of an event; None if it has none."""
    if event.startswith(b"data: {") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    event = event.strip(b"\r\n")
    if event.startswith(b"data:") and b"\n" not in event and b"\r" not in event:
        return event[5:].strip()
    lines = [line for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines).strip() if lines else None


def _chunk(shape: _Shape, choices: list[_Choice]) -> Event:
    generated = shape.usage.generated if shape.usage is not None else 0
    if not choices:
        return Event(is_beginning=not generated, generated=generated)
    choice = choices[0]
    piece = choice.delta
    text = choice.text or ""
    if piece is not None:
        # Nearly all chunks have content and nothing else.
        text = piece.content or ""
        if not text or piece.tool_calls or piece.reasoning or piece.reasoning_content or piece.refusal:
            text = _said(piece)
    finished = choice.finish_reason
    if finished is not None:
        finished = "length" if finished in _CUT_SHORT else "stop"
    return Event(choice.index, text, finished, is_beginning=not text and not finished, generated=generated)


def _typed(shape: _Shape, kind: str) -> Event:
    piece, text = shape.delta, ""
    if isinstance(piece, str):
        text = piece
    elif piece is not None:
        text = _said(piece)
    usage = shape.usage or (shape.response.usage if shape.response is not None else None)
    finished = None
    if kind in _ENDS:
        finished = "length" if kind in _CUT_SHORT else "stop"
    return Event(
        0,
        text,
        finished,
        is_beginning=kind in _BEGINNINGS,
        is_end=kind in _ENDS,
        generated=usage.generated if usage is not None and kind not in _BEGINNINGS else 0,
    )


def _said(piece: _Piece) -> str:
    calls = [call.function for call in piece.tool_calls or () if call.function is not None]
    said = [piece.reasoning_content or piece.reasoning, piece.thinking, piece.content, piece.refusal]
    said += [piece.text, piece.partial_json]
    said += [part for function in calls for part in (function.name, function.arguments)]
    return "".join(part for part in said if part)


def _texts(document: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the places where an event says something."""
    if isinstance(document.get("delta"), str):
        yield document, "delta"
    holders = [document.get("delta")]
    for choice in document.get("choices") or ():
        holders += [choice, choice.get("delta")]
    for holder in [holder for holder in holders if isinstance(holder, dict)]:
        holders += [call.get("function") for call in holder.get("tool_calls") or ()]
    for holder in holders:
        for name in _SAYING:
            if isinstance(holder, dict) and isinstance(holder.get(name), str) and holder[name]:
                yield holder, name


_SAYING = (
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


def _error_message(shape: _Shape) -> str:
    error = shape.error if shape.error is not None else shape.message
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:200]
