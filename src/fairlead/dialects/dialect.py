"""What a dialect is: how a client's request is read, and how its answer and its errors are written.

`generate` serves the requests of all dialects and depends on none. To add one, write its class in a module of
this package, and give it a row in the route table. A `RelayDialect` is for models of other servers only.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as ReadOnlySequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import msgspec

from fairlead.base.config import DialectName, Limits, SpecialTokens
from fairlead.base.errors import FairleadError, NodeRefused
from fairlead.base.formats.server_sent_events import encode_comment, encode_event
from fairlead.base.job import Delta, Job
from fairlead.base.upstream_events import UpstreamReader, readers
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.fields import Envelope, SamplingParameters
from fairlead.dialects.unread import known_fields, unread_fields
from fairlead.dialects.unserved import Fields
from fairlead.language.structured.request import AnswerSpec
from fairlead.language.text.model import Task, TextModel
from fairlead.language.text.truncation import Truncation
from fairlead.router.dispatch.estimates import WaitEstimate

EVENTS = "text/event-stream"
# The interval of comments in a stream that has no answer yet.
COMMENT_INTERVAL_S = 5.0
REQUEST_ID_HEADERS = ("X-Request-Id",)

Prompt = str | list[int]

_encode = msgspec.json.Encoder().encode


class TextPairs(NamedTuple):
    """Texts to compare: `firsts[i]` with `seconds[i]`, or a single first text with all.

    `fields`: where the firsts and the seconds are in the body, for errors.
    """

    firsts: list[str]
    seconds: list[str]
    fields: tuple[str, str]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to one of our own models, in the terms of no dialect.

    It has either `messages`, which it continues as a chat, or `prompts`. With `embed` it returns a vector for
    each prompt; with `pairs` as well, one for each of their texts, or a number for each pair, by the kind of
    the model.

    messages: The conversation, as chat templates read it; None: there are prompts instead.
    messages_field: The field of the body that the messages are from, for errors.
    image_field: The field of their first image, which only other servers read; "": they are texts.
    tools: The tools that it may call, as chat templates read them.
    template_variables: Further variables of the chat template.
    continuation: The beginning of the answer, which is not repeated in it.
    drops_turns: The oldest turns of `messages` are left out if it is too long for the model.
    prompts: Texts or token ids.
    prompts_field: The field of the body that the prompts are from, for errors.
    special_tokens: Whether control tokens in the prompts' texts are parsed or stay text.
    suffix: The answers are the texts between the prompts, which are texts, and this; "": they follow the
        prompts.
    sampling: How tokens are chosen.
    add_generation_prompt: The chat ends with the beginning of an answer.
    continues_last: The chat ends with the last message's text, which the answer continues.
    truncation: How prompts and second texts of pairs are cut that are too long; None: they are refused.
    max_tokens: The most tokens of an answer; None: no limit but the model's.
    stop: Strings that end an answer.
    n: Answers of each prompt.
    logprobs: How many of the likeliest tokens are listed beside each token of an answer; None: none is
        listed.
    prompt_logprobs: The same for the prompt.
    echo: The answers begin with the prompts.
    embed: Nothing is generated.
    dimensions: The numbers of each vector; None: all that the model makes.
    pairs: Texts to compare.
    answer: The form of the answer; None: any text.
    is_chat: The answer is divided into reasoning, content and calls.
    reasoning_tokens: The most tokens of the reasoning; None: no limit.
    options: For the dialect that made this; kept as long as the answer.
    """

    messages: list[dict[str, Any]] | None = None
    messages_field: str = "messages"
    image_field: str = ""
    tools: list[dict[str, Any]] | None = None
    template_variables: dict[str, Any] | None = None
    continuation: str = ""
    drops_turns: bool = False
    prompts: ReadOnlySequence[Prompt] = ()
    prompts_field: str = "prompt"
    special_tokens: SpecialTokens = "parse"
    suffix: str = ""
    sampling: SamplingParameters = SamplingParameters()
    add_generation_prompt: bool = True
    continues_last: bool = False
    truncation: Truncation | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    embed: bool = False
    dimensions: int | None = None
    pairs: TextPairs | None = None
    answer: AnswerSpec | None = None
    is_chat: bool = False
    reasoning_tokens: int | None = None
    options: Any = None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the models that can serve it."""
        if self.pairs is not None:
            return ("embed", "score")
        return ("embed",) if self.embed else ("generate",)


def check_texts(request: GenerationRequest) -> None:
    """Raise `InvalidRequest` for a request with an image."""
    if request.image_field:
        raise invalid_field(request.image_field, "images are not served by this model, only text")


class AnswerTimes:
    """When an answer was requested and begun, by `time.perf_counter_ns`, and its wait for a seat."""

    __slots__ = ("begun_ns", "requested_ns", "waited_ns")

    def __init__(self) -> None:
        self.requested_ns = self.begun_ns = time.perf_counter_ns()
        self.waited_ns = 0

    def begin(self, waited_s: float) -> None:
        """Record that the answer has begun, after a wait for a seat."""
        self.begun_ns, self.waited_ns = time.perf_counter_ns(), int(waited_s * 1e9)


class AnswerContext(NamedTuple):
    """What the writers of an answer need.

    job: The job that is answered.
    model: Its model; None: only other servers have it, and the answer was translated from their dialect.
    created: The answer's time, in seconds since 1970.
    options: The request's, for its dialect.
    prompt_texts: The texts of the prompts, if the request has `echo`.
    times: For dialects that show durations.
    warning: Why arguments of tools do not follow their schemas; "": they do.
    unread_fields: The fields of the request that nothing reads.
    """

    job: Job
    model: TextModel | None
    created: int
    options: Any = None
    prompt_texts: tuple[str, ...] = ()
    times: AnswerTimes | None = None
    warning: str = ""
    unread_fields: tuple[str, ...] = ()

    @property
    def own_model(self) -> TextModel:
        """The model, for dialects with answers that are never translated."""
        assert self.model is not None
        return self.model


class StreamWriter(Protocol):
    """A serializer of deltas as whole events, for one answer."""

    def write(self, deltas: list[Delta]) -> bytes:
        """Return the events for these deltas; empty if they have nothing to show yet."""

    def end(self) -> bytes:
        """Return the events that end a complete answer; empty if it has ended already."""

    def fail(self, error: FairleadError) -> bytes:
        """Return the events that end an incomplete answer, of which nothing may have been written yet."""


class AnswerWriter(StreamWriter, Protocol):
    """A `StreamWriter` for an answer of our own engine, which may continue another server's."""

    def skip_beginnings(self) -> None:
        """Skip the beginnings of all choices: another server has written them already."""


