"""A minimal client of any OpenAI-compatible server, for the commands. Independent of the terminal.

Its requests are those of remote nodes (`Upstream`), in a thread that runs Trio: the commands wait for pieces,
and print them, in plain functions. Every failure is a `ServerError` with a one-line message for the user.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from threading import Event, Thread
from typing import Literal, Self
from urllib.parse import quote

import msgspec
import trio

from fairlead.base.config import UNIX_PREFIX
from fairlead.base.errors import FairleadError
from fairlead.base.formats.server_sent_events import (
    EventSplitter,
    event_comments,
    event_data,
    event_name,
    split_events,
)
from fairlead.base.reported import decoded
from fairlead.dialects.event_reader import ABSENT
from fairlead.dialects.openai.events import ChunkFunction, ChunkPiece, ChunkShape
from fairlead.dialects.upstream_errors import error_of, is_error
from fairlead.nodes.http.client import (
    ContentFailed,
    Upstream,
    UpstreamFailed,
    UpstreamResponse,
    UpstreamTimeouts,
)
from fairlead.nodes.http.response_parser import ResponseHead

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 720.0  # above the default queue timeout plus request timeout
ERROR_BODY_BYTES = 64 * 1024
EVENT_BYTES = 16 * 1024 * 1024

_STATUSES = frozenset(HTTPStatus)
_QUEUED = re.compile(r"queued position=(\d+)(?: estimated_wait=(\d+))?")


class ServerError(Exception):
    """The server refused the request, failed or sent an invalid response. The message is one line."""


class NoServerError(ServerError):
    """No connection to the address could be made."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str


KEY_HINT = "(--api-key or FAIRLEAD_API_KEY gives a key)"


class Queued(msgspec.Struct, frozen=True):
    """The request is queued. `wait_s` is the server's estimate; None: no server has the model now."""

    position: int
    wait_s: int | None


class ReasoningPiece(msgspec.Struct, frozen=True):
    """A piece of the reasoning before the text."""

    text: str


class ToolCallPiece(msgspec.Struct):
    """A piece of the tool call with this `index`: its name, which comes first, or more of its arguments."""

    index: int
    name: str
    arguments: str


_decode_chunk = msgspec.json.Decoder(ChunkShape).decode

Piece = str | ReasoningPiece | ToolCallPiece
"""A piece of an answer: its text, its reasoning or a tool call."""


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Refusal(msgspec.Struct, frozen=True):
    error: msgspec.Raw = ABSENT


