"""A server that a configured command starts, as a node: one run of it, from its start to its end.

`CommandNode.run` starts the process, waits until it answers, and takes jobs. It ends by raising: when the
process ends, when the process hangs (`nodes/processes/liveness.py`), or when a stranger answers on its port
(`nodes/processes/ports.py`).
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from http import HTTPStatus

import structlog
import trio

from fairlead.base.backoff import Backoff
from fairlead.base.config import CommandConfig, HealthConfig
from fairlead.base.errors import LoadFailed, NodeFailed
from fairlead.base.grant import Grant
from fairlead.base.job import Job
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.nodes.command_start import CommandStart, command_start, is_taken
from fairlead.nodes.http.client import Upstream, UpstreamFailed
from fairlead.nodes.node import ModelState, NodeReport
from fairlead.nodes.processes.command_process import CommandProcess
from fairlead.nodes.processes.health import HealthCheck
from fairlead.nodes.processes.liveness import LivenessProbe
from fairlead.nodes.processes.ports import PortOwner
from fairlead.nodes.progress import fraction_reader
from fairlead.nodes.remote_node import RemoteNode, upstream_timeouts
from fairlead.nodes.status import ProcessStatus
from fairlead.nodes.streams.sink import Sink

FIRST_POLL_S = 0.05
LONGEST_POLL_S = 1.0
POLL_TIMEOUT_S = 5.0
LAST_LINES = 10

logger = structlog.get_logger("fairlead.node")


class CommandNode:
    """One run of a command's server. `on_progress` is called with the load's progress and what it waits for,
    and `on_line` with each line that the process prints.

    `stuck` is why the process was given up although it had not ended; `health` says when that happens.
    """

    def __init__(
        self,
        config: CommandConfig,
        report: NodeReport,
        *,
        health: HealthConfig | None = None,
        on_progress: Callable[[float | None, str], None] = lambda _fraction, _stage: None,
        on_line: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.id = f"command:{config.name}"
        self.models = frozenset({config.name})
        self.stuck: str | None = None
        self._config = config
        self._health = HealthCheck(health or HealthConfig())
        self._on_progress = on_progress
        self._on_line = on_line
        self.state: ModelState = "stopped"
        self._report = report
        self._progress: float | None = None
        pattern = config.progress_pattern
        self._fraction_of = None if pattern is None else fraction_reader(pattern)
        self._problem: LoadFailed | None = None
        self._run: _Run | None = None

    @property
    def started_config(self) -> CommandConfig:
        """The command as it was started: with its port and the key of its server."""
        return self._config if self._run is None else self._run.config

    @property
    def gpu(self) -> None:
        """None: which GPU the server uses, if any, is not known."""
        return None

    @property
    def pid(self) -> int | None:
        """The process id; None before the process is started."""
        return None if self._run is None else self._run.process.pid

    def change_health(self, health: HealthConfig) -> None:
        """Use another health check from now on."""
        self._health.change(health)

    def status(self) -> ProcessStatus:
        """Return its status."""
        if self._run is None:
            return ProcessStatus(seats=self._config.concurrency_limit, sequences=0)
        remote, process = self._run.remote.status(), self._run.process
        return ProcessStatus(seats=remote.seats, sequences=remote.busy, output=tuple(process.output()))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the process, call `started()` when it is ready, and run until it ends. Cancelling stops it.

        Raises `LoadFailed` if it does not become ready, and `NodeFailed` if it ends afterwards or is stuck,
        with its last lines. Calls `report`; the caller reports a failed load.
        When this is over, the process is gone and every job has failed.
        """
        assert self.state == "stopped", "a command node is run once"
        self.state = "loading"
        try:
            async with command_start(self._config) as start:
                self._run = run = self._new_run(start)
                try:
                    was_ready = await self._live(run, task_status)
                finally:
                    run.upstream.close()
        finally:
            self.state = "stopped"
        if self._problem is not None:
            raise self._problem
        reason = self.stuck or f"{self._config.name} {run.process.ending}"
        if was_ready:
            raise NodeFailed("\n".join([reason, *run.process.output(1)]))
        raise LoadFailed("\n".join([f"{reason} while loading", *run.process.output(LAST_LINES)]))

    async def _live(self, run: "_Run", task_status: trio.TaskStatus[None]) -> bool:
        """Run the process until it has ended; return whether it was ready."""
        was_ready = False
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(run.process.run)
                with trio.CancelScope() as loading:
                    nursery.start_soon(_cancel_at_end, run.process, loading)
                    await self._become_ready(run)
                was_ready = not loading.cancelled_caught
                if was_ready:
                    task_status.started()
                    with trio.CancelScope() as serving:
                        nursery.start_soon(self._watch, run, serving)
                        nursery.start_soon(self._watch_port, run, serving)
                        await run.process.ended.wait()
            except LoadFailed as error:
                self._problem = error
            finally:
                # Before the process is stopped, so that it gets no more jobs.
                self._stopping(run, was_ready=was_ready)
            nursery.cancel_scope.cancel()
        return was_ready

    def generate(
        self, job: Job, into: Sink, *, grant: Grant | None = None, seats: SequenceSeats | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Start the job; leaving the block in any way ends it and frees what it holds."""
        if self._run is None:
            raise NodeFailed(f"{self.id} is down")
        return self._run.remote.generate(job, into, grant=grant, seats=seats)

    # Loading and ending ------------------------------------------------------------------------------

    def _new_run(self, start: CommandStart) -> "_Run":
        config, upstream = start.config, command_upstream(start.config)
        remote = RemoteNode(
            self.id,
            upstream,
            lambda _remote, limits: self._report(self, limits),
            names={config.name: config.use_model_name or config.name},
            seats=config.concurrency_limit,
            filters=config.filters,
            answer_bytes=config.answer_bytes,
            dialects=config.dialects,
            evictable=True,
        )
        process = CommandProcess(
            config.name,
            config.cmd,
            stop_command=config.cmd_stop,
            environment=config.env,
            unload_timeout_s=config.unload_timeout_s,
            on_line=self._on_output_line,
            on_partial_line=None if self._fraction_of is None else self._parse_progress,
            secrets=start.secrets,
        )
        return _Run(start, upstream, remote, process)

    async def _become_ready(self, run: "_Run") -> None:
        config = run.config
        limit_s = config.health_check_timeout_s
        if config.check_endpoint != "none":
            with trio.move_on_after(limit_s) as timeout:
                backoff = Backoff(FIRST_POLL_S, LONGEST_POLL_S)
                while not await self._answers(run):
                    self._report_progress()
                    await trio.sleep(backoff.take())
            if timeout.cancelled_caught:
                reason = f"{config.name} did not answer {config.check_endpoint} within {limit_s:g} s"
                raise LoadFailed("\n".join([reason, *run.process.output(LAST_LINES)]))
            if await run.meets_stranger():
                raise LoadFailed("\n".join([is_taken(run.start.port), *run.process.output(LAST_LINES)]))
        self.state = "ready"
        self._progress = 1.0
        self._on_progress(1.0, "ready")
        logger.info("command ready", model=config.name, pid=run.process.pid)
        run.remote.came_up()

    def _on_output_line(self, line: str) -> None:
        self._on_line(line)
        self._parse_progress(line)

    def _parse_progress(self, printed: str) -> None:
        if self.state != "loading" or self._fraction_of is None:
            return
        fraction = self._fraction_of(printed)
        if fraction is not None and fraction != self._progress:
            self._progress = fraction
            self._report_progress()

    def _report_progress(self) -> None:
        self._on_progress(self._progress, f"waiting for {self._config.check_endpoint}")

    async def _answers(self, run: "_Run") -> bool:
        try:
            path = self._config.check_endpoint
            async with run.upstream.exchange("GET", path, within_s=POLL_TIMEOUT_S) as answer:
                return answer.head.status == HTTPStatus.OK
        except UpstreamFailed:
            return False

    async def _watch(self, run: "_Run", serving: trio.CancelScope) -> None:
        """Cancel `serving` when the server is stuck: silent and idle for `failures` probes in a row."""
        path = self._config.check_endpoint
        if path == "none" or self.pid is None:
            return
        probe = LivenessProbe(run.upstream, path, group=self.pid)
        await probe.stopped(self._health)
        times = self._health.config.failures
        self.stuck = f"{self._config.name} did not answer {path} {times} times in a row, and did nothing else"
        serving.cancel()

    async def _watch_port(self, run: "_Run", serving: trio.CancelScope) -> None:
        """Cancel `serving` when a stranger listens on the port, which the server has closed then."""
        await self._health.pause(trio.current_time())
        while not await run.meets_stranger():
            await self._health.pause(trio.current_time())
        self.stuck = is_taken(run.start.port)
        serving.cancel()

    def _stopping(self, run: "_Run", *, was_ready: bool) -> None:
        self.state = "stopping"
        if was_ready:
            ending = run.process.ending or "is being stopped"
            run.remote.went_down(NodeFailed(self.stuck or f"{self._config.name} {ending}"))


class _Run:
    """The parts of a run, which exist when the command has its port."""

    def __init__(
        self, start: CommandStart, upstream: Upstream, remote: RemoteNode, process: CommandProcess
    ) -> None:
        self.start = start
        self.config = start.config
        self.upstream = upstream
        self.remote = remote
        self.process = process
        self._owner: PortOwner | None = None

    async def meets_stranger(self) -> bool:
        """Return whether a stranger listens where requests are sent; False if that cannot be known."""
        if not self.start.addresses or self.process.pid is None:
            return False
        if self._owner is None:
            self._owner = PortOwner(self.start.port, self.start.addresses, self.process.pid)
        if self._owner.is_unchanged():
            return False
        with suppress(OSError, RuntimeError):  # there is no thread, or no descriptor, for looking
            return await trio.to_thread.run_sync(self._owner.find_stranger) is not None
        return False


def command_upstream(config: CommandConfig) -> Upstream:
    """Return the client of a command's server."""
    return Upstream(
        config.proxy,
        name=config.name,
        api_key=config.api_key,
        speaks_messages="messages" in config.dialects,
        timeouts=upstream_timeouts(config.timeouts),
    )


async def _cancel_at_end(process: CommandProcess, loading: trio.CancelScope) -> None:
    await process.ended.wait()
    loading.cancel()
