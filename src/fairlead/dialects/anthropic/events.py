"""Answers in Anthropic's Messages: as events of a stream, and as a whole. Does not know sockets.

A message is a list of blocks, of thinking, text and calls. Blocks are streamed one at a time, and the index
in an event is the block's position. The Python package of Anthropic relies on both.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET

from fairlead.base.errors import FairleadError
from fairlead.base.formats.server_sent_events import encode_event
from fairlead.base.job import Delta, Job
from fairlead.dialects.answer_events import AnswerEnd, AnswerEvent, AnswerEvents, CallEnd, TokenUsage
from fairlead.dialects.anthropic.shapes import (
    AnthropicMessage,
    Block,
    GeneratedText,
    GeneratedThinking,
    GeneratedToolUse,
    MessageUsage,
    StopReason,
    ThinkingTokens,
)
from fairlead.dialects.dialect import AnswerContext
from fairlead.dialects.openai.common import call_id
from fairlead.language.structured.pieces import CallArguments, CallBegin, Content, Reasoning
from fairlead.router.dispatch.estimates import WaitEstimate

PING_INTERVAL_S = 5.0
ID_PREFIX = "toolu"

BlockKind = Literal["thinking", "text", "tool_use"]

_encode = msgspec.json.Encoder().encode

# The types and members of deltas, by the kind of their block.
_DELTAS: dict[BlockKind, tuple[str, str]] = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageOptions(NamedTuple):
    """What writers of messages need of a request. `omits_thinking`: thinking blocks have no text."""

    omits_thinking: bool = False


class MessagePings:
    """`WaitingEvents` as pings, which may be sent at any time, also before the beginning of a message."""

    interval_s = PING_INTERVAL_S

    def write(self, waiting: WaitEstimate | None, model: str) -> bytes:  # noqa: ARG002  # of the interface
        """Return the event for now, once every `interval_s`; `waiting` is None if the job is not queued."""
        return _event("ping")

    def end(self) -> bytes:
        """Return the end of these events when the answer begins."""
        return b""


class MessageEvents:
    """An `AnswerWriter` of events. `fail` returns the event for an error."""

    def __init__(self, context: AnswerContext, fail: Callable[[FairleadError], bytes]) -> None:
        self.fail = fail
        self._context = context
        self._omits_thinking = (context.options or MessageOptions()).omits_thinking
        self._answer = AnswerEvents(context.job)
        self._has_begun = self._has_ended = self._has_call = False
        self._open: BlockKind | None = None
        self._blocks = 0
        self._head = b""
        self._end: AnswerEnd | None = None

    def write(self, deltas: list[Delta]) -> bytes:
        """Return the events for these deltas; empty if they have nothing to show yet."""
        # The usual case, one piece of the open text, is made fast: there is one for every token.
        if len(deltas) == 1 and self._open == "text" and _is_text(deltas[0]):
            self._answer.count(deltas[0])
            return self._delta(deltas[0].text)
        events = self._answer.of(deltas)
        written = [] if self._has_begun else [self._beginning()]
        written += map(self._write_event, events)
        return b"".join(written)

    def end(self) -> bytes:
        """Return the events that end a complete answer; empty if it has ended already."""
        if self._has_ended:
            return b""
        self._has_ended = True
        last = self._end_block() if self._blocks else self._begin_block("text", text="") + self._end_block()
        reason, sequence = stop_reason(self._end, has_call=self._has_call)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return last + _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def skip_beginnings(self) -> None:
        """See `AnswerWriter`. Only an answer of one text block can be continued."""
        if not self._has_begun:
            self._has_begun = True
            self._blocks = 1
            self._set_open("text")

    def _beginning(self) -> bytes:
        self._has_begun = True
        usage = message_usage(self._answer.usage._replace(completion_tokens=0))
        return _event("message_start", message=_message(self._context.job, [], usage, (None, None)))

    def _usage(self) -> MessageUsage:
        has_parts = self._context.job.parts is not None
        return message_usage(self._answer.usage, has_parts=has_parts)

    def _write_event(self, event: AnswerEvent) -> bytes:
        match event:
            case Reasoning(text):
                begun = self._continue_block("thinking", thinking="", signature="")
                return begun if self._omits_thinking else begun + self._delta(text)
            case Content(text):
                return self._continue_block("text", text="") + self._delta(text)
            case CallBegin(number, name):
                return self._begin_block("tool_use", id=_call_id(self._context, number), name=name, input={})
            case CallArguments(_, text):
                return self._delta(text)
            case CallEnd():
                self._has_call = True
                return self._end_block()
            case AnswerEnd():
                self._end = event
        return b""

    def _continue_block(self, kind: BlockKind, **members: Any) -> bytes:
        """Return the events that begin a block, if none of its kind is open."""
        return b"" if self._open == kind else self._begin_block(kind, **members)

    def _begin_block(self, kind: BlockKind, **members: Any) -> bytes:
        """Return the events that end the block before, and begin the next one."""
        closed = self._end_block()
        index = self._blocks
        self._blocks += 1
        self._set_open(kind)
        return closed + _event("content_block_start", index=index, content_block={"type": kind, **members})

    def _set_open(self, kind: BlockKind) -> None:
        self._open = kind
        delta, member = _DELTAS[kind]
        empty = _event("content_block_delta", index=self._blocks - 1, delta={"type": delta, member: ""})
        self._head = empty.removesuffix(b'""}}\n\n')

    def _delta(self, text: str) -> bytes:
        """Return the event for a piece of the open block; all but the text was encoded before."""
        return self._head + _encode(text) + b"}}\n\n"

    def _end_block(self) -> bytes:
        """Return the events that end the open block; empty if there is none."""
        if self._open is None:
            return b""
        index, signed = self._blocks - 1, b""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": _signature(self._context.job, index)}
            signed = _event("content_block_delta", index=index, delta=delta)
        self._open = None
        return signed + _event("content_block_stop", index=index)


def whole_message(context: AnswerContext, answer: Delta) -> bytes:
    """Return the body of a whole answer."""
    events = AnswerEvents(context.job)
    blocks: list[Block] = []
    arguments: list[str] = []
    end = None
    has_call = False
    for event in events.of([answer]):
        match event:
            case Reasoning(text):
                shown = "" if (context.options or MessageOptions()).omits_thinking else text
                signature = _signature(context.job, len(blocks))
                blocks.append(GeneratedThinking(shown, signature))
            case Content(text):
                blocks.append(GeneratedText(text))
            case CallBegin(_, name):
                arguments, called = [], name
            case CallArguments(_, text):
                arguments.append(text)
            case CallEnd(number):
                has_call = True
                call = GeneratedToolUse(_call_id(context, number), called, _input("".join(arguments)))
                blocks.append(call)
            case AnswerEnd():
                end = event
    usage = message_usage(events.usage, has_parts=context.job.parts is not None)
    reason = stop_reason(end, has_call=has_call)
    return _encode(_message(context.job, blocks or [GeneratedText("")], usage, reason))


def stop_reason(end: AnswerEnd | None, *, has_call: bool) -> tuple[StopReason, str | None]:
    """Return why the answer ended, and the stop string that ended it, if one did."""
    if end is not None and end.finish_reason == "length":
        return "max_tokens", None
    if has_call:
        return "tool_use", None
    if end is not None and isinstance(end.stop_reason, str):
        return "stop_sequence", end.stop_reason
    return "end_turn", None


def message_usage(counts: TokenUsage, *, has_parts: bool = False) -> MessageUsage:
    """Return the token counts. `has_parts`: the answer is divided into parts, of which thinking is one."""
    return MessageUsage(
        max(0, counts.prompt_tokens - counts.cached_tokens),
        0,
        counts.cached_tokens,
        counts.completion_tokens,
        ThinkingTokens(counts.reasoning_tokens) if has_parts else UNSET,
    )


def _is_text(delta: Delta) -> bool:
    return bool(delta.text) and not (delta.reasoning or delta.calls or delta.finish_reason)


def _message(
    job: Job, content: list[Block], usage: MessageUsage, reason: tuple[StopReason | None, str | None]
) -> AnthropicMessage:
    return AnthropicMessage(job.id, "message", "assistant", job.model, content, *reason, usage)


def _event(kind: str, **members: Any) -> bytes:
    return b"event: %s\n" % kind.encode() + encode_event(_encode({"type": kind, **members}))


def _call_id(context: AnswerContext, number: int) -> str:
    return call_id(context, 0, number, prefix=ID_PREFIX)


def _signature(job: Job, index: int) -> str:
    """Return a text that is not empty: some clients drop blocks without a signature. It proves nothing."""
    return blake2b(f"{job.id}/{index}".encode(), digest_size=24).hexdigest()


def _input(arguments: str) -> Any:
    """Return the arguments of a call as it has them; an empty object if they are cut, or are none."""
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return msgspec.Raw(arguments.encode()) if isinstance(decoded, dict) else {}
