"""The types of responses, for `/openapi.json`: the code that writes responses does not use them.

A test verifies that every response fits its type, and has no other fields.
"""

from typing import Any, Literal

import msgspec

from fairlead.base.job import FinishReason


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong: `code` for programs, `message` for people, `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Any error."""

    error: ErrorBody


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: tokens of the prompt that were in the KV cache, and so not computed again."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """`reasoning_tokens`: tokens of the answers that are reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts; a prompt counts once however many answers it gets.

    `completion_tokens_details` are of answers that are divided into their parts.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """The name of a function, and its arguments as JSON in a string."""

    name: str
    arguments: str


class GeneratedCall(msgspec.Struct, frozen=True):
    """A tool call that the model generated."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantText(msgspec.Struct, frozen=True):
    """The message that the model generated. `content` is null if it has only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[GeneratedCall] | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer. `stop_reason`: the stop string or token that ended it."""

    index: int
    message: AssistantText
    finish_reason: FinishReason | None
    logprobs: dict[str, Any] | None = None
    stop_reason: str | int | None = None


class ListedToken(msgspec.Struct, frozen=True):
    """A token that could stand at a position of the prompt. `rank`: 1 is the likeliest there."""

    logprob: float
    rank: int
    decoded_token: str


PromptToken = dict[str, ListedToken]
"""The candidates for a position of the prompt, by token id: the actual token, and the likeliest ones."""


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to a chat; `created` in seconds since 1970."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: list[PromptToken | None] | None = None


class TextChoice(msgspec.Struct, frozen=True):
    """One continuation."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: dict[str, Any] | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[PromptToken | None] | None = None


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Continuations of prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    system_fingerprint: str | None = None


class TextVector(msgspec.Struct, frozen=True):
    """One text's vector: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PromptUsage(msgspec.Struct, frozen=True):
    """Token counts of texts for which nothing is generated."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    """The vectors, in the order of their texts."""

    object: Literal["list"]
    data: list[TextVector]
    model: str
    usage: PromptUsage


class ModelCard(msgspec.Struct, frozen=True):
    """A model that is served. `max_model_len`: prompt and answer together, in tokens, where that is known.

    `root` is the model itself, and `parent` the one that it adapts: null, as adapters are not served. `task`,
    if known: whether it generates text, makes embeddings or scores pairs of texts. `infill`: completions may
    have a `suffix`. `problem`: why the model cannot be loaded, from the faulty file or setting. The other
    fields are from the configuration of a model that a command serves, or of a selector: a name that stands
    for several models.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    task: Literal["generate", "embed", "score"] | None = None
    infill: bool | None = None
    problem: str | None = None
    name: str | None = None
    description: str | None = None
    capabilities: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None


class ModelList(msgspec.Struct, frozen=True):
    """All models that the caller may use."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(msgspec.Struct, frozen=True):
    """Token ids, and their texts if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of token ids."""

    prompt: str


class CancelledRequest(msgspec.Struct, frozen=True):
    """A request that was cancelled."""

    id: str
    object: Literal["request"]
    status: Literal["cancelled"]


class RemovedNode(msgspec.Struct, frozen=True):
    """A node that was removed."""

    id: str
    object: Literal["node"]
    deleted: bool


class ServerState(msgspec.Struct, frozen=True):
    """The server's state; `models` has the problems, by model. `instance` changes at every start."""

    status: Literal["ok", "stuck", "ready", "loading", "stopping"]
    models: dict[str, str] | None = None
    instance: str | None = None


class Version(msgspec.Struct, frozen=True):
    """The program's version."""

    version: str
