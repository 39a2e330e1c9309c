"""Requests for sound, images and moderations at another server: JSON or a form, and an answer of any type.

The answer is passed on as it arrives, behind a head: its type. Nothing is put before its first byte, so that
another node can be tried until then; of JSON that is not large, before all of it, and of events, before the
first one. These may be errors with the status 200.
"""

from collections.abc import AsyncIterator, Iterator
from secrets import token_hex
from typing import Any
from urllib.parse import quote

import msgspec

from fairlead.base.config import FiltersConfig
from fairlead.base.formats.multipart import FORM, part_head
from fairlead.base.formats.server_sent_events import is_comment
from fairlead.base.job import CHAT_PATH, Delta, Form, FormPart
from fairlead.base.upstream_events import EVENTS, UpstreamReader, readers
from fairlead.nodes.http.client import UpstreamResponse
from fairlead.nodes.http.request_head import StreamedBody
from fairlead.nodes.streams.passthrough import PassthroughHead, encode_head
from fairlead.nodes.streams.refusals import JSON, late_refusal
from fairlead.nodes.streams.sink import Sink
from fairlead.nodes.streams.upstream_stream import STREAM_BYTES, RelayFailed

# What is held back of an answer that may be an error.
HELD_BYTES = 1024 * 1024
READ_BYTES = 64 * 1024
UNTOLD = "application/octet-stream"

_PAGES = frozenset({"text/html", "application/xhtml+xml"})
_PAGE_BEGINNINGS = (b"<!doctype html", b"<html")

_encode = msgspec.json.Encoder().encode


async def relay_media(name: str, response: UpstreamResponse, sink: Sink) -> None:
    """Put a success into the sink. Raises `RelayFailed`, and what `late_refusal` returns.

    name: that of the server, for messages.
    response: the response, which is decoded.
    sink: where it is put, with its head as the first piece.
    """
    kind = response.head.headers.get("content-type", "").strip()
    first = await _beginning(name, response, readers[CHAT_PATH])
    head = encode_head(PassthroughHead(response.head.status, {"Content-Type": kind or UNTOLD}))
    sink.put(Delta(0, raw=[head, first]))
    size = len(first)
    while piece := await response.read():
        size += len(piece)
        if size > STREAM_BYTES:
            raise RelayFailed(f"{name} sent more than {STREAM_BYTES} bytes")
        sink.put(Delta(0, raw=[piece]))
        if (pressure := sink.backpressure()) is not None:
            await response.pause(pressure.wait)
    sink.put(Delta(0, finish_reason="stop"))


def with_model(path: str, model: str) -> str:
    """Return the path of a request without a body, with the server's own name of the model in its query."""
    return f"{path}{'&' if '?' in path else '?'}model={quote(model, safe='')}"


def written_form(
    form: Form, model: str, filters: FiltersConfig | None, requested: str
) -> tuple[str, StreamedBody]:
    """Return a form as a server gets it, and its type.

    form: the form, as it was read.
    model: the server's own name of the model, which comes first.
    filters: those of the server, which are applied; None: it has none.
    requested: the name of the model in the request, for filters by it.
    """
    fields: dict[str, Any] = {}
    if filters is not None:
        fields = dict(filters.set_params) | filters.set_params_by_id.get(requested, {})
    dropped = {"model", *fields, *(() if filters is None else filters.strip_params)}
    fields["model"] = model
    boundary = token_hex(16).encode()
    pieces: list[bytes | FormPart] = []
    for name, value in sorted(fields.items(), key=lambda field: field[0] != "model"):
        for each, text in _texts(name, value):
            pieces.append(part_head(boundary, each) + text.encode() + b"\r\n")
    for part in form.parts:
        if part.name.partition("[")[0] not in dropped:
            head = part_head(boundary, part.name, part.filename, part.content_type)
            pieces += [head, part, b"\r\n"]
    pieces.append(b"--%s--\r\n" % boundary)
    length = sum(piece.size if isinstance(piece, FormPart) else len(piece) for piece in pieces)
    return f"{FORM}; boundary={boundary.decode()}", StreamedBody(_FormPieces(form, pieces), length)


class _FormPieces:
    """A written form: bytes, and parts whose contents are read in pieces."""

    def __init__(self, form: Form, pieces: list[bytes | FormPart]) -> None:
        self._contents = form.contents
        self._pieces = iter(pieces)
        self._at = self._end = 0  # of the contents of the current part

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._at == self._end:
            piece = next(self._pieces, None)
            if piece is None:
                raise StopAsyncIteration
            if isinstance(piece, bytes):
                return piece
            self._at, self._end = piece.start, piece.start + piece.size
            if not piece.size:
                return b""
        size = min(READ_BYTES, self._end - self._at)
        data = await self._contents.read(self._at, size)
        self._at += size
        return data


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the fields of a value, with brackets for members of lists and objects, as OpenAI's clients do."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _texts(f"{name}[{key}]", member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _texts(f"{name}[]", member)
    elif value is not None:
        yield name, value if isinstance(value, str) else _encode(value).decode()


async def _beginning(name: str, response: UpstreamResponse, reader: UpstreamReader | None) -> bytes:
    """Return the beginning of a success, which shows that it is an answer."""
    told = response.head.content_type
    if told in _PAGES:
        raise RelayFailed(f"{name} answered with {told}")
    first = await response.read()
    if not told and first.lstrip().lower().startswith(_PAGE_BEGINNINGS):
        raise RelayFailed(f"{name} answered with a page")
    may_be_empty = told.startswith("text/") and told != EVENTS  # there may be nothing to transcribe
    if not first and not may_be_empty:
        raise RelayFailed(f"{name} sent an empty answer")
    if reader is not None and told == EVENTS:
        return await _first_event(name, response, reader, first)
    if reader is not None and told == JSON:
        return await _object(name, response, reader, first)
    return first


async def _first_event(name: str, response: UpstreamResponse, reader: UpstreamReader, first: bytes) -> bytes:
    """Return a stream up to the piece with its first event, which must not be an error."""
    splitter = reader.splitter(HELD_BYTES)
    held, piece = bytearray(), first
    while piece and len(held) <= HELD_BYTES:
        held += piece
        try:
            complete = splitter.feed(piece)
        except OverflowError as error:
            raise RelayFailed(f"{name} sent {error}") from error
        event = next((each for each in reader.split(complete) if not is_comment(each)), None)
        if event is not None:
            if (reported := reader.read_event(event).error) is not None:
                raise late_refusal(name, reported)
            break
        piece = await response.read()
    return bytes(held)


async def _object(name: str, response: UpstreamResponse, reader: UpstreamReader, first: bytes) -> bytes:
    """Return the whole answer, which must not be an error, or the beginning of a large one."""
    held, piece = bytearray(), first
    while piece and len(held) <= HELD_BYTES:
        held += piece
        piece = await response.read()
    held += piece
    if not piece:
        try:
            reported = reader.read_response(bytes(held)).error
        except ValueError:
            reported = None  # other JSON is an answer, too, such as a list of voices
        if reported is not None:
            raise late_refusal(name, reported)
    return bytes(held)
