"""The steps that the routes of every dialect share: read a body, encode texts, run a job.

Request ids: a job has the `X-Request-Id` of its request, for its own client, for `cancel` and in the log. An
id that a job in flight has already gets a suffix, which the response's header includes.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ReadOnlySequence
from contextlib import contextmanager
from functools import partial
from secrets import token_hex
from typing import Any, TypeVar

import msgspec
import structlog
import trio

from fairlead.api import answers
from fairlead.api.body import Body, parse
from fairlead.api.encoding import packed
from fairlead.api.loading import LOADING_AFTER_S, LoadingProgress
from fairlead.api.pending import PendingAnswer
from fairlead.api.request import Request, Response
from fairlead.api.request_auth import MAX_REQUEST_ID_LENGTH
from fairlead.api.schemas import Addressed
from fairlead.api.selecting import Selecting
from fairlead.api.services import Services
from fairlead.api.shares import Shares
from fairlead.api.sse import EventStream, Writer, event_reply
from fairlead.api.turns import Threads
from fairlead.errors import (
    Cancelled,
    FairleadError,
    Forbidden,
    InvalidRequest,
    NoNode,
    RequestTimeout,
    quoted,
)
from fairlead.fleet.status import ModelStatus
from fairlead.gateway import Answer
from fairlead.http.refusals import LOGGED_LENGTH
from fairlead.job import Delta, Job, Relay, Sampling
from fairlead.tenancy.access import flag_of, owner_of, priority_of, tenant_of
from fairlead.tenancy.quotas import Charge, Quotas
from fairlead.text.model import TextModel

Encoded = TypeVar("Encoded")

# From this size on, tokenizing could delay the next token of every stream, so a thread does it.
LONG_BODY_BYTES = 8 * 1024
ENCODING_THREADS = 2
# From this size on, parsing could, too. It holds the GIL: two at a time would hold it twice as long.
LARGE_BODY_BYTES = 64 * 1024
PARSING_THREADS = WRITING_THREADS = 1
_SUFFIX_LENGTH = 8


class JobService:
    """The routes' access to the services. Keeps the state that outlives a request: quotas, threads, ids."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.quotas = Quotas(services.config.api_keys)
        self.selecting = Selecting(services, self._allows)
        self.body_memory = Shares(services.config.limits.bodies_bytes)
        timeout_s = services.config.queue.timeout_s
        self._parsing = Threads(PARSING_THREADS, timeout_s=timeout_s)
        self._writing = Threads(WRITING_THREADS, timeout_s=timeout_s)
        self._encoding = Threads(ENCODING_THREADS, timeout_s=timeout_s)
        self._in_flight: set[str] = set()

    # Reading a request -------------------------------------------------------------------------------

    async def take(self, call: Request, decoder: msgspec.json.Decoder[Body]) -> tuple[bytes, Body]:
        """Return the raw and the parsed body. Raises as `IncomingBody.read` and `parse` do."""
        body = await call.read()
        call.body_bytes = len(body)
        return body, await self.parse(call, body, decoder)

    async def read(self, call: Request, decoder: msgspec.json.Decoder[Body]) -> Body:
        """Return the parsed body. Raises as `take` does."""
        return (await self.take(call, decoder))[1]

    async def parse(self, call: Request, body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
        """Parse a body, in a thread if it is large.

        Raises `InvalidRequest`; for a large body also `QueueFull` and `QueueTimeout`.
        """
        limits = self.services.config.limits
        if len(body) <= LARGE_BODY_BYTES:
            return parse(body, decoder, limits)
        return await self._parsing.run(self._tenant_so_far(call), parse, body, decoder, limits)

    async def encode(
        self, call: Request, encode: Callable[..., Encoded], *arguments: Any, **options: Any
    ) -> Encoded:
        """Call a function whose time grows with a job's prompt, as `in_turn` does.

        Raises `RateLimited`, too, if the body is long and the key's limits are used up.
        """
        if call.body_bytes >= LONG_BODY_BYTES:
            self.quotas.of(call.api_key).check(now_s=trio.current_time())
        return await self.in_turn(call, partial(encode, *arguments, **options))

    async def in_turn(self, call: Request, encode: Callable[..., Encoded], *arguments: Any) -> Encoded:
        """Call a function whose time grows with a text: for a long body in a thread, by tenants' turns.

        Raises what the function raises, `QueueFull` and `QueueTimeout`.
        """
        if call.body_bytes < LONG_BODY_BYTES:
            return encode(*arguments)
        return await self._encoding.run(self._tenant_so_far(call), encode, *arguments)

    async def write(self, call: Request, write: Callable[..., bytes], *arguments: Any) -> bytes:
        """Call a function that writes a long response, in a thread, by turns. Raises as `in_turn` does."""
        return await self._writing.run(self._tenant_so_far(call), write, *arguments)

    @contextmanager
    def charged(
        self, call: Request, tokens: int, param: str, *, is_estimate: bool = False
    ) -> Iterator[Charge]:
        """Charge the key for a request that is not a job; refund it if it is refused.

        Raises as `Quota.admit` does.
        """
        charge = self.quotas.of(call.api_key).admit(
            prompt_tokens=tokens, is_estimate=is_estimate, now_s=trio.current_time(), param=param
        )
        try:
            yield charge
        except FairleadError:
            charge.refund()
            raise
        finally:
            charge.end()

    def _tenant_so_far(self, call: Request) -> str:
        return self.tenant(call, user=call.user)

    def tenant(self, call: Request, *, user: str | None = None, safety_identifier: str | None = None) -> str:
        """Return the tenant that the request counts for."""
        return tenant_of(
            call.api_key, call.headers, call.address, user=user, safety_identifier=safety_identifier
        )

    def priority(self, call: Request, asked: str | int | None = None) -> int:
        """Return the request's priority class; the header overrides `asked`, which is the body's."""
        asked = call.headers.get("X-Priority") or asked
        return priority_of(call.api_key, asked, self.services.config.queue)

    def models(self, call: Request) -> list[ModelStatus]:
        """Return the models that the caller may use, except unlisted ones."""
        known = self.services.fleet.models()
        return [status for status in known if not status.unlisted and self._allows(call, status.model)]

    def offered(self, call: Request) -> list[ModelStatus]:
        """Return those of them that are of use now: without remote models that no ready node has.

        A request for such a model may still wait for its node to come back.
        """
        known = self.models(call)
        return [status for status in known if status.kind != "remote" or status.state == "ready"]

    def find(self, call: Request, name: str | None) -> str:
        """Return the canonical name of a model; without a name, of the only one the caller may use.

        For a selector it is the model that a job would get now. Raises `ModelNotFound`, `Forbidden`, or
        `InvalidRequest` when there are several to choose from.
        """
        if name is None:
            return self._only_model(call)
        if self.selecting.is_selector(name):
            return self.selecting.choose(call, name).model
        model = self.services.canonical(name)
        if not self._allows(call, model):
            raise Forbidden(f"this API key may not use the model {quoted(model)}", param="model")
        return model

    def find_model(self, call: Request, name: str | None) -> TextModel:
        """Return the model, as `find` does. Raises `InvalidRequest`, too, if its tokenizer is unknown."""
        found = self.find(call, name)
        model = self.services.models.get(found)
        if model is None:
            raise InvalidRequest(f"model: the tokens of {quoted(found)} are not known here", param="model")
        return model

    def job(
        self,
        call: Request,
        wanted: Addressed,
        model: str,
        *,
        kind: str,
        prompts: tuple[ReadOnlySequence[int], ...] = (),
        sampling: Sampling,
        n: int,
        stop: tuple[str, ...] = (),
        relay: Relay | None = None,
        prompt_estimate: int = 0,
        embed: bool = False,
    ) -> Job:
        """Return the job for the request; `kind` is the prefix of its id.

        Raises as `priority` does, and `NoNode`.
        """
        if not self.services.fleet.offers(model):
            raise NoNode(f"all nodes that have the model {quoted(model)} are drained")
        return Job(
            id=f"{kind}-{token_hex(16)}",
            tenant=self.tenant(call, user=wanted.user, safety_identifier=wanted.safety_identifier),
            model=model,
            prompts=tuple(map(packed, prompts)),
            sampling=sampling,
            n=n,
            stop=stop,
            stream=bool(wanted.stream) if relay is None else relay.stream,
            request_id=call.request_id,
            owner=owner_of(call.api_key),
            priority=self.priority(call, wanted.priority),
            no_queue=flag_of(call.headers, "X-No-Queue"),
            relay=relay,
            prompt_estimate=prompt_estimate,
            traceparent=call.headers.get("traceparent", ""),
            embed=embed,
            path=call.path[:LOGGED_LENGTH],
            client=call.address,
        )

    # Running its job ---------------------------------------------------------------------------------

    async def whole(self, call: Request, job: Job) -> tuple[list[Delta], dict[str, str]]:
        """Run the job to its end. Return one delta per choice, and the response headers about its wait.

        Raises a `FairleadError`.
        """
        job, charge, pending = self._admit(call, job)
        await self._serve(job, charge, pending)
        answer = await pending.get()
        return await answers.collect(answer.deltas, job.sequences), waiting_headers(answer)

    async def stream(
        self, call: Request, job: Job, writer: Writer, *, loading: LoadingProgress | None = None
    ) -> Response:
        """Start the job; return its stream at the first delta, or when `keep_alive_s` has passed.

        With `loading` to report, the stream begins after `LOADING_AFTER_S`. Raises a `FairleadError` until
        then; afterwards errors are sent as events.
        """
        job, pending = self._start(call, job)
        keep_alive_s = self.services.config.queue.keep_alive_s
        with trio.move_on_after(LOADING_AFTER_S if loading else keep_alive_s or float("inf")):
            await pending.get()
        waiting = partial(self.services.gateway.waiting, job.request_id)
        body = EventStream(pending, writer, waiting, loading)
        if pending.is_there:
            return event_reply(body, waiting_headers(await pending.get()))
        now = waiting()
        headers = _headers(now.estimated_wait_s, now.position, None) if now is not None else {}
        return event_reply(body, headers)

    def start(self, call: Request, job: Job) -> PendingAnswer:
        """Start the job in a task; the route reads the answer as it arrives. Raises `RateLimited`."""
        return self._start(call, job)[1]

    def _start(self, call: Request, job: Job) -> tuple[Job, PendingAnswer]:
        """Return the job with its final request id, and its pending answer."""
        job, charge, pending = self._admit(call, job)
        call.nursery.start_soon(self._serve, job, charge, pending)
        return job, pending

    def _admit(self, call: Request, job: Job) -> tuple[Job, Charge, PendingAnswer]:
        """Charge for the job, or raise. It is in flight from here until `_serve` is over."""
        charge = self.quotas.of(call.api_key).admit(
            prompt_tokens=job.prompt_tokens,
            is_estimate=not job.prompts,
            now_s=trio.current_time(),
        )
        if job.request_id in self._in_flight:
            request_id = f"{job.request_id[: MAX_REQUEST_ID_LENGTH - _SUFFIX_LENGTH - 1]}-{_suffix()}"
            job = msgspec.structs.replace(job, request_id=request_id)
            call.request_id = request_id
            structlog.contextvars.bind_contextvars(request_id=request_id)
        self._in_flight.add(job.request_id)
        call.is_job = True
        if job.relay is None:
            call.leave_body()
        return job, charge, PendingAnswer()

    async def _serve(self, job: Job, charge: Charge, pending: PendingAnswer) -> None:
        """Run one job. It is in flight, and counts against its key, until this task ends."""
        try:
            await self.services.gateway.serve(job, task_status=pending)
            if not pending.is_there:
                raise RuntimeError("the gateway has served a job without an answer")
        except Exception as error:
            if pending.is_there:
                raise
            pending.fail(error)
            if _is_refusal(pending.error):
                charge.refund()
        finally:
            if pending.answer is not None:
                charge.charge_answer(pending.answer.deltas.tokens, trio.current_time())
            charge.end()
            self._in_flight.discard(job.request_id)

    def _only_model(self, call: Request) -> str:
        models = self.models(call)
        if len(models) == 1:
            return models[0].model
        if not models and self.services.fleet.models():
            raise Forbidden("this API key may use none of the models that are served", param="model")
        raise InvalidRequest("model: one of the served models must be named", param="model")

    def _allows(self, call: Request, model: str) -> bool:
        allowed = call.api_key.models if call.api_key is not None else ()
        return not allowed or model in {self.services.aliases.get(name, name) for name in allowed}


def waiting_headers(answer: Answer) -> dict[str, str]:
    """Return the response headers about a job's wait; none for a job that did not wait."""
    return _headers(answer.estimated_wait_s, answer.queue_position, answer.estimated_wait_p90_s)


def _headers(wait_s: int | None, position: int | None, wait_p90_s: int | None) -> dict[str, str]:
    headers = {
        "X-Estimated-Wait": wait_s,
        "X-Queue-Position": position,
        "X-Estimated-Wait-P90": wait_p90_s,
    }
    return {name: str(value) for name, value in headers.items() if value is not None}


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether a job without an answer costs nothing.

    A job that ran until its timeout costs, and so does one that its client cancelled: otherwise clients could
    have prompts computed for free.
    """
    return isinstance(error, FairleadError) and not isinstance(error, RequestTimeout | Cancelled)


def _suffix() -> str:
    return token_hex(_SUFFIX_LENGTH // 2)
