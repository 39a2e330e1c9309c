"""The views of `/v1/responses`, and which responses they keep.

A response is kept if it is written here, unless its request has `store: false`. A response that is relayed
byte for byte belongs to the other server, as does its id. A stream that fails is kept, too, with its error.
A response is not kept if its request is refused, or if its client disconnects before the end.

A response in the background is kept from its beginning, and goes on without its client. It ends when the
server stops.
"""

from functools import partial
from typing import Any

import msgspec
import trio

from fairlead.base.config import Limits
from fairlead.base.errors import FairleadError, NotFound, quoted
from fairlead.base.job import Job
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.dialect import AnswerContext
from fairlead.dialects.responses.compaction import CompactionDialect
from fairlead.dialects.responses.responses import InputTokensDialect, ResponsesDialect, ResponsesEnvelope
from fairlead.dialects.responses.shapes import DeletedResponse
from fairlead.generation.caller import Caller, call_at_end
from fairlead.generation.event_stream import EventStream
from fairlead.generation.job_service import AnswerNotes
from fairlead.generation.metrics.metrics import KeptResponses
from fairlead.generation.offload import LARGE_BODY_BYTES
from fairlead.generation.pipeline import GenerationPipeline
from fairlead.server.listener.websocket import WEBSOCKET
from fairlead.server.responses.archive import ResponseArchive, SharedEvents
from fairlead.server.responses.background import BackgroundRuns, StoredEvents
from fairlead.server.responses.conversations import ConversationRoutes, find_conversation, items_of
from fairlead.server.responses.items import (
    CONVERSATION_PREFIX,
    Turn,
    history_of,
    input_items_of,
    page_of,
    page_query,
    turns_before,
    whole_number,
)
from fairlead.server.responses.keeping import KeepingDialect
from fairlead.server.responses.local_turns import LocalTurns
from fairlead.server.responses.store import ResponseStore, StoredResponse
from fairlead.server.routes.answers import EVENT_HEADERS, answer_headers, answer_response
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_caller import owner_so_far
from fairlead.server.routes.request_reader import RequestReader
from fairlead.server.routes.route import EVENTS

_parse_members = BodyParser(dict[str, Any])
CANCELLED_S = 10.0
"""How long a request waits for the end of a response that it has cancelled at another front."""

_OFF = "needs stored responses, which the setting responses.store turns off"


