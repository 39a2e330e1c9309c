"""The parent's end of a model's child process: its lifetime.

A `Worker` is one run of one child: `run` starts the child, ends with it, and kills it when it is stuck.
Sequences are submitted by the child's clients, also by those in this process (`nodes/engines/attachment.py`).
Independent of models, text and jobs.
"""

import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import trio

from fairlead.base import messages
from fairlead.base.errors import LoadFailed, NodeFailed
from fairlead.base.frame_link import FrameLink
from fairlead.base.runtime import child_output
from fairlead.base.supervision import exit_description
from fairlead.nodes.engines.watchdog import Watchdog
from fairlead.nodes.processes.child import Child

COMMAND = (sys.executable, "-P", "-m", "fairlead.engine.worker.main")
END_WAIT_S = 5.0
RANKS_WAIT_S = 5.0
LOG_WAIT_S = 1.0
FINAL_OUTPUT_WAIT_S = 0.3
# A load reports each tensor, but nothing while kernels are compiled. The watchdog covers requests only.
LOAD_PROGRESS_TIMEOUT_S = 600.0
LOG_LINES = 50
# How often a child is pinged, if a third of the watchdog's timeout is not shorter.
PING_INTERVAL_S = 1.0


class Worker:
    """One child process. `pid` is None before it starts.

    `on_progress` is called with the loaded fraction (0…1) and the stage, and `on_ready` when the model is
    loaded. `on_stuck` is called when the child makes no progress but has not ended; `stuck` has the reason
    from then on. `statistics` are the engine's counts, as of the latest answer to a ping.
    `command` starts a child; `--fd N` is appended. `name` is the prefix of each line of its output, and
    `on_line` is called with each.
    """

    def __init__(
        self,
        spec: messages.WorkerSpec,
        *,
        name: str = "engine",
        command: Sequence[str] = COMMAND,
        on_progress: Callable[[float, str], None] = lambda _fraction, _stage: None,
        on_ready: Callable[[messages.Ready], None] = lambda _ready: None,
        on_stuck: Callable[[NodeFailed], None] = lambda _error: None,
        on_line: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.on_progress = on_progress
        self.on_ready = on_ready
        self.on_stuck = on_stuck
        self.on_line = on_line
        self.pid: int | None = None
        self.stuck: str | None = None
        self.statistics = messages.EngineStatistics()
        self._spec = spec
        self._name = name
        self._command = command
        self._watchdog = Watchdog(spec.watchdog_s)
        self._loading = trio.CancelScope()  # its deadline bounds the silence of a child that loads
        self._epoch = 0
        self._is_ready = False
        self._load_error: str | None = None
        self._link: FrameLink[messages.ToParent] | None = None
        self._log: deque[str] = deque(maxlen=LOG_LINES)

    def raise_epoch(self, epoch: int) -> None:
        """Make the child refuse grants of lower epochs, now or once its model is loaded."""
        self._epoch = max(self._epoch, epoch)
        if self._is_ready:
            self._send(messages.Epoch(self._epoch))

    def end(self, reason: str = "") -> None:
        """End the child, as if its parent had ended; `run` raises how it has ended, with the reason."""
        if reason:
            self._log.append(reason)
        if self._link is not None:
            self._link.close()

    # The child's lifetime ----------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[messages.Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the child, call `started()` when its model is loaded, and watch it until it ends.

        Never returns: raises `LoadFailed` if the child does not become ready, and `NodeFailed` if it ends
        afterwards or is stuck. A child that is stuck or cancelled gets SIGTERM, after 5 s SIGKILL.
        """
        assert self._link is None, "a worker is run once"
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
                self._link = FrameLink(stream, messages.to_parent_decoder, name=self._name)
                child = await self._start(theirs)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child.read_output, self._log_line)
                try:
                    was_ready = await self._live(child, self._link, task_status)
                    failure = self._failure(child, was_ready)
                finally:
                    self._is_ready = False
                    ours.close()
                    # Other ranks end with the process. Then they no longer hold its output, nor memory.
                    wait_s = RANKS_WAIT_S if self._spec.parallel > 1 else 0.0
                    await child.end(grace_s=END_WAIT_S, output_wait_s=wait_s)
        raise failure

    async def _start(self, theirs: socket.socket) -> Child:
        try:
            # Nothing is ever written to the child's stdin: its end signals that the parent has died.
            return await Child.start(
                [*self._command, "--fd", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            raise LoadFailed(f"the model's process cannot be started: {error}") from error

    async def _live(
        self, child: Child, link: FrameLink[messages.ToParent], task_status: trio.TaskStatus[messages.Ready]
    ) -> bool:
        """Exchange messages until the child is gone; return whether it had become ready."""
        self.pid = child.pid
        link.send(self._spec)
        async with trio.open_nursery() as watching:
            watching.start_soon(self._watch, child)
            watching.start_soon(self._ping)
            self._loading.deadline = trio.current_time() + LOAD_PROGRESS_TIMEOUT_S
            with self._loading:
                await link.run(partial(self._handle, task_status))
            watching.cancel_scope.cancel()
        if self._loading.cancelled_caught:
            self._load_error = f"the model's process made no progress for {LOAD_PROGRESS_TIMEOUT_S:g} s"
        if link.problem:
            self._log.append(link.problem)
        was_ready, self._is_ready = self._is_ready or self.stuck is not None, False
        if self.stuck is None:
            with trio.move_on_after(END_WAIT_S):
                await child.wait()
            with trio.move_on_after(LOG_WAIT_S):
                await child.output_ended.wait()
        return was_ready

    def _failure(self, child: Child, was_ready: bool) -> LoadFailed | NodeFailed:
        reason = self.stuck or f"the model's process {child.ending or exit_description(None)}"
        if not was_ready:
            return LoadFailed(self._load_error or "\n".join([f"{reason} while loading", *self._log_end(5)]))
        return NodeFailed(reason if self.stuck else "; ".join([reason, *self._log_end(1)]))

    def _handle(self, task_status: trio.TaskStatus[messages.Ready], message: messages.ToParent) -> None:
        self._loading.deadline = trio.current_time() + LOAD_PROGRESS_TIMEOUT_S
        match message:
            case messages.StepOutputs():
                self.statistics = message.statistics
                self._watchdog.frame_received(more=False, stepped=message.statistics.steps > 0)
            case messages.LoadProgress(fraction, stage):
                self.on_progress(fraction, stage)
            case messages.LoadFailure(reason):
                self._load_error = reason
            case messages.Ready():
                self._is_ready = True
                if self._epoch:
                    self._send(messages.Epoch(self._epoch))
                self.on_ready(message)
                task_status.started(message)
        if self._is_ready:
            self._loading.deadline = inf

    def _send(self, message: messages.Ping | messages.Epoch) -> None:
        assert self._link is not None
        self._link.send(message)
        self._watchdog.message_sent()

    async def _ping(self) -> None:
        """Request statistics regularly, once the model is loaded. The watchdog counts what is unanswered."""
        while True:
            await trio.sleep(min(PING_INTERVAL_S, self._spec.watchdog_s / 3))
            if self._is_ready:
                self._send(messages.Ping())

    async def _watch(self, child: Child) -> None:
        """When the child is stuck, report that, request its stack, and end the connection."""
        silent_s = await self._watchdog.stuck()
        self.stuck = f"the model's process made no progress for {silent_s:g} s"
        self._is_ready = False
        self.on_stuck(NodeFailed(self.stuck))
        child.signal(signal.SIGUSR1)  # it prints its stack, unless the process is stopped
        await trio.sleep(FINAL_OUTPUT_WAIT_S)
        self.end()

    # The child's output ------------------------------------------------------------------------------

    def _log_line(self, line: str) -> None:
        self._log.append(line)
        self.on_line(line)
        child_output.relay(self._name, line)

    def _log_end(self, lines: int) -> list[str]:
        return [line for line in self._log if line][-lines:]
