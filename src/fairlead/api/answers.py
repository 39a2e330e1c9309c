"""What an answer looks like in OpenAI's dialect: whole, or as the chunks of a stream. Knows no socket.

Chunks are written by hand: everything but the text is the same from one to the next, so it is prepared
once and only the text is encoded. That makes a chunk ten times cheaper, and there is one for every token.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as ReadOnlySequence
from typing import Any, ClassVar

import msgspec

from fairlead.api.errors import error_event
from fairlead.api.schemas import StreamOptions
from fairlead.errors import FairleadError
from fairlead.job import Delta, Job, TokenLogprob
from fairlead.nodes.deltas import Deltas
from fairlead.text.tokenizer import Tokenizer

# JSON has no infinity; OpenAI writes this for a token that cannot come.
LEAST_LOGPROB = -9999.0
DONE = b"data: [DONE]\n\n"

# Above these, deltas are written in a thread, or other streams' tokens would wait. A token with 20 others
# beside it takes 25 µs.
LARGE_TEXT_CHARS = 1024 * 1024
LARGE_VECTORS_BYTES = 200_000
MANY_LOGPROBS = 200

_encode = msgspec.json.Encoder().encode


async def collect(deltas: Deltas, choices: int) -> list[Delta]:
    """Wait for the end; return one delta a choice, in order. Raises the error that came instead, if any.

    What another server wrote is whole in the first: it is one body for all choices.
    """
    # Not reading before the end leaves the adding up to the channel, and wakes this task once.
    await deltas.ended()
    whole = [Delta(index) for index in range(choices)]
    while taken := await deltas.take():
        for delta in taken:
            if delta.index < choices:
                whole[delta.index].merge(delta)
    return whole


def is_large(deltas: list[Delta]) -> bool:
    """Whether these deltas are to be written in a thread. A slow client's may be a whole answer."""
    return (
        sum(len(delta.text) for delta in deltas) > LARGE_TEXT_CHARS
        or sum(len(delta.logprobs) for delta in deltas) > MANY_LOGPROBS
        or sum(len(delta.vector) for delta in deltas) > LARGE_VECTORS_BYTES
    )


def usage(job: Job, completion_tokens: int) -> dict[str, int]:
    """Return the counts, in tokens; a prompt counts once however many answers it gets."""
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": job.prompt_tokens + completion_tokens,
    }


# Whole ---------------------------------------------------------------------------------------------


