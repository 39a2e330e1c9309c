"""Streamed responses in OpenAI's dialect, as chunks. Does not know sockets.

Chunks are assembled by hand: everything but the text is the same in all of them, so it is prepared once and
only the text is encoded. That makes a chunk ten times cheaper, and there is one for every token.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from fairlead.api.answers import NO_ECHO, Echo, cached_tokens, identity, scored, usage
from fairlead.api.errors import error_event
from fairlead.api.logprobs import Scored, chat_logprobs, completion_logprobs
from fairlead.api.schemas import StreamOptions
from fairlead.errors import FairleadError
from fairlead.http.server_sent_events import encode_event
from fairlead.job import Delta, Job
from fairlead.text.tokenizer import Tokenizer

DONE = encode_event(b"[DONE]")

_encode = msgspec.json.Encoder().encode


class Chunks(ABC):
    """A writer of deltas as server-sent events, which counts their tokens. One object per answer."""

    # The object's name, and the JSON before and after a choice's text.
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
        self._completion_tokens = self._cached_tokens = 0
        self._head = b"data: " + _encode(identity(job, self._kind, created))[:-1] + b',"choices":['
        self._heads = [self._head + b'{"index":%d,' % index + self._opening for index in range(job.sequences)]
        no_usage = b',"usage":null' if self._include_usage else b""
        self._tail = self._closing + b',"logprobs":null,"finish_reason":null}]' + no_usage + b"}\n\n"

    def write(self, deltas: list[Delta]) -> bytes:
        """Return the events for these deltas; none for those whose text is still held back."""
        events = []
        for delta in deltas:
            index = delta.index
            self._completion_tokens += len(delta.token_ids)
            if delta.cached_tokens:
                self._cached_tokens += cached_tokens(self._job, [delta])
            if not self._begun[index]:
                self._begun[index] = True
                events.append(self._beginning(delta))
            if delta.finish_reason is not None:
                events.append(self._last(delta))
            elif self._detailed and delta.token_ids:
                events.append(self._heads[index] + _encode(delta.text) + self._detailed_tail(delta))
            elif delta.text:
                events.append(self._heads[index] + _encode(delta.text) + self._tail)
        return b"".join(events)

    def end(self) -> bytes:
        """Return the events after the last delta: the usage, if requested, and the end mark."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + self._usage() + b"}\n\n" + DONE

    def error(self, error: FairleadError) -> bytes:
        """Return the event that says why the answer is incomplete."""
        return error_event(error)

    def skip_beginnings(self) -> None:
        """Skip the beginnings of all choices: another server has written them already."""
        self._begun = [True] * len(self._begun)

    def _last(self, delta: Delta) -> bytes:
        """Return the events for the last delta of a choice."""
        return self._heads[delta.index] + _encode(delta.text) + self._detailed_tail(delta)

    def _detailed_tail(self, delta: Delta) -> bytes:
        logprobs = self._logprobs(delta) if delta.logprobs else None
        finish: dict[str, Any] = {"logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            finish["stop_reason"] = delta.stop_reason
        return self._closing + b"," + _encode(finish)[1:] + b"]" + self._usage_member() + b"}\n\n"

    def _usage_member(self) -> bytes:
        if not self._include_usage:
            return b""
        return b',"usage":' + (self._usage() if self._continuous_usage else b"null")

    def _usage(self) -> bytes:
        return _encode(usage(self._job, self._completion_tokens, self._cached_tokens))

    @abstractmethod
    def _beginning(self, delta: Delta) -> bytes:
        """Return the event before a choice's first delta, which is `delta`; empty if there is none."""

    @abstractmethod
    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        """Return the log-probabilities of the delta's tokens in this dialect."""


class ChatChunks(Chunks):
    """The chunks of a chat completion. The first of a choice has the role, the last an empty `delta`."""

    _kind = "chat.completion.chunk"
    _opening = b'"delta":{"content":'
    _closing = b"}"

    def _beginning(self, delta: Delta) -> bytes:
        return self._head + b'{"index":%d,"delta":{"role":"assistant","content":""' % delta.index + self._tail

    def _last(self, delta: Delta) -> bytes:
        content = b""
        if delta.text or delta.logprobs:
            before = Delta(delta.index, delta.text, logprobs=delta.logprobs)
            content = self._heads[delta.index] + _encode(delta.text) + self._detailed_tail(before)
        end = Delta(delta.index, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        return content + self._head + b'{"index":%d,"delta":{' % delta.index + self._detailed_tail(end)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, delta.logprobs)


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
        echo: Echo = NO_ECHO,
    ) -> None:
        super().__init__(job, tokenizer, created=created, options=options)
        self._echo = echo
        self._offsets = [0] * job.sequences

    def write(self, deltas: list[Delta]) -> bytes:
        return super().write(self._echo.of(deltas))

    def _beginning(self, delta: Delta) -> bytes:
        if not self._echo.texts:
            return b""
        head = self._heads[delta.index] + _encode(self._echo.texts[delta.index // self._job.n])
        if self._job.sampling.logprobs is None:
            return head + self._tail
        prompt, _ = scored(self._job, delta, self._echo)
        listed = {"logprobs": self._list(delta.index, prompt), "finish_reason": None}
        return head + b"," + _encode(listed)[1:] + b"]" + self._usage_member() + b"}\n\n"

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return self._list(delta.index, Scored(delta.logprobs))

    def _list(self, index: int, part: Scored) -> dict[str, Any]:
        written, self._offsets[index] = completion_logprobs(
            self._tokenizer, [part], offset=self._offsets[index]
        )
        return written
