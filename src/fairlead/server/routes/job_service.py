"""What the routes share: reading a body, and running jobs.

Request ids: a job has the id of its caller, which is the `X-Request-Id` of a request. The response, `cancel`
and the log use this id. If another job in flight has the same id, a suffix is appended; the response's header
includes it.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from secrets import token_hex
from typing import TypeVar, Unpack

import msgspec
import structlog
import trio

from fairlead.base.config import Limits
from fairlead.base.errors import (
    Cancelled,
    Draining,
    FairleadError,
    NoNode,
    QueueTimeout,
    RequestTimeout,
    quoted,
)
from fairlead.base.job import Delta, Job
from fairlead.base.requester import Requester
from fairlead.dialects import body as bodies
from fairlead.dialects.dialect import AnswerTimes, RelayDialect, StreamWriter
from fairlead.dialects.fields import CommonFields
from fairlead.generation.caller import Caller, JobContent
from fairlead.generation.gateway import Answer
from fairlead.generation.loading import LOADING_DELAY_S, LoadingProgress
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.generation.model_access import ModelAccess
from fairlead.generation.offload import Offload
from fairlead.generation.services import Services
from fairlead.nodes.streams.deltas import Deltas
from fairlead.router.dispatch.job_spec import REQUEST_TOKENS
from fairlead.router.quotas.access import owner_of, priority_of
from fairlead.router.quotas.key_quotas import JobCharge, LocalQuotas
from fairlead.server.auth.request_auth import MAX_REQUEST_ID_LENGTH
from fairlead.server.routes.pending import PendingAnswer
from fairlead.server.routes.request import Request, Response
from fairlead.server.routes.request_body import BodyMemory
from fairlead.server.routes.request_caller import identify, owner_so_far, tenant_so_far
from fairlead.server.routes.scope import scope_of
from fairlead.server.routes.sse import EventStream, stream_response
from fairlead.server.routes.unread import UnreadAnswers
from fairlead.server.routes.uploads import Uploads

Parsed = TypeVar("Parsed")

_SUFFIX_LENGTH = 8
DRAINING_RETRY_S = 5
PROBLEMS_NAMED = 5


class JobService:
    """The routes' access to the services. Keeps the state that outlives a request: quotas, threads, ids."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.quotas = services.quotas or LocalQuotas(services.config.api_keys)
        self.models = ModelAccess(services)
        self.offload = Offload(services.config, self.quotas)
        self.body_memory = BodyMemory(services.config.limits.bodies_bytes)
        self.uploads = Uploads(services.config.limits)
        self._tenant_names = TenantNames(services.config)
        self.unread = UnreadAnswers(services.config.limits.answers_bytes, self._tenant_names.shown)
        self._in_flight: set[str] = set()

    # Reading a request -------------------------------------------------------------------------------

    async def take(self, request: Request, parse: Callable[[bytes, Limits], Parsed]) -> tuple[bytes, Parsed]:
        """Return the raw and the parsed body. Raises as `IncomingBody.read` and `Offload.parse` do."""
        body = await request.read()
        request.body_bytes = len(body)
        return body, await self.offload.parse(tenant_so_far(request), body, parse)

    async def read(self, request: Request, decoder: msgspec.json.Decoder[Parsed]) -> Parsed:
        """Return the parsed body. Raises as `take` does."""
        return (await self.take(request, lambda body, limits: bodies.parse(body, decoder, limits)))[1]

    def identify(self, request: Request, envelope: CommonFields | None = None) -> Caller:
        """Return the caller of a request, as `request_caller.identify` does."""
        return identify(request, self.services.config.queue, envelope)

    def requester(self, request: Request) -> Requester:
        """Return who sends the request, for what it ends, and for the log lines about what it changes."""
        tenant, key = self._tenant_names.shown(tenant_so_far(request)), owner_of(request.api_key)
        return Requester(tenant, key, request.request_id, owner_so_far(request))

    # Running the job of a caller ---------------------------------------------------------------------

    def priority(self, caller: Caller) -> int:
        """Return the caller's priority class. Raises as `priority_of` does."""
        return priority_of(caller.api_key, caller.priority, self.services.config.queue)

    def job(self, caller: Caller, model: str, prefix: str, **work: Unpack[JobContent]) -> Job:
        """Return a job of the caller's.

        model: The canonical name of its model.
        prefix: The beginning of its id. A hyphen follows, except after `_`.
        work: What is generated. A job that is only relayed has no prompts.

        Raises as `priority` does, `NoNode` and `Draining`.
        """
        if self.services.draining():
            raise Draining("the server is shutting down", retry_after_s=DRAINING_RETRY_S)
        if not self.services.fleet.offers(model):
            raise NoNode(f"all nodes that have the model {quoted(model)} are drained")
        return Job(
            id=f"{prefix}{'' if prefix.endswith('_') else '-'}{token_hex(16)}",
            tenant=caller.tenant,
            model=model,
            request_id=caller.request_id,
            owner=caller.owner,
            priority=self.priority(caller),
            no_queue=caller.no_queue,
            wait_limit_s=caller.wait_limit_s,
            traceparent=caller.traceparent,
            path=caller.path,
            client=caller.address,
            cache_owner=caller.tenant if self.services.fleet.catalog.isolates_tenants(model) else "",
            **work,
        )

    async def collect(
        self, caller: Caller, job: Job, *, times: AnswerTimes | None = None
    ) -> tuple[list[Delta], dict[str, str]]:
        """Run the job to its end. Return one delta per choice, and the response headers about the answer.

        `times` records when the answer began. Raises a `FairleadError`.
        """
        job, charge, pending = await self._admit(caller, job, times)
        await self._serve(caller, job, charge, pending)
        answer = await pending.get()
        return await _collect(answer.deltas, job.sequences), answer_headers(answer)

    async def stream(
        self,
        caller: Caller,
        job: Job,
        dialect: RelayDialect,
        writer: StreamWriter,
        *,
        loading: LoadingProgress | None = None,
        times: AnswerTimes | None = None,
    ) -> Response:
        """Start the job; return its stream at the first delta, or when `keep_alive_s` has passed.

        With `loading` to report, the stream begins after `LOADING_DELAY_S`. Raises a `FairleadError` until
        then; afterwards errors are sent as events. `times` records when the answer began.
        """
        job, pending = await self.start(caller, job, times=times)
        keep_alive_s = self.services.config.queue.keep_alive_s or inf
        with trio.move_on_after(LOADING_DELAY_S if loading else keep_alive_s):
            await pending.get()
        waiting = partial(self.services.gateway.waiting, job.request_id)
        body = EventStream(
            pending,
            dialect,
            writer,
            waiting,
            loading,
            model=job.model,
            keep_alive_s=keep_alive_s,
            unread=caller.unread,
        )
        if pending.is_available:
            return stream_response(body, answer_headers(await pending.get()))
        now = await waiting()
        headers = _headers(now.estimated_wait_s, now.position, None) if now is not None else {}
        return stream_response(body, headers)

    async def start(
        self, caller: Caller, job: Job, *, times: AnswerTimes | None = None
    ) -> tuple[Job, PendingAnswer]:
        """Start the job in a task; the route reads the answer as it arrives.

        Return the job with its final request id, and its pending answer. Raises `RateLimited`.
        """
        job, charge, pending = await self._admit(caller, job, times)
        caller.nursery.start_soon(self._serve, caller, job, charge, pending)
        return job, pending

    async def _admit(
        self, caller: Caller, job: Job, times: AnswerTimes | None
    ) -> tuple[Job, JobCharge, PendingAnswer]:
        """Charge for the job, or raise. It is in flight from here until `_serve` is over."""
        tokens = REQUEST_TOKENS if job.has_no_tokens else job.prompt_tokens
        charge = await self.quotas.admit(caller.api_key, prompt_tokens=tokens, is_estimate=not job.prompts)
        if job.request_id in self._in_flight:
            request_id = f"{job.request_id[: MAX_REQUEST_ID_LENGTH - _SUFFIX_LENGTH - 1]}-{_suffix()}"
            job = msgspec.structs.replace(job, request_id=request_id)
            structlog.contextvars.bind_contextvars(request_id=request_id)
        self._in_flight.add(job.request_id)
        caller.admitted(job)
        return job, charge, PendingAnswer(times)

    async def _serve(self, caller: Caller, job: Job, charge: JobCharge, pending: PendingAnswer) -> None:
        """Run one job. It is in flight, and counts against its key, until this task ends."""
        try:
            await self.services.gateway.serve(job, task_status=pending)
            if not pending.is_available:
                raise RuntimeError("the gateway has served a job without an answer")
        except Exception as error:
            if pending.is_available:
                raise
            pending.fail(error)
            if isinstance(pending.error, QueueTimeout):
                pending.error.message += self._why_no_node_is_up(caller, job.model)
            if _is_refusal(pending.error):
                charge.refund()
        finally:
            if pending.answer is not None:
                charge.charge_answer(pending.answer.deltas.tokens, trio.current_time())
            charge.end()
            self._in_flight.discard(job.request_id)

    def _why_no_node_is_up(self, caller: Caller, model: str) -> str:
        """Return the problems of the nodes with the model if none is up; only operators see them."""
        if caller.api_key is not None and not caller.api_key.has_role("operator"):
            return ""
        seen = scope_of(self.services, caller.api_key).of_nodes(self.services.fleet.nodes())
        nodes = [node for node in seen if model in node.models]
        if any(node.state == "up" for node in nodes):
            return ""
        named = [f"{node.id}: {node.problem}" for node in nodes if node.problem is not None]
        return "".join(f"; {problem}" for problem in named[:PROBLEMS_NAMED])


