"""A front's side: seats of a dispatcher in another process, with the interface of `Dispatcher.seat`.

The front's jobs outlive the connection. While no dispatcher answers, jobs that run go on, and others wait;
all are declared on the next connection. A dispatcher with a lower epoch than one seen before is not accepted,
unless it raises its epoch: it gets the one that was seen.
"""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import Any

import msgspec
import structlog
import trio

from fairlead.base.backoff import Backoff
from fairlead.base.config import QueueConfig
from fairlead.base.errors import FairleadError, NoNode, QueueFull, QueueTimeout
from fairlead.base.frame_link import FrameLink
from fairlead.base.grant import Grant
from fairlead.base.requester import Requester
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.base.supervision import contain
from fairlead.distributed.frontends import wire
from fairlead.distributed.ipc.handshake import HandshakeFailed
from fairlead.distributed.ipc.limited_log import LimitedLog
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.dispatch.held_sequences import HeldSequences
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.tenant_counters import KnownCounters
from fairlead.router.dispatch.waiter import HeldSeat, SeatLoss

RETRY_S = 0.1
# A dispatcher that refuses the handshake, does not lead, or was connected for less than `USEFUL_S`, is tried
# again after a pause that grows.
USEFUL_S = 1.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
ANSWER_TIMEOUT_S = 2.0
NO_ANSWER = "the dispatcher does not answer"
# The dispatcher ends a wait at its deadline; if it does not answer, the front does, a little later.
TIMEOUT_MARGIN_S = 5.0

Connect = Callable[[], Awaitable[trio.abc.Stream]]

logger = structlog.get_logger("fairlead.distributed.frontends")


class RemoteSeat:
    """The right to run one job on the node `node_id`; see `dispatch.dispatcher.Seat`."""

    def __init__(self, client: "DispatchClient", job: "_OpenJob") -> None:
        self._client = client
        self._job = job

    @property
    def node_id(self) -> str:
        """The id of its node."""
        return self._job.held.node_id

    @property
    def grant(self) -> Grant | None:
        """Its grant; see `Seat`."""
        return self._job.held.grant

    @property
    def waited_s(self) -> float:
        """How long the job waited for its first seat."""
        return self._job.held.waited_s

    @property
    def estimate(self) -> WaitEstimate | None:
        """The estimate of its wait, made when it arrived; None if it did not wait."""
        return self._job.estimate

    @property
    def sequences(self) -> SequenceSeats:
        """The seats of its sequences at its node."""
        return self._job.sequences

    def begin(self, generated: Callable[[], int]) -> None:
        """Report the first delta."""
        self._job.begin(generated)
        self._client.send(wire.BeginJob(self._job.number))

    def fail(self) -> None:
        """Report that the node has failed, and that the job will not be queued again."""
        self._job.has_failed = True

    async def requeue(self, loss: SeatLoss) -> None:
        """Release the seat, because its node failed or is full after all, and wait for another."""
        self._job.release()
        self._client.send(wire.RequeueJob(self._job.number, loss))
        await self._client.wait(self._job)


