"""Runs one request of a batch: a job of a caller of its own, which waits for an idle seat. Knows no files.

What would be a response over HTTP, also with an error, is the result. Only what a repetition may avoid, such
as a full queue, a limit of the key or a seat that was needed for another job, is no result: the request waits
and runs again, until its batch ends.
"""

from secrets import token_hex

import msgspec
import structlog
import trio

from fairlead.base.errors import (
    Displaced,
    Draining,
    FairleadError,
    InvalidApiKey,
    ModelUnloaded,
    NodeRefused,
    QueueTimeout,
)
from fairlead.base.supervision import FailureBoundary, hide_bug
from fairlead.dialects.body import invalid_field
from fairlead.dialects.dialect import Dialect
from fairlead.dialects.openai.chat import ChatDialect
from fairlead.dialects.openai.completions import CompletionDialect
from fairlead.dialects.openai.embeddings import EmbeddingDialect
from fairlead.dialects.responses.responses import ResponsesDialect, ResponsesEnvelope
from fairlead.generation.caller import Caller
from fairlead.generation.job_service import JobService
from fairlead.generation.pipeline import GenerationPipeline
from fairlead.router.quotas.access import BATCH_PREFIX, Authenticator
from fairlead.server.batches.records import BatchRecord
from fairlead.server.batches.requests import BatchRequest
from fairlead.server.batches.store import JournalLine

ENDPOINTS: dict[str, Dialect] = {
    dialect.path: dialect
    for dialect in (ChatDialect(), CompletionDialect(), EmbeddingDialect(), ResponsesDialect())
}

# Attempts of a request whose node or engine fails. What a repetition may avoid is repeated without a limit.
ATTEMPTS = 3
RETRY_S = 1.0
MOST_RETRY_S = 60.0

_encode = msgspec.json.Encoder().encode


class _Answer(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str


class _Result(msgspec.Struct, frozen=True):
    """A line of a file of results, as OpenAI's."""

    id: str
    custom_id: str
    response: _Answer | None
    error: _Error | None


def expired_result(number: int, request: BatchRequest) -> JournalLine:
    """Return the result of a request that did not run in time."""
    error = _Error("batch_expired", "the request did not run before the end of the completion window")
    return _line(number, _Result(_new_id(), request.custom_id, None, error), failed=True)


class BatchExecution:
    """Runs requests.

    jobs: Has the models, and makes the jobs.
    pipeline: Answers them.
    authenticator: Says whether a batch's key is still valid.
    """

    def __init__(self, jobs: JobService, pipeline: GenerationPipeline, authenticator: Authenticator) -> None:
        self._jobs = jobs
        self._pipeline = pipeline
        self._authenticator = authenticator

    def concurrency(self, record: BatchRecord) -> int:
        """Return how many requests of a batch may wait or run: one a seat, and half of what its key may."""
        seats = sum(node.seats for node in self._jobs.services.fleet.nodes())
        most = min(max(seats, 1) + 2, 256)
        try:
            api_key = self._authenticator.with_id(record.key_id)
        except FairleadError:
            return 1
        if api_key is not None and api_key.limits.concurrent is not None:
            most = min(most, max(1, api_key.limits.concurrent // 2))
        return most

    async def run(self, record: BatchRecord, number: int, request: BatchRequest) -> JournalLine:
        """Run a request until it has a result."""
        dialect = ENDPOINTS[record.endpoint]
        request_id = f"{record.id}-{number}"
        failures = 0
        while True:
            try:
                body = await self._attempt(record, dialect, request_id, request)
            except Exception as raised:  # noqa: BLE001  # a bug ends its request, and no other
                error = hide_bug(raised)
                if isinstance(error, Displaced):
                    continue  # it waits for the next idle seat like all others, and needs no pause
                failures += error.status >= 500
                if not _may_be_avoided(error) and (error.status < 500 or failures >= ATTEMPTS):
                    return _line(number, _failed(request, request_id, dialect, error), failed=True)
                await trio.sleep(min(error.retry_after_s or RETRY_S, MOST_RETRY_S))
            else:
                answer = _Answer(200, request_id, msgspec.Raw(body))
                return _line(number, _Result(_new_id(), request.custom_id, answer, None), failed=False)

    async def _attempt(
        self, record: BatchRecord, dialect: Dialect, request_id: str, request: BatchRequest
    ) -> bytes:
        """Return the body of the answer. Raises a `FairleadError`."""
        structlog.contextvars.bind_contextvars(request_id=request_id)
        body = bytes(request.body)
        boundary = FailureBoundary()
        answer = b""
        with boundary:
            async with trio.open_nursery() as nursery:
                caller = self._caller(record, request_id, nursery, len(body))
                answer = await self._answer(caller, dialect, body)
                nursery.cancel_scope.cancel()
        if boundary.failure is not None:
            is_exception = isinstance(boundary.failure, Exception)  # and not a Rust library's panic
            raise boundary.failure if is_exception else FairleadError("the request failed")
        return answer

    def _caller(self, record: BatchRecord, request_id: str, nursery: trio.Nursery, body_bytes: int) -> Caller:
        api_key = self._authenticator.with_id(record.key_id)
        return Caller(
            nursery=nursery,
            request_id=request_id,
            tenant=f"{BATCH_PREFIX}{record.tenant}",
            api_key=api_key,
            owner=record.owner,
            priority=self._jobs.services.config.queue.classes[-1],
            when_idle=True,
            body_bytes=body_bytes,
            path=record.endpoint,
        )

    async def _answer(self, caller: Caller, dialect: Dialect, body: bytes) -> bytes:
        envelope = await self._jobs.offload.parse(caller.tenant, body, dialect.read_envelope)
        if envelope.stream:
            raise invalid_field("stream", "is not served in a batch")
        if isinstance(envelope, ResponsesEnvelope):
            if envelope.background:
                raise invalid_field("background", "is not served in a batch")
            if envelope.previous_response_id is not None:
                raise invalid_field("previous_response_id", "is not served in a batch")
        job, context = await self._pipeline.prepare(caller, dialect, body, envelope)
        answer = await self._pipeline.answer(caller, dialect, job, context)
        assert isinstance(answer.body, bytes), "no stream was requested"
        return answer.body


def _may_be_avoided(error: FairleadError) -> bool:
    """Return whether the same request may succeed later, although nothing has failed."""
    kinds = (Displaced, Draining, ModelUnloaded, QueueTimeout)
    return isinstance(error, kinds) or (error.status in (429, 503) and not isinstance(error, NodeRefused))


def _failed(request: BatchRequest, request_id: str, dialect: Dialect, error: FairleadError) -> _Result:
    if isinstance(error, InvalidApiKey):
        message = "the key that has created the batch is not valid any more"
        return _Result(_new_id(), request.custom_id, None, _Error(error.code, message))
    body = error.body if isinstance(error, NodeRefused) and error.body else dialect.error_body(error)
    answer = _Answer(error.status, request_id, msgspec.Raw(body))
    return _Result(_new_id(), request.custom_id, answer, None)


def _line(number: int, result: _Result, *, failed: bool) -> JournalLine:
    # A body of another server may have line ends, and a line of results has none.
    document = _encode(result)
    if b"\n" in document or b"\r" in document:
        document = msgspec.json.format(document, indent=-1)
    return JournalLine(number, failed, msgspec.Raw(document))


def _new_id() -> str:
    return f"batch_req_{token_hex(16)}"
