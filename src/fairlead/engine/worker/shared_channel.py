"""The child's end of its connections, to the parent and to clients. Clients submit sequences.

The parent is trusted, and writing to it blocks. A client's malformed message ends its connection, and a
client that does not read is disconnected, so that neither affects the others. All sequences of a connection
that has ended are aborted before the next step.
"""

import contextlib
import os
import select
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fairlead.base import messages
from fairlead.base.frames import FrameSocket, PeerGone
from fairlead.base.grant import FIRST_GRANT, Grant
from fairlead.engine.worker.grants import Grants

MOST_CLIENTS = 64
# A client with more unread data than this does not read.
UNSENT_BYTES = 4 << 20

ParentSocket = FrameSocket[messages.FromParent]


class _Client:
    """One connection, and what it has in the engine. `name` is for the log.

    `prefix` is 0 until it has attached. `open` has the grants of its open sequences by key. `is_due`: one of
    its messages is not answered yet. `refused`: outputs for sequences that the engine never got.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = FrameSocket(connection, messages.from_client_decoder, unsent_bytes=UNSENT_BYTES)
        self.name = "a client"
        self.prefix = 0
        self.open: dict[int, Grant | None] = {}
        self.last_key = 0
        self.is_due = False
        self.refused: list[messages.Output] = []
        self.has_left = False

    def attach(self, prefix: int, name: str) -> None:
        self.prefix, self.name = prefix, f"client {name!r}"
        self.last_key = prefix << messages.KEY_BITS


class SharedChannel:
    """A `MessageInbox` for the parent and at most `MOST_CLIENTS` clients, which connect to `listener`.

    `first_grant` as of `Grants`.
    """

    def __init__(
        self,
        parent: ParentSocket,
        listener: socket.socket,
        ready: messages.Ready,
        first_grant: Grant = FIRST_GRANT,
    ) -> None:
        self.grants = Grants(first_grant)
        self._parent = parent
        self._parent_is_due = False
        self._listener = listener
        self._ready = ready
        self._prefix = 0
        self._steps = 0
        self._connected: dict[int, _Client] = {}  # by file descriptor
        self._attached: dict[int, _Client] = {}  # by prefix
        self._left: list[_Client] = []  # their sequences are to be aborted
        self._poll = select.poll()
        self._poll.register(parent.fileno(), select.POLLIN)
        self._poll.register(listener, select.POLLIN)

    # The loop's interface ----------------------------------------------------------------------------

    def read(self, *, wait_s: float | None) -> list[messages.ToEngine]:
        """Return the received messages, after waiting at most `wait_s`; None: until something happens.

        Raises `PeerGone` if the parent is gone.
        """
        if self._left or self._parent.has_received:
            wait_s = 0.0
        events = dict(self._poll.poll(None if wait_s is None else 1000 * wait_s))
        received: list[messages.ToEngine] = []
        if self._parent.has_received or events.pop(self._parent.fileno(), 0):
            received += self._read_parent()
        if events.pop(self._listener.fileno(), 0):
            self._accept()
        for descriptor, event in events.items():
            received += self._handle_event(self._connected[descriptor], event)
        for client in self._left:
            received += self._forget(client)
        self._left.clear()
        return received

    def write(self, step: messages.StepOutputs) -> None:
        """Send each client its part of a step, and the answers to messages. Raises `PeerGone` as `read`.

        The parent learns of the first step at once, because a later step may take less time.
        """
        self._parent_is_due |= bool(step.statistics.steps) and not self._steps
        for client, part in self._parts(step):
            for output in part.outputs:
                if output.finish_reason is not None or output.error is not None:
                    self._end_sequence(client, output.key)
            if client.refused:
                part.outputs.extend(client.refused)
                client.refused = []
            client.is_due = False
            if not client.has_left:
                self._send(client, part)
        if self._parent_is_due:
            self._parent_is_due = False
            self._parent.send(_empty(step))

    def close(self) -> None:
        """Close the connections of all clients."""
        for client in self._connected.values():
            client.connection.close()

    # Reading -----------------------------------------------------------------------------------------

    def _read_parent(self) -> Iterator[messages.ToEngine]:
        for message in self._parent.read(wait_s=0.0):
            assert not isinstance(message, messages.WorkerSpec)
            self._parent_is_due = True
            if isinstance(message, messages.Epoch):
                self.grants.raise_epoch(message.epoch)
            yield message

    def _accept(self) -> None:
        try:
            client = _Client(self._listener.accept()[0])
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if not self._connected:
                raise
            # Out of file descriptors: accept the next one when one of these has left.
            _report(f"no client can be accepted: {error}")
            self._poll.unregister(self._listener)
            return
        if len(self._connected) == MOST_CLIENTS:
            self._refuse(client, f"it serves {MOST_CLIENTS} clients already")
            return
        self._connected[client.connection.fileno()] = client
        self._poll.register(client.connection.fileno(), select.POLLIN)

    def _handle_event(self, client: _Client, event: int) -> list[messages.ToEngine]:
        received: list[messages.ToEngine] = []
        try:
            if event & select.POLLOUT:
                client.connection.flush()
            if event & ~select.POLLOUT:
                for message in client.connection.read(wait_s=0.0):
                    received += self._handle(client, message)
            self._poll.modify(client.connection.fileno(), client.connection.awaited)
        except PeerGone as gone:
            self._leave(client, str(gone))
        return received

    def _handle(self, client: _Client, message: messages.FromClient) -> list[messages.ToEngine]:
        """Return what the engine is to execute. Raises `PeerGone` for a message that is not allowed."""
        if isinstance(message, messages.Attach) or not client.prefix:
            if client.prefix or not isinstance(message, messages.Attach):
                raise PeerGone("its first message, and no other, must be Attach")
            self._attach(client, message)
            return []
        if message.key >> messages.KEY_BITS != client.prefix:
            raise PeerGone(f"it used the key {message.key}, which has not its prefix {client.prefix}")
        if isinstance(message, messages.Suspend | messages.Resume):
            return [message] if message.key in client.open else []
        client.is_due = True
        if isinstance(message, messages.Abort):
            self._end_sequence(client, message.key)
            return [message]
        return self._admit(client, message)

    def _attach(self, client: _Client, attach: messages.Attach) -> None:
        if attach.version != messages.PROTOCOL_VERSION:
            reason = f"it speaks version {messages.PROTOCOL_VERSION} of the protocol, not {attach.version}"
            client.connection.send(messages.AttachRefused(reason))
            raise PeerGone(f"it speaks version {attach.version} of the protocol")
        self._prefix += 1  # never used twice, so that no late message concerns another client's sequence
        client.attach(self._prefix, attach.name)
        self._attached[client.prefix] = client
        client.connection.send(messages.Attached(client.prefix, self._ready))

    def _admit(self, client: _Client, submit: messages.Submit | messages.Prepare) -> list[messages.ToEngine]:
        if submit.key <= client.last_key:
            raise PeerGone(f"it used the key {submit.key} after {client.last_key}")
        client.last_key = submit.key
        if isinstance(submit, messages.Prepare):
            client.open[submit.key] = None
            return [submit]
        if submit.grant is None:
            raise PeerGone("it submitted a sequence without a grant")
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

    def _leave(self, client: _Client, reason: str = "") -> None:
        """Close a connection. Its sequences are aborted by the next `read`."""
        descriptor = client.connection.fileno()
        del self._connected[descriptor]
        self._poll.unregister(descriptor)
        self._poll.register(self._listener, select.POLLIN)  # it may have been unregistered
        client.connection.close()
        if reason:
            _report(f"{client.name} was disconnected: {reason}")
        if client.prefix:
            client.has_left = True
            self._left.append(client)

    def _forget(self, client: _Client) -> Iterator[messages.ToEngine]:
        del self._attached[client.prefix]
        for key in list(client.open):
            self._end_sequence(client, key)
            yield messages.Abort(key)

    # Writing -----------------------------------------------------------------------------------------

    def _parts(self, step: messages.StepOutputs) -> list[tuple[_Client, messages.StepOutputs]]:
        """Return the part of each client that has outputs or waits for a reply.

        A frame without a step and without a reply has new counts, as after a trim: all clients get it.
        """
        streaming = [client for client in self._attached.values() if client.open]
        due = [client for client in self._attached.values() if client.is_due]
        has_stepped, self._steps = step.statistics.steps > self._steps, step.statistics.steps
        if not (due or self._parent_is_due or has_stepped or step.outputs):
            return [(client, _empty(step)) for client in self._attached.values()]
        if len(streaming) == 1:  # all outputs are of its sequences
            client = streaming[0]
            parts = [(client, step)] if client.is_due or step.keys or step.outputs else []
            return parts + [(other, _empty(step)) for other in due if other is not client]
        keys: npt.NDArray[np.int64] = np.frombuffer(step.keys, "<i8")
        tokens: npt.NDArray[np.int32] = np.frombuffer(step.tokens, "<i4")
        counts: npt.NDArray[np.uint8] = np.frombuffer(step.counts, np.uint8)
        prefixes = keys >> messages.KEY_BITS
        outputs: dict[int, list[messages.Output]] = {}
        for output in step.outputs:
            outputs.setdefault(output.key >> messages.KEY_BITS, []).append(output)
        parts = []
        for client in {client.prefix: client for client in (*streaming, *due)}.values():
            mine = prefixes == client.prefix
            own = outputs.get(client.prefix, [])
            if client.is_due or own or mine.any():
                own_tokens = tokens[mine.repeat(counts) if step.counts else mine]
                own_counts = counts[mine].tobytes() if step.counts else b""
                part = messages.StepOutputs(
                    keys[mine].tobytes(), own_tokens.tobytes(), own, step.statistics, own_counts
                )
                parts.append((client, part))
        return parts

    def _send(self, client: _Client, message: messages.ToClient) -> None:
        try:
            client.connection.send(message)
            self._poll.modify(client.connection.fileno(), client.connection.awaited)
        except PeerGone as gone:
            self._leave(client, str(gone))

    def _refuse(self, client: _Client, reason: str) -> None:
        try:
            client.connection.send(messages.AttachRefused(reason))
        except PeerGone:
            pass
        finally:
            client.connection.close()


def bind(path: str) -> socket.socket:
    """Return a socket bound to `path`, which does not listen yet; only this user can connect to it.

    A socket that is there is replaced: its process has ended. Raises `OSError`.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(Path(path).lstat().st_mode):
            Path(path).unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        bound.bind(path)
    except BaseException:
        bound.close()
        raise
    finally:
        os.umask(previous)
    bound.setblocking(False)
    return bound


def _empty(step: messages.StepOutputs) -> messages.StepOutputs:
    return messages.StepOutputs(b"", b"", [], step.statistics)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  the parent reads the lines of its child