@runtime_checkable
class RelayFollower(Protocol):
    """An `AnswerWriter` with events that depend on those that another server has written before."""

    def follow(self, delta: Delta) -> None:
        """Read a piece of another server, which the client has received."""


class WaitingEvents(Protocol):
    """The events of a stream that has nothing to show: no answer yet, or a silent one. Clients skip them."""

    interval_s: float

    def write(self, waiting: WaitEstimate | None, model: str) -> bytes:
        """Return the event for now, once every `interval_s`; `waiting` is None if the job is not queued.

        `model` is the name of the job's model.
        """

    def end(self) -> bytes:
        """Return the end of these events when the answer begins. Not called if none were written."""


class ReasoningEvents(Protocol):
    """The events that show text as the model's reasoning, before an answer of any server."""

    def write(self, job: Job, created: int, text: str) -> bytes:
        """Return the event for this text. `created`: the answer's time, in seconds since 1970."""


class WaitingComments:
    """`WaitingEvents` as comments, which clients skip: the queue position and the estimated wait."""

    interval_s = COMMENT_INTERVAL_S

    def write(self, waiting: WaitEstimate | None, model: str) -> bytes:  # noqa: ARG002  # of the interface
        """Return the event for now, once every `interval_s`; `waiting` is None if the job is not queued."""
        if waiting is None:
            return encode_comment("running")
        known = "" if waiting.estimated_wait_s is None else f" estimated_wait={waiting.estimated_wait_s}"
        return encode_comment(f"queued position={waiting.position}{known}")

    def end(self) -> bytes:
        """Return the end of these events when the answer begins."""
        return b""


