"""Reads the chunks and whole responses of servers with OpenAI's chat completions or completions."""

from collections.abc import Iterator
from typing import Any

import msgspec

from fairlead.answer.reported import decoded, is_given
from fairlead.api.dialects.event_reader import (
    ABSENT,
    UNKNOWN,
    EventReader,
    EventShape,
    ResponseShape,
    generated_tokens,
    objects,
    text_members,
)
from fairlead.upstream_events import UpstreamEvent

# Reasons of other servers, too.
CUT_SHORT = frozenset({"length", "max_tokens", "max_output_tokens"})
_IN_CHOICE = ("text",)
_IN_PIECE = ("reasoning_content", "reasoning", "thinking", "content", "refusal", "text")
_IN_FUNCTION = ("name", "arguments")


class ChunkFunction(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class ChunkCall(msgspec.Struct, gc=False):
    function: ChunkFunction | None = None


class ChunkPiece(msgspec.Struct, gc=False):
    """A chat chunk's `delta`. Some servers repeat `reasoning_content` as `reasoning`."""

    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    content: str | None = None
    refusal: str | None = None
    text: str | None = None
    tool_calls: list[ChunkCall] | None = None


class ChunkChoice(msgspec.Struct, gc=False):
    index: int = 0
    delta: ChunkPiece | None = None
    text: str | None = None
    finish_reason: str | None = None


class ChunkShape(EventShape, gc=False):
    choices: list[ChunkChoice] | None = None


class CompletionShape(ResponseShape, gc=False):
    content: msgspec.Raw = msgspec.field(name="choices", default=ABSENT)


_decode_chunks = msgspec.json.Decoder(list[ChunkShape]).decode


class ChunkReader(EventReader[ChunkShape]):
    """The reader of both dialects."""

    shape = ChunkShape
    response_shape = CompletionShape

    def read_plain(self, events: bytes) -> tuple[int, list[str]] | None:
        """See `UpstreamReader`.

        Nearly all reads of a stream are plain, and reading all events at once takes a third of the time.
        """
        if not (events.startswith(b"data: {") and events.endswith(b"}\n\n")):
            return None
        count = events.count(b"\n\ndata: ") + 1
        # JSON strings have no raw line ends. A separator inside one leads to invalid JSON or too few shapes.
        shapes = decoded(_decode_chunks, b"[" + events[6:-2].replace(b"\n\ndata: ", b",") + b"]")
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

    def _event(self, shape: ChunkShape) -> UpstreamEvent:
        if shape.choices is None:
            return UNKNOWN
        generated = generated_tokens(shape.usage)
        if not shape.choices:
            return UpstreamEvent(is_beginning=not generated, generated=generated)
        choice = shape.choices[0]
        piece = choice.delta
        text = choice.text or ""
        if piece is not None:
            # Nearly all chunks have content and nothing else.
            text = piece.content or ""
            if not text or _has_more(piece):
                text = _text(piece)
        finished = choice.finish_reason
        if finished is not None:
            finished = "length" if finished in CUT_SHORT else "stop"
        is_beginning = not text and not finished
        return UpstreamEvent(choice.index, text, finished, is_beginning, generated=generated)

    def _texts(self, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        for choice in objects(document.get("choices")):
            yield from text_members(choice, _IN_CHOICE)
            piece = choice.get("delta")
            yield from text_members(piece, _IN_PIECE)
            for call in objects(piece.get("tool_calls") if isinstance(piece, dict) else None):
                yield from text_members(call.get("function"), _IN_FUNCTION)


def _plain_text(shape: ChunkShape, index: int) -> str | None:
    if shape.choices is None or len(shape.choices) != 1 or is_given(shape.usage) or is_given(shape.error):
        return None
    choice = shape.choices[0]
    if choice.index != index or choice.finish_reason is not None:
        return None
    if choice.delta is None:
        return choice.text
    return None if _has_more(choice.delta) else choice.delta.content


def _has_more(piece: ChunkPiece) -> bool:
    """Return whether a piece has anything but content."""
    return bool(piece.tool_calls or piece.reasoning or piece.reasoning_content or piece.refusal)


def _text(piece: ChunkPiece) -> str:
    functions = [call.function for call in piece.tool_calls or () if call.function is not None]
    parts = [piece.reasoning_content or piece.reasoning, piece.thinking, piece.content, piece.refusal]
    parts += [piece.text, *(part for function in functions for part in (function.name, function.arguments))]
    return "".join(part for part in parts if part)
