"""The parent's end of a model's child process: its lifetime.

A `Worker` is one run of one child: `run` starts the child, ends with it, and kills it when it is stuck.
Sequences are submitted by the child's clients, also by those in this process (`worker/attachment.py`).
Independent of models, text and jobs.
"""

import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from math import inf

import trio

from fairlead import child_output, messages
from fairlead.errors import LoadFailed, NodeFailed
from fairlead.link.connection import FrameLink
from fairlead.supervision import exit_description
from fairlead.worker.watchdog import Watchdog

COMMAND = (sys.executable, "-P", "-m", "fairlead.worker.main")
END_WAIT_S = 5.0
KILLED_WAIT_S = 5.0
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
                process = await self._start(theirs)
            try:
                was_ready = await self._live(process, self._link, task_status)
                reason = self.stuck or f"the model's process {exit_description(process.returncode)}"
                if was_ready:
                    if self.stuck is None:
                        reason = "; ".join([reason, *self._log_end(1)])
                    raise NodeFailed(reason)
                raise LoadFailed(
                    self._load_error or "\n".join([f"{reason} while loading", *self._log_end(5)])
                )
            finally:
                self._is_ready = False
                ours.close()
                await _end(process, has_ranks=self._spec.parallel > 1)

    async def _start(self, theirs: socket.socket) -> trio.Process:
        # Nothing is ever written to the child's stdin: its end signals that the parent has died.
        try:
            process = await trio.lowlevel.open_process(
                [*self._command, "--fd", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            raise LoadFailed(f"the model's process cannot be started: {error}") from error
        self.pid = process.pid
        return process

    async def _live(
        self,
        process: trio.Process,
        link: FrameLink[messages.ToParent],
        task_status: trio.TaskStatus[messages.Ready],
    ) -> bool:
        """Exchange messages until the child is gone; return whether it had become ready."""
        async with trio.open_nursery() as nursery:
            log_read = trio.Event()
            nursery.start_soon(self._relay_log, process.stdout, log_read)
            link.send(self._spec)
            async with trio.open_nursery() as watching:
                watching.start_soon(self._watch, process)
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
                    await process.wait()
                with trio.move_on_after(LOG_WAIT_S):
                    await log_read.wait()
            nursery.cancel_scope.cancel()
        return was_ready

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

    async def _watch(self, process: trio.Process) -> None:
        """When the child is stuck, report that, request its stack, and end the connection."""
        silent_s = await self._watchdog.stuck()
        self.stuck = f"the model's process made no progress for {silent_s:g} s"
        self._is_ready = False
        self.on_stuck(NodeFailed(self.stuck))
        process.send_signal(signal.SIGUSR1)  # it prints its stack, unless the process is stopped
        await trio.sleep(FINAL_OUTPUT_WAIT_S)
        self.end()

    # The child's output ------------------------------------------------------------------------------

    async def _relay_log(self, stream: trio.abc.ReceiveStream | None, ended: trio.Event) -> None:
        """Copy the child's lines to our stderr, and keep the last ones, which may say why it died."""
        assert stream is not None
        await child_output.read_lines(stream, self._log_line)
        ended.set()

    def _log_line(self, line: str) -> None:
        self._log.append(line)
        self.on_line(line)
        child_output.relay(self._name, line)

    def _log_end(self, lines: int) -> list[str]:
        return [line for line in self._log if line][-lines:]


async def _end(process: trio.Process, *, has_ranks: bool) -> None:
    """End the process if it has not, and reap it. Shielded; takes at most `END_WAIT_S` + `KILLED_WAIT_S`.

    SIGKILL and the closing of the pipes follow even if an earlier call raises. With `has_ranks`, its other
    ranks have ended as well, as these end with it: they no longer hold the end of its output, nor memory.
    """
    with trio.CancelScope(shield=True):
        async with AsyncExitStack() as closing:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                closing.push_async_callback(stream.aclose)
            if has_ranks:
                closing.push_async_callback(_wait_for_end, process.stdout)
            try:
                process.terminate()
                process.send_signal(signal.SIGCONT)  # else a stopped process would not react
                with trio.move_on_after(END_WAIT_S):
                    await process.wait()
            finally:
                process.kill()  # no effect if it has ended
                with trio.move_on_after(KILLED_WAIT_S):
                    await process.wait()


async def _wait_for_end(output: trio.abc.ReceiveStream | None) -> None:
    assert output is not None
    with trio.move_on_after(KILLED_WAIT_S):
        while await output.receive_some():
            pass
