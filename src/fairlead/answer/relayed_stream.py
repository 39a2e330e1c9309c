"""Relays a stream of another server into a sink and reads as much of its events as accounting needs.

Everything received in one read is relayed at once.
"""

from dataclasses import dataclass, field

from fairlead.answer.sink import Sink
from fairlead.answer.upstream_stream import RelayFailed, UpstreamStream
from fairlead.job import Delta, FinishReason, Job
from fairlead.upstream_events import Splitter, UpstreamEvent, UpstreamReader

# Memory of a buffered event, besides its bytes.
BUFFERED_EVENT_BYTES = 64


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


class RelayedStream(UpstreamStream):
    """Relays a stream's events. Two kinds are held back.

    Events before any generated text are held until some follows: a client that has received nothing can get
    another node's answer instead. The end of the last choice, and all after it, is held until the stream is
    complete, because no other node can repeat an answer that has ended.

    `event_bytes` bounds one event, and all events that are held back.
    """

    def __init__(self, name: str, job: Job, reader: UpstreamReader, sink: Sink, *, event_bytes: int) -> None:
        super().__init__(name, job, sink, event_bytes=event_bytes)
        self._reader = reader
        self._last_index = 0
        self._has_begun = False
        self._reported: int | None = None
        self._buffered_bytes = 0
        self._beginning: list[bytes] = []
        self._pending: _Pending | None = None
        self._end: Delta | None = None
        self._tail: list[bytes] = []

    def _splitter(self) -> Splitter:
        return self._reader.splitter(self._event_bytes)

    def _split(self, events: bytes) -> list[bytes]:
        return self._reader.split(events)

    async def _take(self, events: bytes) -> None:
        try:
            if not self._put_plain(events):
                await super()._take(events)
        finally:
            self._flush()

    def _put_plain(self, events: bytes) -> bool:
        """Put events at once if they are only text of one choice; return False if each must be read."""
        if not self._has_begun or self._ends or (plain := self._reader.read_plain(events)) is None:
            return False
        index, texts = plain
        self._last_index = self._choice(index)
        text = "".join(texts)
        self._count(text, len(texts))
        self._sink.put(Delta(self._last_index, text, raw=[events], relayed_tokens=len(texts)))
        return True

    def _read(self, raw: bytes) -> None:
        event = self._reader.read_event(raw)
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
        correction = self._correction(self._reported)
        if self._tail or correction:
            # With several choices the tail has its own index, so that it comes after all of them.
            tail = self._choices if self._choices > 1 else 0
            raw = [b"".join(self._tail)] if self._tail else []
            self._sink.put(Delta(tail, raw=raw, relayed_tokens=correction))
        for index in unended:
            # With an empty event: for a delta without one, the dialect would write an event.
            self._sink.put(Delta(index, finish_reason=self._ends.get(index, "stop"), raw=[b""]))
