"""Jobs of callers: made, charged, in flight, and answered.

A job has the id of its caller, which is that of an HTTP request, for the response, `cancel` and the log. If
another job in flight has the same id, a suffix is appended.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from secrets import token_hex
from typing import NamedTuple, Unpack

import msgspec
import structlog
import trio

from fairlead.base.config import TeamConfig
from fairlead.base.errors import (
    Cancelled,
    Displaced,
    Draining,
    FairleadError,
    NoNode,
    QueueTimeout,
    RequestTimeout,
    quoted,
)
from fairlead.base.job import Delta, Job
from fairlead.dialects.dialect import AnswerTimes, RelayDialect, StreamWriter
from fairlead.generation.caller import MAX_REQUEST_ID_LENGTH, Caller, JobContent
from fairlead.generation.event_stream import EventStream
from fairlead.generation.gateway import Answer
from fairlead.generation.loading import LOADING_DELAY_S, LoadingProgress
from fairlead.generation.model_access import ModelAccess
from fairlead.generation.offload import Offload
from fairlead.generation.pending import PendingAnswer
from fairlead.generation.services import Services
from fairlead.nodes.streams.deltas import Deltas
from fairlead.router.dispatch.job_spec import REQUEST_TOKENS
from fairlead.router.quotas.access import priority_of
from fairlead.router.quotas.budgets import shares_of
from fairlead.router.quotas.key_quotas import JobCharge, LocalQuotas

_SUFFIX_LENGTH = 8
DRAINING_RETRY_S = 5
PROBLEMS_NAMED = 5


class AnswerNotes(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller learns of an answer besides its content.

    estimated_wait_s: The estimate of the wait, in seconds; None: unknown, or the job was not queued.
    estimated_wait_p90_s: The same with a probability of 90 %.
    queue_position: The job's place in the queue, from 1; None: it was not queued.
    translated_from: The dialect of the server whose answer was translated; None: it was not translated.
    warning: Why arguments of tools do not follow their schemas; "": they do.
    budgets: Which budgets are nearly spent; "": none.
    unread_fields: The fields of the request that nothing reads.
    """

    estimated_wait_s: int | None = None
    estimated_wait_p90_s: int | None = None
    queue_position: int | None = None
    translated_from: str | None = None
    warning: str = ""
    budgets: str = ""
    unread_fields: tuple[str, ...] = ()

    @classmethod
    def of(cls, answer: Answer) -> "AnswerNotes":
        """Return the notes of an answer that has begun."""
        return cls(
            estimated_wait_s=answer.estimated_wait_s,
            estimated_wait_p90_s=answer.estimated_wait_p90_s,
            queue_position=answer.queue_position,
            translated_from=answer.deltas.translated_from,
        )


class WrittenAnswer(NamedTuple):
    """An answer in its dialect: the whole body, or its events as they come."""

    body: bytes | EventStream
    notes: AnswerNotes


