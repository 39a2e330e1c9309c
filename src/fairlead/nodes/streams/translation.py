"""Translates another server's chat into deltas without its bytes, which any dialect can write.

Every event is read completely. What cannot be read, or has no place in an answer, is the server's failure.
"""

from collections.abc import Callable, Iterator
from itertools import chain

from fairlead.base.formats.server_sent_events import is_comment
from fairlead.base.job import CHAT_DIALECT, CallPiece, ChatRelay, Delta, FinishReason, Job, Translation
from fairlead.base.reported import BYTES_A_TOKEN, allowed_tokens, generated_tokens
from fairlead.base.upstream_events import (
    UpstreamCall,
    UpstreamChat,
    UpstreamChoice,
    UpstreamUsage,
    chat_readers,
)
from fairlead.nodes.streams.refusals import late_refusal
from fairlead.nodes.streams.sink import Sink
from fairlead.nodes.streams.upstream_stream import RelayFailed, UpstreamStream

# The server's chat template may add this many tokens to those of the request.
TEMPLATE_TOKENS = 64 * 1024


class TranslatedStream(UpstreamStream):
    """Translates a stream's events. The ends of all choices are held back until the stream is complete.

    name: that of the server, for messages.
    job: the job.
    chat: its request as it was sent.
    sink: gets the deltas.
    event_bytes: bounds one event.
    """

    def __init__(self, name: str, job: Job, chat: ChatRelay, sink: Sink, *, event_bytes: int) -> None:
        super().__init__(name, job, sink, event_bytes=event_bytes)
        self._read_event = chat_readers[chat.path].read_event
        self._answer = _Answer(name, job, chat)
        self._ends = self._answer.ends

    def _read(self, event: bytes) -> None:
        content = self._answer.read(self._read_event, event, has_begun=self._tokens > 0)
        self._is_complete = self._is_complete or content.is_end
        if content.choices or content.usage is not None:
            self._has_answer = True
        elif not (content.is_end or is_comment(event)):
            self._first_noise = self._first_noise or event
        tokens = self._tokens
        for choice, delta in self._answer.deltas(content):
            self._count("".join(choice.texts), 1)
            delta.relayed_tokens = 1
            self._sink.put(delta)
        if self._tokens == tokens:
            self._check_silence()

    def _is_readable(self, event: bytes) -> bool:
        try:
            self._read_event(event)
        except ValueError:
            return False
        return True

    def _finish(self) -> None:
        correction = self._correction(self._answer.usage.generated)
        for delta in self._answer.end(correction, generated=self._tokens + correction):
            self._sink.put(delta)


