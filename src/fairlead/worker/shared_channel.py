"""The child's channel when it serves fronts: messages of all connections in, each connection's outputs out.

The parent's connection is one of them, with prefix 0. It is trusted, and writing to it blocks. A front's
malformed message ends its connection, and a front that does not read is disconnected, so that neither affects
the others. All sequences of a connection that has ended are aborted before the next step.
"""

import select
import socket
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from fairlead import messages
from fairlead.grant import FIRST_GRANT, Grant
from fairlead.worker.channel import Channel
from fairlead.worker.front_connection import FrontConnection, FrontGone
from fairlead.worker.grants import Grants

MOST_FRONTS = 64
PARENT = 0  # the prefix of the parent's sequences


class _Client:
    """What one connection has in the engine. `connection` is None for the parent.

    `open` has the grants of its open sequences by key. `is_due`: one of its messages is not answered yet.
    `refused`: outputs for sequences that the engine never got.
    """

    def __init__(self, prefix: int, connection: FrontConnection | None = None) -> None:
        self.prefix = prefix
        self.connection = connection
        self.open: dict[int, Grant | None] = {}
        self.last_key = prefix << messages.KEY_BITS
        self.is_due = False
        self.refused: list[messages.Output] = []
        self.has_left = False


class SharedChannel:
    """A `MessageInbox` for the parent and at most `MOST_FRONTS` fronts, which connect to `listener`.

    `first_grant` as of `Grants`.
    """

    def __init__(
        self,
        parent: Channel,
        listener: socket.socket,
        ready: messages.Ready,
        first_grant: Grant = FIRST_GRANT,
    ) -> None:
        self.grants = Grants(first_grant)
        self._parent = parent
        self._listener = listener
        self._ready = ready
        self._prefix = PARENT
        self._clients = {PARENT: _Client(PARENT)}  # by prefix
        self._fronts: dict[int, tuple[FrontConnection, _Client | None]] = {}  # by file descriptor
        self._left: list[_Client] = []  # their sequences are to be aborted
        self._poll = select.poll()
        self._poll.register(parent.fileno(), select.POLLIN)
        self._poll.register(listener, select.POLLIN)

    # The loop's interface ----------------------------------------------------------------------------

    def read(self, *, wait_s: float | None) -> list[messages.ToChild]:
        """Return the received messages, after waiting at most `wait_s`; None: until something happens.

        Raises `ParentGone`.
        """
        if self._left or self._parent.has_received:
            wait_s = 0.0
        events = dict(self._poll.poll(None if wait_s is None else 1000 * wait_s))
        received: list[messages.ToChild] = []
        if self._parent.has_received or events.pop(self._parent.fileno(), 0):
            received += self._read_parent()
        if events.pop(self._listener.fileno(), 0):
            self._accept()
        for descriptor, event in events.items():
            received += self._handle_event(descriptor, event)
        for client in self._left:
            received += self._forget(client)
        self._left.clear()
        return received

    def write(self, step: messages.StepOutputs) -> None:
        """Send each connection its part of a step, and the answers to its messages. Raises `ParentGone`."""
        for client, part in self._parts(step):
            for output in part.outputs:
                if output.finish_reason is not None or output.error is not None:
                    self._end_sequence(client, output.key)
            if client.refused:
                part.outputs.extend(client.refused)
                client.refused = []
            client.is_due = False
            if client.connection is None:
                self._parent.write(part)
            elif not client.has_left:
                self._send(client.connection, part)

    # Reading -----------------------------------------------------------------------------------------

    def _read_parent(self) -> list[messages.ToChild]:
        client = self._clients[PARENT]
        received = self._parent.read(wait_s=0.0)
        for message in received:
            client.is_due = True
            if isinstance(message, messages.Submit | messages.Prepare):
                client.open[message.key] = None
            elif isinstance(message, messages.Abort):
                self._end_sequence(client, message.key)
            elif isinstance(message, messages.Epoch):
                self.grants.raise_epoch(message.epoch)
        return received

    def _accept(self) -> None:
        try:
            connection = FrontConnection(self._listener.accept()[0])
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if not self._fronts:
                raise
            # Out of file descriptors: accept the next one when one of these has left.
            _report(f"no front can be accepted: {error}")
            self._poll.unregister(self._listener)
            return
        if len(self._fronts) == MOST_FRONTS:
            self._refuse(connection, f"it serves {MOST_FRONTS} fronts already")
            return
        self._fronts[connection.fileno()] = connection, None
        self._poll.register(connection.fileno(), select.POLLIN)

    def _handle_event(self, descriptor: int, event: int) -> list[messages.ToChild]:
        connection = self._fronts[descriptor][0]
        received: list[messages.ToChild] = []
        try:
            if event & select.POLLOUT:
                connection.flush()
            if event & ~select.POLLOUT:
                for frame in connection.receive():
                    received += self._handle_frame(descriptor, frame)
            self._poll.modify(descriptor, connection.awaited)
        except FrontGone as gone:
            self._leave(connection, str(gone))
        return received

    def _handle_frame(self, descriptor: int, frame: bytes) -> list[messages.ToChild]:
        """Return what the engine is to execute. Raises `FrontGone` for an invalid message."""
        _, client = self._fronts[descriptor]
        try:
            message = messages.front_to_child_decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError) as error:
            raise FrontGone(f"it sent an invalid message: {error}") from None
        if isinstance(message, messages.Attach) or client is None:
            if client is not None or not isinstance(message, messages.Attach):
                raise FrontGone("its first message, and no other, must be Attach")
            self._attach(descriptor, message)
            return []
        if message.key >> messages.KEY_BITS != client.prefix:
            raise FrontGone(f"it used the key {message.key}, which has not its prefix {client.prefix}")
        client.is_due = True
        if isinstance(message, messages.Abort):
            self._end_sequence(client, message.key)
            return [message]
        return self._admit(client, message)

    def _attach(self, descriptor: int, attach: messages.Attach) -> None:
        connection, _ = self._fronts[descriptor]
        connection.name = f"front {attach.front!r}"
        if attach.version != messages.PROTOCOL_VERSION:
            reason = f"it speaks version {messages.PROTOCOL_VERSION} of the protocol, not {attach.version}"
            connection.send(messages.AttachRefused(reason))
            raise FrontGone(f"it speaks version {attach.version} of the protocol")
        self._prefix += 1  # never used twice, so that no late message concerns another front's sequence
        client = _Client(self._prefix, connection)
        self._clients[client.prefix] = client
        self._fronts[descriptor] = connection, client
        connection.send(messages.Attached(client.prefix, self._ready))

    def _admit(self, client: _Client, submit: messages.Submit | messages.Prepare) -> list[messages.ToChild]:
        if submit.key <= client.last_key:
            raise FrontGone(f"it used the key {submit.key} after {client.last_key}")
        client.last_key = submit.key
        if isinstance(submit, messages.Prepare):
            client.open[submit.key] = None
            return [submit]
        if submit.grant is None:
            raise FrontGone("it submitted a sequence without a grant")
        refusal = self.grants.take(submit.grant, client.prefix)
        if refusal is not None:
            client.refused.append(messages.Output(submit.key, [], error=refusal, code="stale_grant"))
            return [messages.Ping()]  # the loop answers each message with a frame, which has the refusal
        client.open[submit.key] = submit.grant
        return [submit]

    # Ending ------------------------------------------------------------------------------------------

    def _end_sequence(self, client: _Client, key: int) -> None:
        grant = client.open.pop(key, None)
        if grant is not None:
            self.grants.release(grant)

    def _leave(self, connection: FrontConnection, reason: str = "") -> None:
        """Close a connection. Its sequences are aborted by the next `read`."""
        descriptor = connection.fileno()
        _, client = self._fronts.pop(descriptor)
        self._poll.unregister(descriptor)
        self._poll.register(self._listener, select.POLLIN)  # it may have been unregistered
        connection.close()
        if reason:
            _report(f"{connection.name} was disconnected: {reason}")
        if client is not None:
            client.has_left = True
            self._left.append(client)

    def _forget(self, client: _Client) -> Iterator[messages.ToChild]:
        del self._clients[client.prefix]
        for key in list(client.open):
            self._end_sequence(client, key)
            yield messages.Abort(key)

    # Writing -----------------------------------------------------------------------------------------

    def _parts(self, step: messages.StepOutputs) -> list[tuple[_Client, messages.StepOutputs]]:
        """Return each client's part, of those that have one or wait for an answer."""
        streaming = [client for client in self._clients.values() if client.open]
        due = [client for client in self._clients.values() if client.is_due]
        if len(streaming) == 1:  # all outputs are of its sequences
            client = streaming[0]
            parts = [(client, step)] if client.is_due or step.keys or step.outputs else []
            return parts + [(other, _empty(step)) for other in due if other is not client]
        keys: npt.NDArray[np.int64] = np.frombuffer(step.keys, "<i8")
        tokens: npt.NDArray[np.int32] = np.frombuffer(step.tokens, "<i4")
        prefixes = keys >> messages.KEY_BITS
        outputs: dict[int, list[messages.Output]] = {}
        for output in step.outputs:
            outputs.setdefault(output.key >> messages.KEY_BITS, []).append(output)
        parts = []
        for client in {client.prefix: client for client in (*streaming, *due)}.values():
            mine = prefixes == client.prefix
            own = outputs.get(client.prefix, [])
            if client.is_due or own or mine.any():
                part = (keys[mine].tobytes(), tokens[mine].tobytes(), own)
                parts.append((client, messages.StepOutputs(*part, step.statistics)))
        return parts

    def _send(self, connection: FrontConnection, message: messages.ToFront) -> None:
        try:
            connection.send(message)
            self._poll.modify(connection.fileno(), connection.awaited)
        except FrontGone as gone:
            self._leave(connection, str(gone))

    def _refuse(self, connection: FrontConnection, reason: str) -> None:
        try:
            connection.send(messages.AttachRefused(reason))
        except FrontGone:
            pass
        finally:
            connection.close()


def _empty(step: messages.StepOutputs) -> messages.StepOutputs:
    return messages.StepOutputs(b"", b"", [], step.statistics)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  the parent reads the lines of its child
