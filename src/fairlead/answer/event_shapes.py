"""The members of other servers' responses that are read, and their decoders.

One shape covers the chunks of chat and text completions, the events of Responses and of Anthropic's Messages.
A member is `Raw`, and decoded on its own, where a wrong type must not make the rest unreadable.
"""

import msgspec

ABSENT = msgspec.Raw()


class EventFunction(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class EventCall(msgspec.Struct, gc=False):
    function: EventFunction | None = None


class EventPiece(msgspec.Struct, gc=False):
    """A chat chunk's `delta`, or the `delta` of a Messages event."""

    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    content: str | None = None
    refusal: str | None = None
    text: str | None = None
    partial_json: str | None = None
    tool_calls: list[EventCall] | None = None
    stop_reason: str | None = None


class EventChoice(msgspec.Struct, gc=False):
    index: int = 0
    delta: EventPiece | None = None
    text: str | None = None
    finish_reason: str | None = None


class EventUsage(msgspec.Struct, gc=False):
    completion_tokens: msgspec.Raw = ABSENT
    output_tokens: msgspec.Raw = ABSENT


class EventResponse(msgspec.Struct, gc=False):
    usage: msgspec.Raw = ABSENT


class EventShape(msgspec.Struct, gc=False):
    """An event of a stream."""

    choices: list[EventChoice] | None = None
    type: str | None = None
    delta: str | EventPiece | None = None
    usage: msgspec.Raw = ABSENT
    response: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    message: msgspec.Raw = ABSENT


class WholeShape(msgspec.Struct, gc=False):
    """A response that is not streamed; its generated content is in `choices`, `content` or `output`."""

    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    choices: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT
    output: msgspec.Raw = ABSENT


class EventReason(msgspec.Struct):
    message: str


decode_event = msgspec.json.Decoder(EventShape).decode
decode_events = msgspec.json.Decoder(list[EventShape]).decode
decode_usage = msgspec.json.Decoder(EventUsage).decode
decode_response = msgspec.json.Decoder(EventResponse).decode
decode_whole = msgspec.json.Decoder(WholeShape).decode
decode_reason = msgspec.json.Decoder(EventReason).decode
decode_text = msgspec.json.Decoder(str).decode
decode_any = msgspec.json.Decoder().decode
encode = msgspec.json.Encoder().encode
