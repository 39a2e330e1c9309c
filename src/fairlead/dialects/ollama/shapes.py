"""The types of the responses of Ollama's routes, for `/openapi.json`, as `shapes` has those of the others."""

from typing import Any, Literal

import msgspec


class OllamaError(msgspec.Struct, frozen=True):
    """Any error of a route below `/api/`: only its message."""

    error: str


class OllamaCalledFunction(msgspec.Struct, frozen=True):
    """The name of a function, and its arguments as an object. `index` counts the calls of an answer."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaGeneratedCall(msgspec.Struct, frozen=True):
    """A tool call that the model generated."""

    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(msgspec.Struct, frozen=True):
    """The message that the model generated, or a piece of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaGeneratedCall] | None = None


class OllamaStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The members that all answers share. The last line of a stream, with `done`, has all of them.

    Durations are in nanoseconds; `load_duration` is the wait for the model and for a seat. `done_reason` is
    stop or length, or for a request without content load or unload.
    """

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[dict[str, Any]] | None = None


class OllamaChatAnswer(OllamaStatistics, frozen=True, kw_only=True):
    """The answer to a chat, or a line of its stream."""

    message: OllamaAnswerMessage


class OllamaText(OllamaStatistics, frozen=True, kw_only=True):
    """A generated text, or a line of its stream."""

    response: str
    thinking: str | None = None


class OllamaEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """Vectors of length 1, in the order of their texts. Without a text, there are no counts."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None


class OllamaEmbedding(msgspec.Struct, frozen=True):
    """A text's vector."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct, frozen=True):
    """What is known of a model's files; empty texts if they are not on this machine."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model. `digest` identifies its files, but is no hash of them; `size` is theirs in bytes."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(msgspec.Struct, frozen=True):
    """All models that the caller may use."""

    models: list[OllamaModel]


class OllamaRunningModel(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model. `size` is the memory that it takes, and soon after the load that of its files.

    `expires_at` is far away if it stays loaded.
    """

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(msgspec.Struct, frozen=True):
    """All loaded models that the caller may use."""

    models: list[OllamaRunningModel]


class OllamaShown(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model. `template` is its chat template, in Jinja."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
