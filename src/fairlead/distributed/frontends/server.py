"""The dispatcher's side: the jobs of all fronts, and what happens when a front or a dispatcher dies.

A front that loses its connection keeps its clients, so its jobs stay for `AWAY_S`; then they end. A new
dispatcher grants nothing before the fronts have declared their jobs, or `GRACE_S` has passed since the first
of them connected. Seats that are held are restored first; then waiting jobs are submitted in the order in
which they arrived. `GRACE_S` counts from the first connection, because fronts notice late, but at about the
same time, that the earlier dispatcher hangs.

A dispatcher whose epoch comes from a clock, or from a store that may have lost it, takes a higher one when a
front has seen it: the clock may have been set back. Otherwise only the one that was replaced would be told.
"""

import secrets
from collections.abc import Callable, Collection
from functools import partial
from types import MappingProxyType

import structlog
import trio

from fairlead.base.frame_link import FrameLink
from fairlead.base.supervision import contain
from fairlead.distributed.frontends import wire
from fairlead.distributed.frontends.front import Front, FrontJob
from fairlead.distributed.frontends.questions import FrontQuestions, Orders, Questions
from fairlead.distributed.ipc.limited_log import LimitedLog
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.held_sequences import HeldSequences
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.tenant_counters import KnownCounters, TenantCounters, highest_excess
from fairlead.router.dispatch.ticket import TicketState
from fairlead.router.dispatch.waiter import SeatLoss

AWAY_S = 10.0
GRACE_S = 1.0
MAX_JOBS = 100_000  # of a front; a correct one stays below it

logger = structlog.get_logger("fairlead.distributed.frontends")


