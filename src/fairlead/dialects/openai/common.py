"""What OpenAI's dialects share: fields of bodies and their checks, errors, and members of answers."""

from hashlib import blake2b
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta, Job
from fairlead.dialects.body import invalid_field
from fairlead.dialects.dialect import REQUEST_ID_HEADERS, AnswerContext
from fairlead.dialects.fields import PositiveCount, SamplingParameters, StopString
from fairlead.dialects.openai.structured import ResponseFormat, StructuredOutputs

MAX_STOP_STRINGS = 16

encode = msgspec.json.Encoder().encode
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


class Generation(SamplingParameters, frozen=True, kw_only=True):
    """The fields that chat completions and completions share."""

    stream_options: StreamOptions | None = None
    n: PositiveCount | None = None
    max_tokens: PositiveCount | None = None
    stop: StopStringList | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


def check_generation(body: Generation) -> None:
    """Raise `InvalidRequest` for options that are not served."""
    if body.stream_options is not None and not body.stream:
        raise invalid_field("stream_options", "only makes sense with stream: true")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid_field("prompt_logprobs", "is not served with stream: true")


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
        members = {"message": full_message(error), "type": kind, "param": error.param, "code": error.code}
        return encode({"error": members})


def full_message(error: FairleadError) -> str:
    """Return the message, beginning with the field at fault: many clients show nothing else."""
    if error.status == 400 and error.param and not error.message.startswith(error.param):
        return f"{error.param}: {error.message}"
    return error.message


# Answers -------------------------------------------------------------------------------------------


def usage(job: Job, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return the token counts; a prompt counts once however many answers it gets."""
    counts: dict[str, Any] = {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": job.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if job.parts is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts


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


def identity(job: Job, kind: str, created: int) -> dict[str, Any]:
    """Return the first members of an answer; `kind` is its `object`."""
    return {"id": job.id, "object": kind, "created": created, "model": job.model, "system_fingerprint": None}


def completion_response(
    job: Job, kind: str, created: int, choices: list[dict[str, Any]], answers: list[Delta]
) -> dict[str, Any]:
    """Return a whole answer: its choices, and the token counts of `answers`."""
    completion_tokens = sum(len(answer.token_ids) for answer in answers)
    reasoning_tokens = sum(answer.reasoning_tokens for answer in answers)
    return {
        **identity(job, kind, created),
        "choices": choices,
        "usage": usage(job, completion_tokens, cached_tokens(job, answers), reasoning_tokens),
    }