_decode_error = msgspec.json.Decoder(_Error).decode
_decode_refusal = msgspec.json.Decoder(_Refusal).decode


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class Client:
    """Sends requests to one server. `url` is its root, with or without /v1, or unix:PATH."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._socket_path = url.removeprefix(UNIX_PREFIX) if url.startswith(UNIX_PREFIX) else None
        self.url = url if self._socket_path is not None else url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._requests = RequestThread()
        self._body: Body | None = None  # of the lines that are being read
        self._is_interrupted = False

    def __enter__(self) -> Self:
        self._requests.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.stop()

    def models(self) -> list[str]:
        """Return the names of the served models. Raises `NoServerError` without a server."""
        with self._request("GET", "/v1/models") as response:
            try:
                return [model.id for model in msgspec.json.decode(response.read_all(), type=_Models).data]
            except msgspec.MsgspecError:
                raise ServerError(f"{self.url} is not a language-model server") from None

    def check_model(self, name: str) -> None:
        """Raise `ServerError` with the server's message unless it serves a model of this name or alias."""
        with self._request("GET", f"/v1/models/{quote(name, safe='')}"):
            pass

    def get(self, path: str) -> bytes:
        """Send a GET request; return the body of the response."""
        with self._request("GET", path) as response:
            return response.read_all()

    def post(self, path: str, body: object) -> bytes:
        """Send a POST request with a JSON body; return the body of the response."""
        with self._request("POST", path, msgspec.json.encode(body)) as response:
            return response.read_all()

    def delete(self, path: str) -> bytes:
        """Send a DELETE request; return the body of the response."""
        with self._request("DELETE", path) as response:
            return response.read_all()

    @contextmanager
    def events(self, path: str) -> Iterator[Iterator[tuple[str, str]]]:
        """Yield an iterator over server-sent events, as name and data. Exiting early closes the stream."""
        with self._request("GET", path) as response:
            yield (
                (event_name(event), data.decode(errors="replace"))
                for event in _events(response)
                if (data := event_data(event)) is not None
            )

    @contextmanager
    def lines(self, path: str, *, endless: bool) -> Iterator[Iterator[str]]:
        """Yield an iterator over the lines of a text. An `endless` text has no read timeout."""
        with self._request("GET", path, pause_s=math.inf if endless else READ_TIMEOUT_S) as response:
            self._body = response
            if self._is_interrupted:
                self.interrupt()
            yield _lines(response)

    def interrupt(self) -> None:
        """Make the reading of lines fail at once, as if the connection broke. For a signal handler."""
        self._is_interrupted = True
        if self._body is not None:
            self._body.cut()

    @contextmanager
    def answer(self, model: str, messages: Sequence[Message]) -> Iterator[Iterator[Piece | Queued]]:
        """Request an answer; yield an iterator over its pieces as they arrive. Exiting early cancels it."""
        body = {"model": model, "messages": messages, "stream": True}
        with self._request("POST", "/v1/chat/completions", msgspec.json.encode(body)) as response:
            yield _pieces(_events(response))

    @contextmanager
    def _request(
        self, method: str, path: str, body: bytes = b"", *, pause_s: float = READ_TIMEOUT_S
    ) -> Iterator["Body"]:
        """Yield the body of a successful response. `pause_s`: how long it may send nothing."""
        timeouts = UpstreamTimeouts(
            connect_s=CONNECT_TIMEOUT_S, first_byte_s=READ_TIMEOUT_S, between_bytes_s=pause_s
        )
        try:
            upstream = Upstream(
                self.url if self._socket_path is None else "http://localhost",
                name=self.url,
                api_key=self._api_key or None,
                capacity=1,
                timeouts=timeouts,
                socket_path=self._socket_path,
            )
        except ValueError as error:
            raise ServerError(str(error)) from None
        try:
            with self._requests.exchange(upstream, method, path, body) as response:
                if response.head.status >= HTTPStatus.MULTIPLE_CHOICES:
                    raise ServerError(_refusal(f"{self.url}{path}", response))
                yield response
        except UpstreamFailed as error:
            if not upstream.statistics().opened:
                raise NoServerError(f"no server answers at {self.url}") from None
            raise ServerError(error.message) from None
        except ContentFailed as error:
            raise ServerError(error.message) from None


class RequestThread:
    """A thread that runs Trio, with a task for each exchange. All methods are for other threads."""

    def __init__(self) -> None:
        self._has_started = Event()
        self._thread = Thread(target=trio.run, args=(self._run,), daemon=True)
        self._token: trio.lowlevel.TrioToken
        self._nursery: trio.Nursery

    def start(self) -> None:
        """Start it."""
        self._thread.start()
        self._has_started.wait()

    def stop(self) -> None:
        """Cancel the exchanges, and wait for its end."""
        self._token.run_sync_soon(self._nursery.cancel_scope.cancel)
        self._thread.join()

    @contextmanager
    def exchange(self, upstream: Upstream, method: str, path: str, body: bytes) -> Iterator["Body"]:
        """Send a request; yield its response when the head has arrived. Leaving the block cancels the rest.

        Raises `UpstreamFailed` and `ContentFailed`, also within the block.
        """
        response: Body = trio.from_thread.run(
            self._nursery.start, _exchange, upstream, method, path, body, trio_token=self._token
        )
        try:
            yield response
        finally:
            response.cut()

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:
            self._has_started.set()
            await trio.sleep_forever()


