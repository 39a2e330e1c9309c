"""Responses of Ollama's routes, whole and in lines, as in `dialects/shapes.py`."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


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
    """The message that the model generated, or a piece of it.

    role: Always the assistant's.
    content: The text; empty if there is none.
    thinking: The reasoning before the text; absent if there is none.
    tool_calls: The calls; absent if there are none.
    """

    role: Literal["assistant"]
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaGeneratedCall] | UnsetType = UNSET


class OllamaStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The members that all answers share. A whole answer and the last line of a stream have the counts.

    model: The model that answers.
    created_at: The time of this line, in the form of RFC 3339.
    logprobs: The log-probabilities of the tokens; absent unless requested.
    done: The answer is complete.
    done_reason: Why it ended; for a request without content, whether it has loaded or unloaded the model.
    total_duration: The time since the request, in nanoseconds.
    load_duration: The wait for the model and for a seat, in nanoseconds.
    prompt_eval_count: Tokens of the prompt.
    prompt_eval_duration: The time of computing the prompt, in nanoseconds.
    eval_count: Tokens of the answer.
    eval_duration: The time of generating the answer, in nanoseconds.
    """

    model: str
    created_at: str
    logprobs: list[dict[str, Any]] | UnsetType = UNSET
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatAnswer(OllamaStatistics, frozen=True, kw_only=True):
    """The answer to a chat, or a line of its stream."""

    message: OllamaAnswerMessage


class OllamaText(OllamaStatistics, frozen=True, kw_only=True):
    """A generated text, or a line of its stream."""

    response: str = ""
    thinking: str | UnsetType = UNSET


class OllamaEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """Vectors.

    model: The model that made them.
    embeddings: The vectors, of length 1, in the order of their texts.
    total_duration: The time since the request, in nanoseconds; absent without a text.
    load_duration: The wait for the model and for a seat, in nanoseconds; absent without a text.
    prompt_eval_count: Tokens of the texts; absent without a text.
    """

    model: str
    embeddings: list[list[float]]
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET


class OllamaEmbedding(msgspec.Struct, frozen=True):
    """A text's vector."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct, frozen=True):
    """What is known of a model's files. All texts are empty if they are not on this machine.

    parent_model: Always empty.
    format: The format of the checkpoint.
    family: The name of the architecture.
    families: The same in a list.
    parameter_size: How many parameters it has, as 1.5B.
    quantization_level: The type of most of its numbers.
    """

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model.

    name: Its name, or another name for it.
    model: The same.
    modified_at: The time of its files, or of the server's start, in the form of RFC 3339.
    size: The size of its files, in bytes.
    digest: Identifies its files, but is no hash of them.
    details: What its files show.
    """

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
    """A loaded model.

    name: Its name.
    model: The same.
    size: The memory that it takes, in bytes; soon after the load the size of its files.
    digest: Identifies its files, but is no hash of them.
    details: What its files show.
    expires_at: When it will be unloaded, in the form of RFC 3339; far away if it stays loaded.
    size_vram: The memory that it takes on GPUs, in bytes.
    context_length: The most tokens of a prompt and its answer together; 0 if that is not known here.
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
    """What is known of a model.

    modelfile: A Modelfile with its name only.
    parameters: The default parameters of its answers, one in each line.
    template: Its chat template, in Jinja; empty if it has none.
    details: What its files show.
    model_info: More of that, by Ollama's keys.
    capabilities: What it can do, in Ollama's words.
    modified_at: The time of its files, or of the server's start, in the form of RFC 3339.
    """

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