async def _collect(deltas: Deltas, choices: int) -> list[Delta]:
    """Wait for the end; return one delta per choice, in order. Raises the error that ended it, if any.

    Another server's response is whole in the first delta: it is one body for all choices.
    """
    # Reading only at the end lets the channel merge the deltas, and wakes this task once.
    await deltas.ended()
    merged = [Delta(index) for index in range(choices)]
    while taken := await deltas.take():
        for delta in taken:
            if delta.index < choices:
                merged[delta.index].merge(delta)
    return merged


def answer_headers(answer: Answer) -> dict[str, str]:
    """Return the response headers about a job's wait, if it did wait, and about a translated answer."""
    headers = _headers(answer.estimated_wait_s, answer.queue_position, answer.estimated_wait_p90_s)
    translated_from = answer.deltas.translated_from
    return headers if translated_from is None else {**headers, "X-Fairlead-Translated": translated_from}


def _headers(wait_s: int | None, position: int | None, wait_p90_s: int | None) -> dict[str, str]:
    headers = {"X-Estimated-Wait": wait_s, "X-Queue-Position": position, "X-Estimated-Wait-P90": wait_p90_s}
    return {name: str(value) for name, value in headers.items() if value is not None}


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether the error refused the job, which is then not charged.

    A job that ran until its timeout is charged, and also one that its client cancelled. Otherwise clients
    could have prompts computed without a charge.
    """
    return isinstance(error, FairleadError) and not isinstance(error, RequestTimeout | Cancelled)


def _suffix() -> str:
    return token_hex(_SUFFIX_LENGTH // 2)
