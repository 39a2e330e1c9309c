"""Requests of Anthropic's Messages: their fields, and what they request in the terms of no dialect."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fairlead.base.config import Limits
from fairlead.base.errors import InvalidRequest
from fairlead.dialects.anthropic.blocks import TextBlocks, Turns, conversation, tool_changes
from fairlead.dialects.anthropic.events import MessageOptions
from fairlead.dialects.anthropic.tools import (
    AnyChoice,
    CustomTool,
    CustomTools,
    JsonOutputFormat,
    MessageToolChoice,
    NamedChoice,
    OutputConfig,
    message_spec,
    offered_tools,
    template_custom_tools,
)
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.dialect import GenerationRequest
from fairlead.dialects.fields import (
    Envelope,
    PositiveCount,
    SamplingParameters,
    StopString,
    TemplateVariables,
    UserName,
)
from fairlead.dialects.openai.common import MAX_STOP_STRINGS
from fairlead.dialects.unserved import MESSAGES, capturing, refuse_unserved

_BLOCK_TYPE = re.compile(r"(?:messages\[\d+\]|system)(?:\.content)?\[\d+\](?:\.content\[\d+\])?\.type")


class MessageMetadata(msgspec.Struct, frozen=True):
    """`user_id` names the user, as `user` does in OpenAI's API."""

    user_id: UserName | None = None


class MessagesEnvelope(Envelope, frozen=True, kw_only=True):
    """What is read of every body."""

    metadata: MessageMetadata | None = None


class EnvelopeParser(BodyParser[MessagesEnvelope]):
    """Reads the user from the metadata."""

    def __call__(self, body: bytes, limits: Limits) -> MessagesEnvelope:
        envelope = super().__call__(body, limits)
        named = envelope.metadata.user_id if envelope.metadata is not None else None
        return msgspec.structs.replace(envelope, user=named) if named else envelope


class _Thinking(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    """`display`: with `omitted`, the text of thinking blocks is empty."""

    display: Literal["summarized", "omitted"] | None = None


class ThinkingEnabled(_Thinking, frozen=True, tag="enabled", kw_only=True):
    """The model reasons, with at most `budget_tokens`."""

    budget_tokens: PositiveCount


class ThinkingAdaptive(_Thinking, frozen=True, tag="adaptive"):
    """The model may reason."""


class ThinkingBetweenTools(_Thinking, frozen=True, tag="between_tools"):
    """The same as `adaptive`."""


class ThinkingDisabled(_Thinking, frozen=True, tag="disabled"):
    """The model does not reason, if its chat template reads `enable_thinking`."""


class CountTokensRequest(SamplingParameters, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`. Sampling parameters have no effect.

    messages: The conversation.
    system: A system message before it.
    tools: The tools that the model may call.
    tool_choice: Whether it may or must call one, or which one it must call.
    thinking: Whether the model reasons, and how much.
    output_config: The effort of the answer, and its form.
    output_format: The older name for `output_config.format`.
    metadata: The user for whom the client asks.
    chat_template_kwargs: Further variables of the chat template.
    """

    messages: Turns
    system: str | TextBlocks | None = None
    tools: CustomTools | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingBetweenTools | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None
    metadata: MessageMetadata | None = None
    chat_template_kwargs: TemplateVariables | None = None


class CreateMessageRequest(CountTokensRequest, frozen=True, kw_only=True):
    """`POST /v1/messages`. `output_format` is the older name for `output_config.format`."""

    max_tokens: PositiveCount
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None


_parse_message = BodyParser(capturing(CreateMessageRequest, MESSAGES))
_parse_count = BodyParser(CountTokensRequest)


def message_request(body: bytes, limits: Limits) -> GenerationRequest:
    """Return the request in a body. Raises `InvalidRequest`."""
    request: CreateMessageRequest = _parse(_parse_message, body, limits)
    refuse_unserved(request, MESSAGES)
    if request.prompt_logprobs is not None:
        raise invalid_field("prompt_logprobs", "is not served here")
    offered = _offered(request)
    prompt = _prompt(request, offered)
    output, output_field = _output_format(request)
    if prompt.continuation:
        _check_continuation(request, output)
    thinking = request.thinking
    return msgspec.structs.replace(
        prompt,
        answer=message_spec(offered, request.tool_choice, output, output_field),
        reasoning_tokens=thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None,
        sampling=request,
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
        options=MessageOptions(thinking is not None and thinking.display == "omitted"),
    )


def count_request(body: bytes, limits: Limits) -> GenerationRequest:
    """Return the prompt in a body. Raises `InvalidRequest`."""
    request: CountTokensRequest = _parse(_parse_count, body, limits)
    return _prompt(request, _offered(request))


def _parse(parse: BodyParser[Any], body: bytes, limits: Limits) -> Any:
    """Parse a body. Raises `InvalidRequest`, which says what blocks there may be instead of another."""
    try:
        return parse(body, limits)
    except InvalidRequest as error:
        if error.param is None or not _BLOCK_TYPE.fullmatch(error.param) or "is missing" in error.message:
            raise
        reason = "such blocks are not served here, only text, thinking, calls and their results"
        raise InvalidRequest(f"{error.message}: {reason}", param=error.param) from None


def _prompt(request: CountTokensRequest, offered: Mapping[int, CustomTool]) -> GenerationRequest:
    """Return what a request has of its prompt, with these tools. Raises `InvalidRequest`."""
    found = conversation(request.system, request.messages)
    return GenerationRequest(
        messages=found.messages,
        continuation=found.continuation,
        tools=template_custom_tools(offered),
        template_variables=_template_variables(request),
        is_chat=True,
    )


def _offered(request: CountTokensRequest) -> dict[int, CustomTool]:
    return offered_tools(request.tools or [], request.tool_choice, tool_changes(request.messages))


def _template_variables(request: CountTokensRequest) -> dict[str, Any] | None:
    """Return the variables of the chat template, as chat completions name them."""
    named: dict[str, Any] = {}
    if request.output_config is not None and request.output_config.effort is not None:
        named["reasoning_effort"] = request.output_config.effort
    if request.thinking is not None:
        named["enable_thinking"] = not isinstance(request.thinking, ThinkingDisabled)
    return (named | (request.chat_template_kwargs or {})) or None


def _output_format(request: CreateMessageRequest) -> tuple[JsonOutputFormat | None, str]:
    """Return the form of the text, and the field that has its schema."""
    newer = request.output_config.format if request.output_config is not None else None
    if newer is not None and request.output_format is not None:
        raise invalid_field("output_format", "cannot be combined with output_config.format")
    if newer is not None:
        return newer, "output_config.format.schema"
    return request.output_format, "output_format.schema"


def _check_continuation(request: CreateMessageRequest, output: JsonOutputFormat | None) -> None:
    """Raise `InvalidRequest` for forms that an answer with a given beginning cannot have."""
    field = f"messages[{len(request.messages) - 1}]"
    if isinstance(request.tool_choice, AnyChoice | NamedChoice):
        raise invalid_field(field, "the beginning of the answer cannot be combined with a required call")
    if output is not None:
        raise invalid_field(field, "the beginning of the answer cannot be combined with a format of it")
