"""The types of Anthropic's responses, for `/openapi.json`, as in `dialects/shapes.py`."""

from typing import Any, Literal

import msgspec


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


class ThinkingTokens(msgspec.Struct, frozen=True):
    """`thinking_tokens`: tokens of the answer that are reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """Token counts. Those of the prompt that were in the KV cache are counted apart from the others."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = None


class AnthropicMessage(msgspec.Struct, frozen=True):
    """An answer in Anthropic's API: its blocks, and why it ended."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[GeneratedThinking | GeneratedText | GeneratedToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(msgspec.Struct, frozen=True):
    """The number of tokens of a prompt."""

    input_tokens: int
