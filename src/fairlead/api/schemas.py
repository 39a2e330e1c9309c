"""The types of request bodies, with their ranges. `prepare` checks what depends on the model.

Every optional field may also be null, which means absent. Unlisted fields are ignored, because clients send
more of them every month.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fairlead.config import SpecialTokens
from fairlead.config.fleet import LONGEST_ID

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20
_MAX_INT32 = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=_MAX_INT32)]
PositiveCount = Annotated[int, Meta(ge=1, le=_MAX_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=_MAX_INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
VllmPriority = Annotated[int, Meta(ge=-(2**31), le=_MAX_INT32)]
UserName = Annotated[str, Meta(max_length=64 * 1024)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


# Declared for `/openapi.json` only; checked elsewhere, with messages of our own.
NonEmpty = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
_OF_ONE_KIND = {"anyOf": [{"items": {"type": kind}} for kind in ("string", "integer", "array")]}


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: a last chunk with the counts; `continuous_usage_stats`: counts in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The required form of the text; further fields depend on the type."""

    type: str


class Addressed(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that the server itself reads, even of relayed requests.

    `priority`: the name of a class, or vLLM's number: 0 is the default class, and each one below or above it
    a class earlier or later.
    """

    model: str | None = None
    stream: bool | None = None
    user: UserName | None = None
    safety_identifier: UserName | None = None
    priority: str | VllmPriority | None = None


class Relayed(Addressed, frozen=True, kw_only=True):
    """The fields that are read of a relayed body, in any dialect. The other server checks their ranges.

    `prompt` is a text completion's, which may be several; the dialects' names for `max_tokens` differ.
    """

    n: PositiveCount | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    prompt: msgspec.Raw = msgspec.Raw()


LogitBias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=1024, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}),
]


class Generation(Addressed, frozen=True, kw_only=True):
    """The fields that chat completions and completions share.

    `prompt_logprobs`, from vLLM: lists each token of the prompt, and this number of the likeliest ones.
    """

    stream_options: StreamOptions | None = None
    n: PositiveCount | None = None
    max_tokens: PositiveCount | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Beyond these bounds, float32 logits overflow and the sequence would fail in the engine.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: LogitBias | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None


# Chat ----------------------------------------------------------------------------------------------


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of a message. Only the type `text` is served; the error for others names them."""

    type: str
    text: str | None = None


Content = str | Annotated[list[ContentPart], Meta(max_length=4096)]


class FunctionCall(msgspec.Struct, frozen=True):
    """An assistant's call of a function; `arguments` is JSON in a string."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """One call in an assistant's message."""

    id: str
    function: FunctionCall
    type: str = "function"


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    name: str | None = None


class SystemMessage(_Message, frozen=True, tag="system"):
    """Instructions for the model."""

    content: Content


class DeveloperMessage(_Message, frozen=True, tag="developer"):
    """OpenAI's newer name for a system message."""

    content: Content


class UserMessage(_Message, frozen=True, tag="user"):
    """A message of the user."""

    content: Content


class AssistantMessage(_Message, frozen=True, tag="assistant"):
    """An earlier message of the model: text, calls or both."""

    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=1024)] | None = None


class ToolMessage(_Message, frozen=True, tag="tool"):
    """The result of a called tool."""

    content: Content
    tool_call_id: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=16_384)]


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema for the chat template."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may use."""

    type: str
    function: Function


Tools = Annotated[list[Tool], Meta(max_length=2048)]
TemplateVariables = Annotated[dict[str, Any], Meta(max_length=1024)]


class ChatCompletionRequest(Generation, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`. `max_completion_tokens` is OpenAI's newer name for `max_tokens`."""

    messages: Messages
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tool_choice: str | dict[str, Any] | None = None


# Completions ---------------------------------------------------------------------------------------

TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Texts = list[NonEmpty | TokenId | TokenIds]


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """`POST /v1/completions`. `prompt`: a text, token ids, or a list of either (all of one kind).

    `special_tokens`: whether control tokens in a text are parsed (the default) or stay text. With `echo`, the
    answer begins with the prompt, also in `logprobs`, and `max_tokens` may be 0.
    """

    prompt: NonEmpty | Annotated[Texts, Meta(extra_json_schema={"minItems": 1, **_OF_ONE_KIND})]
    max_tokens: Count | None = None
    special_tokens: SpecialTokens | None = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: PositiveCount | None = None
    logprobs: TopLogprobs | None = None


# Embeddings ----------------------------------------------------------------------------------------


class EmbeddingRequest(Addressed, frozen=True, kw_only=True):
    """`POST /v1/embeddings`. `input`: a text, token ids, or a list of either (all of one kind).

    `dimensions` truncates each vector to its first numbers, for models that were trained for that.
    """

    input: NonEmpty | Annotated[Texts, Meta(min_length=1, extra_json_schema=_OF_ONE_KIND)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveCount | None = None


# Tokens --------------------------------------------------------------------------------------------


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: a `prompt`, or `messages` as the chat template renders them.

    `special_tokens`: whether control tokens in a prompt are parsed (the default) or stay text.
    """

    model: str | None = None
    prompt: str | None = None
    special_tokens: SpecialTokens | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


# For `/openapi.json`: one of the two is required.
DescribedTokenizeRequest = Annotated[
    TokenizeRequest,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"required": [name], "properties": {name: {"type": kind}}}
                for name, kind in (("prompt", "string"), ("messages", "array"))
            ]
        }
    ),
]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


# Models and nodes ----------------------------------------------------------------------------------


class LoadModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /models/load`."""

    model: str


class UnloadModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /models/unload`. With `force` the model's jobs fail; otherwise they finish first."""

    model: str
    force: bool | None = None


NodeId = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": LONGEST_ID})]
HttpUrl = Annotated[str, Meta(extra_json_schema={"format": "uri"})]


class AddNodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /nodes`: a remote server, with the fields of `nodes` in a configuration file (`NodeConfig`).

    Unknown fields are refused: a node with a misspelled `api_key` would be unusable.
    """

    id: NodeId
    url: HttpUrl
    api_key: str | None = None
    seats: PositiveCount | None = None
    models: tuple[str, ...] | None = None
    model_names: dict[str, str] | None = None