class DispatchClient:
    """The jobs of one front, and its connection to the dispatcher that leads.

    `connects` open an authenticated connection to each dispatcher, of which one leads. `run` keeps the front
    connected. The functions of `on_connect` are called when a dispatcher has accepted this front and its jobs
    are declared, and `on_keys` with the keys that it sends.
    """

    def __init__(self, connects: list[Connect], queue: QueueConfig) -> None:
        self.epoch = 0
        self.run_id = ""  # of the dispatcher with this epoch
        self.on_connect: list[Callable[[], None]] = []
        self.on_keys: Callable[[wire.StoredKeys], None] = lambda _keys: None
        self._connects = connects
        self._pauses = {connect: _Pause() for connect in connects}
        self._no_dispatcher = LimitedLog("no dispatcher")
        self._refused = LimitedLog("dispatcher not accepted: its epoch is not higher than one seen before")
        self._queue = queue
        self._numbers = itertools.count(1)
        self._jobs: dict[int, _OpenJob] = {}
        self._questions: dict[int, _Question] = {}
        self._link: FrameLink[wire.ToFront] | None = None
        self._counters = KnownCounters()  # of tenants, for the next dispatcher

    def __len__(self) -> int:
        """Return the number of jobs that have not ended."""
        return len(self._jobs)

    @property
    def is_connected(self) -> bool:
        """Whether a dispatcher that leads has accepted this front."""
        return self._link is not None

    async def run(self) -> None:
        """Keep connected until cancelled."""
        while True:
            connect, stream = await self._connect()
            began_at = trio.current_time()
            has_led = await self._use(stream)
            # A message that either side cannot handle ends the connection, and may be sent again on the next.
            if has_led and trio.current_time() - began_at >= USEFUL_S:
                self._pauses[connect].end()
            else:
                self._pauses[connect].begin()
            await trio.sleep(RETRY_S)

    @asynccontextmanager
    async def seat(self, spec: JobSpec) -> AsyncIterator[RemoteSeat]:
        """Wait for a seat, hold it during the block, and release it however the block ends.

        Raises what `Dispatcher.seat` raises, and `QueueFull` if no dispatcher answers and `queue.capacity`
        jobs wait for one.
        """
        if (
            self._link is None
            and sum(job.seat is None for job in self._jobs.values()) >= self._queue.capacity
        ):
            raise QueueFull("the dispatcher does not answer, and the queue is full")
        job = _OpenJob(next(self._numbers), spec, self.send)
        self._jobs[job.number] = job
        with job.scope:
            try:
                self.send(wire.SubmitJob(job.number, spec))
                await self.wait(job)
                yield RemoteSeat(self, job)
            finally:
                del self._jobs[job.number]
                job.sequences.close()
                self.send(wire.EndJob(job.number, job.generated(), job.has_failed))
        if job.error is not None:
            raise job.error

    async def wait(self, job: "_OpenJob") -> None:
        """Wait until the job has a seat, or raise its error."""
        timeout_s = min(self._queue.timeout_s, job.spec.wait_limit_s or inf)
        if job.spec.when_idle:
            timeout_s = inf
        last = inf if job.has_begun else job.arrived_at + timeout_s + TIMEOUT_MARGIN_S
        with trio.move_on_at(last) as deadline:
            await job.event.wait()
        if deadline.cancelled_caught and not job.event.is_set():
            raise QueueTimeout(f"the request waited longer than {timeout_s:g} s")
        if job.error is not None:
            raise job.error

    async def waiting(self, request_id: str) -> WaitEstimate | None:
        """Return the current estimate of a waiting job; None if it does not wait or there is no answer."""
        try:
            found = await self.ask("waiting", request_id)
        except NoNode:
            return None
        return msgspec.convert(found, WaitEstimate | None)

    async def cancel(
        self, request_id: str, by: Requester, *, others: frozenset[str] | None = frozenset()
    ) -> bool:
        """See `Dispatcher.cancel`; the job may be of any front."""
        models = None if others is None else sorted(others)
        return bool(await self.ask("cancel", request_id, by, models))

    async def ask(self, question: str, *arguments: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Return the dispatcher's answer.

        Raises its error, and `NoNode` if there is no answer in time, or if the connection ends before it.
        """
        if self._link is None:
            raise NoNode(NO_ANSWER)
        asked = _Question()
        number = next(self._numbers)
        self._questions[number] = asked
        try:
            self.send(wire.Ask(number, question, arguments))
            with trio.move_on_after(timeout_s):
                await asked.event.wait()
        finally:
            del self._questions[number]
        if asked.error is not None:
            raise asked.error
        if not asked.event.is_set():
            raise NoNode(NO_ANSWER)
        return asked.answer

    def tell(self, question: str, *arguments: Any) -> None:
        """Send a question as `ask` does, but do not wait for the answer."""
        self.send(wire.Ask(next(self._numbers), question, arguments))

    def send(self, message: wire.ToDispatcher) -> None:
        """Send a message. Without a connection it is dropped: every job is declared on the next one."""
        if self._link is not None:
            self._link.send(message)

    # The connection ----------------------------------------------------------------------------------

    async def _connect(self) -> tuple[Connect, trio.abc.Stream]:
        """Return the first connection to any dispatcher. All are tried at once, because one may hang."""
        found: list[tuple[Connect, trio.abc.Stream]] = []
        try:
            async with trio.open_nursery() as nursery:
                for connect in self._connects:
                    nursery.start_soon(self._connect_to, connect, found, nursery.cancel_scope)
        except BaseException:
            await _close(found)
            raise
        await _close(found[1:])
        return found[0]

    async def _connect_to(
        self, connect: Connect, found: list[tuple[Connect, trio.abc.Stream]], scope: trio.CancelScope
    ) -> None:
        pause = self._pauses[connect]
        while True:
            await trio.sleep_until(pause.ends_at)
            try:
                found.append((connect, await connect()))
            except OSError as error:  # it does not run: nothing is lost by asking again soon
                self._no_dispatcher.report(str(error))
                await trio.sleep(RETRY_S)
            except HandshakeFailed as error:
                self._no_dispatcher.report(str(error))
                pause.begin()
            else:
                scope.cancel()
                return

    async def _use(self, stream: trio.abc.Stream) -> bool:
        """Use a connection until it ends. Return whether its dispatcher led."""
        link = FrameLink(stream, wire.to_front_decoder, name="dispatcher", silence_s=wire.SILENCE_S)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._report_progress, link)
                # A message that fails ends the connection: the front, its clients and jobs stay.
                handle = partial(self._handle, link)
                await contain("messages of the dispatcher", link.run, handle)
                nursery.cancel_scope.cancel()
        finally:
            has_led = self._link is link
            if has_led:
                self._link = None
                for asked in self._questions.values():
                    asked.error = NoNode(NO_ANSWER)
                    asked.event.set()
                logger.warning("dispatcher disconnected", epoch=self.epoch, jobs=len(self._jobs))
        return has_led

    async def _report_progress(self, link: FrameLink[wire.ToFront]) -> None:
        """Report regularly. End the connection to a dispatcher that was not accepted in time."""
        last = trio.current_time() + wire.SILENCE_S
        while self._link is link or trio.current_time() < last:
            self._send_progress(link)
            await trio.sleep(wire.HEARTBEAT_S)
        link.close()

    def _send_progress(self, link: FrameLink[wire.ToFront]) -> None:
        running = (job for job in self._jobs.values() if job.seat is not None and job.seat.has_begun)
        link.send(wire.Progress({job.number: job.generated() for job in running}))

    def _handle(self, link: FrameLink[wire.ToFront], message: wire.ToFront) -> None:
        if self._link is not link and not isinstance(message, wire.Welcome | wire.Standby):
            return  # of a dispatcher that is not accepted yet
        match message:
            case wire.Welcome(epoch, run):
                self._welcome(link, epoch, run)
            case wire.Heartbeat(counters):
                if counters is not None:
                    self._counters.update(counters)
            case wire.CountTokens():
                self._send_progress(link)
            case wire.Answered():
                self._answered(message)
            case wire.StoredKeys():
                self.on_keys(message)
            case wire.Standby():  # one that was replaced, or that does not lead
                link.close()
            case _:
                # A job that has ended meanwhile is absent; its `EndJob` is on the way to the dispatcher.
                if (job := self._jobs.get(message.number)) is not None:
                    job.receive(message)

    def _answered(self, answered: wire.Answered) -> None:
        if (asked := self._questions.get(answered.number)) is not None:
            asked.answer = answered.value
            asked.error = None if answered.error is None else answered.error.error()
            asked.event.set()

    def _welcome(self, link: FrameLink[wire.ToFront], epoch: int, run: str) -> None:
        """Accept a dispatcher, and higher epochs that it takes later; or tell it which one it must exceed."""
        run = run or str(epoch)
        if epoch < self.epoch or (epoch == self.epoch and run != self.run_id):
            self._refused.report("it may have started with an earlier clock", epoch=epoch, seen=self.epoch)
            link.send(wire.EpochSeen(self.epoch))
            return
        is_new = self._link is not link
        self.epoch, self.run_id, self._link = epoch, run, link
        if is_new:
            self._declare(link)

    def _declare(self, link: FrameLink[wire.ToFront]) -> None:
        now = trio.current_time()
        for job in self._jobs.values():
            age_s = now - job.arrived_at
            tokens, begun = job.generated(), job.has_begun
            link.send(wire.DeclareJob(job.number, job.spec, age_s, job.declared, job.released, tokens, begun))
        link.send(wire.Declared(self._counters.whole()))
        for declare in self.on_connect:
            declare()
        logger.info("dispatcher connected", epoch=self.epoch, jobs=len(self._jobs))


async def _close(found: list[tuple[Connect, trio.abc.Stream]]) -> None:
    for _, stream in found:
        await trio.aclose_forcefully(stream)


class _Pause:
    """The pause before a dispatcher that was of no use is tried again; it doubles until one was of use."""

    def __init__(self) -> None:
        self.ends_at = -inf
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def begin(self) -> None:
        """Begin a pause: it counts from now."""
        self.ends_at = trio.current_time() + self._backoff.take()

    def end(self) -> None:
        """End it, and begin with the shortest one the next time."""
        self.ends_at = -inf
        self._backoff.reset()


class _Question:
    """A question that waits for its answer."""

    def __init__(self) -> None:
        self.event = trio.Event()
        self.answer: Any = None
        self.error: FairleadError | None = None


class _OpenJob:
    """A job that has not ended. `send` sends a message about it.

    `seat` is None while it waits; `released` is the grant of its last seat. `sequences`: the seats of its
    sequences; of a job that `is_whole`, all run in the first one.
    """

    def __init__(self, number: int, spec: JobSpec, send: Callable[[wire.ToDispatcher], None]) -> None:
        self.number = number
        self.spec = spec
        self.sequences = SequenceSeats(self._end_sequence)
        self.is_whole = True
        self._send = send
        self.arrived_at = trio.current_time()
        self.event = trio.Event()
        self.scope = trio.CancelScope()
        self.error: FairleadError | None = None
        self.estimate: WaitEstimate | None = None
        self.seat: HeldSeat | None = None
        self.released: Grant | None = None
        self.generated: Callable[[], int] = int  # none yet
        self.has_begun = False
        self.has_failed = False

    @property
    def held(self) -> HeldSeat:
        """Its seat."""
        assert self.seat is not None
        return self.seat

    def begin(self, generated: Callable[[], int]) -> None:
        """Record the first delta."""
        self.generated = generated
        self.has_begun = True
        self.seat = self.held._replace(has_begun=True)

    @property
    def declared(self) -> HeldSeat | None:
        """Its seat, with its sequences, for another dispatcher."""
        if self.seat is None or self.is_whole:
            return self.seat
        suspended = self.sequences.suspended
        running = tuple(index for index in self.sequences.grants if index not in suspended)
        held = HeldSequences(1, running, self.sequences.begun, tuple(sorted(suspended)))
        return self.seat._replace(sequences=held)

    def release(self) -> None:
        """Release the seat, before a wait for another."""
        self.sequences.close()
        self.sequences = SequenceSeats(self._end_sequence)
        self.released, self.seat = self.held.grant, None
        self.event = trio.Event()

    def _end_sequence(self, index: int) -> None:
        self._send(wire.SequenceEnded(self.number, index))

    def receive(self, message: msgspec.Struct) -> None:
        """Handle a message of the dispatcher about this job."""
        match message:
            case wire.JobQueued(_, estimate):
                self.estimate = self.estimate or estimate
            case wire.SeatGranted(_, node_id, grant, waited_s, is_whole):
                # After a reconnection a grant may arrive twice, the second time after its seat was released.
                if self.seat is None and grant != self.released:
                    self.seat = HeldSeat(node_id, grant, waited_s, self.has_begun)
                    self.is_whole = is_whole
                    self.sequences.grant(0, grant)
                    self.event.set()
            case wire.SequenceGranted(_, index, grant):
                if self.seat is not None:
                    self.sequences.grant(index, grant)
            case wire.SequencePaused(_, index, is_paused):
                if self.seat is not None:
                    self.sequences.pause(index, is_paused=is_paused)
            case wire.JobRefused(_, error):
                self.error = self.error or error.error()
                self.event.set()
            case wire.JobStopped(_, error):
                self.error = self.error or error.error()
                self.event.set()
                self.scope.cancel()
