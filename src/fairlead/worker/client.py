"""The parent's end of a model's child process: its lifetime and its sequences.

A `Worker` is one run of one child: `run` starts the child, ends with it, and kills it when it is stuck.
Submitting and aborting are synchronous. A step's outputs are delivered to the sequences' receivers in one
wake-up. Independent of models, text and jobs.
"""

import itertools
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from math import inf

import trio

from fairlead import child_output, messages
from fairlead.errors import ContextLengthExceeded, InvalidRequest, LoadFailed, NodeFailed
from fairlead.job import Sampling
from fairlead.supervision import exit_description
from fairlead.worker.connection import ChildConnection
from fairlead.worker.open_sequences import OpenSequences, Receiver
from fairlead.worker.watchdog import Watchdog

COMMAND = (sys.executable, "-P", "-m", "fairlead.worker.main")
END_WAIT_S = 5.0
KILLED_WAIT_S = 5.0
LOG_WAIT_S = 1.0
FINAL_OUTPUT_WAIT_S = 0.3
# A load reports each tensor, but nothing while kernels are compiled. The watchdog covers requests only.
LOAD_PROGRESS_TIMEOUT_S = 600.0
LOG_LINES = 50


class Worker:
    """One child process. `pid` is None before it starts; `statistics` are those of its latest step.

    `on_progress` is called with the loaded fraction (0…1) and the stage, and `on_ready` when the model is
    loaded. `on_stuck` is called, before any sequence fails, when the child makes no progress but has not
    ended; `stuck` has the reason from then on.
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
        self.statistics = messages.EngineStatistics()
        self.stuck: str | None = None
        self._spec = spec
        self._name = name
        self._command = command
        self._keys = itertools.count(1)
        self._sequences = OpenSequences(self.abort)
        self._watchdog = Watchdog(spec.watchdog_s)
        self._ready: messages.Ready | None = None
        self._load_error: str | None = None
        self._connection: ChildConnection | None = None
        self._log: deque[str] = deque(maxlen=LOG_LINES)

    # Sequences: synchronous --------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        receiver: Receiver,
        *,
        priority: int = 1,
        timeout_s: float | None = None,
        salt: bytes = b"",
        embed: bool = False,
    ) -> int:
        """Start a sequence and return its key; the options are those of `messages.Submit`.

        Raises `NodeFailed` if the child is not ready or gone, `InvalidRequest` if the prompt can never run.
        """
        if self._ready is None or self._connection is None:
            raise NodeFailed("the model's process is not running")
        if len(prompt) >= self._ready.max_model_len:
            raise ContextLengthExceeded.of_prompt(
                self._ready.max_model_len, f"this one has {len(prompt)}", param="prompt"
            )
        try:
            packed = messages.pack_tokens(prompt)
        except struct.error:
            raise InvalidRequest("the prompt has a token id outside the vocabulary", param="prompt") from None
        key = next(self._keys)
        self._connection.send(messages.Submit(key, packed, sampling, priority, timeout_s, salt, embed))
        self._sequences.add(key, receiver)
        self._watchdog.message_sent()
        return key

    def abort(self, key: int) -> None:
        """Abort a sequence; its receiver is not called any more. Safe at any time, for any key."""
        if self._sequences.remove(key) and self._ready is not None and self._connection is not None:
            self._connection.send(messages.Abort(key))
            self._watchdog.message_sent()

    # The child's lifetime ----------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[messages.Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the child, call `started()` when its model is loaded, and exchange messages until it ends.

        Never returns: raises `LoadFailed` if the child does not become ready, and `NodeFailed` if it ends
        afterwards or is stuck. A child that is stuck or cancelled gets SIGTERM, after 5 s SIGKILL. In any
        case, every open sequence has failed by then.
        """
        assert self._connection is None, "a worker is run once"
        ours, theirs = socket.socketpair()
        with ours:
            self._connection = connection = ChildConnection(ours, self._log.append)
            with theirs:
                process = await self._start(theirs)
            try:
                was_ready = await self._live(process, connection, task_status)
                reason = self.stuck or f"the model's process {exit_description(process.returncode)}"
                if was_ready:
                    if self.stuck is None:
                        reason = "; ".join([reason, *self._log_end(1)])
                    self._sequences.fail_all(reason)
                    raise NodeFailed(reason)
                raise LoadFailed(
                    self._load_error or "\n".join([f"{reason} while loading", *self._log_end(5)])
                )
            finally:
                self._ready = None
                self._sequences.fail_all("the model's process was stopped")
                ours.close()
                await _end(process)

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
        connection: ChildConnection,
        task_status: trio.TaskStatus[messages.Ready],
    ) -> bool:
        """Exchange messages until the child is gone; return whether it had become ready."""
        async with trio.open_nursery() as nursery:
            log_read = trio.Event()
            nursery.start_soon(self._relay_log, process.stdout, log_read)
            nursery.start_soon(connection.run)
            connection.send(self._spec)
            async with trio.open_nursery() as reading:
                reading.start_soon(self._watch, process, reading.cancel_scope)
                await self._read(connection, task_status)
                reading.cancel_scope.cancel()
            was_ready, self._ready = self._ready is not None or self.stuck is not None, None
            connection.shut_down()
            if self.stuck is None:
                with trio.move_on_after(END_WAIT_S):
                    await process.wait()
                with trio.move_on_after(LOG_WAIT_S):
                    await log_read.wait()
            nursery.cancel_scope.cancel()
        return was_ready

    async def _read(self, connection: ChildConnection, task_status: trio.TaskStatus[messages.Ready]) -> None:
        """Handle the child's messages until it closes the socket, sends an invalid one, or stops loading."""
        while True:
            with trio.move_on_after(inf if self._ready else LOAD_PROGRESS_TIMEOUT_S) as silence:
                received = await connection.receive()
            if silence.cancelled_caught:
                self._load_error = f"the model's process made no progress for {LOAD_PROGRESS_TIMEOUT_S:g} s"
                return
            if received is None:
                return
            for message in received:
                await self._handle(message, task_status)

    async def _handle(self, message: messages.ToParent, task_status: trio.TaskStatus[messages.Ready]) -> None:
        match message:
            case messages.StepOutputs():
                self.statistics = message.statistics
                await self._sequences.deliver(message)
                self._watchdog.frame_received(more=bool(self._sequences))
            case messages.LoadProgress(fraction, stage):
                self.on_progress(fraction, stage)
            case messages.LoadFailure(reason):
                self._load_error = reason
            case messages.Ready():
                self._ready = message
                self.on_ready(message)
                task_status.started(message)

    async def _watch(self, process: trio.Process, reading: trio.CancelScope) -> None:
        """When the child is stuck, fail the open sequences, request its stack, and stop reading."""
        silent_s = await self._watchdog.stuck()
        self.stuck = f"the model's process made no progress for {silent_s:g} s"
        self._ready = None
        self.on_stuck(NodeFailed(self.stuck))
        self._sequences.fail_all(self.stuck)
        process.send_signal(signal.SIGUSR1)  # it prints its stack, unless the process is stopped
        await trio.sleep(FINAL_OUTPUT_WAIT_S)
        reading.cancel()

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


async def _end(process: trio.Process) -> None:
    """End the process if it has not, and reap it. Shielded; takes at most `END_WAIT_S` + `KILLED_WAIT_S`.

    SIGKILL and the closing of the pipes follow even if an earlier call raises.
    """
    with trio.CancelScope(shield=True):
        async with AsyncExitStack() as closing:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                closing.push_async_callback(stream.aclose)
            try:
                process.terminate()
                process.send_signal(signal.SIGCONT)  # else a stopped process would not react
                with trio.move_on_after(END_WAIT_S):
                    await process.wait()
            finally:
                process.kill()  # no effect if it has ended
                with trio.move_on_after(KILLED_WAIT_S):
                    await process.wait()
