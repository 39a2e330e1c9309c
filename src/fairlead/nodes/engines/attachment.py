"""A client's end of an engine: one connection to its process, from attaching to its end."""

import sys
from collections.abc import Awaitable, Callable
from math import inf

import trio

from fairlead.base import messages
from fairlead.base.errors import NodeFailed
from fairlead.base.frame_link import FrameLink
from fairlead.base.supervision import described
from fairlead.nodes.engines.sequence_client import SequenceClient

# The engine accepts clients between its steps, and the first of them may take long.
ATTACH_TIMEOUT_S = 60.0
CLOSED = "the model's process closed the connection"


async def _unchanged(reason: str) -> str:
    return reason


class Attachment:
    """One connection to the engine that listens at `path`.

    - `name`: that of this process, for logs.
    - `on_ready`: called when the engine has accepted this client.
    - `on_end`: called when no more sequences can be submitted, before those that are open fail.
    - `explain`: gets why the connection has ended; returns the reason with which the open sequences fail.
    - `on_cancel`: the reason with which they fail when `run` is cancelled.

    `stuck` and `pid` are None: the process that started the engine supervises it. It kills a stuck engine,
    which ends the connection.
    """

    pid: int | None = None
    stuck: str | None = None

    def __init__(
        self,
        path: str,
        *,
        name: str,
        on_ready: Callable[[messages.Ready], None] = lambda _ready: None,
        on_end: Callable[[], None] = lambda: None,
        explain: Callable[[str], Awaitable[str]] = _unchanged,
        on_cancel: str = "this server was detached from the model's process",
        version: int = messages.PROTOCOL_VERSION,
    ) -> None:
        self.sequences = SequenceClient()
        self._path = path
        self._name = name
        self._version = version
        self._on_ready = on_ready
        self._on_end = on_end
        self._explain = explain
        self._on_cancel = on_cancel
        self._reason = ""
        self._has_run = False

    async def run(self, *, task_status: trio.TaskStatus[messages.Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect, attach, call `started()`, and exchange messages until the connection ends.

        Never returns: raises `NodeFailed` if the engine cannot be attached to, or when the connection has
        ended. Every open sequence has failed by then, also if this is cancelled.
        """
        assert not self._has_run, "an attachment is run once"
        self._has_run = True
        reason = self._on_cancel
        try:
            await self._live(task_status)
            self.end()
            reason = await self._explain(self._reason or CLOSED)
        finally:
            self.fail(reason)
        raise NodeFailed(reason)

    def end(self) -> None:
        """Accept no more sequences, and report that. The open ones fail later."""
        self.sequences.end()
        self._on_end()

    def fail(self, reason: str) -> None:
        """Accept no more sequences, and fail the open ones. The connection is left open."""
        try:
            self.end()
        finally:
            self.sequences.fail_all(reason)

    async def _live(self, task_status: trio.TaskStatus[messages.Ready]) -> None:
        deadline = trio.current_time() + ATTACH_TIMEOUT_S
        with trio.CancelScope(deadline=deadline) as attaching:
            try:
                stream = await trio.open_unix_socket(self._path)
            except OSError as error:
                self._reason = f"the model's process cannot be reached: {described(error)}"
                return
            # The number of seats bounds what is unsent.
            link = FrameLink(stream, messages.to_client_decoder, name="engine", unsent_bytes=sys.maxsize)

            def handle(message: messages.ToClient) -> Awaitable[None] | None:
                match message:
                    case messages.StepOutputs():
                        return self.sequences.deliver(message)
                    case messages.Attached(prefix, ready):
                        attaching.deadline = inf
                        self.sequences.begin(link, ready, prefix=prefix)
                        self._on_ready(ready)
                        task_status.started(ready)
                    case messages.AttachRefused(reason):
                        self._reason = f"the model's process refused this server: {reason}"
                return None

            link.send(messages.Attach(self._version, self._name))
            await link.run(handle)
            self._reason = self._reason or (f"the model's process: {link.problem}" if link.problem else "")
        if attaching.cancelled_caught:
            self._reason = f"the model's process did not answer within {ATTACH_TIMEOUT_S:g} s"