class ResponseRoutes:
    """The views of `/v1/responses`. `store` has the responses that are kept."""

    def __init__(self, reader: RequestReader, pipeline: GenerationPipeline) -> None:
        jobs = reader.jobs
        config = jobs.services.config.responses
        self.store = ResponseStore(config.max_bytes, config.ttl_s)
        self.archive = ResponseArchive(self.store, jobs.services.kept, ttl_s=config.ttl_s)
        self.background = BackgroundRuns(jobs, self.store, self.archive)
        self._is_on = config.store
        self.conversations = ConversationRoutes(
            reader,
            self.archive,
            is_on=config.store,
            max_bytes=jobs.services.config.limits.body_bytes,
        )
        self._reader = reader
        self._jobs = jobs
        self._services = jobs.services
        self._pipeline = pipeline

    # Creating a response -----------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        """Respond as `GenerationViews.respond` does, and keep the response."""
        connection = request.scope.get(WEBSOCKET)
        if connection is None:
            body, envelope = await self._reader.take(request, ResponsesDialect.read_envelope)
            return await self._create(request, body, envelope, None)
        local: LocalTurns = connection.setdefault("turns", LocalTurns())
        _, (body, envelope) = await self._reader.take(request, read_message)
        try:
            return await self._create(request, body, envelope, local)
        except FairleadError:
            if local.has(envelope.previous_response_id):
                local.clear()
            raise

    async def _create(
        self, request: Request, body: bytes, envelope: ResponsesEnvelope, local: LocalTurns | None
    ) -> Response:
        caller = self._reader.identify(request, envelope, header_prefix=ResponsesDialect.header_prefix)
        if not self._writes(self._jobs.models.find(caller.api_key, envelope.model)):
            dialect = ResponsesDialect()
            job, relayed = await self._pipeline.prepare(caller, dialect, body, envelope)
            del body, envelope
            return answer_response(await self._pipeline.answer(caller, dialect, job, relayed))
        is_local = local is not None and local.has(envelope.previous_response_id)
        is_stored = self._check(envelope, is_local=is_local) and not is_local
        turns: list[Turn] = []
        if local is not None and is_local:
            turns = local.turns
            history, size = history_of(turns), sum(len(part) for turn in turns for part in turn)
        else:
            history, size = await self._history(caller, envelope)
        dialect = ResponsesDialect(history=history, is_stored=is_stored)
        caller = msgspec.structs.replace(caller, body_bytes=caller.body_bytes + size)
        if envelope.background:
            return await self._begin(await self.background.open(caller), dialect, body, envelope)
        job, context = await self._prepare(caller, dialect, body, envelope)
        given = bytes(envelope.input)
        response = self._stored(job, envelope) if is_stored and context is not None else None
        del body, envelope, dialect, history  # which the job does not need, as in `respond`
        if response is not None and context is not None:
            return await self._keep(caller, job, context, response)
        answering = ResponsesDialect()
        if local is not None:
            answering = KeepingDialect(partial(local.keep, job.id, turns, given))
        return answer_response(await self._pipeline.answer(caller, answering, job, context))

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

    async def compact(self, request: Request) -> Response:
        """Return a conversation in a shorter form, which the model writes."""
        body, envelope = await self._reader.take(request, CompactionDialect.read_envelope)
        if envelope.model is None:
            raise invalid_field("model", "is missing")
        caller = self._reader.identify(request, envelope, header_prefix=CompactionDialect.header_prefix)
        history: list[dict[str, Any]] = []
        if self._writes(self._jobs.models.find(caller.api_key, envelope.model)):
            self._check(envelope)
            history, size = await self._history(caller, envelope)
            caller = msgspec.structs.replace(caller, body_bytes=caller.body_bytes + size)
        dialect = CompactionDialect(history=history)
        job, context = await self._prepare(caller, dialect, body, envelope)
        return answer_response(await self._pipeline.answer(caller, dialect, job, context))

    def _writes(self, model: str) -> bool:
        """Return whether responses of the model are written here, perhaps translated from another dialect."""
        speaks = self._services.fleet.speaks
        return model in self._services.models or not speaks(model, ResponsesDialect.name)

    def _check(self, envelope: ResponsesEnvelope, *, is_local: bool = False) -> bool:
        """Return whether the response is kept. Raises `InvalidRequest` if it needs to be and is not.

        `is_local`: the connection has the response that it continues.
        """
        if not self._is_on:
            if envelope.background:
                raise invalid_field("background", _OFF)
            if envelope.previous_response_id is not None and not is_local:
                raise invalid_field("previous_response_id", _OFF)
            if envelope.conversation is not None:
                raise invalid_field("conversation", _OFF)
        if envelope.conversation is not None:
            if envelope.previous_response_id is not None:
                raise invalid_field("conversation", "cannot be combined with previous_response_id")
            if envelope.store is False:
                raise invalid_field("conversation", "cannot be combined with store: false")
        if envelope.background and envelope.store is False:
            raise invalid_field("background", "cannot be combined with store: false")
        return self._is_on and envelope.store is not False

    async def _history(self, caller: Caller, envelope: ResponsesEnvelope) -> tuple[list[dict[str, Any]], int]:
        """Return the items that precede the input, and their size, which counts as the body's does."""
        if envelope.conversation_id is not None:
            document = await find_conversation(self.archive, envelope.conversation_id, caller.owner)
            most = self._services.config.limits.body_bytes
            if len(document) + len(envelope.input) > most:
                reason = f"the conversation would be longer than {most} bytes (limits.bodyBytes)"
                raise invalid_field("conversation", reason)
            if len(document) > LARGE_BODY_BYTES:
                return await self._jobs.offload.in_thread(caller.tenant, items_of, document), len(document)
            return items_of(document), len(document)
        if envelope.previous_response_id is None:
            return [], 0
        turns = await turns_before(
            self.archive,
            envelope.previous_response_id,
            caller.owner,
            max_bytes=self._services.config.limits.body_bytes,
        )
        texts = [(turn.input, turn.document) for turn in turns]
        size = sum(len(given) + len(document) for given, document in texts)
        if size > LARGE_BODY_BYTES:
            return await self._jobs.offload.in_thread(caller.tenant, history_of, texts), size
        return history_of(texts), size

    async def _prepare(
        self,
        caller: Caller,
        dialect: ResponsesDialect | CompactionDialect,
        body: bytes,
        envelope: ResponsesEnvelope,
    ) -> tuple[Job, AnswerContext | None]:
        """Return the job and its context, as the pipeline does.

        Other servers have neither the response that the request continues, nor the id of a response in the
        background. So such a request is sent to them as a chat, or not at all. Raises `InvalidRequest` if it
        cannot be translated.
        """
        job, context = await self._pipeline.prepare(caller, dialect, body, envelope)
        fields = ("background", "previous_response_id", "conversation")
        field = next((name for name in fields if getattr(envelope, name)), None)
        if field is None:
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
            request_id=job.request_id,
            input=bytes(envelope.input),
            previous=envelope.previous_response_id,
            conversation=envelope.conversation_id,
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
            answer = await self._pipeline.answer(caller, dialect, job, context)
            if isinstance(answer.body, EventStream):
                answer.body.before_end = partial(self.archive.settle_or_raise, response)
            return answer_response(answer)
        try:
            answer = await self._pipeline.answer(caller, dialect, job, context)
            assert isinstance(answer.body, bytes)
            self._end(response, answer.body)
            await self.archive.settle_or_raise(response)
            return answer_response(answer)
        finally:
            self._leave(response)

    def _end(self, response: StoredResponse, document: bytes) -> None:
        """Keep the response, unless another server has begun it, and chosen its id.

        A stream may end twice: with its answer, and with the error of its turn.
        """
        if not response.has_ended and document.startswith(b'{"id":"%s"' % response.id.encode()):
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
            await self.archive.settle_or_raise(response)
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
        response = await self._find(request)
        if request.query("stream") not in ("true", "1"):
            return json_response(response.document)
        if not response.keeps_events:
            raise invalid_field("stream", "this response was not created with background and stream")
        after = whole_number(request, "starting_after")
        first = 0 if after is None else after + 1
        if response.has_ended:
            await self.archive.load_events(response)
        elif not self.archive.is_here(response):
            return _event_response(self.archive.events(response, first))
        return self._events(response, first)

    async def delete(self, request: Request) -> Response:
        """Remove a response. One in progress is cancelled."""
        response = await self._find(request)
        if not response.has_ended and not self.archive.is_here(response):
            await self._services.gateway.cancel(response.request_id, self._reader.requester(request))
        await self.archive.remove(response.id, response.owner)
        return json_response(DeletedResponse(response.id, "response", deleted=True))

    async def cancel_response(self, request: Request) -> Response:
        """Cancel a response in the background, and return it. One that has ended is not changed."""
        response = await self._find(request)
        if not response.is_background:
            raise invalid_field("response_id", "only a response in the background can be cancelled")
        requester = self._reader.requester(request)
        if self.archive.is_here(response):
            await self.background.cancel(response, requester)
            await self.archive.settle(response)
        elif not response.has_ended:
            await self._services.gateway.cancel(response.request_id, requester)
            await self.archive.wait_for_end(response, CANCELLED_S)
        return json_response((await self._find(request)).document)

    async def input_items(self, request: Request) -> Response:
        """Return a page of a response's input items."""
        response = await self._find(request)
        return json_response(page_of(input_items_of(response), **page_query(request)))

    def totals(self) -> KeptResponses:
        """Return what is kept now."""
        return KeptResponses(len(self.store), self.store.size)

    async def _find(self, request: Request) -> StoredResponse:
        """Return the response in the path. Those of other keys and users are reported as not found."""
        response_id = request.path_parameters["response_id"]
        found = None
        if not response_id.startswith(CONVERSATION_PREFIX):
            found = await self.archive.find(response_id, owner_so_far(request))
        if found is None:
            hint = "" if self._is_on else "; the setting responses.store is off"
            raise NotFound(f"no response {quoted(response_id)} of yours is kept here{hint}")
        return found

    def _events(self, response: StoredResponse, first: int) -> Response:
        return _event_response(self.background.events(response, first))


def _event_response(body: StoredEvents | SharedEvents) -> Response:
    return Response(body, 200, {"Content-Type": EVENTS, **EVENT_HEADERS})


def read_message(body: bytes, limits: Limits) -> tuple[bytes, ResponsesEnvelope]:
    """Return the request in a message of a WebSocket, as a body that asks for a stream.

    Raises `InvalidRequest` for messages of other types.
    """
    members = _parse_members(body, limits)
    if members.pop("type", None) != "response.create":
        raise invalid_field("type", "must be response.create")
    if members.pop("generate", True) is False:
        raise invalid_field("generate", "must be true: prompts are not computed in advance")
    members.pop("stream_options", None)
    body = msgspec.json.encode({**members, "stream": True})
    return body, ResponsesDialect.read_envelope(body, limits)
