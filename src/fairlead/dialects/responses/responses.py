"""OpenAI's Responses: `POST /v1/responses`."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from fairlead.base.config import Limits
from fairlead.base.errors import quoted
from fairlead.base.job import Delta
from fairlead.base.reported import decoded, is_given
from fairlead.base.upstream_events import UpstreamEvent
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.dialect import AnswerContext, CountingDialect, GenerationRequest, StreamingDialect
from fairlead.dialects.event_reader import ABSENT, EventShape, ResponseShape, TypedReader, text_members
from fairlead.dialects.fields import (
    MAX_INT32,
    TEXT_OR_TEXTS,
    Envelope,
    PositiveCount,
    SamplingParameters,
    TemplateVariables,
    TokenLimit,
    TopLogprobs,
    UserName,
    describe_alternatives,
)
from fairlead.dialects.openai.common import (
    OpenAIErrors,
    StopStringList,
    encode,
    stop_strings,
    token_limit,
)
from fairlead.dialects.openai.messages import template_variables
from fairlead.dialects.openai.structured import StructuredOutputs
from fairlead.dialects.responses.events import SAMPLING, ResponseEvents, ResponseOptions
from fairlead.dialects.responses.items import Input, input_messages
from fairlead.dialects.responses.shapes import ConversationId, CountedInput, ResponseObject
from fairlead.dialects.responses.tools import (
    AnyToolChoice,
    FunctionTools,
    TextConfig,
    answer_form,
    choice_echo,
    offered_functions,
    template_functions,
    text_echo,
    tools_echo,
)
from fairlead.dialects.unserved import RESPONSES, capturing, refuse_unserved
from fairlead.dialects.upstream_errors import error_of, is_error

LOGPROBS = "message.output_text.logprobs"
# What else a response may include. We have none of it: most is of OpenAI's own tools.
_INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "reasoning.encrypted_content",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class ResponsesEnvelope(Envelope, frozen=True, kw_only=True):
    """What is read of every body.

    input: The input as it was sent.
    metadata: Texts of the client, as they were sent.
    store: Keep the response, which is the default.
    background: Generate it without its client.
    previous_response_id: The response that it continues.
    conversation: The conversation that it continues.
    """

    input: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation; None: there is none."""
        return conversation_id(self.conversation)


