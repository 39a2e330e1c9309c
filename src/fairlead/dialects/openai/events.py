"""Reads the chunks and whole responses of servers with OpenAI's chat completions or completions."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from fairlead.base.reported import decoded, is_given
from fairlead.base.upstream_events import UpstreamEvent
from fairlead.dialects.event_reader import (
    ABSENT,
    EventReader,
    EventShape,
    ResponseShape,
    generated_tokens,
    objects,
    text_members,
)

# Reasons of other servers, too: Mistral, Anthropic, TGI, DeepSeek, Gemini, llama.cpp.
_CUT_SHORT = frozenset({"length", "max_tokens", "max_output_tokens", "model_length", "MAX_TOKENS"})
_CALLED = frozenset({"tool_calls", "function_call", "tool_use"})
_STOPPED = frozenset(
    {
        *("stop", "eos", "eos_token", "end_turn", "stop_sequence", "content_filter", "stopped", "STOP"),
        *("insufficient_system_resource", "SAFETY", "refusal", "abort", "error", "cancelled"),
    }
)
_IN_CHOICE = ("text",)
_IN_PIECE = ("reasoning_content", "reasoning", "thinking", "content", "refusal", "text")
_IN_FUNCTION = ("name", "arguments")


def finish_of(reason: str | None) -> Literal["stop", "length", "tool_calls"] | None:
    """Return why a choice ended; None if this does not end it, as an empty or an unknown word."""
    if reason in _STOPPED:
        return "stop"
    if reason in _CUT_SHORT:
        return "length"
    return "tool_calls" if reason in _CALLED else None


class ChunkFunction(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class ChunkCall(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: ChunkFunction | None = None


class ChunkPiece(msgspec.Struct, gc=False):
    """A chat chunk's `delta`, or a whole chat's `message`. Each member may be absent.

    reasoning_content: The reasoning, as vLLM names it.
    reasoning: The reasoning, as OpenRouter names it.
    thinking: The reasoning, as others name it.
    content: The text for the user.
    refusal: Such a text that refuses.
    text: Such a text, as some servers name it.
    tool_calls: Calls, or pieces of them.
    """

    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    content: str | None = None
    refusal: str | None = None
    text: str | None = None
    tool_calls: list[ChunkCall] | None = None

    @property
    def thoughts(self) -> str:
        """The reasoning. Some servers have it under two names."""
        return self.reasoning_content or self.reasoning or self.thinking or ""

    @property
    def words(self) -> str:
        """The text for the user."""
        return (self.content or "") + (self.refusal or "") + (self.text or "")

    @property
    def has_output(self) -> bool:
        """Whether anything was generated for it."""
        return bool(self.thoughts or self.words or self.tool_calls)


class ChunkChoice(msgspec.Struct, gc=False):
    """A choice of a chunk, or of a whole answer.

    index: Its number.
    delta: A piece of a chat's message.
    message: A whole message of a chat.
    text: Text of a completion.
    finish_reason: Why it ended, in any server's words.
    stop_reason: Of vLLM: the stop string or the id of the token that ended it.
    """

    index: int = 0
    delta: ChunkPiece | None = None
    message: ChunkPiece | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: msgspec.Raw = ABSENT


class ChunkShape(EventShape, gc=False):
    """A chunk of any server, for relays, translations, and the clients of our commands."""

    choices: list[ChunkChoice] | None = None


class CompletionShape(ResponseShape, gc=False):
    content: msgspec.Raw = msgspec.field(name="choices", default=ABSENT)


_decode_chunks = msgspec.json.Decoder(list[ChunkShape]).decode


class ChunkReader(EventReader[ChunkShape]):
    """The reader of both dialects."""

    shape = ChunkShape
    contents = ("choices", "usage", "error")
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

    def _is_noise(self, shape: ChunkShape) -> bool:
        return not shape.choices and not is_given(shape.usage)

    def _event(self, shape: ChunkShape) -> UpstreamEvent:
        generated = generated_tokens(shape.usage)
        if not shape.choices:
            is_odd = shape.choices is None
            return UpstreamEvent(is_beginning=not generated, generated=generated, is_odd=is_odd)
        choice = shape.choices[0]
        piece = choice.delta
        text = choice.text or ""
        if piece is not None:
            # Nearly all chunks have content and nothing else.
            text = piece.content or ""
            if not text or _has_more(piece):
                text = _text(piece)
        finished = finish_of(choice.finish_reason)
        return UpstreamEvent(
            choice.index,
            text,
            "stop" if finished == "tool_calls" else finished,
            is_beginning=not text and not finished,
            generated=generated,
            is_odd=len(shape.choices) > 1 or (finished is None and choice.finish_reason is not None),
        )

    def repair(self, event: bytes) -> list[bytes]:
        """See `UpstreamReader`. Usage comes with the last choice."""
        document = self._document(event)
        choices = objects(document.get("choices"))
        for choice in choices:
            if not _is_end(choice.get("finish_reason")):
                choice["finish_reason"] = None
        before = {name: value for name, value in document.items() if name != "usage"}
        documents = [{**before, "choices": [choice]} for choice in choices[:-1]]
        documents.append({**document, "choices": choices[-1:]})
        try:
            return [self._write_anew(event, each) for each in documents]
        except ValueError:
            return [event]

    def without_end(self, event: bytes) -> bytes:
        """Return an event without the finish reason of its choice."""
        return self._change(event, _remove_end) or event

    def only_end(self, event: bytes) -> bytes:
        """Return an event like this one in which the choice ends: as it says, or else by itself."""
        return self._change(event, _leave_only_end)

    def _change(self, event: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
        """Return an event with its choice changed; empty if it has none, or cannot be written anew."""
        document = self._document(event)
        choices = objects(document.get("choices"))
        if not choices:
            return b""
        change(choices[0])
        try:
            return self._write_anew(event, document)
        except ValueError:
            return b""

    def _texts(self, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        for choice in objects(document.get("choices")):
            yield from text_members(choice, _IN_CHOICE)
            piece = choice.get("delta")
            yield from text_members(piece, _IN_PIECE)
            for call in objects(piece.get("tool_calls") if isinstance(piece, dict) else None):
                yield from text_members(call.get("function"), _IN_FUNCTION)


def _remove_end(choice: dict[str, Any]) -> None:
    choice["finish_reason"] = None


def _leave_only_end(choice: dict[str, Any]) -> None:
    for name, empty in (("delta", {}), ("text", "")):
        if name in choice:
            choice[name] = empty
    if not _is_end(choice.get("finish_reason")):
        choice["finish_reason"] = "stop"


def _is_end(reason: Any) -> bool:
    return isinstance(reason, str) and finish_of(reason) is not None


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
    return bool(
        piece.tool_calls
        or piece.reasoning
        or piece.reasoning_content
        or piece.refusal
        or piece.thinking
        or piece.text
    )


def _text(piece: ChunkPiece) -> str:
    functions = [call.function for call in piece.tool_calls or () if call.function is not None]
    calls = "".join((function.name or "") + (function.arguments or "") for function in functions)
    return piece.thoughts + piece.words + calls
