"""What is read of other servers' responses, and the interface of a reader. Only values.

Each dialect of the API reads its own events. A job that may be relayed has the reader of its dialect.
"""

from typing import Protocol

import msgspec

EVENTS = "text/event-stream"


class UpstreamEvent(msgspec.Struct, frozen=True, gc=False):
    """The content of one event. `index` is its (first) choice, None if it has none.

    `text` is all generated text in it, of any kind. `finished` is why the choice ended: "length" if it was
    cut short, else "stop". `is_beginning`: it precedes all generated text, and need not be passed on at once.
    `is_end`: the answer is complete. `is_known`: the event could be read. `generated` is the reported number
    of tokens, unchecked; None if there is none.
    """

    index: int | None = None
    text: str = ""
    finished: str | None = None
    is_beginning: bool = False
    is_end: bool = False
    is_known: bool = True
    generated: int | None = None
    error: str | None = None


class UpstreamAnswer(msgspec.Struct, frozen=True, gc=False):
    """The content of a whole response. `generated` is the reported number of tokens, unchecked, or None.

    `content_bytes` is the size of the generated content as JSON; 0 if there is none, as for embeddings.
    `error` is the reason of a failure, if the response contains nothing else.
    """

    generated: int | None = None
    content_bytes: int = 0
    error: str | None = None


class Splitter(Protocol):
    """Splits a stream into events. Buffers an incomplete one, up to a limit."""

    @property
    def has_rest(self) -> bool:
        """Whether an incomplete event is buffered."""

    def feed(self, data: bytes) -> bytes:
        """Return all events that are complete now, joined. Raises `OverflowError` if one is too long."""


class UpstreamReader(Protocol):
    """Reads the responses of one dialect, as far as accounting needs it.

    `stream_type` is the media type of its streams.
    """

    @property
    def stream_type(self) -> str: ...

    def splitter(self, event_bytes: int) -> Splitter:
        """Return a splitter of one stream, whose events may have `event_bytes`."""

    def split(self, events: bytes) -> list[bytes]:
        """Return the events in joined ones, each with its end."""

    def read_plain(self, events: bytes) -> tuple[int, list[str]] | None:
        """Return the choice and the text of each event, if they are only text of one choice; else None."""

    def read_event(self, event: bytes) -> UpstreamEvent:
        """Return the content of an event of a stream, whatever it contains."""

    def read_response(self, body: bytes) -> UpstreamAnswer:
        """Return the content of a whole response. Raises `ValueError` if it is not a JSON object."""

    def without_beginning(self, event: bytes, text: str) -> bytes:
        """Return an event with its text cut to `text`, its last part. Everything else stays.

        Raises `ValueError` if its text is in several members, or if it cannot be written anew.
        """
