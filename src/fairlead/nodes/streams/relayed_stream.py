"""Relays a stream of another server into a sink and reads as much of its events as accounting needs.

Everything received in one read is relayed at once.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from fairlead.base.job import Delta, Job
from fairlead.base.upstream_events import Splitter, UpstreamEvent, UpstreamReader
from fairlead.nodes.streams.refusals import late_refusal
from fairlead.nodes.streams.sink import Sink
from fairlead.nodes.streams.upstream_stream import RelayFailed, UpstreamStream

# Memory of a buffered event, besides its bytes.
BUFFERED_EVENT_BYTES = 64


class _End(NamedTuple):
    """An event in which a choice ends, and the text in it."""

    raw: bytes
    text: str


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
    another node's answer instead. The ends of choices, and what follows all of them, are held until the
    stream is complete, because no other node can repeat an answer that has ended.

    Some servers end a choice in every chunk, with an empty word, or never. The client gets all of the text,
    and one end behind it. An event that says nothing of the answer is dropped: the client may fail for it. A
    stream of nothing else, such as one in the format of another API, is a failure.

    `event_bytes` bounds one event, and all events that are held back.
    """

    def __init__(self, name: str, job: Job, reader: UpstreamReader, sink: Sink, *, event_bytes: int) -> None:
        super().__init__(name, job, sink, event_bytes=event_bytes)
        self._reader = reader
        self._last_index = 0
        self._has_begun = False
        self._reported: int | None = None
        self._buffered_bytes = 0
        self._dropped_bytes = 0  # since the latest text
        self._dropped_at = 0  # tokens
        self._beginning: list[bytes] = []
        self._pending: _Pending | None = None
        self._held: dict[int, _End] = {}  # by choice
        self._moved: dict[int, bytes] = {}  # by choice, the latest event in which it did not end after all
        self._latest: dict[int, bytes] = {}  # by choice, the latest events
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
        self._latest[self._last_index] = events
        self._sink.put(Delta(self._last_index, text, raw=[events], relayed_tokens=len(texts)))
        return True

    def _read(self, raw: bytes) -> None:
        event = self._reader.read_event(raw)
        if not event.is_odd:
            self._read_one(raw, event)
            return
        for part in self._reader.repair(raw):
            self._read_one(part, self._reader.read_event(part))

    def _read_one(self, raw: bytes, event: UpstreamEvent) -> None:
        # An error that is an end of the client's dialect is relayed, once the answer has begun.
        if event.error is not None and not (event.is_end and self._has_begun):
            raise late_refusal(self._name, event.error, has_begun=self._has_begun)
        if event.is_noise:
            self._drop(raw)
            return
        if event.generated is not None:
            self._reported = event.generated
        self._is_complete = self._is_complete or event.is_end
        # Neither a comment nor `[DONE]`, which end streams of other APIs, too.
        self._has_answer = (
            self._has_answer or event.index is not None or (b"data:" in raw and not event.is_end)
        )
        if not event.text:
            self._check_silence()
        if not self._has_begun and event.is_beginning:
            if b"data:" in raw or event.index is not None:  # comments only keep a connection open
                self._buffer(raw, self._beginning)
                self._latest[self._choice(event.index or 0)] = raw
            return
        self._has_begun = True
        self._relay(raw, event)

    def _relay(self, raw: bytes, event: UpstreamEvent) -> None:
        if event.is_end and event.index is None:
            self._buffer(raw, self._tail)
            return
        index = self._last_index if event.index is None else self._choice(event.index)
        if index in self._ends:
            if not event.text and event.finished is None:
                self._buffer(raw, self._tail)
                return
            self._move_end(index)
        self._last_index = index
        if event.text:
            self._count(event.text, 1)
        if event.finished is None:
            self._add(index, raw, event.text)
            return
        self._ends[index] = "length" if event.finished == "length" else "stop"
        self._hold(len(raw))
        self._held[index] = _End(raw, event.text)

    def _move_end(self, index: int) -> None:
        """Put the event in which a choice ended, without the end: more of the choice follows."""
        end = self._held.pop(index)
        del self._ends[index]
        self._buffered_bytes -= len(end.raw) + BUFFERED_EVENT_BYTES
        self._moved[index] = end.raw
        self._add(index, self._reader.without_end(end.raw), end.text)

    def _choice(self, index: int) -> int:
        """Return the choice of that index; an index that the request does not have is clamped."""
        return max(0, min(index, self._choices - 1))

    def _buffer(self, raw: bytes, buffer: list[bytes]) -> None:
        self._hold(len(raw))
        buffer.append(raw)

    def _hold(self, size: int) -> None:
        self._buffered_bytes += size + BUFFERED_EVENT_BYTES
        self._check_bytes(self._buffered_bytes)

    def _drop(self, raw: bytes) -> None:
        """Drop an event that says nothing. Their bytes are bounded between two texts, not in all."""
        self._first_noise = self._first_noise or raw
        self._check_silence()
        if self._dropped_at != self._tokens:
            self._dropped_at, self._dropped_bytes = self._tokens, 0
        self._dropped_bytes += len(raw) + BUFFERED_EVENT_BYTES
        self._check_bytes(self._dropped_bytes)

    def _check_bytes(self, size: int) -> None:
        if size > self._event_bytes:
            raise RelayFailed(f"{self._name} sent more than {self._event_bytes} bytes beside its answer")

    def _add(self, index: int, raw: bytes, text: str) -> None:
        self._latest[index] = raw
        if self._pending is None or self._pending.index != index:
            self._flush()
            self._pending = _Pending(index, self._beginning)
            self._beginning = []
        self._pending.raw.append(raw)
        if text:
            self._pending.texts.append(text)

    def _flush(self) -> None:
        if self._pending is not None:
            delta, self._pending = self._pending.delta(), None
            self._sink.put(delta)

    def _is_readable(self, event: bytes) -> bool:
        return self._reader.read_event(event).is_known

    def _missing_end(self, index: int) -> bytes:
        """Return an event in which the choice ends, like its latest one; empty if there is none."""
        events = self._reader.split(self._moved.get(index) or self._latest.get(index, b""))
        return self._reader.only_end(events[-1]) if events else b""

    def _finish(self) -> None:
        """Put the ends that were held back, and correct the token count to the server's, if plausible."""
        for index in range(self._choices):
            if index not in self._held and (missing := self._missing_end(index)):
                self._held[index] = _End(missing, "")
        for index, end in self._held.items():
            events = b"".join([*self._beginning, end.raw])
            self._beginning = []
            self._sink.put(Delta(index, end.text, raw=[events], relayed_tokens=bool(end.text)))
        correction = self._correction(self._reported)
        if self._tail or correction:
            # With several choices the tail has its own index, so that it comes after all of them.
            tail = self._choices if self._choices > 1 else 0
            after = [b"".join(self._tail)] if self._tail else []
            self._sink.put(Delta(tail, raw=after, relayed_tokens=correction))
        for index in range(self._choices):
            # With an empty event: for a delta without one, the dialect would write an event.
            self._sink.put(Delta(index, finish_reason=self._ends.get(index, "stop"), raw=[b""]))
