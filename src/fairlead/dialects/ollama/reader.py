"""Reads the lines and whole responses of servers with Ollama's API."""

from collections.abc import Iterator
from typing import Any

import msgspec

from fairlead.base.formats.lines import LineSplitter, split_lines
from fairlead.base.reported import decoded, is_given, token_count
from fairlead.base.upstream_events import UpstreamAnswer, UpstreamEvent
from fairlead.dialects.event_reader import (
    ABSENT,
    NOISE,
    UNKNOWN,
    EventReader,
    EventShape,
    objects,
    text_members,
)
from fairlead.dialects.ollama.writer import LINES
from fairlead.dialects.upstream_errors import error_of, is_error

_TEXTS = ("thinking", "content", "response")


class LineFunction(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: msgspec.Raw = ABSENT


class LineCall(msgspec.Struct, gc=False):
    function: LineFunction | None = None


class LineMessage(msgspec.Struct, gc=False):
    thinking: str | None = None
    content: str | None = None
    tool_calls: list[LineCall] | None = None


class LineShape(EventShape, gc=False):
    """A line of a stream, or a whole response.

    response: A piece of a generated text.
    thinking: A piece of its reasoning.
    done: The answer is complete.
    done_reason: Why it ended.
    eval_count: Tokens of the answer.
    """

    response: str | None = None
    thinking: str | None = None
    done: bool = False
    done_reason: str | None = None
    eval_count: msgspec.Raw = ABSENT


_decode_message = msgspec.json.Decoder(LineMessage).decode


class LineReader(EventReader[LineShape]):
    """The reader of all of its routes. A line is an event."""

    shape = LineShape
    stream_type = LINES
    contents = ("message", "response", "thinking", "done", "error")

    def splitter(self, event_bytes: int) -> LineSplitter:
        """Return a splitter of one stream."""
        return LineSplitter(event_bytes)

    def split(self, events: bytes) -> list[bytes]:
        """Return the events in joined ones, each with its end."""
        return split_lines(events)

    def _payload(self, event: bytes) -> bytes | None:
        return event.strip() or None

    def _without_data(self, event: bytes) -> UpstreamEvent:  # noqa: ARG002  # of the interface
        return NOISE  # clients read every line

    def _with_data(self, event: bytes, data: bytes) -> bytes:  # noqa: ARG002  # a line has nothing else
        return data + b"\n"

    def read_response(self, body: bytes) -> UpstreamAnswer:
        """Return the content of a whole response."""
        shape = decoded(self._decode_event, body)
        if shape is None:
            raise ValueError("no JSON object")
        if is_error(shape.error):
            return UpstreamAnswer(error=error_of(shape.error, body))
        size = len(shape.message) + len((shape.response or "") + (shape.thinking or ""))
        return UpstreamAnswer(token_count(shape.eval_count), size)

    def _is_noise(self, shape: LineShape) -> bool:
        texts = (shape.response, shape.thinking)
        return not (shape.done or is_given(shape.message) or any(text is not None for text in texts))

    def _event(self, shape: LineShape) -> UpstreamEvent:
        message = decoded(_decode_message, shape.message) if is_given(shape.message) else LineMessage()
        if message is None:
            return UNKNOWN
        text = _text(message) + (shape.thinking or "") + (shape.response or "")
        if not shape.done:
            return UpstreamEvent(0, text, is_beginning=not text)
        finished = "length" if shape.done_reason == "length" else "stop"
        return UpstreamEvent(0, text, finished, is_end=True, generated=token_count(shape.eval_count))

    def _texts(self, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        yield from text_members(document, _TEXTS)
        message = document.get("message")
        yield from text_members(message, _TEXTS)
        for call in objects(message.get("tool_calls") if isinstance(message, dict) else None):
            # The name and the arguments of a call are two members, so it is never cut.
            yield from ((call, "function"), (call, "function"))


def _text(message: LineMessage) -> str:
    functions = [call.function for call in message.tool_calls or () if call.function is not None]
    calls = "".join(
        (function.name or "") + bytes(function.arguments).decode(errors="replace") for function in functions
    )
    return (message.thinking or "") + (message.content or "") + calls
