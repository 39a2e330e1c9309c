"""Reads the chats of servers with OpenAI's API completely, so that they can be translated.

Stricter than the readers of relayed answers, which are passed on unchanged: here, what is ignored is lost.
"""

import msgspec

from fairlead.answer.reported import decoded, is_given, token_count
from fairlead.api.dialects.event_reader import ABSENT, error_of, is_noise
from fairlead.api.dialects.openai_events import ChunkReader, finish_of
from fairlead.http.server_sent_events import event_data
from fairlead.upstream_events import UpstreamCall, UpstreamChat, UpstreamChoice, UpstreamUsage


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    """A whole message, or the piece of it in a chunk. Servers have three names for the reasoning."""

    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct, gc=False):
    """`stop_reason`, of vLLM: the stop string or the id of the token that ended the choice."""

    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    stop_reason: msgspec.Raw = ABSENT


class _Chat(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: msgspec.Raw = ABSENT


class _CompletionDetails(msgspec.Struct, gc=False):
    reasoning_tokens: msgspec.Raw = ABSENT


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: msgspec.Raw = ABSENT
    completion_tokens: msgspec.Raw = ABSENT
    prompt_tokens_details: msgspec.Raw = ABSENT
    completion_tokens_details: msgspec.Raw = ABSENT


_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_usage = msgspec.json.Decoder(_Usage).decode
_decode_prompt = msgspec.json.Decoder(_PromptDetails).decode
_decode_completion = msgspec.json.Decoder(_CompletionDetails).decode
_decode_text = msgspec.json.Decoder(str).decode


class OpenAIChatReader:
    """The `ChatReader` of all servers with this API."""

    def read_event(self, event: bytes) -> UpstreamChat:
        """See `ChatReader`."""
        payload = event_data(event)
        if payload is None:
            return UpstreamChat()
        if payload == b"[DONE]":
            return UpstreamChat(is_end=True)
        shape = decoded(_decode_chat, payload)
        if shape is None and not is_noise(payload, ChunkReader.contents):
            raise ValueError("an event that is no chunk of a chat")
        return UpstreamChat() if shape is None else _chat(shape)

    def read_response(self, body: bytes) -> UpstreamChat:
        """See `ChatReader`."""
        shape = decoded(_decode_chat, body)
        if shape is None:
            raise ValueError("no chat completion")
        chat = _chat(shape)
        if chat.error is None and not chat.choices:
            raise ValueError("a chat completion without choices")
        return chat


def _chat(shape: _Chat) -> UpstreamChat:
    if is_given(shape.error):
        return UpstreamChat(error=error_of(shape.error))
    return UpstreamChat(tuple(map(_choice, shape.choices or ())), _usage(shape.usage))


def _choice(choice: _Choice) -> UpstreamChoice:
    message = choice.delta or choice.message or _Message()
    return UpstreamChoice(
        choice.index,
        message.reasoning_content or message.reasoning or message.thinking or "",
        (message.content or "") + (message.refusal or ""),
        tuple(
            _call(call, None if choice.message is None else at)
            for at, call in enumerate(message.tool_calls or ())
        ),
        finish_of(choice.finish_reason),
        decoded(_decode_text, choice.stop_reason) if is_given(choice.stop_reason) else None,
    )


def _call(call: _Call, place: int | None) -> UpstreamCall:
    """Return a call, or a piece of one; `place` is that of a whole call in its message."""
    function = call.function or _Function()
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