def translated_response(name: str, job: Job, chat: ChatRelay, body: bytes) -> list[Delta]:
    """Return the deltas of a whole response. Raises `RelayFailed`.

    name: that of the server, for messages.
    job: the job.
    chat: its request as it was sent.
    body: the response.
    """
    answer = _Answer(name, job, chat)
    pairs = list(answer.deltas(answer.read(chat_readers[chat.path].read_response, body)))
    text_bytes = sum(len(text.encode()) for text in chain.from_iterable(choice.texts for choice, _ in pairs))
    estimate = min(text_bytes // BYTES_A_TOKEN, allowed_tokens(job))
    generated = generated_tokens(job, answer.usage.generated, counted=estimate, text_bytes=text_bytes)
    return [*(delta for _, delta in pairs), *answer.end(generated, generated=generated)]


class _Answer:
    """What is known of one answer: its choices, and the latest report of its tokens."""

    def __init__(self, name: str, job: Job, chat: ChatRelay) -> None:
        self.ends: dict[int, FinishReason] = {}
        self.usage = UpstreamUsage()
        self._name = name
        self._job = job
        self._chat = chat
        self._origin = Translation(CHAT_DIALECT)
        self._choices = [_Choice(self._origin) for _ in range(job.sequences)]

    def read(
        self, read: Callable[[bytes], UpstreamChat], data: bytes, *, has_begun: bool = False
    ) -> UpstreamChat:
        """Return what the server has sent. Raises `RelayFailed` if it is unreadable; see `late_refusal`."""
        try:
            content = read(data)
        except ValueError as error:
            raise RelayFailed(f"{self._name} sent {error}") from error
        if content.error is not None:
            raise late_refusal(self._name, content.error, has_begun=has_begun)
        self.usage = content.usage or self.usage
        return content

    def deltas(self, content: UpstreamChat) -> Iterator[tuple[UpstreamChoice, Delta]]:
        """Yield the generated text of each choice, if there is any. Raises `RelayFailed`.

        Choices that were not requested are ignored. Some servers end a choice in every chunk: what follows an
        end belongs to the choice, too.
        """
        for choice in content.choices:
            if not 0 <= choice.index < self._job.sequences:
                continue
            part = self._choices[choice.index]
            if choice.texts:
                try:
                    yield choice, part.delta(choice)
                except ValueError as error:
                    raise RelayFailed(f"{self._name} sent {error}") from error
            if choice.finished is not None:
                self.ends[choice.index] = part.finish_reason(choice.finished)
                part.stop = choice.stop if choice.stop in self._job.stop else None

    def end(self, tokens: int, *, generated: int) -> list[Delta]:
        """Return the last delta of each choice. The first one has `tokens`, and the server's other counts."""
        prompt = _at_most(self.usage.prompt, len(self._chat.body) + TEMPLATE_TOKENS)
        counted = sum(part.reasoning_tokens for part in self._choices)
        reasoning = _at_most(self.usage.reasoning, generated)
        first = Delta(
            0,
            relayed_tokens=tokens,
            reasoning_tokens=0 if reasoning is None else reasoning - counted,
            cached_tokens=_at_most(self.usage.cached, prompt or 0) or 0,
            translation=Translation(CHAT_DIALECT, prompt),
        )
        others = [Delta(index, translation=self._origin) for index in range(1, len(self._choices))]
        for delta, part in zip([first, *others], self._choices, strict=True):
            delta.finish_reason = self.ends.get(delta.index, part.finish_reason("stop"))
            delta.stop_reason = part.stop
        return [first, *others]


class _Choice:
    """One choice. Its calls are numbered as they begin, and their pieces follow each other.

    `reasoning_tokens` counts the events with reasoning, and `stop` is the stop string that ended it.
    """

    def __init__(self, origin: Translation) -> None:
        self.reasoning_tokens = 0
        self.stop: str | None = None
        self._origin = origin
        self._calls = 0
        self._open: UpstreamCall | None = None

    def delta(self, choice: UpstreamChoice) -> Delta:
        """Return the text as a delta. Raises `ValueError` for a piece of a call that has ended."""
        if choice.reasoning or choice.text:
            self._open = None
        self.reasoning_tokens += bool(choice.reasoning)
        return Delta(
            choice.index,
            choice.text,
            reasoning=choice.reasoning,
            reasoning_tokens=int(bool(choice.reasoning)),
            calls=[piece for call in choice.calls if (piece := self._piece(call)) is not None],
            translation=self._origin,
        )

    def finish_reason(self, reported: FinishReason) -> FinishReason:
        """Return why the choice ended; not all servers report that its end is a call."""
        if reported == "length":
            return reported
        return "tool_calls" if self._calls else "stop"

    def _piece(self, call: UpstreamCall) -> CallPiece | None:
        if self._open is None or _is_another(call, self._open):
            if not call.name:
                raise ValueError("a piece of a tool call that has ended, or has no name")
            self._open = call
            self._calls += 1
            return CallPiece(self._calls - 1, call.name, call.arguments)
        return CallPiece(self._calls - 1, None, call.arguments) if call.arguments else None


def _is_another(call: UpstreamCall, latest: UpstreamCall) -> bool:
    """Return whether this begins another call: some servers leave out the position, or have 0 for all."""
    if call.id and latest.id and call.id != latest.id:
        return True
    return bool(call.name) if call.position is None else call.position != latest.position


def _at_most(reported: int | None, most: int) -> int | None:
    """Return a reported number if it is possible."""
    return reported if reported is not None and reported <= most else None
