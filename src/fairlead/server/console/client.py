"""A minimal client of any OpenAI-compatible server, for the commands. Independent of the terminal.

Every failure is a `ServerError` with a one-line message for the user.
"""

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Literal, Self
from urllib.parse import quote

import httpx
import msgspec

from fairlead.base.config import UNIX_PREFIX, is_loopback
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

READ_TIMEOUT_S = 720.0  # above the default queue timeout plus request timeout
ERROR_BODY_BYTES = 64 * 1024
EVENT_BYTES = 16 * 1024 * 1024

_QUEUED = re.compile(r"queued position=(\d+)(?: estimated_wait=(\d+))?")


class ServerError(Exception):
    """The server refused the request, failed or sent an invalid response. The message is one line."""


class NoServerError(ServerError):
    """No connection to the address could be made."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str


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
        path = url.removeprefix(UNIX_PREFIX) if url.startswith(UNIX_PREFIX) else None
        self.url = url if path is not None else url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=self.url if path is None else "http://localhost",
            transport=None if path is None else httpx.HTTPTransport(uds=path),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            # A proxy from the environment cannot reach this machine's loopback.
            trust_env=path is None and not is_loopback(httpx.URL(self.url).host),
        )
        self._socket: socket.socket | None = None  # of the lines that are being read
        self._is_interrupted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Return the names of the served models. Raises `NoServerError` without a server."""
        with self._request("GET", "/v1/models") as response:
            try:
                return [model.id for model in msgspec.json.decode(response.read(), type=_Models).data]
            except msgspec.MsgspecError:
                raise ServerError(f"{self.url} is not a language-model server") from None

    def check_model(self, name: str) -> None:
        """Raise `ServerError` with the server's message unless it serves a model of this name or alias."""
        with self._request("GET", f"/v1/models/{quote(name, safe='')}"):
            pass

    def get(self, path: str) -> bytes:
        """Send a GET request; return the body of the response."""
        with self._request("GET", path) as response:
            return response.read()

    def post(self, path: str, body: object) -> bytes:
        """Send a POST request with a JSON body; return the body of the response."""
        with self._request("POST", path, msgspec.json.encode(body)) as response:
            return response.read()

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
        with self._request("GET", path, read_timeout_s=None if endless else READ_TIMEOUT_S) as response:
            self._socket = response.extensions["network_stream"].get_extra_info("socket")
            if self._is_interrupted:
                self.interrupt()
            yield response.iter_lines()

    def interrupt(self) -> None:
        """Make the reading of lines fail at once, as if the connection broke. For a signal handler."""
        self._is_interrupted = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def answer(self, model: str, messages: Sequence[Message]) -> Iterator[Iterator[Piece | Queued]]:
        """Request an answer; yield an iterator over its pieces as they arrive. Exiting early cancels it."""
        body = {"model": model, "messages": messages, "stream": True}
        with self._request("POST", "/v1/chat/completions", msgspec.json.encode(body)) as response:
            yield _pieces(_events(response))

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        read_timeout_s: float | None = READ_TIMEOUT_S,
    ) -> Iterator[httpx.Response]:
        headers = {} if body is None else {"Content-Type": "application/json"}
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=5.0, read=read_timeout_s)
        try:
            with self._http.stream(method, path, content=body, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    raise ServerError(_refusal(response))
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise NoServerError(f"no server answers at {self.url}") from None
        except httpx.TimeoutException:
            raise ServerError(f"{self.url} has sent nothing for {READ_TIMEOUT_S:.0f} s") from None
        except httpx.HTTPError as error:
            raise ServerError(f"the connection to {self.url} broke: {error}") from None


def _events(response: httpx.Response) -> Iterator[bytes]:
    """Yield the server-sent events of a response, each when it is complete."""
    splitter = EventSplitter(EVENT_BYTES)
    try:
        for data in response.iter_bytes():
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


def _refusal(response: httpx.Response) -> str:
    """Return the server's error message, or the status if the body has none."""
    body = b""
    for part in response.iter_bytes():
        body += part
        if len(body) > ERROR_BODY_BYTES:
            break
    refusal = decoded(_decode_refusal, body)
    if refusal is not None and is_error(refusal.error):
        message = _message(refusal.error, body)
        # The servers of others name their own ways to give a key.
        is_about_keys = response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        return f"{message} (--api-key or FAIRLEAD_API_KEY gives a key)" if is_about_keys else message
    return f"{response.url} answered {response.status_code} {response.reason_phrase}"


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
