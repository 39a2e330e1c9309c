"""Relays a stream of another server into a sink and reads as much of its events as accounting needs.

Everything received in one read is relayed at once. Memory and computation are bounded, by bytes and by the
number of events without text.
"""

from dataclasses import dataclass, field

import trio

from fairlead.answer.reported import generated_tokens
from fairlead.answer.sink import Sink
from fairlead.errors import NodeFailed
from fairlead.http.client import UpstreamFailed, UpstreamResponse
from fairlead.job import Delta, FinishReason, Job
from fairlead.upstream_events import UpstreamEvent, UpstreamReader

STREAM_BYTES = 256 * 1024 * 1024
# Allowed events without text, such as keep-alive comments: a fixed number, plus some for each token.
SILENT_EVENTS = 10_000
SILENT_PER_TOKEN = 10
# Events that are read before other tasks run.
EVENTS_A_TURN = 200
# Memory of a buffered event, besides its bytes.
BUFFERED_EVENT_BYTES = 64
AFTER_END_S = 1.0


class RelayFailed(NodeFailed):
    """The server sent an invalid response or an error. That does not count against its health."""


@dataclass(slots=True)
class _Pending:
    """Events of one choice that arrived in one read."""

    index: int
    raw: list[bytes]
    texts: list[str] = field(default_factory=list)

    def delta(self) -> Delta:
        return Delta(
            self.index, "".join(self.texts), raw=[b"".join(self.raw)], relayed_tokens=len(self.texts)
        )


