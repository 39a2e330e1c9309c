"""What OpenAI's dialects share: fields of bodies and their checks, errors, and members of answers."""

from hashlib import blake2b
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta

from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta, Job
from fairlead.dialects.body import invalid_field
from fairlead.dialects.dialect import REQUEST_ID_HEADERS, AnswerContext
from fairlead.dialects.fields import (
    CommonFields,
    PositiveCount,
    SamplingParameters,
    StopString,
    TokenLimit,
    TruncatedTokens,
)
from fairlead.dialects.openai.structured import (
    FORMER_OUTPUTS,
    OUTPUTS,
    Choices,
    Pattern,
    ResponseFormat,
    Schema,
    StructuredOutputs,
)
from fairlead.dialects.shapes import (
    CompletionTokensDetails,
    ErrorAnswer,
    ErrorBody,
    PromptTokensDetails,
    PromptUsage,
    Usage,
)
from fairlead.language.text.truncation import Side, Truncation

MAX_STOP_STRINGS = 16

encode = msgspec.json.Encoder().encode


def encode_member(value: object) -> Any:
    """Return a member that is encoded already: one call for a whole long response would hold the GIL long."""
    return msgspec.Raw(encode(value))


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    504: "timeout_error",
}


StopStringList = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: a last chunk with the counts; `continuous_usage_stats`: counts in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TruncationFields(CommonFields, frozen=True, kw_only=True):
    """vLLM's fields about texts that are too long, which are refused otherwise.

    truncate_prompt_tokens: Cut each text to so many tokens; -1: to as many as the model takes.
    truncation_side: Which end is cut; None: the right one.
    """

    truncate_prompt_tokens: TruncatedTokens | None = None
    truncation_side: Side | None = None


def truncation_of(tokens: int | None, side: Side) -> Truncation | None:
    """Return how prompts are cut; None: they are not. Raises `InvalidRequest` for 0 tokens."""
    if tokens is None:
        return None
    if tokens == 0:
        raise invalid_field("truncate_prompt_tokens", "must be at least 1, or -1 for as many as fit")
    return Truncation(None if tokens == -1 else tokens, side)


class Generation(SamplingParameters, frozen=True, kw_only=True):
    """The fields that chat completions and completions share.

    stream_options: What else a stream has.
    n: Answers of each prompt.
    max_tokens: The most tokens of an answer.
    stop: Strings that end an answer.
    return_token_ids: From vLLM: the answer has the ids of its tokens, and of the prompt's.
    response_format: The form of the answer in OpenAI's words.
    structured_outputs: The form of the answer in vLLM's words.
    """

    stream_options: StreamOptions | None = None
    n: PositiveCount | None = None
    max_tokens: TokenLimit | None = None
    stop: StopStringList | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_json_object: bool | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None

    def constraints(self) -> tuple[StructuredOutputs | None, str]:
        """Return the constraint of the answer, and what precedes its name. `InvalidRequest` for two."""
        former = StructuredOutputs(
            json=self.guided_json,
            json_object=self.guided_json_object or None,
            regex=self.guided_regex or None,
            choice=self.guided_choice or None,
            grammar=self.guided_grammar or None,
        )
        if former == _UNCONSTRAINED:
            return self.structured_outputs, OUTPUTS
        if self.structured_outputs is not None:
            raise invalid_field("structured_outputs", "cannot be combined with its former names, guided_…")
        return former, FORMER_OUTPUTS


_UNCONSTRAINED = StructuredOutputs()


def token_limit(field: str, limit: int | None) -> int | None:
    """Return the most tokens of an answer; None for -1, no limit. Raises `InvalidRequest` for 0."""
    if limit == 0:
        raise invalid_field(field, "must be at least 1, or -1 for no limit")
    return None if limit == -1 else limit


def check_generation(body: Generation) -> None:
    """Raise `InvalidRequest` for options that are not served."""
    if body.stream_options is not None and not body.stream:
        raise invalid_field("stream_options", "only makes sense with stream: true")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid_field("prompt_logprobs", "is not served with stream: true")


def check_final_message(*, add_generation_prompt: bool | None, continues: bool | None) -> None:
    """Raise `InvalidRequest` if a chat would end with its last message and also begin an answer."""
    if continues and add_generation_prompt:
        reason = "cannot be combined with add_generation_prompt: true"
        raise invalid_field("continue_final_message", reason)


def stop_strings(stop: StopStringList | None) -> tuple[str, ...]:
    """Return the stop strings, from either form."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def prompts_of(field: str, prompts: str | list[Any], *, empty: str) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids, from any of the four forms OpenAI allows.

    Raises `InvalidRequest`, with the reason `empty` for an empty text.
    """
    kinds = {str} if isinstance(prompts, str) else set(map(type, prompts))
    if len(kinds) > 1:
        raise invalid_field(field, "must be a text, token ids, or a list of either, all of one kind")
    listed = [prompts] if isinstance(prompts, str) or kinds == {int} else prompts
    if not listed or "" in listed:
        raise invalid_field(field, empty)
    return listed


# Errors --------------------------------------------------------------------------------------------


class OpenAIErrors:
    """Writes errors as OpenAI does. All routes that are not of another dialect use this form."""

    request_id_headers: ClassVar[tuple[str, ...]] = REQUEST_ID_HEADERS

    def error_body(self, error: FairleadError) -> bytes:
        """Return the body of an error; also the data of an error event in a stream."""
        default = "server_error" if error.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(error.status, default)
        return encode(ErrorAnswer(ErrorBody(full_message(error), kind, error.param, error.code)))


def full_message(error: FairleadError) -> str:
    """Return the message, beginning with the field at fault: many clients show nothing else."""
    if error.status == 400 and error.param and not error.message.startswith(error.param):
        return f"{error.param}: {error.message}"
    return error.message


# Answers -------------------------------------------------------------------------------------------


def usage(job: Job, completion_tokens: int, cached_tokens: int, reasoning_tokens: int) -> Usage:
    """Return the token counts of an answer."""
    return Usage(
        job.prompt_tokens,
        completion_tokens,
        job.prompt_tokens + completion_tokens,
        PromptTokensDetails(cached_tokens),
        UNSET if job.parts is None else CompletionTokensDetails(reasoning_tokens),
    )


def usage_of(job: Job, answers: list[Delta]) -> Usage:
    """Return the token counts of whole answers."""
    completion_tokens = sum(len(answer.token_ids) for answer in answers)
    reasoning_tokens = sum(answer.reasoning_tokens for answer in answers)
    return usage(job, completion_tokens, cached_tokens(job, answers), reasoning_tokens)


def prompt_usage(job: Job) -> PromptUsage:
    """Return the token counts of a job that generates nothing."""
    return PromptUsage(job.prompt_tokens, job.prompt_tokens)


def call_id(context: AnswerContext, choice: int, number: int, *, prefix: str = "call") -> str:
    """Return the id of a tool call: the same whenever the job is run again.

    Mistral's chat templates refuse ids which do not have nine letters or digits.
    """
    name = f"{context.job.id}/{choice}/{number}".encode()
    digest = blake2b(name, digest_size=12).hexdigest()
    answer_format = context.model.answer_format if context.model is not None else None
    is_short = answer_format is not None and answer_format.wire_format.name.startswith("mistral")
    return digest[:9] if is_short else f"{prefix}_{digest}"


def cached_tokens(job: Job, deltas: list[Delta]) -> int:
    """Return the cached tokens of the prompts, as counted by the first choice of each."""
    return sum(delta.cached_tokens for delta in deltas if delta.index % job.n == 0)
