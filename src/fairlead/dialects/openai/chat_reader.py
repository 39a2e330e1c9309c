"""Reads the chats of servers with OpenAI's API completely, so that they can be translated.

Stricter than the readers of relayed answers, which are passed on unchanged: here, what is ignored is lost.
"""

import msgspec

from fairlead.base.reported import decoded, is_given, token_count
from fairlead.base.upstream_events import UpstreamCall, UpstreamChat, UpstreamChoice, UpstreamUsage
from fairlead.dialects.event_reader import ABSENT
from fairlead.dialects.openai.events import (
    ChunkCall,
    ChunkChoice,
    ChunkFunction,
    ChunkPiece,
    ChunkReader,
    ChunkShape,
    finish_of,
)
from fairlead.dialects.upstream_errors import error_of, is_error


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: msgspec.Raw = ABSENT


class _CompletionDetails(msgspec.Struct, gc=False):
    reasoning_tokens: msgspec.Raw = ABSENT


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: msgspec.Raw = ABSENT
    completion_tokens: msgspec.Raw = ABSENT
    prompt_tokens_details: msgspec.Raw = ABSENT
    completion_tokens_details: msgspec.Raw = ABSENT


_decode_chat = msgspec.json.Decoder(ChunkShape).decode
_decode_usage = msgspec.json.Decoder(_Usage).decode
_decode_prompt = msgspec.json.Decoder(_PromptDetails).decode
_decode_completion = msgspec.json.Decoder(_CompletionDetails).decode
_decode_text = msgspec.json.Decoder(str).decode


class OpenAIChatReader:
    """The `ChatReader` of all servers with this API. What an event is, is the decision of `ChunkReader`."""

    def __init__(self) -> None:
        self._chunks = ChunkReader()

    def read_event(self, event: bytes) -> UpstreamChat:
        """Return the content of an event of a stream; a comment has none."""
        found = self._chunks.sort(event)
        if isinstance(found, ChunkShape):
            return _chat(found)
        if not found.is_known:
            raise ValueError("an event that is no chunk of a chat")
        return UpstreamChat(is_end=found.is_end, error=found.error)

    def read_response(self, body: bytes) -> UpstreamChat:
        """Return the content of a whole response."""
        shape = decoded(_decode_chat, body)
        if shape is None:
            raise ValueError("no chat completion")
        if is_error(shape.error):
            return UpstreamChat(error=error_of(shape.error, body))
        chat = _chat(shape)
        if not chat.choices:
            raise ValueError("a chat completion without choices")
        return chat


def _chat(shape: ChunkShape) -> UpstreamChat:
    return UpstreamChat(tuple(map(_choice, shape.choices or ())), _usage(shape.usage))


def _choice(choice: ChunkChoice) -> UpstreamChoice:
    message = choice.delta or choice.message or ChunkPiece(content=choice.text)
    return UpstreamChoice(
        choice.index,
        message.thoughts,
        message.words,
        tuple(
            _call(call, None if choice.message is None else at)
            for at, call in enumerate(message.tool_calls or ())
        ),
        finish_of(choice.finish_reason),
        decoded(_decode_text, choice.stop_reason) if is_given(choice.stop_reason) else None,
    )


def _call(call: ChunkCall, place: int | None) -> UpstreamCall:
    """Return a call, or a piece of one; `place` is that of a whole call in its message."""
    function = call.function or ChunkFunction()
    position = call.index if place is None else place
    return UpstreamCall(position, call.id, function.name, function.arguments or "")


def _usage(usage: msgspec.Raw) -> UpstreamUsage | None:
    if not is_given(usage) or (shape := decoded(_decode_usage, usage)) is None:
        return None
    prompt = decoded(_decode_prompt, shape.prompt_tokens_details) or _PromptDetails()
    completion = decoded(_decode_completion, shape.completion_tokens_details) or _CompletionDetails()
    return UpstreamUsage(
        token_count(shape.prompt_tokens),
        token_count(prompt.cached_tokens),
        token_count(shape.completion_tokens),
        token_count(completion.reasoning_tokens),
    )
