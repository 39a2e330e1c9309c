"""`/upstream/MODEL/…`: any request to a model's own server, which a command started, as in llama-swap.

The request loads the model as a job does, and holds one of its seats until the response is complete. Only
commands have such a server.
"""

import re
from collections.abc import AsyncIterator
from urllib.parse import quote, unquote

from fairlead.base.errors import FairleadError, Forbidden, InvalidRequest, ModelUnloaded, NotFound, quoted
from fairlead.base.job import Job, Passthrough, Relay, Sampling
from fairlead.base.reported import BYTES_A_TOKEN
from fairlead.generation.caller import Caller
from fairlead.generation.event_stream import CutStream
from fairlead.generation.job_service import AnswerNotes
from fairlead.nodes.streams.deltas import Deltas
from fairlead.nodes.streams.passthrough import decode_head, forwarded_headers
from fairlead.server.auth.cors import Cors
from fairlead.server.routes.answers import answer_headers
from fairlead.server.routes.paths import UPSTREAM
from fairlead.server.routes.request import NO_SNIFFING, Request, Response
from fairlead.server.routes.request_reader import RequestReader

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
# Longer paths are not a model server's, and would take long to compare with `ignorePaths`.
MAX_PATH_CHARS = 2048


class UpstreamRoute:
    """The route. Requests for paths in the configuration's `ignorePaths` do not load a model."""

    def __init__(self, reader: RequestReader, cors: Cors) -> None:
        self._reader = reader
        self._jobs = reader.jobs
        self._cors = cors
        self._services = self._jobs.services
        self._ignored = [re.compile(pattern) for pattern in self._services.config.upstream.patterns]

    async def relay(self, request: Request) -> Response:
        """Relay the request, and stream its response back."""
        raw_path: bytes | None = request.scope.get("raw_path")
        raw = quote(request.path) if raw_path is None else raw_path.decode("ascii")
        name, path = self._model_in(raw.removeprefix(UPSTREAM))
        model = self._jobs.models.find(request.api_key, name)
        self._check(request, name, model)
        if not path:
            return _with_slash(request, raw)
        self._check_ignored(name, model, unquote(path))
        return await self._answer(*await self._job(request, model, path))

    def _model_in(self, raw: str) -> tuple[str, str]:
        """Return the model's name, which may have slashes, and the path after it. Raises `NotFound`."""
        segments = raw.split("/")
        known = {*self._services.aliases, *(status.model for status in self._services.fleet.models())}
        deepest = max((name.count("/") for name in known), default=0)
        for count in range(min(deepest + 1, len(segments)), 0, -1):
            name = unquote("/".join(segments[:count]))
            if name in known:
                rest = segments[count:]
                return name, "/" + "/".join(rest) if rest else ""
        raise NotFound(f"model {quoted(unquote(segments[0]))} not found: it is not served here")

    def _check(self, request: Request, name: str, model: str) -> None:
        status = self._services.fleet.model(model)
        if status is None or status.kind != "command":
            raise NotFound(
                f"the model {quoted(name)} has no server of its own that {UPSTREAM} could reach: only models "
                "with cmd have one; use the routes under /v1"
            )
        if request.api_key is not None and request.api_key.limits.tokens_per_minute is not None:
            raise Forbidden(f"this API key has a limit of tokens, which are not counted under {UPSTREAM}")
        refuse_foreign_page(request, self._cors)

    def _check_ignored(self, name: str, model: str, path: str) -> None:
        if len(path) > MAX_PATH_CHARS:
            raise InvalidRequest(f"the path must have at most {MAX_PATH_CHARS} characters")
        status = self._services.fleet.model(model)
        if (status is None or status.state != "ready") and any(each.search(path) for each in self._ignored):
            raise ModelUnloaded(
                f"the model {quoted(name)} is not loaded, and a path in upstream.ignorePaths does not load it"
            )

    async def _job(self, request: Request, model: str, path: str) -> tuple[Caller, Job]:
        body = b""
        headers = forwarded_headers(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.scope["headers"]
        )
        if request.method in _WITH_BODY:
            body = await request.read()
            request.body_bytes = len(body)
            if "Content-Type" not in dict(headers):
                headers += (("Content-Type", "application/octet-stream"),)
        elif request.headers.get("Content-Length", "0") != "0" or request.headers.get("Transfer-Encoding"):
            raise InvalidRequest(f"a {request.method} request must have no body")
        query = request.query_string
        target = path.encode() + (b"?" + query if query else b"")
        if not all(0x21 <= letter <= 0x7E for letter in target):
            raise InvalidRequest("the query has characters that must be escaped")
        caller = self._reader.identify(request)
        job = self._jobs.job(
            caller,
            model,
            "upstream",
            prompts=(),
            sampling=Sampling(max_tokens=1),
            relay=Relay(target.decode(), body, passthrough=Passthrough(request.method, headers)),
            prompt_estimate=len(body) // BYTES_A_TOKEN,
        )
        return caller, job

    async def _answer(self, caller: Caller, job: Job) -> Response:
        _, pending = await self._jobs.start(caller, job)
        answer = await pending.get()
        answer.deltas.unread = caller.unread
        (first,) = await answer.deltas.take()
        head = decode_head(first.raw.pop(0))
        headers = {**head.headers, **answer_headers(AnswerNotes.of(answer)), **NO_SNIFFING}
        return Response(PassedThrough(answer.deltas, b"".join(first.raw)), head.status, headers)


def refuse_foreign_page(request: Request, cors: Cors) -> None:
    """Raise `Forbidden` for a request of a page of another server that is not allowed to send it.

    For an image or a link in a page, a browser sends GET without `Origin`. Here it may load a model.
    """
    is_foreign = request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
    if request.api_key is None and is_foreign and not cors.allows(request.headers):
        message = "Sec-Fetch-Site: a page of another server may not send this request"
        raise Forbidden(message, param="Sec-Fetch-Site")


def _with_slash(request: Request, raw: str) -> Response:
    """Redirect to the model's root, so that relative URLs in its pages are right."""
    query = request.query_string.decode("ascii", "replace")
    status = 301 if request.method in ("GET", "HEAD") else 308
    location = f"{request.prefix}{raw}/{'?' if query else ''}{query}"
    return Response(b"", status, {"Location": location})


class PassedThrough:
    """A response body: the server's data, as it arrives. If it is cut short, the connection is closed."""

    def __init__(self, deltas: Deltas, first: bytes) -> None:
        self._deltas = deltas
        self._first = first

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        try:
            while taken := await self._deltas.take():
                if piece := b"".join(part for delta in taken for part in delta.raw):
                    return piece
        except FairleadError:
            raise CutStream from None
        raise StopAsyncIteration
