"""Whole responses in OpenAI's Responses API, and their items, as in `dialects/shapes.py`."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Text of the model's reasoning."""

    text: str


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text of a message. `logprobs`: its tokens, if requested."""

    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The model's reasoning.

    id: The item's id.
    status: Whether it is complete.
    summary: Always empty.
    content: Its text, in one part; empty at its beginning.
    """

    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the model.

    id: The item's id.
    status: Whether it is complete.
    role: Always the assistant's.
    content: Its text, in one part; empty at its beginning.
    """

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a function.

    id: The item's id.
    status: Whether it is complete.
    call_id: The call's id. Its result is sent as an item `function_call_output` with the same one.
    name: The function.
    arguments: Its arguments as JSON in a string; empty at its beginning.
    namespace: The namespace of the function; absent if it has none.
    """

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


OutputItem = ReasoningItem | MessageItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: tokens of the input that were in the KV cache. Keeping others there costs nothing."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """`reasoning_tokens`: tokens of the output that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts.

    input_tokens: Tokens of the input, with those of the responses that it continues.
    input_tokens_details: How many of these were cached.
    output_tokens: Tokens of the output, with those of its reasoning.
    output_tokens_details: How many of these are reasoning.
    total_tokens: The sum of both.
    """

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFault(msgspec.Struct, frozen=True):
    """Why a response failed.

    code: One of OpenAI's few codes.
    message: For people.
    param: The field at fault; None: none is.
    type: Our own kind of the error.
    """

    code: str
    message: str
    param: str | None
    type: str


class ConversationId(msgspec.Struct, frozen=True):
    """A conversation by its id."""

    id: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response. The members from `background` on repeat the request, with its defaults.

    id: The response's id.
    object: The kind of this object.
    created_at: Its time, in seconds since 1970.
    completed_at: When its answer was complete, in seconds since 1970; None: it is not.
    status: Whether it is complete.
    error: Why it failed; None: it did not.
    incomplete_details: Why it was cut; None: it was not.
    model: The model that answers.
    output: The items of the answer.
    usage: Token counts; None until the answer has begun.
    temperature: The temperature of sampling.
    top_p: The probability of the tokens among which one is chosen.
    presence_penalty: What a token loses that the answer has.
    frequency_penalty: What it loses for each time that the answer has it.
    background: Whether it is generated without its client.
    conversation: The conversation that it continues.
    instructions: A system message.
    max_output_tokens: The most tokens of the output.
    max_tool_calls: Has no effect: the client executes all calls.
    metadata: Texts of the client.
    parallel_tool_calls: Whether there may be several calls.
    previous_response_id: The response that it continues.
    prompt_cache_key: Has no effect.
    reasoning: The effort of the reasoning.
    safety_identifier: A user of the client.
    service_tier: Always the default.
    store: Whether it is kept.
    text: The form of the text.
    tool_choice: Which tools may be called.
    tools: The tools.
    top_logprobs: How many alternatives each token has.
    truncation: Whether old turns may be left out.
    user: A user of the client.
    """

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    background: bool
    conversation: ConversationId | None
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
    truncation: Literal["auto", "disabled"]
    user: str | None


class CountedInput(msgspec.Struct, frozen=True):
    """The number of tokens of an input, with the instructions, the tools and the earlier turns."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactedResponse(msgspec.Struct, frozen=True):
    """A conversation as the messages of its user, and a compaction: a summary, which only servers read.

    id: The job's id.
    object: The kind of this object.
    created_at: Its time, in seconds since 1970.
    output: The items, to be sent as the beginning of a later input.
    usage: The token counts of the summary.
    """

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


class ConversationObject(msgspec.Struct, frozen=True):
    """A conversation, without its items.

    id: Its id.
    object: The kind of this object.
    created_at: Its time, in seconds since 1970.
    metadata: Texts of the client.
    """

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(msgspec.Struct, frozen=True):
    """A conversation that is no longer kept."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: bool


class DeletedResponse(msgspec.Struct, frozen=True):
    """A response that is no longer kept."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItemList(msgspec.Struct, frozen=True):
    """Items of a response's input.

    object: The kind of this object.
    data: The items.
    first_id: The id of the first; None: there is none.
    last_id: The id of the last; None: there is none.
    has_more: There are more after the last.
    """

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