class ReasoningConfig(msgspec.Struct, frozen=True):
    """How much the model reasons: a value that its chat template has, or `none`. `summary` is ignored."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(SamplingParameters, frozen=True, kw_only=True):
    """`POST /v1/responses`.

    input: The user's text, or items.
    instructions: A system message before it.
    tools: The tools that the model may call.
    tool_choice: Whether the model may or must call a tool, or which one it must call.
    parallel_tool_calls: An answer may have several calls, which is the default.
    text: The form of the text.
    reasoning: How much the model reasons.
    max_output_tokens: The most tokens of the output.
    max_tool_calls: Has no effect: the client runs all calls.
    include: OpenAI's values are accepted; only `message.output_text.logprobs` has an effect.
    top_logprobs: How many of the likeliest tokens are listed beside each.
    truncation: With `auto` the oldest turns are left out of an input that is too long for the model; with
        `disabled`, the default, it is refused.
    stream_options: Has no effect.
    store: Keep the response, which is the default.
    background: Generate it without its client.
    previous_response_id: The response that it continues.
    conversation: The conversation that it continues, and to which its items are added when it ends.
    metadata: Texts of the client, which the response repeats.
    prompt_cache_key: Has no effect; the response repeats it.
    service_tier: Has no effect.
    stop: Strings that end the answer.
    structured_outputs: The form of the answer in vLLM's words.
    chat_template_kwargs: Further variables of the chat template.
    thinking_token_budget: The most tokens of the reasoning; -1: no limit.
    """

    input: Input | None = None
    instructions: str | None = None
    tools: FunctionTools | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: TokenLimit | None = None
    max_tool_calls: PositiveCount | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    metadata: Metadata | None = None
    prompt_cache_key: UserName | None = None
    service_tier: str | None = None
    stop: StopStringList | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: TemplateVariables | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None


def conversation_id(conversation: str | ConversationId | None) -> str | None:
    """Return the id of a conversation, which a request has alone or in an object."""
    return conversation.id if isinstance(conversation, ConversationId) else conversation


_parse = BodyParser(capturing(ResponsesRequest, RESPONSES))


class ResponsesEvent(EventShape, gc=False):
    delta: str | None = None
    response: msgspec.Raw = ABSENT


class ResponsesShape(ResponseShape, gc=False):
    content: msgspec.Raw = msgspec.field(name="output", default=ABSENT)


_decode_response = msgspec.json.Decoder(ResponseShape).decode


class ResponsesReader(TypedReader[ResponsesEvent]):
    """The reader of other servers' responses."""

    shape = ResponsesEvent
    prefixes = ("response.",)
    response_shape = ResponsesShape
    beginnings = frozenset(
        f"response.{name}"
        for name in ("created", "queued", "in_progress", "output_item.added", "content_part.added")
    )
    ends: ClassVar = {
        "response.completed": "stop",
        "response.failed": "stop",
        "response.incomplete": "length",
    }

    def _event(self, shape: ResponsesEvent) -> UpstreamEvent:
        event = super()._event(shape)
        if shape.type != "response.failed" or (response := decoded(_decode_response, shape.response)) is None:
            return event
        error = error_of(response.error, bytes(shape.response)) if is_error(response.error) else None
        return msgspec.structs.replace(event, error=error)

    def _text(self, shape: ResponsesEvent) -> str:
        return shape.delta or ""

    def _usage(self, shape: ResponsesEvent) -> msgspec.Raw:
        if is_given(shape.usage) or not is_given(shape.response):
            return shape.usage
        response = decoded(_decode_response, shape.response)
        return ABSENT if response is None else response.usage

    def _texts(self, document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        return text_members(document, ("delta",))


class ResponsesDialect(OpenAIErrors, StreamingDialect):
    """Responses.

    `history`: the input and output items of the earlier responses that a request continues, oldest first, as
    they were sent and answered. `is_stored`: the response is kept, and can be read later.
    """

    name = "responses"
    path = "/v1/responses"
    body_type = describe_alternatives(
        ResponsesRequest, {"input": TEXT_OR_TEXTS}, {"previous_response_id": "string"}
    )
    answer_type = ResponseObject
    refused_fields = RESPONSES
    job_prefix = "resp_"  # LangChain continues only responses with this prefix
    read_envelope = BodyParser(ResponsesEnvelope)
    reader = ResponsesReader()

    def __init__(self, *, history: Sequence[dict[str, Any]] = (), is_stored: bool = False) -> None:
        self._history = history
        self._is_stored = is_stored

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        request = _parse(body, limits)
        refuse_unserved(request, RESPONSES)
        self._check(request)
        functions = offered_functions(request.tools or ())
        answer = answer_form(
            request.text,
            request.structured_outputs,
            functions,
            request.tool_choice,
            parallel=request.parallel_tool_calls is not False,
        )
        has_logprobs = LOGPROBS in (request.include or ())
        given = input_messages(request.instructions, self._history, request.input)
        effort = request.reasoning.effort if request.reasoning is not None else None
        budget = request.thinking_token_budget
        return GenerationRequest(
            messages=given.messages,
            messages_field="input",
            image_field=given.image_field,
            tools=None if request.tool_choice == "none" else template_functions(functions),
            template_variables=template_variables(effort, request.chat_template_kwargs),
            drops_turns=request.truncation == "auto",
            is_chat=True,
            answer=answer,
            reasoning_tokens=None if budget == -1 else budget,
            sampling=request,
            max_tokens=token_limit("max_output_tokens", request.max_output_tokens),
            stop=stop_strings(request.stop),
            logprobs=(request.top_logprobs or 0) if has_logprobs else None,
            options=ResponseOptions(
                self._echo(request),
                {one.name: (one.namespace, one.tool.name) for one in functions if one.namespace},
            ),
        )

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the body of a response; `deltas` has one per choice, in order."""
        events = ResponseEvents(context)
        events.write(deltas)
        return encode(events.response())

    def stream_writer(self, context: AnswerContext) -> ResponseEvents:
        """Return the writer of a streamed response."""
        return ResponseEvents(context)

    def _check(self, request: ResponsesRequest) -> None:
        """Raise `InvalidRequest` for what is not served."""
        if request.background and not self._is_stored:
            raise invalid_field("background", "is not served")
        if request.previous_response_id is not None and not self._history:
            raise invalid_field("previous_response_id", "there is no such response")
        if request.conversation is not None and not self._is_stored:
            raise invalid_field("conversation", "needs a response that is kept")
        if request.prompt_logprobs is not None:
            raise invalid_field("prompt_logprobs", "is not served")
        for index, name in enumerate(request.include or ()):
            if name not in _INCLUDABLE:
                raise invalid_field(f"include[{index}]", f"{quoted(name)} is not served")
            if name == LOGPROBS and request.tools:
                raise invalid_field(f"include[{index}]", f"{name!r} cannot be combined with tools")
        if request.top_logprobs and LOGPROBS not in (request.include or ()):
            raise invalid_field("top_logprobs", f"needs {LOGPROBS!r} in include")

    def _echo(self, request: ResponsesRequest) -> dict[str, Any]:
        """Return the members of a response that repeat its request."""
        effort = request.reasoning.effort if request.reasoning is not None else None
        conversation = conversation_id(request.conversation)
        return {
            "conversation": None if conversation is None else ConversationId(conversation),
            "background": bool(request.background),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": self._is_stored,
            "text": text_echo(request.text),
            "tool_choice": choice_echo(request.tool_choice),
            "tools": tools_echo(request.tools or ()),
            "top_logprobs": request.top_logprobs or 0,
            "truncation": request.truncation or "disabled",
            "user": request.user,
            **{name: value for name in SAMPLING if (value := getattr(request, name)) is not None},
        }


class InputTokensDialect(OpenAIErrors, CountingDialect):
    """The number of tokens of a response's input. `history` is as for `ResponsesDialect`."""

    path = "/v1/responses/input_tokens"
    body_type = ResponsesDialect.body_type
    answer_type = CountedInput
    refused_fields = RESPONSES
    read_envelope = BodyParser(ResponsesEnvelope)
    reader = ResponsesReader()

    def __init__(self, *, history: Sequence[dict[str, Any]] = ()) -> None:
        self._counted = ResponsesDialect(history=history, is_stored=True)

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body, as `Dialect.decode` does."""
        return self._counted.decode(body, limits)

    def write_count(self, tokens: int) -> bytes:
        """Return the body of a response."""
        return encode(CountedInput("response.input_tokens", tokens))
