"""The views of `/v1/responses`, and which responses they keep.

A response is kept if it is written here, unless its request has `store: false`. A response that is relayed
byte for byte belongs to the other server, as does its id. A stream that fails is kept, too, with its error.
A response is not kept if its request is refused, or if its client disconnects before the end.

A response in the background is kept from its beginning, and goes on without its client. It ends when the
server stops.
"""

from functools import partial
from typing import Any, Literal, cast

import msgspec
import trio

from fairlead.base.errors import NotFound, quoted
from fairlead.base.job import Job
from fairlead.dialects.body import invalid_field
from fairlead.dialects.dialect import AnswerContext
from fairlead.dialects.responses.responses import InputTokensDialect, ResponsesDialect, ResponsesEnvelope
from fairlead.dialects.responses.shapes import DeletedResponse
from fairlead.generation.caller import Caller, call_at_end
from fairlead.generation.job_service import AnswerNotes
from fairlead.generation.metrics.metrics import KeptResponses
from fairlead.generation.offload import LARGE_BODY_BYTES
from fairlead.generation.pipeline import GenerationPipeline
from fairlead.server.responses.background import BackgroundRuns
from fairlead.server.responses.items import history_of, input_list, turns_before
from fairlead.server.responses.keeping import KeepingDialect
from fairlead.server.responses.store import ResponseStore, StoredResponse
from fairlead.server.routes.answers import EVENT_HEADERS, answer_headers, answer_response
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_caller import owner_so_far
from fairlead.server.routes.request_reader import RequestReader
from fairlead.server.routes.route import EVENTS

MAX_LISTED = 100
_USUALLY_LISTED = 20
_MAX_DIGITS = 9

_OFF = "needs stored responses, which the setting responses.store turns off"


