"""Responses of llama.cpp's native API, as in `dialects/shapes.py`."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

StopType = Literal["eos", "limit", "word", "none"]


class Timings(msgspec.Struct, frozen=True):
    """Token counts and durations. The wait for a seat is in none of them.

    cache_n: Tokens of the prompt that were cached.
    prompt_n: Tokens of the prompt that were computed.
    prompt_ms: How long that took.
    prompt_per_token_ms: How long one of them took.
    prompt_per_second: How many were computed a second.
    predicted_n: Tokens of the answer.
    predicted_ms: How long they took.
    predicted_per_token_ms: How long one of them took.
    predicted_per_second: Tokens of the answer a second.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer was sampled.

    n_predict: The most tokens of the answer; -1: no limit but the model's.
    seed: The seed; 4294967295: a random one.
    temperature: The temperature.
    top_k: How many tokens are kept; 0: all.
    top_p: The least probability of the tokens that are kept, together; 1: all.
    min_p: The least probability of each, as a part of the likeliest one's.
    repeat_last_n: How many of the last tokens the penalties consider; -1: all.
    repeat_penalty: The repetition penalty.
    presence_penalty: The presence penalty.
    frequency_penalty: The frequency penalty.
    ignore_eos: Whether the answer goes on after the model's own end.
    stop: Strings that end the answer.
    n_probs: How many of the likeliest tokens are listed beside each.
    stream: Whether the answer is streamed.
    """

    n_predict: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    ignore_eos: bool
    stop: list[str]
    n_probs: int
    stream: bool


class NativeCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion. The response to several prompts is a list of completions.

    index: The number of the prompt.
    content: What the model generated; in a stream, the next piece of it.
    tokens: The ids of its tokens, in a stream or with `return_tokens`.
    id_slot: Always -1: sequences have no fixed slots here.
    stop: The completion ends here.
    model: The model that answered.
    tokens_predicted: Tokens of the answer.
    tokens_evaluated: Tokens of the prompt.
    generation_settings: How it was sampled.
    prompt: The prompt's text.
    has_new_line: The answer has a line break.
    truncated: Always false: a prompt that is too long is refused.
    stop_type: Why it ended: by itself, at the limit, or at a stop string.
    stopping_word: The stop string.
    tokens_cached: Tokens of the prompt that were cached.
    timings: Token counts and durations.
    completion_probabilities: The tokens of the answer with their log-probabilities, with `n_probs`.
    """

    index: int
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: GenerationSettings
    prompt: str
    has_new_line: bool
    truncated: bool = False
    stop_type: StopType
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET


class AppliedTemplate(msgspec.Struct, frozen=True):
    """A rendered chat."""

    prompt: str


class ServerSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A seat of a model.

    id: Its number. Jobs have no fixed seats, so the busy ones come first.
    id_task: Always -1.
    n_ctx: The longest context of a sequence.
    speculative: Always false: a seat has no draft model.
    is_processing: Whether a job has it.
    """

    id: int
    id_task: int = -1
    n_ctx: int
    speculative: bool = False
    is_processing: bool


class ServerProperties(msgspec.Struct, frozen=True, kw_only=True):
    """What llama.cpp's clients ask of a server, for one model.

    default_generation_settings: The context's length, and how answers are sampled by default.
    total_slots: How many sequences may run at a time; 0: the model is not loaded.
    model_alias: The model's name.
    model_path: The same.
    modalities: Which inputs besides text it reads.
    chat_template: Its chat template; empty: it has none.
    bos_token: The text of the token that begins a prompt; empty: there is none.
    eos_token: The text of a token that ends an answer.
    build_info: The program and its version.
    """

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