class RelayedBody(msgspec.Struct, frozen=True):
    """A body that is relayed to the server which has the model; that server reads the other fields."""

    model: str
    stream: bool | None = None


class RelayDialect(ABC):
    """A dialect for requests that are relayed: to a node that serves the same `path`, in the same bytes.

    `name` is what the configuration calls it and those that servers have together with it. Where a node does
    not speak it, a request that can be decoded is translated.

    `read_envelope` parses what is read of every body, and `reader` reads the node's responses. `streams`: a
    request may ask for a stream, of type `stream_type`. Until the answer begins, the stream has
    `waiting_events`, or `reasoning_events` about the load of the model; None: the dialect has none. In the
    pauses of an answer it has `waiting_events`, too.
    `body_type`, `answer_type` and `refused_fields`, of other servers, are for the documents. Every response
    has the request's id in `request_id_headers`. A node gets the client's headers whose names begin with
    `header_prefix`; empty: none.
    """

    name: ClassVar[DialectName] = "openai"
    path: ClassVar[str]
    body_type: ClassVar[Any] = RelayedBody
    answer_type: ClassVar[Any] = Any
    refused_fields: ClassVar[Fields | None] = None
    streams: ClassVar[bool] = True
    stream_type: ClassVar[str] = EVENTS
    read_envelope: ClassVar[BodyParser[Any]] = BodyParser(Envelope)
    reader: ClassVar[UpstreamReader]
    waiting_events: ClassVar[WaitingEvents] = WaitingComments()
    reasoning_events: ClassVar[ReasoningEvents | None] = None
    request_id_headers: ClassVar[tuple[str, ...]] = REQUEST_ID_HEADERS
    header_prefix: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Register the reader of the path for relays."""
        super().__init_subclass__(**options)
        if "path" in vars(cls):
            readers[cls.path] = cls.reader

    @abstractmethod
    def error_body(self, error: FairleadError) -> bytes:
        """Return the body of an error response."""

    def error_event(self, error: FairleadError) -> bytes:
        """Return the event of an error that ends a stream. Another server's error keeps its own form."""
        data = (_in_one_line(error.body) if isinstance(error, NodeRefused) else b"") or self.error_body(error)
        return encode_event(data)


class Dialect(RelayDialect):
    """A dialect that our own models answer, too, unstreamed. `job_prefix` begins the ids of its answers."""

    job_prefix: ClassVar[str]
    streams = False

    @abstractmethod
    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body. Pure: called in a thread for a large one. Raises `InvalidRequest`."""

    def unread(self, body: bytes) -> tuple[str, ...]:
        """Return the names of the fields of a decoded body that nothing reads."""
        return unread_fields(body, fields_of(type(self)))

    @abstractmethod
    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the body of a response; `deltas` has one per choice, in order."""


@cache
def fields_of(dialect: type[Dialect]) -> frozenset[str]:
    """Return the names of the fields of a body that a dialect knows: it reads, refuses or ignores them."""
    return known_fields(dialect.body_type, dialect.refused_fields or ())


class CountingDialect(RelayDialect):
    """A dialect of requests for the number of tokens of a prompt, which is not a job."""

    streams = False

    @abstractmethod
    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body, as `Dialect.decode` does."""

    @abstractmethod
    def write_count(self, tokens: int) -> bytes:
        """Return the body of a response."""


class StreamingDialect(Dialect):
    """A dialect that our own models answer as a whole or in a stream."""

    streams = True

    @abstractmethod
    def stream_writer(self, context: AnswerContext) -> AnswerWriter:
        """Return the writer of a streamed response."""


def _in_one_line(body: bytes) -> bytes:
    """Return another server's error in one line, as events require; empty if its form is unknown."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return b""
    return _encode(document) if isinstance(document, dict) and "error" in document else b""
