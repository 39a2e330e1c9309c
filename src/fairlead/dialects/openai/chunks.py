"""Writes streamed responses in OpenAI's dialect, as chunks; `events` reads those of other servers.

Chunks are assembled by hand. Everything but the text is the same in all of them, so it is prepared once, and
only the text is encoded. That makes a chunk ten times cheaper, and there is one for every token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta, Job
from fairlead.dialects.dialect import AnswerContext
from fairlead.dialects.openai.common import StreamOptions, cached_tokens, encode, usage

DONE = b"data: [DONE]\n\n"
CHAT_CHUNK = "chat.completion.chunk"


def beginning_of(job: Job, kind: str, created: int) -> bytes:
    """Return a chunk up to its choices. `kind`: its `object`. `created`: in seconds since 1970."""
    head = {"id": job.id, "object": kind, "created": created, "model": job.model, "system_fingerprint": None}
    return b"data: " + encode(head)[:-1] + b',"choices":['


class ChunkOptions(NamedTuple):
    """What else a stream has.

    stream: What the client requested of streams only.
    token_ids: The ids of the tokens, and of the prompt's at the beginning of each choice.
    """

    stream: StreamOptions | None = None
    token_ids: bool = False


class ReasoningChunks:
    """`ReasoningEvents` as chunks of a chat. They have no role: clients that merge deltas would repeat it."""

    def write(self, job: Job, created: int, text: str) -> bytes:
        """Return the event for this text. `created`: the answer's time, in seconds since 1970."""
        delta = b'{"index":0,"delta":{"reasoning_content":%s},"finish_reason":null}' % encode(text)
        return beginning_of(job, CHAT_CHUNK, created) + delta + b"]}\n\n"


class Chunks(ABC):
    """A writer of deltas as server-sent events, which counts their tokens. One object per answer.

    The `options` in the context are `ChunkOptions` or None. `fail` returns the event for an error.
    """

    # The object's name, and the JSON before and after a choice's text.
    kind: ClassVar[str]
    opening: ClassVar[bytes]
    closing: ClassVar[bytes]

    def __init__(self, context: AnswerContext, fail: Callable[[FairleadError], bytes]) -> None:
        self.fail = fail
        job = context.job
        all_options: ChunkOptions = context.options or ChunkOptions()
        options = all_options.stream or StreamOptions()
        self._returns_ids = all_options.token_ids
        self._context = context
        self._job = job
        self._tokenizer = context.own_model.tokenizer
        self._include_usage = bool(options.include_usage)
        self._continuous_usage = self._include_usage and bool(options.continuous_usage_stats)
        has_details = self._continuous_usage or self._returns_ids
        self._detailed = has_details or job.sampling.logprobs is not None
        self._begun = [False] * job.sequences
        self._completion_tokens = self._cached_tokens = self._reasoning_tokens = 0
        self._head = beginning_of(job, self.kind, context.created)
        self._heads = [self._head + b'{"index":%d,' % index + self.opening for index in range(job.sequences)]
        no_usage = b',"usage":null' if self._include_usage else b""
        self._tail = self.closing + b',"logprobs":null,"finish_reason":null}]' + no_usage + b"}\n\n"

    def write(self, deltas: list[Delta]) -> bytes:
        """Return the events for these deltas; none for a delta without text, unless it ends a choice."""
        events = []
        for delta in deltas:
            index = delta.index
            self._completion_tokens += len(delta.token_ids)
            self._reasoning_tokens += delta.reasoning_tokens
            if delta.cached_tokens:
                self._cached_tokens += cached_tokens(self._job, [delta])
            if not self._begun[index]:
                self._begun[index] = True
                events.append(self._beginning(delta))
            if delta.reasoning or delta.calls:
                events.append(self._parts(delta))
                delta = Delta(  # noqa: PLW2901  what is left of it
                    index,
                    "",
                    delta.token_ids,
                    delta.logprobs,
                    delta.finish_reason,
                    delta.stop_reason,
                )
            if delta.finish_reason is not None:
                events.append(self._last(delta))
            elif self._detailed and delta.token_ids:
                events.append(self._heads[index] + encode(delta.text) + self._detailed_tail(delta))
            elif delta.text:
                events.append(self._heads[index] + encode(delta.text) + self._tail)
        return b"".join(events)

    def end(self) -> bytes:
        """Return the events after the last delta: the usage, if requested, and the end mark."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + self._usage() + b"}\n\n" + DONE

    def skip_beginnings(self) -> None:
        """Skip the beginnings of all choices: another server has written them already."""
        self._begun = [True] * len(self._begun)

    def _last(self, delta: Delta) -> bytes:
        """Return the events for the last delta of a choice."""
        return self._heads[delta.index] + encode(delta.text) + self._detailed_tail(delta)

    def _detailed_tail(self, delta: Delta) -> bytes:
        logprobs = self._logprobs(delta) if delta.logprobs else None
        finish: dict[str, Any] = {"logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            finish["stop_reason"] = delta.stop_reason
        if self._returns_ids and delta.token_ids:
            finish["token_ids"] = delta.token_ids
        return self.closing + b"," + encode(finish)[1:] + b"]" + self._usage_member() + b"}\n\n"

    def _first_tail(self, index: int) -> bytes:
        """Return the end of a choice's first event, with the ids of its prompt if they are requested."""
        if not self._returns_ids:
            return self._tail
        prompt = list(self._job.prompts[index // self._job.n])
        return self._tail[:-3] + b',"prompt_token_ids":' + encode(prompt) + b"}\n\n"

    def _usage_member(self) -> bytes:
        if not self._include_usage:
            return b""
        return b',"usage":' + (self._usage() if self._continuous_usage else b"null")

    def _usage(self) -> bytes:
        return encode(usage(self._job, self._completion_tokens, self._cached_tokens, self._reasoning_tokens))

    @abstractmethod
    def _beginning(self, delta: Delta) -> bytes:
        """Return the event before a choice's first delta, which is `delta`; empty if there is none."""

    def _parts(self, delta: Delta) -> bytes:
        """Return the events for a delta's reasoning, text and calls, which only chats have."""
        raise AssertionError(delta)

    @abstractmethod
    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        """Return the log-probabilities of the delta's tokens in this dialect."""
