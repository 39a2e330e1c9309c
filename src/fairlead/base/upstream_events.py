"""What is read of other servers' responses, the interface of a reader, and the readers by their paths.

Each dialect of the API reads its own events, and adds its reader here when it is defined. A job that may be
relayed has only the path of its dialect.
"""

from typing import Literal, Protocol

import msgspec

EVENTS = "text/event-stream"


class UpstreamError(msgspec.Struct, frozen=True, gc=False):
    """An error in place of an answer, or in a stream. `status`: the HTTP status that it names, if any."""

    message: str
    status: int | None = None


class UpstreamEvent(msgspec.Struct, frozen=True, gc=False):
    """The content of one event.

    index: Its (first) choice; None if it has none.
    text: All generated text in it, of any kind.
    finished: Why the choice ended: "length" if it was cut short, else "stop"; None if it did not.
    is_odd: Clients may fail for its form, or it is read here only in part: it must be repaired.
    is_beginning: It precedes all generated text, and need not be passed on at once.
    is_end: The answer is complete.
    is_known: It could be read.
    is_noise: It says nothing of the answer, and some clients fail for it.
    generated: The reported number of tokens, unchecked; None if there is none.
    error: The server has failed, or refuses the request.
    """

    index: int | None = None
    text: str = ""
    finished: str | None = None
    is_beginning: bool = False
    is_end: bool = False
    is_known: bool = True
    generated: int | None = None
    error: UpstreamError | None = None
    is_noise: bool = False
    is_odd: bool = False


class UpstreamAnswer(msgspec.Struct, frozen=True, gc=False):
    """The content of a whole response. `generated` is the reported number of tokens, unchecked, or None.

    `content_bytes` is the size of the generated content as JSON; 0 if there is none, as for embeddings.
    `error` is the reason of a failure, if the response contains nothing else.
    """

    generated: int | None = None
    content_bytes: int = 0
    error: UpstreamError | None = None


class UpstreamCall(msgspec.Struct, frozen=True, gc=False):
    """A piece of a tool call in a chat.

    position: the call's place among all of them; None if the server left it out.
    id: the call's id; None if the server left it out.
    name: the function's name, in the first piece of a call.
    arguments: the next part of the arguments.
    """

    position: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class UpstreamChoice(msgspec.Struct, frozen=True, gc=False):
    """The content of one choice in a chunk of a chat, or in a whole one.

    index: the choice.
    reasoning: the next part of its reasoning.
    text: the next part of its text.
    calls: pieces of its calls.
    finished: why it ended; None: it has not.
    stop: the stop string that ended it, if one is reported.
    """

    index: int = 0
    reasoning: str = ""
    text: str = ""
    calls: tuple[UpstreamCall, ...] = ()
    finished: Literal["stop", "length", "tool_calls"] | None = None
    stop: str | None = None

    @property
    def texts(self) -> list[str]:
        """All generated text; empty if there is none."""
        parts = [self.reasoning, self.text]
        parts += [part for call in self.calls for part in (call.name or "", call.arguments)]
        return [part for part in parts if part]


class UpstreamUsage(msgspec.Struct, frozen=True, gc=False):
    """The reported numbers of tokens, unchecked; None if there are none.

    prompt: tokens of the prompt.
    cached: how many of these were cached.
    generated: tokens of the answer, with those of the reasoning.
    reasoning: how many of these are of the reasoning.
    """

    prompt: int | None = None
    cached: int | None = None
    generated: int | None = None
    reasoning: int | None = None


class UpstreamChat(msgspec.Struct, frozen=True, gc=False):
    """The content of one event of a chat, or of a whole one.

    choices: the choices in it.
    usage: the numbers of tokens; None: it has none.
    is_end: whether the answer is complete.
    error: the error in it, if there is one.
    """

    choices: tuple[UpstreamChoice, ...] = ()
    usage: UpstreamUsage | None = None
    is_end: bool = False
    error: UpstreamError | None = None


class ChatReader(Protocol):
    """Reads chats completely, in order to translate them. Raises `ValueError` for anything else."""

    def read_event(self, event: bytes) -> UpstreamChat:
        """Return the content of an event of a stream; a comment has none."""

    def read_response(self, body: bytes) -> UpstreamChat:
        """Return the content of a whole response."""


class Splitter(Protocol):
    """Splits a stream into events. Buffers an incomplete one, up to a limit."""

    @property
    def has_rest(self) -> bool:
        """Whether an incomplete event is buffered."""

    def feed(self, data: bytes) -> bytes:
        """Return all events that are complete now, joined. Raises `OverflowError` if one is too long."""

    def take_rest(self) -> bytes:
        """Return the incomplete event as a complete one: the body has ended, and only its end is missing."""


class UpstreamReader(Protocol):
    """Reads the responses of one dialect, as far as accounting needs it.

    `stream_type` is the media type of its streams.
    """

    @property
    def stream_type(self) -> str: ...

    def splitter(self, event_bytes: int) -> Splitter:
        """Return a splitter of one stream. An event may have `event_bytes`."""

    def split(self, events: bytes) -> list[bytes]:
        """Return the events in joined ones, each with its end."""

    def read_plain(self, events: bytes) -> tuple[int, list[str]] | None:
        """Return the choice and the text of each event, if they are only text of one choice; else None."""

    def read_event(self, event: bytes) -> UpstreamEvent:
        """Return the content of an event of a stream, whatever it contains."""

    def repair(self, event: bytes) -> list[bytes]:
        """Return an odd event as usual ones: each has one choice at most, and no unknown finish reason."""

    def read_response(self, body: bytes) -> UpstreamAnswer:
        """Return the content of a whole response. Raises `ValueError` if it is not a JSON object."""

    def without_end(self, event: bytes) -> bytes:
        """Return an event without the finish reason of its choice. Everything else stays."""

    def only_end(self, event: bytes) -> bytes:
        """Return an event like this one in which the choice ends: as it says, or else by itself.

        It has no text. It is empty if the dialect's events have no such member.
        """

    def without_beginning(self, event: bytes, text: str) -> bytes:
        """Return an event with its text cut to `text`, its last part. Everything else stays.

        Raises `ValueError` if its text is in several members, or if it cannot be written anew.
        """


readers: dict[str, UpstreamReader] = {}
"""The reader of each dialect, by the path of its requests."""

chat_readers: dict[str, ChatReader] = {}
"""The readers of chats that are translated to other dialects, by the path of the chats."""
