"""A front's end of an engine that another process has started: one connection, from attaching to its end."""

import socket
from collections.abc import Callable
from math import inf

import trio

from fairlead import messages
from fairlead.errors import NodeFailed
from fairlead.supervision import described
from fairlead.worker.connection import EngineConnection
from fairlead.worker.sequence_client import SequenceClient

# The engine accepts fronts between its steps, and the first of them may take long.
ATTACH_TIMEOUT_S = 60.0


class Attachment:
    """One connection to the engine that listens at `path`. `front` is this process's name, for logs.

    `on_ready` is called when the engine has accepted the front, and `on_end` before the sequences fail.
    A stuck engine is not detected here: the process that started it kills it, which ends the connection.
    """

    def __init__(
        self,
        path: str,
        *,
        front: str,
        on_ready: Callable[[messages.Ready], None] = lambda _ready: None,
        on_end: Callable[[], None] = lambda: None,
        version: int = messages.PROTOCOL_VERSION,
    ) -> None:
        self.sequences = SequenceClient()
        self._path = path
        self._front = front
        self._version = version
        self._on_ready = on_ready
        self._on_end = on_end
        self._reason: str | None = None
        self._has_run = False

    async def run(self, *, task_status: trio.TaskStatus[messages.Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect, attach, call `started()`, and exchange messages until the connection ends.

        Never returns: raises `NodeFailed` if the engine cannot be attached to, or when the connection has
        ended. Every open sequence has failed by then, also if this is cancelled.
        """
        assert not self._has_run, "an attachment is run once"
        self._has_run = True
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
            try:
                await self._live(connected, task_status)
            finally:
                self.sequences.end()
                self._on_end()
                self.sequences.fail_all(self._reason or "this server was detached from the model's process")
        raise NodeFailed(self._reason or "the model's process closed the connection")

    async def _live(self, connected: socket.socket, task_status: trio.TaskStatus[messages.Ready]) -> None:
        deadline = trio.current_time() + ATTACH_TIMEOUT_S
        with trio.CancelScope(deadline=deadline) as attaching:
            try:
                await trio.socket.from_stdlib_socket(connected).connect(self._path)
            except OSError as error:
                self._reason = f"the model's process cannot be reached: {described(error)}"
                return
            connection = EngineConnection(connected, self._set_reason, messages.to_front_decoder)
            connection.send(messages.Attach(self._version, self._front))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.run)
                while (received := await connection.receive()) is not None:
                    for message in received:
                        if isinstance(message, messages.Attached):
                            attaching.deadline = inf
                            self._begin(connection, message, task_status)
                        elif isinstance(message, messages.StepOutputs):
                            await self.sequences.deliver(message)
                        else:
                            self._set_reason(f"the model's process refused this server: {message.reason}")
                nursery.cancel_scope.cancel()
            self._set_reason("the model's process closed the connection")
        if attaching.cancelled_caught:
            self._set_reason(f"the model's process did not answer within {ATTACH_TIMEOUT_S:g} s")

    def _begin(
        self,
        connection: EngineConnection[messages.ToFront],
        attached: messages.Attached,
        task_status: trio.TaskStatus[messages.Ready],
    ) -> None:
        self.sequences.begin(connection, attached.ready, prefix=attached.prefix)
        self._on_ready(attached.ready)
        task_status.started(attached.ready)

    def _set_reason(self, reason: str) -> None:
        self._reason = self._reason or reason