class JobService:
    """Makes and runs jobs. Keeps the state that outlives a job: quotas, threads, ids in flight."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.quotas = services.quotas or LocalQuotas(services.config.api_keys, services.budgets)
        self.models = ModelAccess(services)
        self.offload = Offload(services.config, self.quotas)
        self.teams: Mapping[str, TeamConfig] = services.config.teams
        self._in_flight: set[str] = set()

    def priority(self, caller: Caller) -> int:
        """Return the caller's priority class. Raises as `priority_of` does."""
        return priority_of(caller.api_key, caller.priority, self.services.config.queue)

    def team(self, caller: Caller) -> tuple[str, float]:
        """Return the team of the caller's key, and its weight; "" and 1 without a team."""
        team = None if caller.api_key is None else caller.api_key.team
        # A reload may have removed the team since the request was authenticated.
        config = None if team is None else self.teams.get(team)
        return ("", 1.0) if team is None or config is None else (team, config.weight)

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
        team, team_weight = self.team(caller)
        return Job(
            id=f"{prefix}{'' if prefix.endswith('_') else '-'}{token_hex(16)}",
            tenant=caller.tenant,
            model=model,
            request_id=caller.request_id,
            owner=caller.owner,
            priority=self.priority(caller),
            no_queue=caller.no_queue,
            wait_limit_s=caller.wait_limit_s,
            when_idle=caller.when_idle,
            traceparent=caller.traceparent,
            path=caller.path,
            client=caller.address,
            cache_owner=caller.tenant if self.services.fleet.catalog.isolates_tenants(model) else "",
            team=team,
            team_weight=team_weight,
            **work,
        )

    async def collect(
        self, caller: Caller, job: Job, *, times: AnswerTimes | None = None
    ) -> tuple[list[Delta], AnswerNotes]:
        """Run the job to its end. Return one delta per choice, and what else is known of the answer.

        `times` records when the answer began. Raises a `FairleadError`.
        """
        job, charge, pending = await self._admit(caller, job, times)
        await self._serve(caller, job, charge, pending)
        answer = await pending.get()
        notes = msgspec.structs.replace(AnswerNotes.of(answer), budgets=pending.warning)
        return await _collect(answer.deltas, job.sequences), notes

    async def stream(
        self,
        caller: Caller,
        job: Job,
        dialect: RelayDialect,
        writer: StreamWriter,
        *,
        loading: LoadingProgress | None = None,
        times: AnswerTimes | None = None,
    ) -> WrittenAnswer:
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
            write_large=partial(self.offload.write_piece, caller.tenant),
        )
        if pending.is_available:
            notes = AnswerNotes.of(await pending.get())
            return WrittenAnswer(body, msgspec.structs.replace(notes, budgets=pending.warning))
        now = await waiting()
        if now is None:
            return WrittenAnswer(body, AnswerNotes(budgets=pending.warning))
        notes = AnswerNotes(
            estimated_wait_s=now.estimated_wait_s, queue_position=now.position, budgets=pending.warning
        )
        return WrittenAnswer(body, notes)

    async def start(
        self, caller: Caller, job: Job, *, times: AnswerTimes | None = None
    ) -> tuple[Job, PendingAnswer]:
        """Start the job in a task; the caller reads the answer as it arrives.

        Return the job with its final request id, and its pending answer. Raises `RateLimited`.
        """
        job, charge, pending = await self._admit(caller, job, times)
        caller.nursery.start_soon(self._serve, caller, job, charge, pending)
        return job, pending

    @asynccontextmanager
    async def charge(
        self, caller: Caller, tokens: int, param: str, *, is_estimate: bool = False
    ) -> AsyncIterator[JobCharge]:
        """Charge the caller's key for the block as for a job; refund it if the block refuses the request.

        tokens: What is charged.
        param: The field of the request that they come from, for errors.
        is_estimate: The block corrects the charge.

        Raises as `KeyQuotas.admit` does.
        """
        charge = await self.quotas.admit(
            caller.api_key, prompt_tokens=tokens, is_estimate=is_estimate, param=param
        )
        try:
            yield charge
        except FairleadError:
            charge.refund()
            raise
        finally:
            charge.end()

    async def _admit(
        self, caller: Caller, job: Job, times: AnswerTimes | None
    ) -> tuple[Job, JobCharge, PendingAnswer]:
        """Charge for the job, or raise. It is in flight from here until `_serve` is over."""
        tokens = REQUEST_TOKENS if job.has_no_tokens else job.prompt_tokens
        catalog = self.services.fleet.catalog
        charge = await self.quotas.admit(
            caller.api_key,
            prompt_tokens=tokens,
            is_estimate=not job.prompts,
            shares=shares_of(
                caller.api_key,
                job.tenant,
                catalog.config.budgets,
                self.services.stored_budgets,
                is_batch=job.when_idle,
            ),
            price=catalog.price_of(job.model, is_batch=job.when_idle),
        )
        if job.request_id in self._in_flight:
            request_id = f"{job.request_id[: MAX_REQUEST_ID_LENGTH - _SUFFIX_LENGTH - 1]}-{_suffix()}"
            job = msgspec.structs.replace(job, request_id=request_id)
            structlog.contextvars.bind_contextvars(request_id=request_id)
        self._in_flight.add(job.request_id)
        caller.admitted(job)
        return job, charge, PendingAnswer(times, charge.warning)

    async def _serve(self, caller: Caller, job: Job, charge: JobCharge, pending: PendingAnswer) -> None:
        """Run one job. It is in flight, and counts against its key, until this task ends."""
        try:
            await self.services.gateway.serve(job, seated=charge.begin, task_status=pending)
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
            answer = pending.answer
            if answer is not None and isinstance(answer.deltas.error, Displaced):
                charge.refund()  # a line of a batch, which is answered and charged later
            elif answer is not None:
                deltas = answer.deltas
                cached = deltas.prompt_cached_tokens(job.n)
                charge.charge_answer(deltas.tokens, trio.current_time(), cached_tokens=cached)
            charge.end()
            self._in_flight.discard(job.request_id)

    def _why_no_node_is_up(self, caller: Caller, model: str) -> str:
        """Return the problems of the nodes with the model if none is up; only operators see them."""
        if caller.api_key is not None and not caller.api_key.has_role("operator"):
            return ""
        seen = self.services.scope_of(caller.api_key).of_nodes(self.services.fleet.nodes())
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


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether the error refused the job, which is then not charged.

    A job that ran until its timeout is charged, and also one that its client cancelled. Otherwise clients
    could have prompts computed without a charge.
    """
    return isinstance(error, FairleadError) and not isinstance(error, RequestTimeout | Cancelled)


def _suffix() -> str:
    return token_hex(_SUFFIX_LENGTH // 2)