def chat_completion(job: Job, answers: list[Delta], tokenizer: Tokenizer, *, created: int) -> bytes:
    """Return the body of a chat completion; `created` in seconds since 1970."""
    wants_logprobs = job.sampling.logprobs is not None
    choices = [
        {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            # Encoded for each choice: one call for all of them would hold the GIL too long.
            "logprobs": (
                msgspec.Raw(_encode(_chat_logprobs(tokenizer, answer.logprobs))) if wants_logprobs else None
            ),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        for answer in answers
    ]
    return _whole(job, "chat.completion", choices, answers, created)


def completion(
    job: Job, answers: list[Delta], tokenizer: Tokenizer, *, created: int, echo: ReadOnlySequence[str] = ()
) -> bytes:
    """Return the body of a completion; `echo` has the prompts' texts, if the answers begin with them."""
    wants_logprobs = job.sampling.logprobs is not None
    choices = [
        {
            "index": answer.index,
            "text": (echo[answer.index // job.n] if echo else "") + answer.text,
            "logprobs": (
                msgspec.Raw(_encode(_completion_logprobs(tokenizer, answer.logprobs, offset=0)[0]))
                if wants_logprobs
                else None
            ),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        for answer in answers
    ]
    return _whole(job, "text_completion", choices, answers, created)


def _whole(job: Job, kind: str, choices: list[dict[str, Any]], answers: list[Delta], created: int) -> bytes:
    return _encode(
        {
            **_identity(job, kind, created),
            "choices": choices,
            "usage": usage(job, sum(len(answer.token_ids) for answer in answers)),
        }
    )


def _identity(job: Job, kind: str, created: int) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": created, "model": job.model, "system_fingerprint": None}


# Streamed ------------------------------------------------------------------------------------------


class Chunks(ABC):
    """Writes deltas as server-sent events and counts their tokens. One object an answer."""

    # The beginning of a choice's text and what closes it, in JSON.
    _kind: ClassVar[str]
    _opening: ClassVar[bytes]
    _closing: ClassVar[bytes]

    def __init__(
        self, job: Job, tokenizer: Tokenizer, *, created: int, options: StreamOptions | None = None
    ) -> None:
        options = options or StreamOptions()
        self._job = job
        self._tokenizer = tokenizer
        self._include_usage = bool(options.include_usage)
        self._continuous_usage = self._include_usage and bool(options.continuous_usage_stats)
        self._detailed = self._continuous_usage or job.sampling.logprobs is not None
        self._begun = [False] * job.sequences
        self._completion_tokens = 0
        self._head = b"data: " + _encode(_identity(job, self._kind, created))[:-1] + b',"choices":['
        self._heads = [self._head + b'{"index":%d,' % index + self._opening for index in range(job.sequences)]
        no_usage = b',"usage":null' if self._include_usage else b""
        self._tail = self._closing + b',"logprobs":null,"finish_reason":null}]' + no_usage + b"}\n\n"

    def write(self, deltas: list[Delta]) -> bytes:
        """Return the events for these deltas; none for those whose text is still held back."""
        events = []
        for delta in deltas:
            index = delta.index
            self._completion_tokens += len(delta.token_ids)
            if not self._begun[index]:
                self._begun[index] = True
                events.append(self._beginning(index))
            if delta.finish_reason is not None or (self._detailed and delta.token_ids):
                events.append(self._heads[index] + _encode(delta.text) + self._detailed_tail(delta))
            elif delta.text:
                events.append(self._heads[index] + _encode(delta.text) + self._tail)
        return b"".join(events)

    def end(self) -> bytes:
        """Return the events after the last delta: the usage, if asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + self._usage() + b"}\n\n" + DONE

    def error(self, error: FairleadError) -> bytes:
        """Return the event that says why the answer is not whole."""
        return error_event(error)

    def skip_beginnings(self) -> None:
        """The client has the beginnings of all choices already, by another's hand."""
        self._begun = [True] * len(self._begun)

    def _detailed_tail(self, delta: Delta) -> bytes:
        logprobs = self._logprobs(delta) if delta.logprobs else None
        finish: dict[str, Any] = {"logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            finish["stop_reason"] = delta.stop_reason
        usage_member = b""
        if self._include_usage:
            usage_member = b',"usage":' + (self._usage() if self._continuous_usage else b"null")
        return self._closing + b"," + _encode(finish)[1:] + b"]" + usage_member + b"}\n\n"

    def _usage(self) -> bytes:
        return _encode(usage(self._job, self._completion_tokens))

    @abstractmethod
    def _beginning(self, index: int) -> bytes:
        """Return the event that comes before a choice's first delta, if one does."""

    @abstractmethod
    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        """Return what the dialect says about the delta's tokens."""


class ChatChunks(Chunks):
    """The chunks of a chat completion. The first of a choice has the role."""

    _kind = "chat.completion.chunk"
    _opening = b'"delta":{"content":'
    _closing = b"}"

    def _beginning(self, index: int) -> bytes:
        return self._head + b'{"index":%d,"delta":{"role":"assistant","content":""' % index + self._tail

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return _chat_logprobs(self._tokenizer, delta.logprobs)


class CompletionChunks(Chunks):
    """The chunks of a completion. With `echo`, the first of a choice has the prompt's text."""

    _kind = "text_completion"
    _opening = b'"text":'
    _closing = b""

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        *,
        created: int,
        options: StreamOptions | None = None,
        echo: ReadOnlySequence[str] = (),
    ) -> None:
        super().__init__(job, tokenizer, created=created, options=options)
        self._echo = echo
        self._offsets = [0] * job.sequences

    def _beginning(self, index: int) -> bytes:
        if not self._echo:
            return b""
        return self._heads[index] + _encode(self._echo[index // self._job.n]) + self._tail

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        written, self._offsets[delta.index] = _completion_logprobs(
            self._tokenizer, delta.logprobs, offset=self._offsets[delta.index]
        )
        return written


# Log-probabilities ---------------------------------------------------------------------------------


def _chat_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprob]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token(token_id),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        {**entry(chosen.token_id, chosen.logprob), "top_logprobs": [entry(*other) for other in chosen.top]}
        for chosen in logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(
    tokenizer: Tokenizer, logprobs: list[TokenLogprob], *, offset: int
) -> tuple[dict[str, Any], int]:
    """Return the four parallel lists, and the offset after them; offsets in characters of the answer."""
    tokens, values, tops, offsets = [], [], [], []
    for chosen in logprobs:
        token = tokenizer.token(chosen.token_id)
        # Different tokens can have the same text; the chosen one and then the likelier one keep the name.
        top: dict[str, float] = {token: max(chosen.logprob, LEAST_LOGPROB)}
        for token_id, logprob in chosen.top:
            top.setdefault(tokenizer.token(token_id), max(logprob, LEAST_LOGPROB))
        tokens.append(token)
        values.append(top[token])
        tops.append(top)
        offsets.append(offset)
        offset += len(token)
    written = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
    return written, offset
