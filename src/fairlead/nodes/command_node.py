"""A server that a configured command starts, as a node: one run of it, from its start to its end.

`CommandNode.run` starts the process, waits until it answers, and takes jobs. It ends by raising: when the
process ends, or when the process hangs (`process/liveness.py`).
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus

import structlog
import trio

from fairlead.answer.sink import Sink
from fairlead.config import CommandConfig, HealthConfig
from fairlead.errors import LoadFailed, NodeFailed
from fairlead.grant import Grant
from fairlead.http.client import Upstream, UpstreamFailed
from fairlead.job import Job
from fairlead.nodes.node import ModelState, NodeReport
from fairlead.nodes.progress import fraction_reader
from fairlead.nodes.remote_node import RemoteNode, upstream_timeouts
from fairlead.nodes.status import ProcessStatus
from fairlead.process.command_process import CommandProcess
from fairlead.process.health import HealthCheck
from fairlead.process.liveness import LivenessProbe

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
        self._progress: float | None = None
        pattern = config.progress_pattern
        self._fraction_of = None if pattern is None else fraction_reader(pattern)
        self._problem: LoadFailed | None = None
        self._upstream = Upstream(config.proxy, name=config.name, timeouts=upstream_timeouts(config.timeouts))
        self._remote = RemoteNode(
            self.id,
            self._upstream,
            lambda _remote, limits: report(self, limits),
            names={config.name: config.use_model_name or config.name},
            seats=config.concurrency_limit,
            filters=config.filters,
            answer_bytes=config.answer_bytes,
            dialects=config.dialects,
            evictable=True,
        )
        self._process = CommandProcess(
            config.name,
            config.cmd,
            stop_command=config.cmd_stop,
            environment=config.env,
            unload_timeout_s=config.unload_timeout_s,
            on_line=self._on_output_line,
            on_partial_line=None if pattern is None else self._parse_progress,
        )

    @property
    def gpu(self) -> None:
        """None: which GPU the server uses, if any, is not known."""
        return None

    @property
    def pid(self) -> int | None:
        """The process id; None before the process is started."""
        return self._process.pid

    def change_health(self, health: HealthConfig) -> None:
        """Use another health check from now on."""
        self._health.change(health)

    def status(self) -> ProcessStatus:
        """Return its status."""
        remote = self._remote.status()
        return ProcessStatus(seats=remote.seats, sequences=remote.busy, output=tuple(self._process.output()))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the process, call `started()` when it is ready, and run until it ends. Cancelling stops it.

        Raises `LoadFailed` if it does not become ready, and `NodeFailed` if it ends afterwards or is stuck,
        with its last lines. Calls `report`; the caller reports a failed load.
        When this is over, the process is gone and every job has failed.
        """
        assert self.state == "stopped", "a command node is run once"
        self.state = "loading"
        was_ready = False
        try:
            async with trio.open_nursery() as nursery:
                try:
                    await nursery.start(self._process.run)
                    with trio.CancelScope() as loading:
                        nursery.start_soon(self._cancel_at_end, loading)
                        await self._become_ready()
                    was_ready = not loading.cancelled_caught
                    if was_ready:
                        task_status.started()
                        with trio.CancelScope() as serving:
                            nursery.start_soon(self._watch, serving)
                            await self._process.ended.wait()
                except LoadFailed as error:
                    self._problem = error
                finally:
                    # Before the process is stopped, so that it gets no more jobs.
                    self._stopping(was_ready=was_ready)
                nursery.cancel_scope.cancel()
        finally:
            self.state = "stopped"
            self._upstream.close()
        if self._problem is not None:
            raise self._problem
        reason = self.stuck or f"{self._config.name} {self._process.ending}"
        if was_ready:
            raise NodeFailed("\n".join([reason, *self._process.output(1)]))
        raise LoadFailed("\n".join([f"{reason} while loading", *self._process.output(LAST_LINES)]))

    def generate(
        self, job: Job, into: Sink, *, grant: Grant | None = None
    ) -> AbstractAsyncContextManager[None]:
        """See `Node`."""
        return self._remote.generate(job, into, grant=grant)

    # Loading and ending ------------------------------------------------------------------------------

    async def _cancel_at_end(self, loading: trio.CancelScope) -> None:
        await self._process.ended.wait()
        loading.cancel()

    async def _become_ready(self) -> None:
        config = self._config
        limit_s = config.health_check_timeout_s
        if config.check_endpoint != "none":
            with trio.move_on_after(limit_s) as timeout:
                pause_s = FIRST_POLL_S
                while not await self._answers():
                    self._report_progress()
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_POLL_S)
            if timeout.cancelled_caught:
                reason = f"{config.name} did not answer {config.check_endpoint} within {limit_s:g} s"
                raise LoadFailed("\n".join([reason, *self._process.output(LAST_LINES)]))
        self.state = "ready"
        self._progress = 1.0
        self._on_progress(1.0, "ready")
        logger.info("command ready", model=config.name, pid=self._process.pid)
        self._remote.came_up()

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

    async def _answers(self) -> bool:
        try:
            path = self._config.check_endpoint
            async with self._upstream.exchange("GET", path, within_s=POLL_TIMEOUT_S) as answer:
                return answer.head.status == HTTPStatus.OK
        except UpstreamFailed:
            return False

    async def _watch(self, serving: trio.CancelScope) -> None:
        """Cancel `serving` when the server is stuck: silent and idle for `failures` probes in a row."""
        path = self._config.check_endpoint
        if path == "none" or self.pid is None:
            return
        probe = LivenessProbe(self._upstream, path, group=self.pid)
        await probe.stopped(self._health)
        times = self._health.config.failures
        self.stuck = f"{self._config.name} did not answer {path} {times} times in a row, and did nothing else"
        serving.cancel()

    def _stopping(self, *, was_ready: bool) -> None:
        self.state = "stopping"
        if was_ready:
            ending = self._process.ending or "is being stopped"
            self._remote.went_down(NodeFailed(self.stuck or f"{self._config.name} {ending}"))
