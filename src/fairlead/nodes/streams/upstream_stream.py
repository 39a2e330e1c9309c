"""Reads a stream of another server to its end. Memory and computation are bounded, by bytes and by events."""

from abc import ABC, abstractmethod

import trio

from fairlead.base.errors import NodeFailed
from fairlead.base.formats.server_sent_events import EventSplitter, split_events
from fairlead.base.job import FinishReason, Job
from fairlead.base.reported import excerpt, generated_tokens
from fairlead.base.upstream_events import Splitter
from fairlead.nodes.http.client import UpstreamResponse
from fairlead.nodes.streams.sink import Sink

STREAM_BYTES = 256 * 1024 * 1024
# Allowed events without text, such as keep-alive comments: a fixed number, plus some for each token.
SILENT_EVENTS = 10_000
SILENT_PER_TOKEN = 10
# Events that are read before other tasks run.
EVENTS_A_TURN = 200
AFTER_END_S = 1.0


class RelayFailed(NodeFailed):
    """The server sent an invalid response or an error, of any status. It lives: only this attempt fails."""


class UpstreamStream(ABC):
    """One answer as a stream of events, which are put into a sink.

    name: that of the server, for messages.
    job: the job.
    sink: gets the answer.
    event_bytes: bounds one event.
    """

    def __init__(self, name: str, job: Job, sink: Sink, *, event_bytes: int) -> None:
        self._name = name
        self._job = job
        self._sink = sink
        self._choices = job.sequences
        self._event_bytes = event_bytes
        self._ends: dict[int, FinishReason] = {}
        self._is_complete = False
        self._has_answer = False  # an event has been a part of one
        self._first_noise = b""  # the first event that is not
        self._tokens = 0
        self._text_bytes = 0
        self._silent_events = 0

    async def run(self, response: UpstreamResponse) -> None:
        """Put the whole stream into the sink. Raises `RelayFailed` or `UpstreamFailed`."""
        splitter = self._splitter()
        read_bytes = 0
        while not self._is_complete and (data := await response.read()):
            read_bytes += len(data)
            if read_bytes > STREAM_BYTES:
                raise RelayFailed(f"{self._name} sent more than {STREAM_BYTES} bytes")
            try:
                await self._take(splitter.feed(data))
            except OverflowError as error:
                raise RelayFailed(f"{self._name} sent {error}") from error
            if (pressure := self._sink.backpressure()) is not None:
                await response.pause(pressure.wait)
        if not self._is_complete and (rest := splitter.take_rest()):
            if not self._is_readable(rest):
                raise RelayFailed(f"{self._name} ended a stream before its end")
            await self._take(rest)  # only its empty line is missing, often that of the last `[DONE]`
        if not self._has_answer and (self._is_complete or self._first_noise):
            sent = excerpt(self._first_noise) or "an empty stream"
            raise RelayFailed(f"{self._name} did not answer in the format of its API: it sent {sent}")
        if not self._is_complete and len(self._ends) < self._choices:
            raise RelayFailed(f"{self._name} ended a stream before its end")
        self._finish()
        # Only the body's end should follow, after which the connection can be reused.
        await response.drain(AFTER_END_S)

    def _splitter(self) -> Splitter:
        """Return the splitter of the stream."""
        return EventSplitter(self._event_bytes)

    def _split(self, events: bytes) -> list[bytes]:
        """Return the events in joined ones."""
        return split_events(events)

    async def _take(self, events: bytes) -> None:
        """Put the events of one read."""
        for number, event in enumerate(self._split(events), 1):
            if self._is_complete:
                return  # what follows the end is ignored, as it is if it comes later
            self._read(event)
            if number % EVENTS_A_TURN == 0:
                await trio.lowlevel.checkpoint()

    @abstractmethod
    def _read(self, event: bytes) -> None:
        """Put one event, or hold it back. Set `_is_complete`, `_has_answer`, and `_ends` by choice."""

    @abstractmethod
    def _is_readable(self, event: bytes) -> bool:
        """Return whether an event is whole."""

    @abstractmethod
    def _finish(self) -> None:
        """Put the end of the answer."""

    def _count(self, text: str, tokens: int) -> None:
        self._tokens += tokens
        self._text_bytes += len(text) if text.isascii() else len(text.encode())

    def _check_silence(self) -> None:
        self._silent_events += 1
        if self._silent_events > SILENT_EVENTS + SILENT_PER_TOKEN * self._tokens:
            raise RelayFailed(f"{self._name} sent {self._silent_events} events without content")

    def _correction(self, reported: int | None) -> int:
        """Return the difference of the server's count of tokens to ours, if its count is plausible."""
        generated = generated_tokens(
            self._job, reported, counted=self._tokens, text_bytes=self._text_bytes, least=min(1, self._tokens)
        )
        return generated - self._tokens
