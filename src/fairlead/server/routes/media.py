"""Routes for sound, images and moderations: relayed to nodes and commands, through the queue that chats use.

A body is JSON or a form, as its `Content-Type` says. Of a form only the fields in `FIELDS` are read, wherever
they stand; of JSON the same members. Everything else is left to the server that has the model.
"""

from collections.abc import AsyncIterator, Mapping
from math import inf
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec
import trio

from fairlead.base.errors import FairleadError, InvalidRequest, quoted
from fairlead.base.formats.multipart import is_form
from fairlead.base.formats.server_sent_events import encode_comment, encode_event
from fairlead.base.job import Form, Media, Relay, Sampling
from fairlead.base.upstream_events import EVENTS
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.fields import CommonFields
from fairlead.dialects.openai.common import OpenAIErrors
from fairlead.generation.caller import Caller
from fairlead.generation.event_stream import CutStream
from fairlead.generation.job_service import AnswerNotes
from fairlead.language.text.model import Task
from fairlead.nodes.streams.deltas import Deltas
from fairlead.nodes.streams.passthrough import decode_head
from fairlead.nodes.streams.relay import rewrite_model
from fairlead.server.auth.cors import Cors
from fairlead.server.routes.answers import EVENT_HEADERS, answer_headers
from fairlead.server.routes.request import Request, Response
from fairlead.server.routes.request_reader import RequestReader
from fairlead.server.routes.route import VERSION
from fairlead.server.routes.upstream import refuse_foreign_page

FIELDS = frozenset({"model", "user", "safety_identifier", "priority"})
LONGEST_QUERY = 2048
# Answers come from other servers. A browser that opens one must not run it as a page of ours.
INERT = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'; sandbox"}

_OWN: dict[Task, str] = {"generate": "writes text", "embed": "makes embeddings", "score": "scores texts"}

_parse = BodyParser(CommonFields)
_errors = OpenAIErrors()


class MediaBody(msgspec.Struct, frozen=True):
    """A request that is relayed to the server which has the model; that server reads the other fields.

    Without `model`, it is for the only model that the key may use.
    """

    model: str | None = None


class MediaRoutes:
    """The routes."""

    def __init__(self, reader: RequestReader, cors: Cors) -> None:
        self._reader = reader
        self._jobs = reader.jobs
        self._cors = cors
        self._services = self._jobs.services

    async def relay(self, request: Request) -> Response:
        """Relay a request with a body, and stream its response back."""
        form, body = None, b""
        if is_form(request.headers.get("Content-Type", "")):
            form, fields = await self._take_form(request)
        else:
            body, fields = await self._reader.take(request, _parse)
        caller = self._reader.identify(request, fields)
        model, requested = self._find(caller, fields.model)
        if form is None and requested != fields.model:
            body = rewrite_model(body, requested)
        media = Media("POST", request.headers.get("Accept", ""), form, requested)
        path = VERSION + request.path.removeprefix(VERSION)
        return await self._answer(caller, model, Relay(path, body, media=media))

    async def voices(self, request: Request) -> Response:
        """Relay a request for the voices of a model, which the query names, as in llama-swap."""
        refuse_foreign_page(request, self._cors)
        query = request.query_string.decode("utf-8", "replace")
        if len(query) > LONGEST_QUERY:
            raise InvalidRequest(f"the query must have at most {LONGEST_QUERY} bytes")
        caller = self._reader.identify(request)
        model, _ = self._find(caller, request.query("model"))
        others = [pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] != "model"]
        path = VERSION + request.path.removeprefix(VERSION) + ("?" + urlencode(others) if others else "")
        media = Media("GET", request.headers.get("Accept", ""))
        return await self._answer(caller, model, Relay(path, b"", media=media))

    async def _take_form(self, request: Request) -> tuple[Form, CommonFields]:
        """Return the form of a request, and what is read of it.

        A request that would be refused anyway is refused before its file has arrived, as far as possible.
        """
        await self._jobs.quotas.check(request.api_key)

        def check(values: Mapping[str, str]) -> None:
            if (name := values.get("model")) is not None:
                self._refuse_own(request.path, self._jobs.models.find(request.api_key, name))

        form, values = await self._reader.uploads.receive(request, FIELDS, check)
        return form, msgspec.convert(values, CommonFields)

    def _find(self, caller: Caller, name: str | None) -> tuple[str, str]:
        """Return the model's canonical name, and its name as requested. Raises as `ModelAccess.find`."""
        models = self._jobs.models
        if name is not None and models.selectors.has(name):
            target = models.selectors.take(caller, name)
            model, requested = target.model, target.name
        else:
            model = models.find(caller.api_key, name)
            requested = name or model
        self._refuse_own(caller.path, model)
        return model, requested

    def _refuse_own(self, path: str, model: str) -> None:
        """Raise `InvalidRequest` for a model that only our own engine has."""
        if self._services.fleet.is_relayed(model):
            return
        own = self._jobs.models.text_of(model)
        if own is not None:
            reason = f"{quoted(model)} {_OWN[own.task]} only, and is not served under {path}"
            raise invalid_field("model", f"{reason}: models of nodes and commands are")

    async def _answer(self, caller: Caller, model: str, relay: Relay) -> Response:
        job = self._jobs.job(caller, model, "media", prompts=(), sampling=Sampling(max_tokens=1), relay=relay)
        _, pending = await self._jobs.start(caller, job)
        answer = await pending.get()
        answer.deltas.unread = caller.unread
        (first,) = await answer.deltas.take()
        head = decode_head(first.raw.pop(0))
        headers = {**head.headers, **answer_headers(AnswerNotes.of(answer)), **INERT}
        keep_alive_s = None
        if head.headers["Content-Type"].partition(";")[0].strip().lower() == EVENTS:
            headers |= EVENT_HEADERS
            keep_alive_s = self._services.config.queue.keep_alive_s or inf
        return Response(MediaAnswer(answer.deltas, b"".join(first.raw), keep_alive_s), head.status, headers)


class MediaAnswer:
    """A response body: the server's data, as it arrives. If it is cut short, the connection is closed.

    keep_alive_s: in pauses between events, a comment is sent so often; None: it has no events.
    """

    def __init__(self, deltas: Deltas, first: bytes, keep_alive_s: float | None) -> None:
        self._deltas = deltas
        self._first = first
        self._keep_alive_s = keep_alive_s
        self._is_between_events = False
        self._has_failed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._has_failed:
            raise CutStream
        piece, self._first = self._first, b""
        try:
            while not piece:
                with trio.move_on_after(inf if self._keep_alive_s is None else self._keep_alive_s) as pause:
                    taken = await self._deltas.take()
                if pause.cancelled_caught:
                    if self._is_between_events:
                        return encode_comment("running")
                    continue
                if not taken:
                    raise StopAsyncIteration
                piece = b"".join(part for delta in taken for part in delta.raw)
        except FairleadError as error:
            if self._keep_alive_s is None:
                raise CutStream from None
            self._has_failed = True
            event = encode_event(_errors.error_body(error))
            return event if self._is_between_events else b"\n\n" + event
        self._is_between_events = piece.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))
        return piece


def describe_form(*files: str) -> Any:
    """Return the schema of a form with these files for `/openapi.json`."""
    properties: dict[str, Any] = {"model": {"type": "string"}}
    properties |= {name: {"type": "string", "format": "binary"} for name in files}
    return {"type": "object", "properties": properties, "required": list(files[:1])}