class Body:
    """A response whose body one task receives, piece by piece, and another thread takes."""

    def __init__(self, head: ResponseHead) -> None:
        self.head = head
        self._token = trio.lowlevel.current_trio_token()
        self._scope = trio.CancelScope()
        self._send, self._take = trio.open_memory_channel[bytes](0)
        self._failure: FairleadError | None = None

    async def receive(self, response: UpstreamResponse) -> None:
        """Receive the body until its end, or until it is cut. A piece waits for the thread that takes it."""
        with self._send, self._scope:
            try:
                while piece := await response.read():
                    await response.pause(partial(self._send.send, piece))
            except (UpstreamFailed, ContentFailed) as error:
                self._failure = error

    def cut(self) -> None:
        """End it now. May be called in a signal handler."""
        self._token.run_sync_soon(self._scope.cancel)

    def __iter__(self) -> Iterator[bytes]:
        """Yield its pieces as they arrive. Raises `UpstreamFailed` and `ContentFailed`."""
        while True:
            try:
                yield trio.from_thread.run(self._take.receive, trio_token=self._token)
            except trio.EndOfChannel:
                break
        if self._failure is not None:
            raise self._failure

    def read_all(self) -> bytes:
        """Return all of it. Raises as iterating does."""
        return b"".join(self)


async def _exchange(
    upstream: Upstream,
    method: str,
    path: str,
    body: bytes,
    task_status: trio.TaskStatus[Body] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one exchange. Raises until the head of the response has arrived; then `Body` has the failure."""
    response: Body | None = None
    try:
        async with upstream.exchange(method, path, body, accept="*/*") as received:
            received.decode()
            response = Body(received.head)
            task_status.started(response)
            await response.receive(received)
    except FairleadError:
        if response is None:
            raise
    finally:
        upstream.close()


def _lines(response: Body) -> Iterator[str]:
    """Yield the lines of a text, each when it is complete."""
    rest = b""
    for data in response:
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.removesuffix(b"\r").decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _events(response: Body) -> Iterator[bytes]:
    """Yield the server-sent events of a response, each when it is complete."""
    splitter = EventSplitter(EVENT_BYTES)
    try:
        for data in response:
            yield from split_events(splitter.feed(data))
    except OverflowError as error:
        raise ServerError(f"the server sent {error}") from None


def _pieces(events: Iterator[bytes]) -> Iterator[Piece | Queued]:
    """Read an answer's events. Raises `ServerError` if they end without [DONE]."""
    for event in events:
        for comment in event_comments(event):
            if found := _QUEUED.match(comment):
                yield Queued(int(found[1]), None if found[2] is None else int(found[2]))
        data = event_data(event)
        if data is None:
            continue
        if data == b"[DONE]":
            return
        chunk = decoded(_decode_chunk, data)
        if chunk is None:
            shown = data[:80].decode(errors="replace")
            raise ServerError(f"the server sent an event that is not part of an answer: {shown}")
        if is_error(chunk.error):
            raise ServerError(_message(chunk.error, data))
        for choice in chunk.choices or ():
            if choice.delta is not None:
                yield from _pieces_of(choice.delta)
    raise ServerError("the server closed the stream before the end of the answer")


def _refusal(url: str, response: Body) -> str:
    """Return the server's error message, or the status if the body has none."""
    body = b""
    for part in response:
        body += part
        if len(body) > ERROR_BODY_BYTES:
            break
    refusal = decoded(_decode_refusal, body)
    if refusal is not None and is_error(refusal.error):
        message = _message(refusal.error, body)
        # The servers of others name their own ways to give a key.
        is_about_keys = response.head.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        return f"{message} {KEY_HINT}" if is_about_keys else message
    status = response.head.status
    phrase = HTTPStatus(status).phrase if status in _STATUSES else ""
    return f"{url} answered {status} {phrase}".rstrip()


def _pieces_of(delta: ChunkPiece) -> Iterator[Piece]:
    """Yield the pieces that are not empty, in the order of an answer."""
    if delta.thoughts:
        yield ReasoningPiece(delta.thoughts)
    if delta.words:
        yield delta.words
    for call in delta.tool_calls or ():
        function = call.function or ChunkFunction()
        yield ToolCallPiece(call.index or 0, function.name or "", function.arguments or "")


def _message(error: msgspec.Raw, document: bytes) -> str:
    """Return the message of an error in a document, on one line. Ours may be longer than `error_of` shows."""
    ours = decoded(_decode_error, error)
    return " ".join((error_of(error, document).message if ours is None else ours.message).split())
