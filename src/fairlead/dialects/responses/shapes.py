"""The types of responses in OpenAI's Responses API, for `/openapi.json`. See `shapes`."""

from typing import Any, Literal

import msgspec

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Text of the model's reasoning."""

    text: str


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text of a message. `logprobs`: its tokens, if requested."""

    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The model's reasoning."""

    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a function. Its result is sent as an item `function_call_output` of the same `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class InputTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: tokens of the input that were in the KV cache, and so not computed again."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """`reasoning_tokens`: tokens of the output that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFault(msgspec.Struct, frozen=True):
    """Why a response failed. `code` is one of OpenAI's, `type` our own."""

    code: str
    message: str
    param: str | None
    type: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response. Most members repeat the request, with its defaults. Times in seconds since 1970."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[ReasoningItem | MessageItem | FunctionCallItem]
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["disabled"]
    user: str | None


class DeletedResponse(msgspec.Struct, frozen=True):
    """A response that is no longer kept."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItemList(msgspec.Struct, frozen=True):
    """Items of a response's input. `has_more`: there are more after `last_id`."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