class ResponseRoutes:
    """The views of `/v1/responses`. `store` has the responses that are kept."""

    def __init__(self, reader: RequestReader, pipeline: GenerationPipeline) -> None:
        jobs = reader.jobs
        config = jobs.services.config.responses
        self.store = ResponseStore(config.max_bytes, config.ttl_s)
        self.background = BackgroundRuns(jobs, self.store)
        self._is_on = config.store
        self._reader = reader
        self._jobs = jobs
        self._services = jobs.services
        self._pipeline = pipeline

    # Creating a response -----------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        """Respond as `GenerationViews.respond` does, and keep the response."""
        body, envelope = await self._reader.take(request, ResponsesDialect.read_envelope)
        caller = self._reader.identify(request, envelope, header_prefix=ResponsesDialect.header_prefix)
        if not self._writes(self._jobs.models.find(caller.api_key, envelope.model)):
            dialect = ResponsesDialect()
            job, relayed = await self._pipeline.prepare(caller, dialect, body, envelope)
            del body, envelope
            return answer_response(await self._pipeline.answer(caller, dialect, job, relayed))
        is_stored = self._check(envelope)
        history, size = await self._history(caller, envelope)
        dialect = ResponsesDialect(history=history, is_stored=is_stored)
        caller = msgspec.structs.replace(caller, body_bytes=caller.body_bytes + size)
        if envelope.background:
            return await self._begin(await self.background.open(caller), dialect, body, envelope)
        job, context = await self._prepare(caller, dialect, body, envelope)
        response = self._stored(job, envelope) if is_stored and context is not None else None
        del body, envelope, dialect, history  # which the job does not need, as in `respond`
        if response is None or context is None:
            return answer_response(await self._pipeline.answer(caller, ResponsesDialect(), job, context))
        return await self._keep(caller, job, context, response)

    async def count(self, request: Request) -> Response:
        """Return the number of tokens that the input of a response with this body has."""
        body, envelope = await self._reader.take(request, InputTokensDialect.read_envelope)
        caller = self._reader.identify(request, envelope, header_prefix=InputTokensDialect.header_prefix)
        model = self._jobs.models.known_text(caller.api_key, envelope.model)
        if model is None:  # another server counts
            dialect = InputTokensDialect()
            job, context = await self._pipeline.prepare(caller, dialect, body, envelope)
            return answer_response(await self._pipeline.answer(caller, dialect, job, context))
        history, size = await self._history(caller, envelope)
        caller = msgspec.structs.replace(caller, body_bytes=caller.body_bytes + size)
        dialect = InputTokensDialect(history=history)
        return json_response(await self._pipeline.count(caller, dialect, body, model))

    def _writes(self, model: str) -> bool:
        """Return whether responses of the model are written here, perhaps translated from another dialect."""
        speaks = self._services.fleet.speaks
        return model in self._services.models or not speaks(model, ResponsesDialect.name)

    def _check(self, envelope: ResponsesEnvelope) -> bool:
        """Return whether the response is kept. Raises `InvalidRequest` if it needs to be and is not."""
        if not self._is_on:
            if envelope.background:
                raise invalid_field("background", _OFF)
            if envelope.previous_response_id is not None:
                raise invalid_field("previous_response_id", _OFF)
        if envelope.background and envelope.store is False:
            raise invalid_field("background", "cannot be combined with store: false")
        return self._is_on and envelope.store is not False

    async def _history(self, caller: Caller, envelope: ResponsesEnvelope) -> tuple[list[dict[str, Any]], int]:
        """Return the items that precede the input, and their size, which counts as the body's does."""
        if envelope.previous_response_id is None:
            return [], 0
        turns = turns_before(
            self.store,
            envelope.previous_response_id,
            caller.owner,
            trio.current_time(),
            max_bytes=self._services.config.limits.body_bytes,
        )
        texts = [(turn.input, turn.document) for turn in turns]
        size = sum(len(given) + len(document) for given, document in texts)
        if size > LARGE_BODY_BYTES:
            return await self._jobs.offload.in_thread(caller, history_of, texts), size
        return history_of(texts), size

    async def _prepare(
        self, caller: Caller, dialect: ResponsesDialect, body: bytes, envelope: ResponsesEnvelope
    ) -> tuple[Job, AnswerContext | None]:
        """Return the job and its context, as the pipeline does.

        Other servers have neither the response that the request continues, nor the id of a response in the
        background. So such a request is sent to them as a chat, or not at all. Raises `InvalidRequest` if it
        cannot be translated.
        """
        job, context = await self._pipeline.prepare(caller, dialect, body, envelope)
        field = "background" if envelope.background else "previous_response_id"
        if not (envelope.background or envelope.previous_response_id is not None):
            return job, context
        if context is None:
            raise invalid_field(field, "needs a request that can be translated for this model's servers")
        if job.relay is not None:
            relay = msgspec.structs.replace(job.relay, only_chat=True) if job.relay.chat is not None else None
            job = msgspec.structs.replace(job, relay=relay)
        return job, context._replace(job=job)

    def _stored(self, job: Job, envelope: ResponsesEnvelope) -> StoredResponse:
        """Return a new response of the store, which counts from here on."""
        response = StoredResponse(
            job.id,
            job.owner,
            job.tenant,
            input=bytes(envelope.input),
            previous=envelope.previous_response_id,
            is_background=bool(envelope.background),
            keeps_events=bool(envelope.background) and envelope.wants_stream,
        )
        self.store.begin(response)
        return response

    async def _keep(
        self, caller: Caller, job: Job, context: AnswerContext, response: StoredResponse
    ) -> Response:
        """Return the answer, and keep it when it has ended."""
        dialect = KeepingDialect(partial(self._end, response))
        if job.stream:
            call_at_end(caller.nursery, self._leave, response)
            return answer_response(await self._pipeline.answer(caller, dialect, job, context))
        try:
            answer = await self._pipeline.answer(caller, dialect, job, context)
            assert isinstance(answer.body, bytes)
            self._end(response, answer.body)
            return answer_response(answer)
        finally:
            self._leave(response)

    def _end(self, response: StoredResponse, document: bytes) -> None:
        """Keep the response, unless another server has begun it, and chosen its id."""
        if document.startswith(b'{"id":"%s"' % response.id.encode()):
            self.store.end(response, document, trio.current_time())

    def _leave(self, response: StoredResponse) -> None:
        if not response.has_ended:
            self.store.remove(response)

    async def _begin(
        self, caller: Caller, dialect: ResponsesDialect, body: bytes, envelope: ResponsesEnvelope
    ) -> Response:
        """Begin a response in the background, of a caller of its own. Return its object or its events."""
        try:
            job, context = await self._prepare(caller, dialect, body, envelope)
            assert context is not None
            job, pending = await self._jobs.start(caller, job)
            response = self._stored(job, envelope)
            self.background.begin(caller.nursery, response, context._replace(job=job), pending)
            if response.is_gone:
                raise invalid_field("input", "is larger than what is kept (responses.maxBytes)")
        except BaseException:
            caller.nursery.cancel_scope.cancel()
            raise
        begun = self._events(response, 0) if response.keeps_events else json_response(response.document)
        return begun._replace(
            headers={**begun.headers, **answer_headers(AnswerNotes(warning=context.warning))}
        )

    # Kept responses ----------------------------------------------------------------------------------

    async def retrieve(self, request: Request) -> Response:
        """Return a response as it is now; with `stream=true` its events, to the end of the response."""
        response = self._find(request)
        if request.query("stream") not in ("true", "1"):
            return json_response(response.document)
        if not response.keeps_events:
            raise invalid_field("stream", "this response was not created with background and stream")
        after = _whole_number(request, "starting_after")
        return self._events(response, 0 if after is None else after + 1)

    async def delete(self, request: Request) -> Response:
        """Remove a response. One in progress is cancelled."""
        response = self._find(request)
        self.store.remove(response)
        return json_response(DeletedResponse(response.id, "response", deleted=True))

    async def cancel_response(self, request: Request) -> Response:
        """Cancel a response in the background, and return it. One that has ended is not changed."""
        response = self._find(request)
        if not response.is_background:
            raise invalid_field("response_id", "only a response in the background can be cancelled")
        await self.background.cancel(response, self._reader.requester(request))
        return json_response(self._find(request).document)

    async def input_items(self, request: Request) -> Response:
        """Return a page of a response's input items."""
        response = self._find(request)
        limit = _whole_number(request, "limit")
        if limit is not None and not 1 <= limit <= MAX_LISTED:
            raise invalid_field("limit", f"must be 1 to {MAX_LISTED}")
        order = request.query("order") or "desc"
        if order not in ("asc", "desc"):
            raise invalid_field("order", "must be asc or desc")
        page = input_list(
            response,
            order=cast(Literal["asc", "desc"], order),
            after=request.query("after"),
            limit=limit or _USUALLY_LISTED,
        )
        return json_response(page)

    def totals(self) -> KeptResponses:
        """Return what is kept now."""
        return KeptResponses(len(self.store), self.store.size)

    def _find(self, request: Request) -> StoredResponse:
        """Return the response in the path. Those of other keys and users are reported as not found."""
        response_id = request.path_parameters["response_id"]
        found = self.store.find(response_id, owner_so_far(request), trio.current_time())
        if found is None:
            hint = "" if self._is_on else "; the setting responses.store is off"
            raise NotFound(f"no response {quoted(response_id)} of yours is kept here{hint}")
        return found

    def _events(self, response: StoredResponse, first: int) -> Response:
        return Response(
            self.background.events(response, first), 200, {"Content-Type": EVENTS, **EVENT_HEADERS}
        )


def _whole_number(request: Request, name: str) -> int | None:
    """Return a number of the query, None if it is absent. Raises `InvalidRequest`."""
    text = request.query(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise invalid_field(name, "must be a whole number")
    return int(text)
