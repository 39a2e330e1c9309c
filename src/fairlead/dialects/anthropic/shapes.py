"""Whole responses in Anthropic's API, as in `dialects/shapes.py`."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class GeneratedThinking(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """The model's reasoning."""

    thinking: str
    signature: str


class GeneratedText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text that the model generated."""

    text: str


class GeneratedToolUse(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the model generated."""

    id: str
    name: str
    input: dict[str, Any]


Block = GeneratedThinking | GeneratedText | GeneratedToolUse


class ThinkingTokens(msgspec.Struct, frozen=True):
    """`thinking_tokens`: tokens of the answer that are reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """Token counts.

    input_tokens: Tokens of the prompt that were computed.
    cache_creation_input_tokens: Always 0: keeping them in the cache costs nothing.
    cache_read_input_tokens: Tokens of the prompt that were in the KV cache.
    output_tokens: Tokens of the answer, with those of its reasoning.
    output_tokens_details: Absent unless the answer is divided into reasoning, text and calls.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class AnthropicMessage(msgspec.Struct, frozen=True):
    """An answer.

    id: The job's id.
    type: The kind of this object.
    role: Always the assistant's.
    model: The model that answered.
    content: The blocks, at least one.
    stop_reason: Why it ended; None at the beginning of a stream.
    stop_sequence: The stop string that ended it; None: none did.
    usage: Token counts.
    """

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(msgspec.Struct, frozen=True):
    """The number of tokens of a prompt."""

    input_tokens: int
