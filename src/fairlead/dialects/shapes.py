"""Whole responses in OpenAI's API and of the server's own routes.

Writers make these objects, and `/openapi.json` describes them. A member that is `UNSET` is left out.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from fairlead.base.job import FinishReason


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong.

    message: For people.
    type: OpenAI's kind of the error, for programs.
    param: The field at fault; None: none is.
    code: Our own kind of the error, for programs.
    """

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

    prompt_tokens: Tokens of the prompts.
    completion_tokens: Tokens of all answers, with those of their reasoning.
    total_tokens: The sum of both.
    prompt_tokens_details: How many of the prompts' tokens were cached.
    completion_tokens_details: Absent unless answers are divided into reasoning, content and calls.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


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
    """The message that the model generated.

    role: Always the assistant's.
    content: The text; None if the message has only calls.
    refusal: Always None: a model's refusal is a text.
    reasoning_content: The reasoning before the text; None: there is none.
    tool_calls: The calls; absent if there are none.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[GeneratedCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer.

    index: Its place among the answers.
    message: What the model generated.
    logprobs: The log-probabilities of its tokens, if requested.
    finish_reason: Why it ended.
    stop_reason: The stop string or the id of the token that ended it; None: neither did.
    token_ids: The ids of its tokens; absent unless requested.
    """

    index: int
    message: AssistantText
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ListedToken(msgspec.Struct, frozen=True):
    """A token that could stand at a position of the prompt. `rank`: 1 is the likeliest there."""

    logprob: float
    rank: int
    decoded_token: str


PromptToken = dict[str, ListedToken]
"""The candidates for a position of the prompt, by token id: the actual token, and the likeliest ones."""


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to a chat.

    id: The job's id.
    object: The kind of this object.
    created: Its time, in seconds since 1970.
    model: The model that answered.
    system_fingerprint: Always None.
    choices: The answers, as many as `n`.
    usage: Token counts of all answers.
    prompt_logprobs: The candidates for each position of the prompt; None: they were not requested.
    prompt_token_ids: The ids of the prompt's tokens; absent unless requested.
    """

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[PromptToken | None] | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True):
    """One continuation.

    index: Its place among the continuations of all prompts.
    text: What the model generated; with `echo` after the prompt.
    logprobs: The log-probabilities of its tokens, if requested.
    finish_reason: Why it ended.
    stop_reason: The stop string or the id of the token that ended it; None: neither did.
    prompt_logprobs: The candidates for each position of the prompt; None: they were not requested.
    token_ids: The ids of its tokens; absent unless requested.
    prompt_token_ids: The ids of the prompt's tokens; absent unless requested.
    """

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: list[PromptToken | None] | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Continuations of prompts.

    id: The job's id.
    object: The kind of this object.
    created: Its time, in seconds since 1970.
    model: The model that answered.
    system_fingerprint: Always None.
    choices: The continuations: `n` of each prompt, in the order of the prompts.
    usage: Token counts of all continuations.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[TextChoice]
    usage: Usage


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
    """The vectors.

    object: The kind of this object.
    data: The vectors, in the order of their texts.
    model: The model that made them.
    usage: Token counts of all texts.
    """

    object: Literal["list"]
    data: list[TextVector]
    model: str
    usage: PromptUsage


class ModelCard(msgspec.Struct, frozen=True):
    """A model that is served.

    id: Its name, or another name for it.
    object: The kind of this object.
    created: The time of its files, or of the server's start, in seconds since 1970.
    owned_by: Always Fairlead.
    root: The model itself.
    parent: The model that it adapts: always None, as adapters are not served.
    max_model_len: The most tokens of a prompt and its answer together; absent if that is not known here.
    task: Whether it generates text, makes embeddings or scores pairs of texts; absent if not known here.
    infill: Completions may have a `suffix`; absent if not.
    problem: Why the model cannot be loaded, from the faulty file or setting; absent if nothing is wrong.
    name: A title, from the configuration of a command, or of a selector: a name for several models.
    description: A text from the same configuration.
    capabilities: What the model can do, from the same configuration.
    meta: Further data from the same configuration.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | UnsetType = UNSET
    task: Literal["generate", "embed", "score"] | UnsetType = UNSET
    infill: bool | UnsetType = UNSET
    problem: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    capabilities: dict[str, Any] | UnsetType = UNSET
    meta: dict[str, Any] | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True):
    """All models that the caller may use."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(msgspec.Struct, frozen=True):
    """Token ids.

    count: How many there are.
    max_model_len: The most tokens of a prompt and its answer together.
    tokens: The ids.
    token_strs: Their texts; None unless requested.
    """

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
    models: dict[str, str] | UnsetType = UNSET
    instance: str | UnsetType = UNSET


class ServerLoad(msgspec.Struct, frozen=True):
    """The number of requests that wait or run."""

    server_load: int


class Version(msgspec.Struct, frozen=True):
    """The program's version."""

    version: str