class FrontServer:
    """Serves the connections of fronts. `run` ends the grace time of a dispatcher that has a predecessor.

    `expected`: the names of the fronts that declare their jobs in the grace time; None: unknown. `questions`
    and `orders` as for `FrontQuestions`. `on_front_connected` is called with a front each time that it has
    connected, `on_front_ended` with the name of a front that has ended.
    `may_send` as for `FrameLink`: whether this dispatcher leads. `raise_epoch` is called with a higher epoch,
    and returns whether this dispatcher takes it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        epoch: int,
        questions: Questions,
        orders: Orders = MappingProxyType({}),
        expected: Collection[str] | None = (),
        may_send: Callable[[], bool] = lambda: True,
        raise_epoch: Callable[[int], bool] = lambda _epoch: False,
        on_front_connected: Callable[[Front], None] = lambda _front: None,
        on_front_ended: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._epoch = epoch
        self._questions = FrontQuestions(questions, orders)
        self._nursery: trio.Nursery | None = None
        self._may_send = may_send
        self._raise_epoch = raise_epoch
        self._run_id = secrets.token_hex(8)
        self._refused = LimitedLog("front refused: it has seen another dispatcher with this or a later epoch")
        self._on_front_connected = on_front_connected
        self._on_front_ended = on_front_ended
        self._fronts: dict[str, Front] = {}
        self._served: set[str] = set()
        self._counters = KnownCounters()
        self._early_counters: list[TenantCounters] = []
        # Waiting jobs of the grace time, with the times of their arrival; None when it is over.
        self._early: dict[FrontJob, float] | None = {} if expected is None or expected else None
        self._early_requeues: dict[FrontJob, Callable[[], None]] = {}
        self._missing = None if expected is None else set(expected)
        self._has_front = trio.Event()
        self._all_declared = trio.Event()

    @property
    def fronts(self) -> list[Front]:
        """The fronts that are connected, or away for a short time."""
        return list(self._fronts.values())

    async def run(self) -> None:
        """End the grace time when it is over, and send heartbeats, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._send_heartbeats)
            if self._early is not None:
                await self._has_front.wait()
                with trio.move_on_after(GRACE_S):
                    await self._all_declared.wait()
                self._end_grace()
            await trio.sleep_forever()  # orders need the nursery

    async def _send_heartbeats(self) -> None:
        while True:
            self._send_heartbeat()
            await trio.sleep(wire.HEARTBEAT_S)

    def _send_heartbeat(self) -> None:
        if self._early is not None:
            for front in self._fronts.values():
                front.send(wire.Heartbeat())
            return
        self._dispatcher.charge_running()  # a restored job counts as charged
        changes = self._dispatcher.scheduler.counters(self._served)
        self._served.clear()
        self._counters.update(changes)
        for front in self._fronts.values():
            front.send(wire.Heartbeat(changes if front.has_counters else self._counters.whole()))
            front.has_counters = True

    async def serve(self, stream: trio.abc.Stream, name: str) -> None:
        """Serve one connection of the front of this name until it ends."""
        link = FrameLink(
            stream,
            wire.to_dispatcher_decoder,
            name=name,
            may_send=self._may_send,
            silence_s=wire.SILENCE_S,
        )
        front = self._fronts.setdefault(name, Front(name, self._served))
        if front.link is not None:
            front.link.close()  # the front has given it up, or it would not have connected again
        front.link = link
        front.connections += 1
        front.undeclared, front.has_counters, front.is_counting = set(front.jobs), False, False
        self._has_front.set()
        link.send(wire.Welcome(self._epoch, self._run_id))
        self._on_front_connected(front)
        logger.info("front connected", front=name, jobs=len(front.jobs))
        try:
            await contain("messages of a front", link.run, partial(self._handle, front))
        finally:
            if front.link is link:
                front.link = None
        if front.link is None:
            await self._wait_for(front)

    def end_front(self, name: str) -> None:
        """End all jobs of a front which is known to have ended."""
        self._on_front_ended(name)
        self._do_not_expect(name)
        front = self._fronts.pop(name, None)
        if front is None:
            return
        if front.link is not None:
            front.link.close()
        logger.info("front ended", front=name, jobs=len(front.jobs))
        for job in list(front.jobs.values()):
            self._end(job)

    # Messages ----------------------------------------------------------------------------------------

    def _handle(self, front: Front, message: wire.ToDispatcher) -> None:
        if self._fronts.get(front.name) is not front:
            return
        if isinstance(message, (wire.BeginJob, wire.EndJob)):  # first: two of three messages
            self._change(front, message)
        else:
            self._handle_other(front, message)

    def _handle_other(self, front: Front, message: wire.ToDispatcher) -> None:
        match message:
            case wire.SubmitJob() | wire.DeclareJob() if len(front.jobs) >= MAX_JOBS:
                front.refuse(f"it has more than {MAX_JOBS} jobs")
            case wire.SubmitJob(number, spec) if number not in front.jobs:
                self._submit(self._new_job(front, number, spec), 0.0)
            case wire.DeclareJob():
                self._declare(front, message)
            case wire.Declared(counters):
                self._end_declaration(front, counters)
            case wire.Progress(tokens):
                front.is_counting = False
                for number, count in tokens.items():
                    if (job := front.jobs.get(number)) is not None:
                        job.tokens = count
                        self._served.add(job.ticket.job.line)
            case wire.EpochSeen(epoch):
                self._learn_epoch(front, epoch)
            case wire.Ask():
                assert self._nursery is not None, "connections are served while `run` runs"
                self._questions.answer(front, message, self._nursery)
            case _:
                self._change(front, message)

    def _change(
        self,
        front: Front,
        message: wire.SubmitJob | wire.BeginJob | wire.SequenceEnded | wire.RequeueJob | wire.EndJob,
    ) -> None:
        job = front.jobs.get(message.number)
        match message:
            case wire.BeginJob() if job is not None:
                self._dispatcher.begun(job)
            case wire.EndJob(_, tokens, has_failed) if job is not None:
                job.tokens = tokens
                if has_failed and job.has_seat:
                    self._dispatcher.node_failed(job)
                self._end(job)
            case wire.SequenceEnded(_, index) if job is not None:
                job.grants.pop(index, None)
                self._dispatcher.sequence_ended(job, index)
            case wire.RequeueJob(_, loss) if job is not None and job.has_seat:
                self._requeue(job, loss)
            case _:
                reason = f"{type(message).__name__} does not fit job {message.number}"
                front.refuse(reason)

    def _learn_epoch(self, front: Front, seen: int) -> None:
        """Take a higher epoch than a front has seen, and tell all fronts, or refuse this one."""
        if seen < self._epoch:  # it was raised meanwhile
            front.send(wire.Welcome(self._epoch, self._run_id))
            return
        if not self._raise_epoch(seen + 1):
            self._refused.report("this one has been replaced", front=front.name, epoch=self._epoch, seen=seen)
            front.send(wire.Standby())
            return
        logger.warning("epoch raised", front=front.name, epoch=self._epoch, seen=seen, now=seen + 1)
        self._epoch = seen + 1
        self._dispatcher.raise_epoch(self._epoch)
        for each in self._fronts.values():
            each.send(wire.Welcome(self._epoch, self._run_id))

    # Jobs --------------------------------------------------------------------------------------------

    def _new_job(self, front: Front, number: int, spec: JobSpec, tokens: int = 0) -> FrontJob:
        job = front.jobs[number] = FrontJob(front, number, self._dispatcher.new_ticket(spec), tokens)
        return job

    def _submit(self, job: FrontJob, age_s: float) -> None:
        """Submit a job; during the grace time, at its end."""
        if self._early is not None:
            self._early[job] = trio.current_time() - age_s
            return
        self._dispatcher.submit(job, age_s=age_s)
        if job.ticket.state is TicketState.QUEUED:
            job.front.send(wire.JobQueued(job.number, job.estimate))

    def _declare(self, front: Front, declared: wire.DeclareJob) -> None:
        """Continue a job that arrived before this connection."""
        job = front.jobs.get(declared.number)
        if job is None:
            job = self._new_job(front, declared.number, declared.job, declared.tokens)
            self._note_begun(job, declared)
            if declared.seat is None:
                self._submit(job, declared.age_s)
            else:
                self._dispatcher.restore(job, declared.seat, age_s=declared.age_s)
            return
        front.undeclared.discard(declared.number)
        job.tokens = max(job.tokens, declared.tokens)
        self._note_begun(job, declared)
        if job.error is None and job.grant is not None and job.grant == declared.released:
            if job.has_seat:  # its `RequeueJob` was lost
                self._requeue(job, SeatLoss())
        elif declared.seat is None or job.error is not None:
            job.report_again()
        elif job.has_seat and declared.seat.sequences.begun is not None:
            self._agree(job, declared.seat.sequences)

    def _agree(self, job: FrontJob, held: HeldSequences) -> None:
        """Repeat what this job's front has not received, and end the sequences that it has ended."""
        assert held.begun is not None
        for index, grant in sorted(job.grants.items()):  # first, because the front takes them in order
            if index >= held.begun:
                job.front.send(wire.SequenceGranted(job.number, index, grant))
        job.report_paused()
        open_ones = {*held.running, *held.suspended}
        for index in [index for index in job.ticket.runs if index < held.begun and index not in open_ones]:
            self._dispatcher.sequence_ended(job, index)

    def _note_begun(self, job: FrontJob, declared: wire.DeclareJob) -> None:
        """Record that a job's answer has begun, so that the deadline of its wait does not apply."""
        if declared.has_begun:
            self._dispatcher.scheduler.first_delta(job.ticket)

    def _requeue(self, job: FrontJob, loss: SeatLoss) -> None:
        """Requeue a job; during the grace time at its end, because other seats may not be declared yet."""
        if self._early is not None:
            requeue = partial(self._requeue, job, loss)
            self._early_requeues[job] = requeue  # once, also if the front declares it again
        elif job.has_seat and job.front.jobs.get(job.number) is job:
            self._dispatcher.requeue(job, loss)

    def _end_declaration(self, front: Front, counters: TenantCounters) -> None:
        """End the jobs that the front does not have any more: their `EndJob` was lost."""
        for number in front.undeclared:
            if (job := front.jobs.get(number)) is not None:
                self._end(job)
        front.undeclared = set()
        if self._early is not None:
            self._early_counters.append(counters)
        self._do_not_expect(front.name)

    def _do_not_expect(self, name: str) -> None:
        """End the grace time if this was the last front that was expected to declare its jobs."""
        if self._missing is not None:
            self._missing.discard(name)
            if not self._missing:
                self._all_declared.set()

    def _end_grace(self) -> None:
        """Submit the waiting jobs of all fronts in the order in which they arrived."""
        early, self._early = self._early or {}, None
        excess = highest_excess(self._early_counters)
        self._early_counters.clear()
        self._dispatcher.scheduler.restore_counters(excess)
        self._served.update(excess)
        for requeue in self._early_requeues.values():
            requeue()
        self._early_requeues.clear()
        now = trio.current_time()
        for job, arrived_at in sorted(early.items(), key=lambda entry: entry[1]):
            self._submit(job, now - arrived_at)

    def _end(self, job: FrontJob) -> None:
        job.front.jobs.pop(job.number, None)
        if self._early is not None and self._early.pop(job, None) is not None:
            return  # not submitted yet
        self._served.add(job.ticket.job.line)
        self._dispatcher.end(job)

    async def _wait_for(self, front: Front) -> None:
        """End the jobs of a front that does not connect again in time."""
        logger.warning("front disconnected", front=front.name, jobs=len(front.jobs))
        connections = front.connections
        await trio.sleep(AWAY_S)
        if front.connections == connections and self._fronts.get(front.name) is front:
            self.end_front(front.name)
