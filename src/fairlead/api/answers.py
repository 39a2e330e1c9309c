"""Whole responses in OpenAI's dialect; `chunks` has the streamed ones. Does not know sockets."""

from collections.abc import Sequence as ReadOnlySequence
from typing import Any, NamedTuple

import msgspec

from fairlead.answer.deltas import Deltas
from fairlead.api.logprobs import Scored, chat_logprobs, completion_logprobs, prompt_logprobs
from fairlead.job import Delta, Job
from fairlead.text.tokenizer import Tokenizer

# Above these, deltas are encoded in a thread, so that other streams' tokens are not delayed. A token with 20
# alternatives takes 25 µs.
LARGE_TEXT_CHARS = 1024 * 1024
LARGE_VECTORS_BYTES = 200_000
MANY_LOGPROBS = 200

_encode = msgspec.json.Encoder().encode


class Echo(NamedTuple):
    """The prompts' texts, with which completions begin. `alone`: nothing follows them (`max_tokens: 0`)."""

    texts: ReadOnlySequence[str] = ()
    alone: bool = False

    def of(self, deltas: list[Delta]) -> list[Delta]:
        """Return the deltas to show; if `alone`, without the generated tokens."""
        return list(map(_without_answer, deltas)) if self.alone else deltas


NO_ECHO = Echo()


async def collect(deltas: Deltas, choices: int) -> list[Delta]:
    """Wait for the end; return one delta per choice, in order. Raises the error that ended it, if any.

    Another server's response is whole in the first delta: it is one body for all choices.
    """
    # Reading only at the end lets the channel merge the deltas, and wakes this task once.
    await deltas.ended()
    whole = [Delta(index) for index in range(choices)]
    while taken := await deltas.take():
        for delta in taken:
            if delta.index < choices:
                whole[delta.index].merge(delta)
    return whole


def is_large(deltas: list[Delta]) -> bool:
    """Return whether to encode these deltas in a thread. A slow client's may be a whole answer."""
    return (
        sum(len(delta.text) for delta in deltas) > LARGE_TEXT_CHARS
        or sum(len(delta.logprobs) + len(delta.prompt_logprobs) for delta in deltas) > MANY_LOGPROBS
        or sum(len(delta.vector) for delta in deltas) > LARGE_VECTORS_BYTES
    )


def usage(job: Job, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the token counts; a prompt counts once however many answers it gets."""
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": job.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def cached_tokens(job: Job, deltas: list[Delta]) -> int:
    """Return the cached tokens of the prompts, as counted by the first choice of each."""
    return sum(delta.cached_tokens for delta in deltas if delta.index % job.n == 0)


def _without_answer(delta: Delta) -> Delta:
    return Delta(
        delta.index,
        finish_reason="length" if delta.finish_reason is not None else None,
        prompt_logprobs=delta.prompt_logprobs,
        cached_tokens=delta.cached_tokens,
    )


# Whole responses -----------------------------------------------------------------------------------


def chat_completion(job: Job, answers: list[Delta], tokenizer: Tokenizer, *, created: int) -> bytes:
    """Return the body of a chat completion; `created` in seconds since 1970."""
    wants_logprobs = job.sampling.logprobs is not None
    choices = [
        {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            # Encoded for each choice: one call for all of them would hold the GIL too long.
            "logprobs": (
                msgspec.Raw(_encode(chat_logprobs(tokenizer, answer.logprobs))) if wants_logprobs else None
            ),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        for answer in answers
    ]
    whole = _whole(job, "chat.completion", choices, answers, created)
    if job.sampling.prompt_logprobs is not None:
        whole["prompt_logprobs"] = _prompt_logprobs(tokenizer, answers[0])
    return _encode(whole)


def completion(
    job: Job,
    answers: list[Delta],
    tokenizer: Tokenizer,
    *,
    created: int,
    echo: Echo = NO_ECHO,
    lists_prompt: bool = False,
) -> bytes:
    """Return the body of a completion; `lists_prompt` adds `prompt_logprobs`."""
    wants_logprobs = job.sampling.logprobs is not None
    answers = echo.of(answers)
    choices = [
        {
            "index": answer.index,
            "text": (echo.texts[answer.index // job.n] if echo.texts else "") + answer.text,
            "logprobs": (
                msgspec.Raw(_encode(completion_logprobs(tokenizer, scored(job, answer, echo), offset=0)[0]))
                if wants_logprobs
                else None
            ),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **({"prompt_logprobs": _prompt_logprobs(tokenizer, answer)} if lists_prompt else {}),
        }
        for answer in answers
    ]
    return _encode(_whole(job, "text_completion", choices, answers, created))


def scored(job: Job, delta: Delta, echo: Echo) -> list[Scored]:
    """Return the tokens for a completion's `logprobs`: the prompt's, if its text is shown, and its own."""
    answer = Scored(delta.logprobs)
    if not echo.texts:
        return [answer]
    prompt = delta.index // job.n
    first, top = job.prompts[prompt][0], job.sampling.logprobs
    return [Scored(delta.prompt_logprobs, first, echo.texts[prompt], top), answer]


def _prompt_logprobs(tokenizer: Tokenizer, answer: Delta) -> msgspec.Raw:
    return msgspec.Raw(_encode(prompt_logprobs(tokenizer, answer.prompt_logprobs)))


def _whole(
    job: Job, kind: str, choices: list[dict[str, Any]], answers: list[Delta], created: int
) -> dict[str, Any]:
    completion_tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        **identity(job, kind, created),
        "choices": choices,
        "usage": usage(job, completion_tokens, cached_tokens(job, answers)),
    }


def identity(job: Job, kind: str, created: int) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": created, "model": job.model, "system_fingerprint": None}