class RelayedStream:
    """Relays a stream's events. Two kinds are held back.

    Events before any generated text are held until some follows: a client that has received nothing can get
    another node's answer instead. The end of the last choice, and all after it, is held until the stream is
    complete: so nothing that was put is needed again if another node repeats the answer.

    `event_bytes` bounds one event, and all events that are held back.
    """

    def __init__(self, name: str, job: Job, reader: UpstreamReader, sink: Sink, *, event_bytes: int) -> None:
        self._name = name
        self._reader = reader
        self._job = job
        self._sink = sink
        self._choices = job.sequences
        self._event_bytes = event_bytes
        self._ends: dict[int, FinishReason] = {}
        self._last_index = 0
        self._has_begun = False
        self._is_complete = False
        self._tokens = 0
        self._text_bytes = 0
        self._reported: int | None = None
        self._silent_events = 0
        self._buffered_bytes = 0
        self._beginning: list[bytes] = []
        self._pending: _Pending | None = None
        self._end: Delta | None = None
        self._tail: list[bytes] = []

    async def run(self, response: UpstreamResponse) -> None:
        """Put the whole stream into the sink. Raises `RelayFailed` or `UpstreamFailed`."""
        splitter = self._reader.splitter(self._event_bytes)
        read_bytes = 0
        while not self._is_complete and (data := await response.read()):
            read_bytes += len(data)
            if read_bytes > STREAM_BYTES:
                raise RelayFailed(f"{self._name} sent more than {STREAM_BYTES} bytes")
            try:
                events = splitter.feed(data)
                if not self._put_plain(events):
                    await self._read_all(self._reader.split(events))
            except OverflowError as error:
                raise RelayFailed(f"{self._name} sent {error}") from error
            finally:
                self._flush()
            if (pressure := self._sink.backpressure()) is not None:
                await response.pause(pressure.wait)
        if not self._is_complete and (self._end is None or splitter.has_rest):
            raise UpstreamFailed(f"{self._name} ended a stream before its end")
        self._finish()
        # Only the body's end should follow, after which the connection can be reused.
        await response.drain(AFTER_END_S)

    def _put_plain(self, events: bytes) -> bool:
        """Put events that are only text of one choice at once; return False if they are not, or not now."""
        if not self._has_begun or self._ends or (plain := self._reader.read_plain(events)) is None:
            return False
        index, texts = plain
        self._last_index = self._choice(index)
        text = "".join(texts)
        self._count(text, len(texts))
        self._sink.put(Delta(self._last_index, text, raw=[events], relayed_tokens=len(texts)))
        return True

    async def _read_all(self, events: list[bytes]) -> None:
        for number, raw in enumerate(events, 1):
            self._read(raw, self._reader.read_event(raw))
            if number % EVENTS_A_TURN == 0:
                await trio.lowlevel.checkpoint()

    def _read(self, raw: bytes, event: UpstreamEvent) -> None:
        if event.error is not None:
            raise RelayFailed(f"{self._name} failed: {event.error}")
        if event.generated is not None:
            self._reported = event.generated
        self._is_complete = self._is_complete or event.is_end
        if not event.text:
            self._check_silence()
        if not self._has_begun and event.is_beginning:
            if b"data:" in raw or event.index is not None:  # comments only keep a connection open
                self._buffer(raw, self._beginning)
            return
        self._has_begun = True
        index = self._last_index if event.index is None else self._choice(event.index)
        if self._end is not None or index in self._ends:
            self._buffer(raw, self._tail)  # after a choice's end, only events for all choices follow
            return
        self._last_index = index
        if event.text:
            self._count(event.text, 1)
        if event.finished is not None:
            self._ends[index] = "length" if event.finished == "length" else "stop"
            if len(self._ends) == self._choices:
                self._end = Delta(index, event.text, raw=[raw], relayed_tokens=bool(event.text))
                return
        self._add(index, raw, event)

    def _choice(self, index: int) -> int:
        """Return the choice of that index; an index that the request does not have is clamped."""
        return max(0, min(index, self._choices - 1))

    def _count(self, text: str, tokens: int) -> None:
        self._tokens += tokens
        self._text_bytes += len(text) if text.isascii() else len(text.encode())

    def _check_silence(self) -> None:
        self._silent_events += 1
        if self._silent_events > SILENT_EVENTS + SILENT_PER_TOKEN * self._tokens:
            raise RelayFailed(f"{self._name} sent {self._silent_events} events without content")

    def _buffer(self, raw: bytes, buffer: list[bytes]) -> None:
        self._buffered_bytes += len(raw) + BUFFERED_EVENT_BYTES
        if self._buffered_bytes > self._event_bytes:
            raise RelayFailed(
                f"{self._name} sent more than {self._event_bytes} bytes before or after its answer"
            )
        buffer.append(raw)

    def _add(self, index: int, raw: bytes, event: UpstreamEvent) -> None:
        if self._pending is None or self._pending.index != index:
            self._flush()
            self._pending = _Pending(index, self._beginning)
            self._beginning = []
        self._pending.raw.append(raw)
        if event.text:
            self._pending.texts.append(event.text)
        if event.finished is not None:
            self._flush(self._ends[index])

    def _flush(self, finish_reason: FinishReason | None = None) -> None:
        if self._pending is not None:
            delta, self._pending = self._pending.delta(), None
            delta.finish_reason = finish_reason
            self._sink.put(delta)

    def _finish(self) -> None:
        """Put the end that was held back, and correct the token count to the server's, if plausible."""
        unended = [index for index in range(self._choices) if index not in self._ends]
        if self._end is not None:
            self._end.raw = [b"".join([*self._beginning, *self._end.raw])]
            self._sink.put(self._end)
            unended = [self._end.index]
        generated = generated_tokens(
            self._job,
            self._reported,
            counted=self._tokens,
            text_bytes=self._text_bytes,
            least=min(1, self._tokens),
        )
        correction = generated - self._tokens
        if self._tail or correction:
            # With several choices the tail has its own index, so that it comes after all of them.
            tail = self._choices if self._choices > 1 else 0
            raw = [b"".join(self._tail)] if self._tail else []
            self._sink.put(Delta(tail, raw=raw, relayed_tokens=correction))
        for index in unended:
            # With an empty event: for a delta without one, the dialect would write an event.
            self._sink.put(Delta(index, finish_reason=self._ends.get(index, "stop"), raw=[b""]))
