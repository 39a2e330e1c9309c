"""An engine's process of this server, with this server as its only client."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import msgspec
import trio

from fairlead.base.errors import LoadFailed, NodeFailed
from fairlead.base.messages import Ready, WorkerSpec
from fairlead.nodes.engines.attachment import CLOSED, Attachment
from fairlead.nodes.engines.client import COMMAND, Worker
from fairlead.nodes.engines.sequence_client import SequenceClient
from fairlead.nodes.processes.socket_folder import socket_folder

SOCKET = "engine.sock"
# For what an ended process has sent before.
LAST_FRAMES_S = 5.0


class OwnEngine:
    """One run of a process, and the connection to it. The parameters are those of `Worker` and `Attachment`.

    The end of the connection ends the process. The open sequences fail with the reason for which that ended.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        name: str = "engine",
        command: Sequence[str] = COMMAND,
        on_progress: Callable[[float, str], None] = lambda _fraction, _stage: None,
        on_line: Callable[[str], None] = lambda _line: None,
        on_ready: Callable[[Ready], None] = lambda _ready: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec = spec
        self._on_ready = on_ready
        self._start = partial(Worker, name=name, command=command, on_progress=on_progress, on_line=on_line)
        self._attach = partial(
            Attachment,
            name="server",
            on_ready=self._attached,
            on_end=on_end,
            explain=self._end_process,
            on_cancel="the model's process was stopped",
        )
        self._worker: Worker | None = None
        self._attachment = self._attach("")  # until `run`, which makes the socket
        self._is_loaded = trio.Event()
        self._was_attached = False
        self._failure: LoadFailed | NodeFailed | None = None
        self._has_ended = trio.Event()

    @property
    def sequences(self) -> SequenceClient:
        """The sequences of this run."""
        return self._attachment.sequences

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it starts."""
        return None if self._worker is None else self._worker.pid

    @property
    def stuck(self) -> str | None:
        """Why the process was given up although it had not ended; None if it was not."""
        return None if self._worker is None else self._worker.stuck

    async def run(self, *, task_status: trio.TaskStatus[Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the process, attach to it, call `started()`, and exchange messages until it ends.

        Never returns: raises `LoadFailed` if the process cannot be attached to, else as `Worker.run`. When
        this is over, every open sequence has failed, and the process is gone.
        """
        assert self._worker is None, "an engine is run once"
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(socket_folder())
            except OSError as error:
                raise LoadFailed(f"the socket of the model's process cannot be made: {error}") from error
            path = f"{folder}/{SOCKET}"
            self._attachment = self._attach(path)
            self._worker = self._start(
                msgspec.structs.replace(self._spec, listen=path),
                on_ready=lambda _ready: self._is_loaded.set(),
                on_stuck=lambda error: self._attachment.fail(error.message),
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve, task_status)
                try:
                    await self._worker.run()
                except (LoadFailed, NodeFailed) as failure:
                    self._failure = failure
                finally:
                    self._has_ended.set()
                wait_s = LAST_FRAMES_S if self._is_loaded.is_set() else 0
                nursery.cancel_scope.deadline = trio.current_time() + wait_s
        assert self._failure is not None
        if isinstance(self._failure, NodeFailed) and not self._was_attached:
            raise LoadFailed(self._failure.message)
        raise self._failure

    async def _serve(self, task_status: trio.TaskStatus[Ready]) -> None:
        await self._is_loaded.wait()
        with suppress(NodeFailed):  # its reason is that of the process
            await self._attachment.run(task_status=task_status)

    def _attached(self, ready: Ready) -> None:
        self._was_attached = True
        self._on_ready(ready)

    async def _end_process(self, reason: str) -> str:
        """End the process, to which there is no connection any more; return why it has ended."""
        assert self._worker is not None
        self._worker.end("" if reason == CLOSED else reason)
        await self._has_ended.wait()
        return reason if self._failure is None else self._failure.message
